"""The policies in force and the planner that follows them, over all lives of the group: what an operator sees and
changes of them, and what is kept. Knows no loop and no ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.schema import SpeculationSettings
from runtime.front.errors import Unavailable
from runtime.in_force import SettingsInForce
from runtime.life import Life
from runtime.link import LoadedGroup, RankProgress
from runtime.verification.calibration_file import CalibrationFile
from runtime.verification.costs import StepCosts
from runtime.verification.policy import Policy, PolicyState, PolicyStore
from runtime.verification.policy_file import NAME, PolicyFile, configured_state, state_at_start
from runtime.verification.policy_planner import PolicyPlanner
from runtime.verification.view import AdviceReport, ProfileStatus, ShadowView
from workers.plan import WorkerDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A profile that was looked for. costs: None where it is not to be used. life: the one that measuring it used up,
    which the first life goes on from; None where nothing was measured."""

    costs: StepCosts | None
    status: ProfileStatus
    life: Life | None = None


class ProfileSource(Protocol):
    """Finds the hardware profile of a group of ranks."""

    async def find(self, group: LoadedGroup, progress: RankProgress, *, may_measure: bool) -> Found:
        """Looks where profiles are kept; may measure the group, which has nothing else to do then, for minutes.

        Raises WorkerError when a rank is lost meanwhile.
        """
        ...


class Policies:
    """One per engine; a `runtime.front.engine_link.PolicyLink`.

    settings: of the server; the policy among them is that of the start, and where `take_up` is called.
    state_dir: where the policy and the calibration of drafts are kept over restarts; None keeps none.
    next_step_id: tells the id of the step that is planned next.
    """

    def __init__(self, settings: SettingsInForce, state_dir: Path | None, next_step_id: Callable[[], int]) -> None:
        self._settings = settings
        self._state_dir = state_dir
        self._next_step_id = next_step_id
        self._file = None if state_dir is None else PolicyFile(state_dir / NAME)
        self._calibration: CalibrationFile | None = None
        self._store: PolicyStore | None = None
        self._planner: PolicyPlanner | None = None

    @property
    def store(self) -> PolicyStore:
        """Raises Unavailable before `begin`."""
        if self._store is None:
            raise Unavailable("the server is starting")
        return self._store

    @property
    def planner(self) -> PolicyPlanner:
        """Raises Unavailable before `begin`."""
        if self._planner is None:
            raise Unavailable("the server is starting")
        return self._planner

    def begin(self, description: WorkerDescription, found: Found | None, *, capacity: int) -> None:
        """With the first life of the group. found: its profile; None where none was looked for. capacity: sequences
        that it runs at once."""
        gamma_max = description.gamma_max
        settings = self._settings.now.speculation
        state = state_at_start(settings, gamma_max, file=self._file, now=time.time())
        self._store = PolicyStore(state, gamma_max=gamma_max, profile=lambda: self.planner.profile)
        self._planner = PolicyPlanner(self._store, settings, capacity=capacity)
        if self._state_dir is not None and gamma_max:
            self._calibration = CalibrationFile(self._state_dir, description, settings.confidence)
            self._calibration.load(self._planner.history.calibrator)
        if found is not None:
            self._planner.use_profile(found.costs, found.status)

    def keep(self) -> None:
        """At the end: what was learnt of drafts is kept."""
        self.planner.catch_up()
        if self._calibration is not None and self.planner.history.calibrator.num_reached:
            self._calibration.save(self.planner.history.calibrator)

    def fit(self, gamma_max: int, found: Found | None, *, capacity: int) -> None:
        """With every later life, before its first step."""
        self.store.fit(gamma_max, effective_step=self._next_step_id(), now=time.time())
        self.planner.fit(gamma_max, capacity=capacity)
        if found is not None and found.status != self.planner.found:
            self.planner.use_profile(found.costs, found.status)

    @property
    def revision(self) -> int:
        """Of the policy in force; 0 before `begin`, which takes the settings as they are then."""
        return 0 if self._store is None else self._store.state.revision

    def take_up(self, settings: SpeculationSettings) -> None:
        """Puts the policy that settings name in force from the next planned step on, whoever had set the present one.
        It is not kept: like that of the start, it comes before a kept one by its revision, which is the higher one."""
        if self._store is None:
            return
        self.planner.settings = settings
        self._store.replace(
            configured_state(settings, self._store.gamma_max, effective_step=self._next_step_id(), now=time.time())
        )

    @property
    def state(self) -> PolicyState:
        """Raises Unavailable before `begin`."""
        return self.store.state

    async def set(
        self,
        policy: Policy | None,
        expected_revision: int | None = None,
        *,
        priority: int | None = None,
        set_by: str = "",
    ) -> PolicyState:
        """Puts a policy in force for all sequences from the next planned step on; returns once that step is fixed, and
        the policy kept.

        expected_revision: the revision the caller read; None replaces whatever is in force. priority, set_by: see
        PolicyStore.set.

        Raises StaleRevision, InvalidRequest, MissingFeature, or Unavailable before `begin`.
        """
        state = self.store.set(
            policy,
            priority=priority,
            expected_revision=expected_revision,
            effective_step=self._next_step_id(),
            set_by=set_by,
            now=time.time(),
        )
        if self._file is not None:
            await asyncio.to_thread(self._file.keep, state)
        return state

    def add_listener(self, listener: Callable[[PolicyState], None]) -> Callable[[], None]:
        """`listener`, which must not raise, hears every change of the policy. Returns what ends that. Raises
        Unavailable before `begin`."""
        return self.store.add_listener(listener)

    def set_shadow(self, policy: Policy | None) -> ShadowView | None:
        """Plans a second policy beside the one in force; None ends it. Raises InvalidRequest, MissingFeature, or
        Unavailable before `begin`."""
        return self.planner.set_shadow(policy)

    def advise(self, *, num_sequences: int | None = None, context: int | None = None) -> AdviceReport:
        """What each draft length would bring. Raises MissingFeature, or Unavailable before `begin`."""
        return self.planner.advise(num_sequences=num_sequences, context=context)
