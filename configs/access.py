"""Settings of who may reach what: certificates of each port, identities and their limits. Knows no files' contents."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from configs.base import Settings


class TlsSettings(Settings):
    """One port's certificate and whose certificates it takes: PEM files, read again when they change."""

    certificate: Path | None = Field(
        None, description="This side's certificate, with the intermediate ones behind it; unset serves plain text."
    )
    key: Path | None = Field(None, description="Its private key, without a passphrase.")
    client_ca: Path | None = Field(
        None,
        description="Authorities whose certificates clients must show (mutual TLS); unset asks clients for none.",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> TlsSettings:
        if (self.certificate is None) != (self.key is None):
            missing, given = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise ValueError(f"{missing} is not set, but {given} is; set both, or neither for plain text")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca is set without certificate and key; set them too")
        return self

    @property
    def is_on(self) -> bool:
        return self.certificate is not None


class WorkerTlsSettings(Settings):
    """Mutual TLS of the links between runtime and ranks: each side shows the certificate, and takes the authority's.

    Files have the same paths on every node, and are read anew for every life of the ranks.
    """

    certificate: Path | None = Field(None, description="Certificate of runtime and ranks; unset links in plain text.")
    key: Path | None = Field(None, description="Its private key, without a passphrase.")
    ca: Path | None = Field(None, description="Authority of both sides' certificates.")
    server_name: str | None = Field(
        None,
        description="Name that ranks' certificates bear; unset: the address that is dialled must be among their names.",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> WorkerTlsSettings:
        unset = [name for name in ("certificate", "key", "ca") if getattr(self, name) is None]
        if 0 < len(unset) < 3:
            raise ValueError(f"{' and '.join(unset)} not set; set certificate, key and ca, or none for plain text")
        if len(unset) == 3 and self.server_name is not None:
            raise ValueError("server_name is set without certificate, key and ca; set them too")
        return self

    @property
    def is_on(self) -> bool:
        return self.ca is not None


class AccessSettings(Settings):
    """Who may do what."""

    identities: Path | None = Field(
        None,
        description="YAML file of identities: their tokens or certificates, roles and limits; read again when it "
        "changes. Unset: whoever reaches a port may do all that it offers.",
    )
    audit_log: Path | None = Field(
        None,
        description="File that operators' acts and all refusals of access are appended to, a JSON object per line; "
        "unset writes them to the log alone.",
    )
    max_streams_per_connection: int = Field(
        1024, ge=1, le=2**20, description="Calls that one connection may have open at once."
    )
    max_connections: int = Field(
        4096, ge=1, le=2**20, description="Connections that a port has open at once; one more is closed."
    )
    max_connection_idle_s: float = Field(
        3600.0, gt=0, description="A connection without calls is closed after this long."
    )
    request_timeout_s: float = Field(
        20.0,
        gt=0,
        le=3600,
        description="How long a connection may take to be made, and the message of a call to arrive.",
    )
