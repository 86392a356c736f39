"""A configuration file and whoever reads it, for tests of what comes of its changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml

from configs.schema import SpeculationSettings
from runtime.access.watched import Watched
from runtime.in_force import SettingsInForce
from runtime.reload import Reloaded, Reloader, SettingsSource

BASE = {"scheduler": {"max_waiting": 7}, "server": {"drain_s": 3.0}, "speculation": {"gamma": 2, "revision": 5}}


class Policies:
    """The policy in force, as far as a reload knows it."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.taken: list[SpeculationSettings] = []

    def take_up(self, settings: SpeculationSettings) -> None:
        assert settings.revision > self.revision
        self.revision = settings.revision
        self.taken.append(settings)


class Desk:
    """A configuration file and whoever reads it. revision: of the policy in force. overrides: of the command line."""

    def __init__(self, folder: Path, *, revision: int = 5, overrides: dict[str, Any] | None = None) -> None:
        self.path = folder / "serve.yaml"
        self.write(BASE)
        self.source = SettingsSource(path=self.path, overrides=overrides or {})
        self.settings = SettingsInForce(self.source.load())
        self.policies = Policies(revision)
        self.watched: list[Watched[Any]] = []
        self.reloader = Reloader(self.settings, self.source, self.policies, watched=lambda: self.watched)

    def write(self, document: object) -> None:
        self.path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))

    def reload(self, document: object | None = None, peer: str | None = None) -> Reloaded:
        if document is not None:
            self.write(document)
        return asyncio.run(self.reloader.reload(peer))

    def look(self, times: int = 1) -> None:
        async def scenario() -> None:
            for _ in range(times):
                await self.reloader.look()

        asyncio.run(scenario())


def changed(**blocks: dict[str, Any]) -> dict[str, Any]:
    """The base with some values replaced."""
    return {name: {**BASE.get(name, {}), **blocks.get(name, {})} for name in {*BASE, *blocks}}
