"""What checks are made of: settings, machine, and what children found, each asked once. Knows no check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.cluster.supervisor import worker_settings
from runtime.doctor.child import ask_child
from runtime.doctor.machine import Machine

T = TypeVar("T")

CHILD_TIMEOUT_S = 60.0
"""Longest look at devices and checkpoint. Importing torch takes seconds, and much longer on a cold disk."""


class Once(Generic[T]):
    """The result of `ask`, or its error, for whoever calls, in whichever thread; asked at the first call."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._found: tuple[T | None, Exception | None] | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._found is None:
                try:
                    self._found = self._ask(), None
                except Exception as error:
                    self._found = None, error
        result, failed = self._found
        if failed is not None:
            raise failed
        return result  # type: ignore[return-value]  # None is a T where there is no error


@dataclass(frozen=True, slots=True)
class Inquiry:
    """settings: as `load_settings` gives them. devices, checkpoint: what `workers.checkup` finds; may raise
    ChildFailed."""

    settings: ServeSettings
    machine: Machine
    devices: Callable[[], dict[str, Any]]
    checkpoint: Callable[[], dict[str, Any]]

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.settings.parallel)


def inquire(settings: ServeSettings, machine: Machine | None = None) -> Inquiry:
    """Into this installation."""
    return Inquiry(
        settings,
        machine or Machine(),
        Once(lambda: ask_child("workers.checkup", "devices", timeout_s=CHILD_TIMEOUT_S)),
        Once(
            lambda: ask_child(
                *("workers.checkup", "checkpoint"),
                timeout_s=CHILD_TIMEOUT_S,
                given=worker_settings(settings, 0).model_dump_json(),
            )
        ),
    )
