"""Whose call it is, and whether it may be made. Knows no gRPC: who asks brings what came with the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.access.directory import Directory
from runtime.access.identities_file import SETTING, load_identities
from runtime.access.identity import ANYONE, Identity, Role
from runtime.access.roles import may
from runtime.access.watched import Watched
from runtime.audit import audit
from runtime.front.errors import Forbidden, Unauthenticated

TOKEN_KEY = "authorization"
"""Metadata with a bearer token (RFC 6750)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What came with a call. authorizations: values of TOKEN_KEY. names, common_name: of a verified client
    certificate."""

    authorizations: Sequence[str | bytes] = ()
    names: Sequence[str] = ()
    common_name: str | None = None


class Callers:
    """Of one server. path: the file of identities; None takes everybody as ANYONE."""

    def __init__(self, path: Path | None) -> None:
        """Raises SettingsError for a file that cannot be used."""
        self._listeners: list[Callable[[Directory], None]] = []
        self.watched: Watched[Directory] | None = None
        if path is not None:
            self.watched = Watched(SETTING, [path], lambda: load_identities(path), self._tell)

    @property
    def are_known(self) -> bool:
        """Whether there are identities at all."""
        return self.watched is not None

    def add_listener(self, listener: Callable[[Directory], None]) -> None:
        """Called with all identities whenever they have changed."""
        self._listeners.append(listener)

    def identify(self, shown: Shown) -> Identity:
        """A token goes before a certificate. Raises Unauthenticated."""
        if self.watched is None:
            return ANYONE
        directory = self.watched.current
        if shown.authorizations:
            return directory.by_token(_token_of(shown.authorizations))
        if shown.names or shown.common_name is not None:
            return directory.by_certificate(shown.names, shown.common_name)
        raise Unauthenticated(
            "this server asks who calls: bring `authorization: Bearer TOKEN`, or a client certificate that it knows"
        )

    def _tell(self, directory: Directory) -> None:
        audit("ReloadIdentities", f"read {len(directory.names)} identities anew", identities=sorted(directory.names))
        for listener in self._listeners:
            listener(directory)


def check_role(identity: Identity, needed: Role, method: str) -> None:
    """Raises Forbidden, which names the role that is missing."""
    if not may(identity.roles, needed):
        held = ", ".join(sorted(role.value for role in identity.roles))
        raise Forbidden(
            f"{method.rpartition('/')[2]} asks for the role {needed.value}, and {identity.name} has {held}; "
            "ask the operator for a credential with it"
        )


def _token_of(values: Iterable[str | bytes]) -> str:
    """Raises Unauthenticated, without repeating what came."""
    given = list(values)
    scheme, _, token = str(given[0]).partition(" ") if isinstance(given[0], str) else ("", "", "")
    if len(given) != 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("metadata `authorization` is not of the form `Bearer TOKEN`, once")
    return token.strip()
