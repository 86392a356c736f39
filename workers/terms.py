"""What the two ends of a link know before they meet: the secret of a life, and where their certificates are. Knows no
launcher, which brings it to a rank by a way of its own.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from configs.access import WorkerTlsSettings
from workers.certificates import check_mutual, read_authority, read_pair
from workers.channel import PLAIN, Security

log = logging.getLogger(__name__)

SECRET_KEY = "outrider-link-secret"
"""Metadata that every call to a rank brings."""

SECRET_BYTES = 32

SETTINGS = "cluster.tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTerms:
    """Of one life of a group.

    secret: printable; known to the runtime and its ranks, and shown to nobody else. tls: files that each end reads, on
    its own machine.
    """

    secret: str = field(repr=False)
    tls: WorkerTlsSettings = field(default_factory=WorkerTlsSettings)

    @classmethod
    def fresh(cls, tls: WorkerTlsSettings) -> LinkTerms:
        """With a new secret. Relative paths start at this process's working directory, which a rank need not share."""
        paths = {name: getattr(tls, name) for name in ("certificate", "key", "ca")}
        whole = {name: path.absolute() for name, path in paths.items() if path is not None}
        return cls(secret=secrets.token_urlsafe(SECRET_BYTES), tls=tls.model_copy(update=whole))

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What a call brings."""
        return ((SECRET_KEY, self.secret),)

    def security(self, host: str | None) -> Security:
        """Credentials of both ends, from the files as they are now. host: address that peers will dial, for a rank.

        Raises CertificateProblem.
        """
        tls = self.tls
        if tls.certificate is None or tls.key is None or tls.ca is None:
            return PLAIN
        pair = read_pair(tls.certificate, tls.key, where=SETTINGS)
        authority = read_authority(tls.ca, setting=f"{SETTINGS}.ca")
        check_mutual(tls.certificate, tls.key, tls.ca, where=SETTINGS, name=tls.server_name or host)
        return Security(
            channel=grpc.ssl_channel_credentials(authority, pair.key, pair.certificate),
            server=grpc.ssl_server_credentials([(pair.key, pair.certificate)], authority, require_client_auth=True),
            server_name=tls.server_name,
        )


class Gate(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Lets through the calls that bring the secret. All others, of whatever method, there or not, get the same answer.

    It is given before anything is read of a call, by a thread that does nothing else: whoever has no secret takes none
    of the server's threads.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refused = grpc.stream_unary_rpc_method_handler(_Refusal())

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        for key, value in handler_call_details.invocation_metadata:
            if key == SECRET_KEY and hmac.compare_digest(_bytes_of(value), self._secret):
                return continuation(handler_call_details)
        return self._refused


class _Refusal:
    """What happens to a call without the secret. Every tenfold of them is a line in the log, and no more."""

    def __init__(self) -> None:
        # gRPC has a handler run in the pool that it names, else in the server's.
        self.experimental_thread_pool = ThreadPoolExecutor(1, thread_name_prefix="refusals")
        self._num_refused = 0
        self._next_told = 1

    def __call__(self, _requests: object, context: grpc.ServicerContext) -> None:
        self._num_refused += 1
        if self._num_refused == self._next_told:
            self._next_told *= 10
            log.warning(
                "%d calls without this rank's secret refused, the last from %s", self._num_refused, context.peer()
            )
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "a rank answers to its own runtime")


def _bytes_of(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode(errors="replace")
