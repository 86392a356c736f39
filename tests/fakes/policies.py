"""The policies of an engine that plans nothing: they are compared and set for real, the planner's part is a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from runtime.front.errors import MissingFeature
from runtime.verification.policy import BY_SETTINGS, Fixed, Policy, PolicyState, PolicyStore
from runtime.verification.view import AdviceReport, ProfileState, ProfileStatus, ShadowView, SpeculationView

NO_PROFILE = ProfileStatus(state=ProfileState.MISSING, detail="no hardware profile of this machine; measure one")
SOUND_PROFILE = ProfileStatus(state=ProfileState.OK, detail="measured on this machine")


class FakePolicies:
    """A `runtime.front.engine_link.PolicyLink` of a fixed length of 4.

    next_step_id: the step from which on what is set is in force. on_listeners: called when one comes or goes.
    view: what the planner would say, profile and shadow among it. advice: what it advises, if anything; advised: for
    which loads it was asked to.
    """

    def __init__(self, gamma_max: int, next_step_id: Callable[[], int], on_listeners: Callable[[], None]) -> None:
        self.view = SpeculationView(profile=NO_PROFILE)
        self.advice: AdviceReport | None = None
        self.advised: list[tuple[int | None, int | None]] = []
        self.num_listeners = 0
        self.store = PolicyStore(
            PolicyState(policy=Fixed(4), revision=1, effective_step=1, set_by=BY_SETTINGS, set_at=time.time()),
            gamma_max=gamma_max,
            profile=lambda: self.view.profile,
        )
        self._next_step_id = next_step_id
        self._on_listeners = on_listeners

    @property
    def state(self) -> PolicyState:
        return self.store.state

    async def set(
        self,
        policy: Policy | None,
        expected_revision: int | None = None,
        *,
        priority: int | None = None,
        set_by: str = "",
    ) -> PolicyState:
        return self.store.set(
            policy,
            priority=priority,
            expected_revision=expected_revision,
            effective_step=self._next_step_id(),
            set_by=set_by,
            now=time.time(),
        )

    def add_listener(self, listener: Callable[[PolicyState], None]) -> Callable[[], None]:
        remove = self.store.add_listener(listener)
        self.num_listeners += 1
        self._on_listeners()

        def leave() -> None:
            remove()
            self.num_listeners -= 1
            self._on_listeners()

        return leave

    def set_shadow(self, policy: Policy | None) -> ShadowView | None:
        shadow = None
        if policy is not None:
            self.store.check(policy)
            self._require_profile()
            shadow = ShadowView(
                policy=policy,
                steps=0,
                agreed=0,
                tokens=0.0,
                step_s=0.0,
                shadow_tokens=0.0,
                shadow_step_s=0.0,
                steps_by_gamma=(0,) * (self.store.gamma_max + 1),
            )
        self.view = replace(self.view, shadow=shadow)
        return shadow

    def advise(self, *, num_sequences: int | None = None, context: int | None = None) -> AdviceReport:
        self._require_profile()
        if self.advice is None:
            raise MissingFeature("nothing has been drafted yet; ask again when requests have run")
        self.advised.append((num_sequences, context))
        return self.advice

    def _require_profile(self) -> None:
        if not self.view.profile.is_usable:
            raise MissingFeature(f"a hardware profile: {self.view.profile.detail}")
