"""Starts the ranks of a deployment for as long as it takes to measure them. Knows no front and no terminal."""

from __future__ import annotations

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.cluster.launcher import Launcher
from runtime.cluster.supervisor import GroupSupervisor, launcher_for
from runtime.link import RankProgress
from runtime.profile.document import Profile
from runtime.profile.drive import SyntheticLoad
from runtime.profile.measure import Progress, measure
from workers.models.layouts import check_layout


async def measure_deployment(
    settings: ServeSettings,
    starting: RankProgress,
    measuring: Progress,
    *,
    quick: bool = False,
    launcher: Launcher | None = None,
) -> Profile:
    """settings: as `load_settings` gives them, with the checkpoint's path set. launcher: who starts ranks; unset takes
    the one that the settings name. No rank is left when this ends, however it does.

    Raises LoadError or WorkerError when the ranks cannot start or one is lost, ProfileError when they cannot be
    measured, ValueError when the step size does not suit them.
    """
    assert settings.model.path is not None, "settings without a checkpoint"
    check_layout(settings.model.path, Mesh.of(settings.parallel))
    supervisor = GroupSupervisor(settings, launcher or launcher_for(settings))
    try:
        group = await supervisor.start(starting)
        return await measure(SyntheticLoad(group, settings), settings, measuring, quick=quick)
    finally:
        await supervisor.stop()
