"""PEM files of certificates, keys and authorities, checked as they are read: what is wrong with one is told with its
setting and a remedy, before a peer can tell it in the words of a library. Knows no gRPC.

Whether peers will take a certificate is not worked out here but tried: two ends that hold the same files shake hands in
memory.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_EXPIRED, _NOT_YET, _UNSUITABLE, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 26, 62, 64
"""Of OpenSSL's numbers for why a certificate is refused (x509_vfy.h)."""

_ROUNDS = 8
"""A handshake takes three."""


class CertificateProblem(ValueError):
    """A file that cannot be used. The text names setting, file and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate, with the intermediate ones behind it, and its private key, both in PEM form."""

    certificate: bytes
    key: bytes = field(repr=False)


def read_pair(certificate: Path, key: Path, *, where: str) -> Pair:
    """where: of the settings, as in `cluster.tls`. Raises CertificateProblem where a file is missing, cannot be read,
    is something else, or the two do not belong together."""
    chain, private = _read(certificate, f"{where}.certificate"), _read(key, f"{where}.key")
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        raise CertificateProblem(f"{where}.certificate: {certificate} holds no certificate in PEM form; give one")
    if b"PRIVATE KEY-----" not in private:
        raise CertificateProblem(f"{where}.key: {key} holds no private key in PEM form; give the certificate's")
    if b"ENCRYPTED" in private:
        raise CertificateProblem(f"{where}.key: {key} asks for a passphrase; store the key without one")
    _present(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key, where)
    return Pair(certificate=chain, key=private)


def read_authority(path: Path, *, setting: str) -> bytes:
    """Certificates of authorities. Raises CertificateProblem where there is none to be read."""
    text = _read(path, setting)
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), path, setting)
    return text


def check_mutual(certificate: Path, key: Path, ca: Path, *, where: str, name: str | None) -> None:
    """Has two ends with these files accept each other, one of them dialled as `name` (None leaves names out).

    Raises CertificateProblem: the certificate has expired or is not valid yet, is of another authority, not for servers
    and clients, or bears other names.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname = name is not None
    for end in (server, client):
        _present(end, certificate, key, where)
        _trust(end, ca, f"{where}.ca")
    try:
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        raise CertificateProblem(_explain(error, client, certificate, ca, where, name)) from None
    except ssl.SSLError as error:
        raise CertificateProblem(f"{where}.certificate: {certificate} cannot be used: {error.reason}") from None


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CertificateProblem(f"{setting}: there is no file {path}; put it there, or name another") from None
    except OSError as error:
        raise CertificateProblem(
            f"{setting}: {path} cannot be read: {error.strerror}; let user {os.geteuid()} read it, or name another file"
        ) from None


def _present(end: ssl.SSLContext, certificate: Path, key: Path, where: str) -> None:
    try:
        end.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise CertificateProblem(
                f"{where}.key: {key} is not the key of {certificate}; put the two in place that were issued together"
            ) from None
        raise CertificateProblem(
            f"{where}.certificate: {certificate} and {key} are damaged ({reason}); put whole PEM files in their place"
        ) from None


def _trust(end: ssl.SSLContext, path: Path, setting: str) -> None:
    try:
        end.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise CertificateProblem(
            f"{setting}: {path} holds no certificates in PEM form ({reason}); give those of the authority"
        ) from None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname=name),
        server.wrap_bio(there, back, server_side=True),
    ]
    for _ in range(_ROUNDS):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def _explain(
    error: ssl.SSLCertVerificationError, end: ssl.SSLContext, certificate: Path, ca: Path, where: str, name: str | None
) -> str:
    match error.verify_code:
        case code if code in (_EXPIRED, _NOT_YET):
            when = "has expired" if code == _EXPIRED else "is not valid yet"
            authorities = end.get_ca_certs()
            if authorities and not any(map(_is_in_force, authorities)):
                return f"{where}.ca: {ca} {when}; renew the authority, or check this machine's clock"
            return f"{where}.certificate: {certificate} {when}; renew it, or check this machine's clock"
        case code if code == _UNSUITABLE:
            return (
                f"{where}.certificate: {certificate} is not for both servers and clients; issue it with the extended "
                "key usages serverAuth and clientAuth, or with none"
            )
        case code if code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"{where}.certificate: {certificate} does not bear the name {name}; issue it with that among its "
                f"subject alternative names, or set {where}.server_name to one of those that it bears"
            )
        case _:
            return (
                f"{where}.certificate: {certificate} is not of the authority in {ca} ({error.verify_message}); set "
                f"{where}.ca to the authority that issued it, and keep intermediate certificates behind it in its file"
            )


def _is_in_force(authority: Mapping[str, object]) -> bool:
    begins, ends = (ssl.cert_time_to_seconds(str(authority[bound])) for bound in ("notBefore", "notAfter"))
    return begins <= time.time() <= ends
