"""The `outrider` command with the counting worker in place of the model: `python -m fakes.outrider_counting ...`."""

from __future__ import annotations

from fakes.counting_worker import FACTORY

import runtime.serve
from configs.schema import ServeSettings
from runtime.cli.main import main
from runtime.cluster.launcher import Launcher
from runtime.cluster.process_launcher import ProcessLauncher


def launcher_for(settings: ServeSettings) -> Launcher:
    if settings.cluster.launcher == "process":
        return ProcessLauncher(settings.cluster, settings.state_dir, factory=FACTORY)
    from runtime.cluster.ray_launcher import RayLauncher

    return RayLauncher(settings.cluster, settings.state_dir, factory=FACTORY)


if __name__ == "__main__":
    runtime.serve.launcher_for = launcher_for
    main()
