"""The policy that operators set, in a file that outlasts the server. Knows no store, no worker and no profile.

    {"schema": 1, "revision": 7, "policy": {"kind": "fixed", "gamma": 4},
     "classes": [{"priority": 3, "policy": {"kind": "off"}}], "set_by": "ipv4:127.0.0.1:41234", "set_at": 1767225600.0}

Settings seed the policy of a server that has no such file, and take over from one of a lower revision.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import SpeculationSettings
from runtime.audit import AUDIT
from runtime.front.errors import InvalidRequest
from runtime.replaced_file import replace_text
from runtime.verification.policy import (
    BY_SETTINGS,
    MAX_CLASSES,
    Dynamic,
    Fixed,
    Off,
    Policy,
    PolicyState,
    check_bounds,
    describe,
    initial_policy,
    lowered_state,
)

log = logging.getLogger(__name__)

NAME = "policy.json"
"""Of the file in a server's state_dir."""

SCHEMA = 1

_KINDS: dict[str, type[Off] | type[Fixed] | type[Dynamic]] = {"off": Off, "fixed": Fixed, "dynamic": Dynamic}
_ANY_GAMMA = 2**32 - 1
"""No file is wrong for a long draft: the worker at hand says how long one may be."""


class PolicyFile:
    """One file, written whole or not at all. Safe to be called from threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()
        self._revision = 0

    def load(self) -> PolicyState | None:
        """The policy that was kept, not yet lowered to any worker; None where none was, or it cannot be read.

        A file that cannot be read is logged and moved aside, where whoever repairs it finds it.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            self._set_aside(str(error))
            return None
        try:
            return _state_of(text)
        except (ValueError, RecursionError) as error:
            self._set_aside(str(error))
            return None

    def save(self, state: PolicyState) -> None:
        """Replaces the file, and returns when that would outlast a loss of power. A state that is older than the one
        written last is let go: saves from several threads may overtake each other, and so may those of a server that
        runs beside this one for a while, as in a rolling restart. Raises OSError."""
        with self._turn:
            if state.revision < self._revision:
                return
            kept = self._kept_by_another()
            if kept is not None and kept.revision > state.revision:
                log.warning(
                    "%s: another server keeps policy revision %d there; this one's, %d, is in force and not kept",
                    *(self.path, kept.revision, state.revision),
                )
                return
            replace_text(self.path, _text_of(state), lasting=True)
            self._revision = state.revision

    def keep(self, state: PolicyState) -> bool:
        """Saves the state; False, and both logs say it, where that fails: the policy is in force all the same."""
        try:
            self.save(state)
        except OSError as error:
            log.error(
                "%s cannot be written (%s): policy revision %d will not survive a restart; make its folder "
                "writable and set the policy again",
                self.path,
                error.strerror or error,
                state.revision,
            )
            AUDIT.error(
                "policy revision %d, set by %s, is not kept and will not survive a restart",
                state.revision,
                state.set_by,
            )
            return False
        return True

    def _kept_by_another(self) -> PolicyState | None:
        """What is in the file, where there is one that can be read."""
        try:
            return _state_of(self.path.read_text(encoding="utf-8")) if self.path.is_file() else None
        except (OSError, ValueError, RecursionError):
            return None

    def _set_aside(self, problem: str) -> None:
        aside = _free_name(self.path)
        try:
            self.path.rename(aside)
            fate = f"it is kept as {aside.name}; repair it and put it back, or set the policy again"
        except OSError as error:
            fate = f"it could not be moved aside ({error.strerror or error}); make its folder writable"
        log.error("%s holds no policy (%s): the configured one is used; %s", self.path, problem, fate)


def choose(kept: PolicyState | None, configured: PolicyState) -> PolicyState:
    """What is in force at start: the kept state, unless the settings have a higher revision. Pure."""
    return configured if kept is None or kept.revision < configured.revision else kept


def configured_state(
    speculation: SpeculationSettings, gamma_max: int, *, effective_step: int, now: float
) -> PolicyState:
    """What the settings ask for. gamma_max: the worker's; what is beyond it is lowered. now: Unix time."""
    return PolicyState(
        policy=initial_policy(speculation, gamma_max),
        revision=speculation.revision,
        effective_step=effective_step,
        set_by=BY_SETTINGS,
        set_at=now,
    )


def state_at_start(
    speculation: SpeculationSettings, gamma_max: int, *, file: PolicyFile | None, now: float
) -> PolicyState:
    """The state of the first step, and in the log where it comes from.

    gamma_max: the worker's; what is beyond it is lowered. file: None for a server that keeps no policy. now: Unix time.
    """
    configured = configured_state(speculation, gamma_max, effective_step=1, now=now)
    kept = None if file is None else file.load()
    chosen = choose(kept, configured)
    if file is None or kept is None:
        return chosen
    what = f"{describe(kept.policy, kept.classes)} (revision {kept.revision}, set by {kept.set_by or 'nobody known'})"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.set_at))
    if chosen is kept:
        log.info(
            "%s: the policy set at %s is in force, %s; the configured one, %s, is not applied: its revision is %d",
            *(file.path, at, what, configured.policy, configured.revision),
        )
        return lowered_state(kept, gamma_max, effective_step=1, now=now)
    log.info(
        "%s: the policy set at %s is not applied, %s; the configured one is newer: %s, revision %d",
        *(file.path, at, what, configured.policy, configured.revision),
    )
    return chosen


def _free_name(path: Path) -> Path:
    """Beside it, with .broken behind its name, and a number where there is such a file already."""
    aside, number = path.with_name(f"{path.name}.broken"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken-{number}")
    return aside


def _text_of(state: PolicyState) -> str:
    content = {
        "schema": SCHEMA,
        "revision": state.revision,
        "policy": _entry_of(state.policy),
        "classes": [{"priority": priority, "policy": _entry_of(own)} for priority, own in state.classes],
        "set_by": state.set_by,
        "set_at": state.set_at,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _entry_of(policy: Policy) -> dict[str, object]:
    [kind] = [name for name, one in _KINDS.items() if isinstance(policy, one)]
    return {"kind": kind, **dataclasses.asdict(policy)}


def _state_of(text: str) -> PolicyState:
    """Raises ValueError with what is wrong."""
    content = _object(json.loads(text), "the file", ("schema", "revision", "policy", "classes", "set_by", "set_at"))
    schema = _integer(content["schema"], "schema")
    if schema != SCHEMA:
        raise ValueError(f"schema is {schema}; this version reads {SCHEMA}")
    revision = _integer(content["revision"], "revision", 1, 2**63)
    if not isinstance(content["classes"], list) or len(content["classes"]) > MAX_CLASSES:
        raise ValueError(f"classes is no list of at most {MAX_CLASSES} entries")
    classes: dict[int, Policy] = {}
    for index, one in enumerate(content["classes"]):
        where = f"classes[{index}]"
        entry = _object(one, where, ("priority", "policy"))
        priority = _integer(entry["priority"], f"{where}.priority", -(2**31), 2**31)
        if priority in classes:
            raise ValueError(f"{where}: priority {priority} is there twice")
        classes[priority] = _policy_of(entry["policy"], f"{where}.policy")
    if not isinstance(content["set_by"], str):
        raise ValueError("set_by is no text")
    content["set_by"].encode()  # halves of characters, which JSON can hold, cannot be printed: a ValueError
    return PolicyState(
        policy=_policy_of(content["policy"], "policy"),
        revision=revision,
        effective_step=1,
        classes=tuple(sorted(classes.items(), key=lambda item: item[0])),
        set_by=content["set_by"],
        set_at=_number(content["set_at"], "set_at", 0.0, 2.0**36),
    )


def _policy_of(value: object, where: str) -> Policy:
    kind = _KINDS.get(str(value.get("kind"))) if isinstance(value, Mapping) else None
    if kind is None:
        raise ValueError(f"{where} is no object with one of the kinds {', '.join(_KINDS)}")
    names = tuple(field.name for field in dataclasses.fields(kind))
    entry = _object(value, where, ("kind", *names))
    checked: dict[str, Any] = {}
    for name in names:
        may_be_none = name in ("gamma_max", "itl_limit_ms")
        read = _integer if name.startswith("gamma") else _number
        checked[name] = None if may_be_none and entry[name] is None else read(entry[name], f"{where}.{name}")
    policy = kind(**checked)
    try:
        check_bounds(policy, _ANY_GAMMA)
    except InvalidRequest as error:
        raise ValueError(f"{where}: {error}") from error
    return policy


def _object(value: object, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """An object with these fields and no others."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{where} has no {missing[0]}")
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{where} has {unknown[0]!r}, which this version does not know")
    return value


def _integer(value: object, where: str, least: int = 0, end: int = _ANY_GAMMA + 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < end:
        raise ValueError(f"{where} is no whole number from {least} to {end - 1}")
    return value


def _number(value: object, where: str, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> float:
    # Compared before it becomes a float, for which whole numbers may be too long.
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{where} is no number that can stand there")
    return float(value)
