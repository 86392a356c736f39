"""Certificates of every port and of the links to ranks, and the file of identities. Repeats nothing that is secret."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from cryptography import x509

from configs.access import TlsSettings
from configs.load import SettingsError
from runtime.access.certificates import end_of_links, read_certificate
from runtime.access.identities_file import load_identities
from runtime.access.identity import Identity, Role
from runtime.doctor.finding import Finding, failure, note, ok, split_remedy, warning
from runtime.doctor.inquiry import Inquiry
from workers.channel import LOOPBACK

SHORT_OF_TIME = timedelta(days=14)
"""Before a certificate expires; rotations by machines renew at a third of 90 days or earlier."""


def check_port_certificates(inquiry: Inquiry) -> Iterator[Finding]:
    """Of clients' and operators' ports."""
    server, operator = inquiry.settings.server.tls, inquiry.settings.operator.tls
    if not server.is_on and not operator.is_on:
        if inquiry.settings.access.identities is not None:
            yield warning(
                "clients and operators are served in plain text, and their tokens can be read on the way",
                "set server.tls.certificate and key, unless a proxy in front of it speaks TLS",
            )
        else:
            yield note("clients and operators are served in plain text")
        return
    if server.is_on:
        yield from _port(inquiry, server, "server.tls")
    if operator.is_on:
        yield from _port(inquiry, operator, "operator.tls")


def _port(inquiry: Inquiry, tls: TlsSettings, where: str) -> Iterator[Finding]:
    now = inquiry.machine.now()
    try:
        found = read_certificate(tls, where, lambda: now)
    except SettingsError as error:
        yield split_remedy(str(error))
        return
    shown, *above = x509.load_pem_x509_certificates(found.pair.certificate)
    names = _names_of(shown)
    until = f"until {found.ends.date().isoformat()}"
    if not names:
        yield failure(
            f"{where}.certificate: {tls.certificate} has no subject alternative name",
            "issue it with the DNS names that clients dial: they compare nothing else",
        )
    elif found.ends - now < SHORT_OF_TIME:
        yield warning(f"{where}.certificate: {tls.certificate} is valid {until} only", "renew it")
    else:
        yield ok(f"{where}: valid {until}, for {', '.join(names)}")
    yield from _chain(where, [shown, *above])
    assert tls.key is not None
    yield from _key(f"{where}.key", tls.key)


def _chain(where: str, chain: list[x509.Certificate]) -> Iterator[Finding]:
    """Each one is signed by the next; the last one's issuer is with the clients."""
    for one, issuer in pairwise(chain):
        try:
            one.verify_directly_issued_by(issuer)
        except Exception as error:  # of many kinds: ValueError, TypeError, InvalidSignature
            yield failure(
                f"{where}.certificate: {one.subject.rfc4514_string()} was not issued by the one behind it "
                f"({type(error).__name__})",
                "put the certificate first and each one's issuer behind it",
            )
            return
    if len(chain) == 1 and chain[0].issuer == chain[0].subject:
        yield note(f"{where}.certificate signed itself: clients must be given it as an authority")


def check_worker_certificates(inquiry: Inquiry) -> Iterator[Finding]:
    """Of the links to ranks, as two ends that hold these files find them."""
    cluster = inquiry.settings.cluster
    tls = cluster.tls
    if not tls.is_on:
        spans = "may go over a network" if cluster.ray_address else "stay on this machine"
        yield note(f"links to ranks are in plain text and {spans}; they are guarded by a secret all the same")
        return
    dialled = cluster.worker_advertise_host or cluster.worker_bind_host
    name = tls.server_name or dialled or (None if cluster.ray_address else LOOPBACK)
    try:
        ends = end_of_links(tls, name)
    except (SettingsError, OSError, ValueError) as error:
        yield split_remedy(str(error))
        return
    if ends - inquiry.machine.now() < SHORT_OF_TIME:
        yield warning(f"cluster.tls.certificate: {tls.certificate} is valid until {ends.date()} only", "renew it")
    else:
        yield ok(f"cluster.tls: both ends take it{f' as {name}' if name else ''}, until {ends.date()}")
    assert tls.key is not None
    yield from _key("cluster.tls.key", tls.key)


def check_identities(inquiry: Inquiry) -> Iterator[Finding]:
    """Whether the file is good, and whether it leaves anybody to work with."""
    path = inquiry.settings.access.identities
    if path is None:
        yield note("access.identities is unset: whoever reaches a port may do all that it offers")
        return
    try:
        directory = load_identities(path)
    except SettingsError as error:
        for line in str(error).splitlines():
            yield split_remedy(line)
        return
    known = [identity for name in directory.names if (identity := directory.named(name)) is not None]
    yield ok(f"{path}: {len(known)} identities")
    for role in Role:
        if not any(role in identity.roles for identity in known):
            yield note(f"{path}: nobody has the role {role.value}")
    yield from _asked_for_nothing(inquiry, path, directory.without_token)


def _asked_for_nothing(inquiry: Inquiry, path: Path, certified: Sequence[Identity]) -> Iterator[Finding]:
    """Who is known by a certificate alone and has a role at a port that asks for none: it is shown none either."""
    server, operator = inquiry.settings.server.tls, inquiry.settings.operator.tls
    operators = ("operator.tls", operator) if operator.is_on else ("server.tls", server)
    for identity in certified:
        for role in sorted(identity.roles, key=lambda one: one.value):
            where, tls = ("server.tls", server) if role is Role.GENERATE else operators
            if tls.client_ca is None:
                yield warning(
                    f"{path}: {identity.name} is known by a certificate alone, and the port where it may "
                    f"{role.value} asks for none",
                    f"set {where}.client_ca, or give it a token",
                )


def check_audit_log(inquiry: Inquiry) -> Iterator[Finding]:
    """Whether it can be appended to. Creates nothing."""
    path = inquiry.settings.access.audit_log
    if path is None:
        yield ok("audit lines go to the log")
        return
    try:
        if path.exists():
            with path.open("a"):
                pass
        elif not path.parent.is_dir():
            raise NotADirectoryError(0, "no such folder", str(path.parent))
    except OSError as error:
        yield failure(f"access.audit_log: {path}: {error.strerror}", "name a file in a folder that can be written")
    else:
        yield ok(f"audit lines go to {path}")


def _names_of(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(one.value) for one in names]


def _key(setting: str, path: Path) -> Iterator[Finding]:
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        yield warning(f"{setting}: anybody on this machine may read {path}", f"chmod 640 {path}, or stricter")
