"""The certificate of a port that clients reach, taken anew when its files change. Knows no service.

A connection keeps the certificate that it was made with; each new one gets what is in force then.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from cryptography import x509

from configs.access import TlsSettings, WorkerTlsSettings
from configs.load import SettingsError
from runtime.access.watched import Watched
from workers.certificates import CertificateProblem, Pair, check_mutual, read_authority, read_pair
from workers.channel import PLAIN, Security

log = logging.getLogger(__name__)

SHORT_OF_TIME = datetime.timedelta(days=7)
"""A certificate that expires before that is told of in the log."""

Clock = Callable[[], datetime.datetime]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCertificate:
    """What a port shows, and whose certificates it takes. ends: when what it shows expires."""

    pair: Pair
    client_ca: bytes | None
    ends: datetime.datetime

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.pair.key, self.pair.certificate)], self.client_ca)


def read_certificate(tls: TlsSettings, where: str, clock: Clock = _now) -> PortCertificate:
    """The files as they are now. where: of the settings, as in `server.tls`.

    Raises SettingsError that names setting, file and remedy.
    """
    assert tls.certificate is not None, f"{where} is off"
    assert tls.key is not None
    try:
        pair = read_pair(tls.certificate, tls.key, where=where)
        client_ca = read_authority(tls.client_ca, setting=f"{where}.client_ca") if tls.client_ca is not None else None
    except CertificateProblem as problem:
        raise SettingsError(str(problem)) from None
    now = clock()
    shown = x509.load_pem_x509_certificates(pair.certificate)[0]
    _check_in_force([shown], f"{where}.certificate: {tls.certificate}", now)
    if client_ca is not None:
        _check_in_force(x509.load_pem_x509_certificates(client_ca), f"{where}.client_ca: {tls.client_ca}", now)
    ends = shown.not_valid_after_utc
    if ends - now < SHORT_OF_TIME:
        log.warning("%s.certificate: %s expires at %s; renew it", where, tls.certificate, ends.isoformat())
    return PortCertificate(pair=pair, client_ca=client_ca, ends=ends)


class PortTls:
    """Of one port, or of several that show the same. watched: its files."""

    def __init__(self, tls: TlsSettings, where: str) -> None:
        """Raises as `read_certificate`."""
        paths = [path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None]
        self.where = where
        self.watched = Watched(f"certificates of {where}", paths, lambda: read_certificate(tls, where))
        self._asks_clients = tls.client_ca is not None

    def security(self) -> Security:
        """For one port."""
        given = self.watched.current

        def newest() -> grpc.ServerCertificateConfiguration | None:
            # Asked by gRPC before each handshake, from a thread of its own.
            nonlocal given
            if self.watched.current is given:
                return None
            given = self.watched.current
            return given.configuration

        return Security(
            server=grpc.dynamic_ssl_server_credentials(
                given.configuration,
                newest,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs alone
                require_client_authentication=self._asks_clients,
            )
        )


def end_of_links(tls: WorkerTlsSettings, name: str | None) -> datetime.datetime:
    """When the certificate of the links to ranks expires, which both ends take. name: dialled; None leaves names out.

    Raises SettingsError that names setting, file and remedy.
    """
    where = "cluster.tls"
    assert tls.certificate is not None, f"{where} is off"
    assert tls.key is not None
    assert tls.ca is not None
    try:
        check_mutual(tls.certificate, tls.key, tls.ca, where=where, name=name)
        pair = read_pair(tls.certificate, tls.key, where=where)
    except CertificateProblem as problem:
        raise SettingsError(str(problem)) from None
    return x509.load_pem_x509_certificates(pair.certificate)[0].not_valid_after_utc


def watched_links(tls: WorkerTlsSettings) -> Watched[datetime.datetime]:
    """`end_of_links`, which raises here too. A new certificate is tried at once, and taken at the ranks' next start:
    one that would end it is told of while there is time."""
    return Watched(
        "certificates of cluster.tls",
        [path for path in (tls.certificate, tls.key, tls.ca) if path is not None],
        lambda: end_of_links(tls, tls.server_name),
        takes_effect="will be used from the ranks' next start on",
    )


def security_of(tls: PortTls | None) -> Security:
    """Plain text where there is none."""
    return PLAIN if tls is None else tls.security()


def _check_in_force(certificates: list[x509.Certificate], what: str, now: datetime.datetime) -> None:
    """Raises SettingsError where none of them is."""
    if any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in certificates):
        return
    one = certificates[0]
    when = (
        f"is not valid before {one.not_valid_before_utc.isoformat()}"
        if now < one.not_valid_before_utc
        else f"has expired at {one.not_valid_after_utc.isoformat()}"
    )
    raise SettingsError(f"{what} {when}; renew it, or check this machine's clock")
