"""The log of what operators do and of who is refused, under a name of its own, so that it is kept whatever else is
logged; and the file that it goes to besides. Knows no service.

A line of the file is a JSON object:

    {"time": "2026-03-01T12:00:00.123456Z", "identity": "ada", "peer": "ipv4:127.0.0.1:41234", "act": "Drain",
     "outcome": "OK", "text": "drains: ...", "details": {"running": 3, "waiting": 0}}
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.access.identity import CALLER, RESERVED, Identity

AUDIT = logging.getLogger("outrider.audit")

BY_SERVER = "server"
"""Who acts where nobody has called."""

_FIELD = "audit"
"""Of a log record: the object above, without its time and text."""

log = logging.getLogger(__name__)


def named(identity: Identity, peer: str) -> str:
    """One word for a caller: ada@ipv4:127.0.0.1:41234, or the peer alone where nobody has a name."""
    return peer if identity.name in RESERVED else f"{identity.name}@{peer}"


def audit(
    act: str,
    text: str,
    *,
    peer: str | None = None,
    outcome: str = "OK",
    level: int = logging.INFO,
    **details: Any,
) -> None:
    """Logs one act of the caller of the running task.

    act: the RPC's name, or what the server did by itself. text: what happened, to follow the caller's name. peer: None
    where the server acts by itself. outcome: OK, or the gRPC code that the caller was told. details: of the request
    and of what came of it; no secrets, no texts of prompts.
    """
    identity = CALLER.get()
    entry = {
        "identity": BY_SERVER if peer is None else identity.name,
        "peer": peer,
        "act": act,
        "outcome": outcome,
        "details": details,
    }
    who = BY_SERVER if peer is None else named(identity, peer)
    AUDIT.log(level, "%s %s", who, text, extra={_FIELD: entry})


class AuditFile(logging.Handler):
    """Appends a JSON object per record; made for its owner alone. Moved away, by logrotate or by hand, it is made
    anew."""

    def __init__(self, path: Path) -> None:
        """Raises OSError that names the setting."""
        super().__init__(logging.INFO)
        self._path = path
        self._fd = -1
        self._has_failed = self._is_torn = False
        try:
            self._open()
        except OSError as error:
            raise OSError(
                f"access.audit_log {path} cannot be written: {error.strerror}; name a file that can"
            ) from None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._is_in_place():
                self._open()
            self._append(_line_of(record).encode())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:  # once, until it works again
                self._has_failed = True
                log.error(
                    "access.audit_log %s cannot be written, its lines are in this log alone: %s", self._path, error
                )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()

    def _append(self, line: bytes) -> None:
        """Raises OSError where there was room for a part alone; the next line begins one of its own."""
        whole = b"\n" + line if self._is_torn else line
        num_written = os.write(self._fd, whole)
        self._is_torn = num_written < len(whole)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def kept_in(path: Path | None) -> Iterator[None]:
    """While the block runs, the audit log goes to the file too. Raises OSError that names the setting."""
    if path is None:
        yield
        return
    file = AuditFile(path)
    if not AUDIT.isEnabledFor(logging.INFO):
        AUDIT.setLevel(logging.INFO)
    AUDIT.addHandler(file)
    try:
        yield
    finally:
        AUDIT.removeHandler(file)
        file.close()


def _line_of(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    entry = getattr(record, _FIELD, None) or {
        "identity": BY_SERVER,
        "peer": None,
        "act": record.name,
        "outcome": record.levelname,
        "details": {},
    }
    told = {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        **{key: value for key, value in entry.items() if key != "details"},
        "text": record.getMessage(),
        "details": entry["details"],
    }
    return json.dumps(told, ensure_ascii=True, default=str) + "\n"
