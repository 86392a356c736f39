"""Everybody that a server knows, and by what it knows them. Knows no files and no gRPC."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.access.identity import Identity
from runtime.front.errors import Unauthenticated


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One identity. token_digests: SHA-256 of each token that stands for it. certificates: names that are in its client
    certificates."""

    identity: Identity
    token_digests: tuple[bytes, ...] = ()
    certificates: tuple[str, ...] = ()


class Directory:
    """Entries whose names, digests and certificate names occur once each. without_token: who is known by a certificate
    alone."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        self.without_token = tuple(entry.identity for entry in entries if not entry.token_digests)
        self._by_name = {entry.identity.name: entry.identity for entry in entries}
        self._digests = [(digest, entry.identity) for entry in entries for digest in entry.token_digests]
        self._certificates = {name: entry.identity for entry in entries for name in entry.certificates}

    def named(self, name: str) -> Identity | None:
        return self._by_name.get(name)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def by_token(self, token: str) -> Identity:
        """Whose token it is; takes as long for a wrong one. Raises Unauthenticated."""
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found = None
        for known, identity in self._digests:
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None:
            raise Unauthenticated("the bearer token is not known to this server; ask its operator for one")
        return found

    def by_certificate(self, names: Sequence[str], common_name: str | None) -> Identity:
        """Whose verified certificate it is.

        names: its subject alternative names, URIs and DNS names. common_name: looked at where none of them is known.
        Raises Unauthenticated, also where it names several.
        """
        found = {identity.name: identity for name in names if (identity := self._certificates.get(name))}
        if not found and common_name is not None and common_name in self._certificates:
            found = {common_name: self._certificates[common_name]}
        if len(found) > 1:
            raise Unauthenticated(
                f"the client certificate names several identities ({', '.join(sorted(found))}); use one for each"
            )
        if not found:
            shown = ", ".join([*names, *([common_name] if common_name is not None else [])])
            raise Unauthenticated(
                f"no identity has the client certificate's name ({shown}); ask the operator to add it, or bring a token"
            )
        return next(iter(found.values()))
