"""A value that is read from files, and read again when they change. Knows not what is in them, and no clock: whoever
owns it asks it to look.

A file is replaced in whatever way: written over, renamed into place, or a link that is turned to another folder, as
Kubernetes does with mounted secrets. What cannot be used is told once, and the old value stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD_S = 1.0
"""From one look at the files to the next."""

_REFUSALS = (OSError, ValueError)
"""What `load` and `on_change` raise for files that cannot be used; a SettingsError is a ValueError."""

Stamp = tuple[int, int, int] | None
"""(mtime_ns, size, inode) of a file; None where there is none."""


class Watched(Generic[T]):
    """current: the newest value that could be used. num_changes, num_refusals: how often files brought a new one, or
    one that could not be used. problem: why the files as they are now are not in use; None where they are."""

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], T],
        on_change: Callable[[T], None] = lambda _: None,
        *,
        takes_effect: str = "are in force",
    ) -> None:
        """Loads, and raises what `load` raises.

        what: names the files in the log, as in "identities". load: reads them all; raises OSError or
        ValueError with a text for the user where they cannot be used. on_change: takes a later value into use,
        before it is `current`; may refuse it by raising the same. takes_effect: said of files that have changed.
        """
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self._on_change = on_change
        self._takes_effect = takes_effect
        # Before the files are read: a change meanwhile is seen by the next look.
        self._stamps = self._look()
        self.current = load()
        self.num_changes = 0
        self.num_refusals = 0
        self.problem: str | None = None

    @property
    def what(self) -> str:
        """The files' name."""
        return self._what

    def check(self) -> bool:
        """Reads the files again if one of them has changed; True where that brought a new value into use."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            value = self._load()
            self._on_change(value)
        except _REFUSALS as error:
            self.problem = str(error)
            self.num_refusals += 1
            log.error("%s changed and cannot be used; what was read before stays in force: %s", self._what, error)
            return False
        self.current = value
        self.problem = None
        self.num_changes += 1
        log.info("%s changed and %s", self._what, self._takes_effect)
        return True

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(stamp_of(path) for path in self._paths)


def stamp_of(path: Path) -> Stamp:
    """Another one than before where the file has changed, links followed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
