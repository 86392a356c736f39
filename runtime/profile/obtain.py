"""The profile that a server plans with: found, or measured where that is allowed. Knows no engine and no terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from configs.schema import ServeSettings
from runtime.link import LoadedGroup, RankProgress
from runtime.policies import Found
from runtime.profile import files
from runtime.profile.drive import ProfileError, SyntheticLoad
from runtime.profile.identity import identity_of
from runtime.profile.measure import measure
from runtime.verification.profile import ProfileCosts

log = logging.getLogger(__name__)

STAGE = "hardware profile"
"""What the progress of measuring is called."""


class ProfileFinder:
    """A `runtime.policies.ProfileSource` by the settings of a deployment.

    now: the time, with its zone; tests pass their own.
    """

    def __init__(self, settings: ServeSettings, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._settings = settings
        self._now = now

    async def find(self, group: LoadedGroup, progress: RankProgress, *, may_measure: bool) -> Found:
        """Looks for a profile of the group; where none fits and it may, measures one and keeps it under `state_dir`.

        Nothing may run on the group. After measuring the ranks hold no sequence, and `life` of what is found is to be
        gone on from.

        Raises WorkerError when a rank is lost meanwhile, ValueError when the step size does not suit the ranks.
        """
        settings = self._settings
        if not group.description.gamma_max:
            return Found(costs=None, status=files.missing_status("nothing is drafted here: gamma_max is 0"))
        kept, status = files.find(
            settings.state_dir,
            identity_of(settings, group.mesh, group.ranks),
            now=self._now(),
            max_age_days=settings.speculation.profile_max_age_days,
            explicit=settings.speculation.profile,
        )
        if kept is not None:
            return Found(costs=ProfileCosts(kept.profile), status=status)
        if not may_measure:
            return Found(costs=None, status=status)
        log.info("a hardware profile is measured: %s", status.detail)
        return await self._measure(group, progress)

    async def _measure(self, group: LoadedGroup, progress: RankProgress) -> Found:
        load = SyntheticLoad(group, self._settings)
        try:
            profile = await measure(
                load, self._settings, lambda done, total, text: progress(0, STAGE, done, total), now=self._now
            )
        except ProfileError as error:
            await load.clear()
            status = files.missing_status(f"no profile could be measured: {error}")
            return Found(costs=None, status=status, life=load.life)
        path = files.profile_path(self._settings.state_dir, profile.identity)
        try:
            files.write(profile, path)
        except OSError as error:
            log.warning("the hardware profile is in use and not kept: %s: %s", path, error.strerror or error)
        return Found(costs=ProfileCosts(profile), status=files.ok_status(files.Kept(path, profile)), life=load.life)
