"""The settings that a server goes by at the moment, of which some change while it runs. Knows no file and no engine.

Whoever goes by a setting that may change holds this, and reads the setting where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from configs.schema import ServeSettings


class SettingsInForce:
    """now: all settings, frozen; replaced as a whole, on the event loop. Those that need a restart never change."""

    def __init__(self, settings: ServeSettings) -> None:
        self.now = settings
        self._listeners: list[Callable[[ServeSettings], None]] = []

    def add_listener(self, listener: Callable[[ServeSettings], None]) -> None:
        """`listener` hears the settings after each change of them; it must not raise."""
        self._listeners.append(listener)

    def replace(self, settings: ServeSettings) -> None:
        """Goes by others from now on."""
        self.now = settings
        for listener in self._listeners:
            listener(settings)
