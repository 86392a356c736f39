"""The configuration, read again while the server runs: what is safe to change comes into force, the rest is named.
Knows no gRPC and no signal.

A configuration is taken as a whole or not at all: where it cannot be used, the one before stays, and who asked, the log
and the metrics are told why. Certificates and identities, which are files of their own, are looked at as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from configs.changes import changed_keys, with_values_of
from configs.load import SettingsError, files_at, load_settings
from configs.schema import ServeSettings, SpeculationSettings
from runtime.access.watched import PERIOD_S, Stamp, Watched, stamp_of
from runtime.audit import audit
from runtime.front.errors import RefusedSettings
from runtime.in_force import SettingsInForce
from runtime.status import Reloads

log = logging.getLogger(__name__)

LIVE_KEYS = (
    "scheduler.max_waiting",
    "scheduler.default_max_tokens",
    "server.max_frame_tokens_unread",
    "server.coalesce_ms",
    "server.withdraw_s",
    "server.drain_s",
    "server.stall_s",
    "logs.level",
)
"""Settings that are read anew wherever they are needed."""

POLICY_KEYS = ("speculation.policy", "speculation.gamma", "speculation.dynamic", "speculation.revision")
"""Settings, or blocks of them, that come into force together, and only with a revision above that in force."""

NEEDS_RESTART = "needs a restart"
NEEDS_REVISION = "needs a speculation.revision above that in force"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSource:
    """Where settings come from. path: the YAML file, or a folder of such; None where there is none. overrides: what the
    command line says beside it, by key path, which comes before the file."""

    path: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> ServeSettings:
        """Raises SettingsError."""
        return load_settings(self.path, self.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What a new configuration came to, by key path. applied: settings that are other ones now. held_back: those that
    it changes and that are as they were, each with what it takes."""

    applied: tuple[str, ...] = ()
    held_back: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{', '.join(self.applied)} in force"] if self.applied else []
        parts += [f"{key} {reason}" for key, reason in self.held_back.items()]
        return "; ".join(parts) or "nothing has changed"


class ConfiguredPolicy(Protocol):
    """The policy in force, as far as settings may replace it."""

    @property
    def revision(self) -> int:
        """Of the policy in force, whoever has set it."""
        ...

    def take_up(self, settings: SpeculationSettings) -> None:
        """Puts the policy that they name in force, under their revision, which is above the present one."""
        ...


class Reloader:
    """One per server.

    settings: those in force. source: what is read again; None reads no configuration. policies: where the configured
    one is put in force. watched: other files, each with what reads it; asked anew for each look.
    """

    def __init__(
        self,
        settings: SettingsInForce,
        source: SettingsSource | None = None,
        policies: ConfiguredPolicy | None = None,
        *,
        watched: Callable[[], Iterable[Watched[Any]]] = tuple,
    ) -> None:
        self._settings = settings
        self._source = source
        self._policies = policies
        self._watched = watched
        self._turn = asyncio.Lock()
        self._status = Reloads()
        self._tasks: set[asyncio.Task[None]] = set()
        # Whether one of them waits for its turn: it will read what is there then.
        self._is_due = False
        # Of the files: as they were seen last, and as they were read last. The first look reads them, for what may have
        # changed since the start.
        self._seen = self._look()
        self._read: tuple[Stamp, ...] | None = None

    def status(self) -> Reloads:
        return self._status

    async def reload(self, peer: str | None = None) -> Reloaded:
        """Reads everything again. peer: who asked for it; None where the server does it by itself.

        Raises RefusedSettings where the configuration cannot be used; the one before stays in force.
        """
        async with self._turn:
            self._is_due = False
            self._check_others()
            if self._source is None:
                return Reloaded()
            before = self._read
            is_first = self._read is None
            self._read = self._look()  # before the file is read: a change meanwhile is seen by the next look
            try:
                reloaded = self._take(await asyncio.to_thread(self._source.load))
            except asyncio.CancelledError:
                self._read = before  # who asked has left, and nothing was taken: the next look does it
                raise
            except SettingsError as error:
                self._note(refused=self._status.refused + 1, problem=str(error))
                if peer is None:  # what callers are refused is on record anyway
                    text = f"read the configuration again, which stays as it was: {error}"
                    audit("Reload", text, outcome=RefusedSettings.code, level=logging.ERROR)
                raise RefusedSettings(f"the configuration stays as it was: {error}") from None
            num_applied = self._status.applied + bool(reloaded.applied)
            self._note(applied=num_applied, problem="", held_back=len(reloaded.held_back))
            if is_first and peer is None and reloaded == Reloaded():
                return reloaded
            audit(
                "Reload",
                f"read the configuration again: {reloaded}",
                peer=peer,
                applied=list(reloaded.applied),
                held_back=dict(reloaded.held_back),
            )
        return reloaded

    def reload_soon(self) -> None:
        """Reads everything again, for whom no answer can reach: a signal's handler. However often it is called, one
        reading waits at most."""
        if self._is_due:
            return
        self._is_due = True
        task = asyncio.get_running_loop().create_task(self._reload_by_itself())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Looks at all files once a period, and reads those that have changed, until it is cancelled."""
        while True:
            await sleep(PERIOD_S)
            try:
                await self.look()
            except Exception:  # the next look is another one
                log.exception("the configuration could not be looked at")

    async def look(self) -> None:
        """One look. A configuration is read when it is as it was at the look before: one that is being written over may
        be half there, and say less than it will."""
        seen = self._look()
        has_settled, self._seen = seen == self._seen, seen
        if has_settled and seen != self._read:
            await self._reload_by_itself()
        else:
            self._check_others()

    def _check_others(self) -> None:
        for one in self._watched():
            try:
                one.check()
            except Exception:  # what is in one file keeps nobody from the others
                log.exception("a file could not be looked at")

    async def _reload_by_itself(self) -> None:
        with contextlib.suppress(RefusedSettings):
            await self.reload()

    def _look(self) -> tuple[Stamp, ...]:
        if self._source is None or self._source.path is None:
            return ()
        return tuple(stamp_of(path) for path in files_at(self._source.path))

    def _take(self, wanted: ServeSettings) -> Reloaded:
        """Puts what is safe to change in force. Raises SettingsError where it does not go with what stays."""
        changed = list(changed_keys(self._settings.now, wanted))
        is_newer = self._policies is None or wanted.speculation.revision > self._policies.revision
        held_back = {key: reason for key in changed if (reason := _obstacle(key, is_newer=is_newer))}
        applied = tuple(key for key in changed if key not in held_back)
        if applied:
            try:
                merged = with_values_of(self._settings.now, wanted, applied)
            except ValidationError as error:
                problems = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
                stay = ", ".join(held_back)
                raise SettingsError(f"{problems}, while {stay} as before: that {NEEDS_RESTART}") from None
            self._settings.replace(merged)
            if self._policies is not None and any(map(_is_of_policy, applied)):
                self._policies.take_up(merged.speculation)
        return Reloaded(applied=applied, held_back=held_back)

    def _note(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)


def _obstacle(key: str, *, is_newer: bool) -> str:
    """What a changed setting needs before its new value comes into force; empty for nothing. is_newer: the new revision
    of the policy is above that in force."""
    if _is_of_policy(key):
        return "" if is_newer else NEEDS_REVISION
    return "" if key in LIVE_KEYS else NEEDS_RESTART


def _is_of_policy(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in POLICY_KEYS)
