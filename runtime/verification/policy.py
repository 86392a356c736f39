"""What the operator set: policies, their revision, compare-and-set. Knows no load, no file and no wire format."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from configs.schema import SpeculationSettings
from runtime.front.errors import InvalidRequest, MissingFeature, StaleRevision

if TYPE_CHECKING:
    from runtime.verification.view import ProfileStatus

log = logging.getLogger(__name__)

MAX_CLASSES = 16
"""Priorities that may have a policy of their own; each is planned for in every step."""

BY_SETTINGS = "the settings of this server"
"""Whom the state names before anybody has set a policy."""


DEFAULT_MIN_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding; the drafter does not run."""

    def __str__(self) -> str:
        return "off"


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same draft length for every sequence. gamma = 0 serves exactly as `Off` does."""

    gamma: int

    def __str__(self) -> str:
        return f"fixed gamma={self.gamma}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """As many drafts as pay, by their survival, the load and the hardware profile.

    gamma_min: drafts per round that are drawn and verified whatever they cost.
    gamma_max: drafts per round at most; None takes the worker's.
    itl_limit_ms: the longest step that is chosen while a shorter one is to be had, which is the time from one delivery
        of a stream to the next; None aims at throughput alone.
    min_gain: how much more than ordinary decoding speculation must promise, as a share.
    min_survival: drafts of less estimated survival are not verified.
    """

    gamma_min: int = 0
    gamma_max: int | None = None
    itl_limit_ms: float | None = None
    min_gain: float = DEFAULT_MIN_GAIN
    min_survival: float = 0.0

    def __str__(self) -> str:
        parts = ["dynamic"]
        if self.gamma_min or self.gamma_max is not None:
            parts.append(f"gamma={self.gamma_min}..{'max' if self.gamma_max is None else self.gamma_max}")
        if self.itl_limit_ms is not None:
            parts.append(f"itl_limit_ms={self.itl_limit_ms:g}")
        if self.min_gain != DEFAULT_MIN_GAIN:
            parts.append(f"min_gain={self.min_gain:g}")
        if self.min_survival:
            parts.append(f"min_survival={self.min_survival:g}")
        return " ".join(parts)


Policy = Off | Fixed | Dynamic


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """effective_step: the first step planned under this policy.

    classes: priorities whose requests have a policy of their own, rising, each with that policy.
    set_by: a peer's address, or what the server itself had reason to. set_at: Unix time, seconds.
    num_changes: how often it was changed since this server started; the revision may begin higher.
    """

    policy: Policy
    revision: int
    effective_step: int
    classes: tuple[tuple[int, Policy], ...] = ()
    set_by: str = ""
    set_at: float = 0.0
    num_changes: int = 0

    def of(self, priority: int) -> Policy:
        """The policy of requests of this priority."""
        return dict(self.classes).get(priority, self.policy)


def initial_policy(speculation: SpeculationSettings, gamma_max: int) -> Policy:
    """The policy that the settings ask for at start. `gamma_max` is the worker's and may be below the one asked for; a
    checkpoint without a drafter has 0."""
    match speculation.policy:
        case "off":
            policy: Policy = Off()
        case "fixed":
            policy = Fixed(speculation.gamma)
        case "dynamic":
            policy = Dynamic(**speculation.dynamic.model_dump())
    return lowered(policy, gamma_max)


def lowered(policy: Policy, gamma_max: int) -> Policy:
    """The policy with drafts no longer than `gamma_max`; without a drafter (0) none is left to draft."""
    match policy:
        case Fixed(gamma=gamma) if gamma > gamma_max:
            return Fixed(gamma_max) if gamma_max else Off()
        case Dynamic() if not gamma_max:
            return Off()
        case Dynamic(gamma_min=least, gamma_max=most):
            most = None if most is None else min(most, gamma_max)
            return replace(policy, gamma_min=min(least, gamma_max), gamma_max=most)
        case _:
            return policy


def lowered_state(state: PolicyState, gamma_max: int, *, effective_step: int, now: float) -> PolicyState:
    """The state with every policy lowered: the very one where none is beyond the worker's limit, else a new revision,
    set by the server."""
    policy = lowered(state.policy, gamma_max)
    classes = tuple((priority, lowered(own, gamma_max)) for priority, own in state.classes)
    if (policy, classes) == (state.policy, state.classes):
        return state
    log.warning(
        "the worker drafts at most %d tokens: %s becomes %s",
        gamma_max,
        describe(state.policy, state.classes),
        describe(policy, classes),
    )
    return PolicyState(
        policy=policy,
        revision=state.revision + 1,
        effective_step=effective_step,
        classes=classes,
        set_by=f"this server: its worker drafts at most {gamma_max} tokens",
        set_at=now,
        num_changes=state.num_changes + 1,
    )


def describe(policy: Policy, classes: tuple[tuple[int, Policy], ...]) -> str:
    """In one line, for logs: fixed gamma=4; priority 3: off."""
    return "; ".join([str(policy), *(f"priority {priority}: {own}" for priority, own in classes)])


def check_bounds(policy: Policy, gamma_max: int) -> None:
    """Raises InvalidRequest, with the field, for a policy that no drafter of this limit can serve."""
    if isinstance(policy, Fixed) and not 0 <= policy.gamma <= gamma_max:
        raise _not_within("fixed.gamma", policy.gamma, gamma_max)
    if not isinstance(policy, Dynamic):
        return
    most = gamma_max if policy.gamma_max is None else policy.gamma_max
    if not 0 <= most <= gamma_max:
        raise _not_within("dynamic.gamma_max", most, gamma_max)
    if not 0 <= policy.gamma_min <= gamma_max:
        raise _not_within("dynamic.gamma_min", policy.gamma_min, gamma_max)
    if policy.gamma_min > most:
        raise InvalidRequest(
            "policy.dynamic.gamma_min",
            f"{policy.gamma_min} is above gamma_max, {most}; lower the one or raise the other",
        )
    limit_ms = policy.itl_limit_ms
    if limit_ms is not None and not (limit_ms > 0 and math.isfinite(limit_ms)):
        raise InvalidRequest(
            "policy.dynamic.itl_limit_ms", f"{limit_ms:g} is no time above 0; leave it out to aim at throughput alone"
        )
    for name, share in (("min_gain", policy.min_gain), ("min_survival", policy.min_survival)):
        if not 0 <= share <= 1:
            raise InvalidRequest(f"policy.dynamic.{name}", f"{share:g} is not from 0 to 1; it is a share")


def _not_within(name: str, gamma: int, gamma_max: int) -> InvalidRequest:
    return InvalidRequest(f"policy.{name}", f"{gamma} is not within 0..{gamma_max} (the server's gamma_max)")


class PolicyStore:
    """Holds the one state in force.

    initial: of the first step. gamma_max: longest draft that the worker's buffers hold.
    profile: what the hardware profile is worth at the moment; `dynamic` can only be set while it is usable.
    """

    def __init__(self, initial: PolicyState, *, gamma_max: int, profile: Callable[[], ProfileStatus]) -> None:
        self.gamma_max = gamma_max
        self.state = initial
        self._profile = profile
        self._listeners: dict[object, Callable[[PolicyState], None]] = {}

    def add_listener(self, listener: Callable[[PolicyState], None]) -> Callable[[], None]:
        """Calls `listener`, which must not raise, with the state after each change. Returns what ends that."""
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def announce(self) -> None:
        """Tells the listeners of the state; also to be called when what a policy comes to has changed, and not it."""
        for listener in list(self._listeners.values()):
            listener(self.state)

    def check(self, policy: Policy) -> None:
        """Raises InvalidRequest, with the field, or MissingFeature where this server cannot serve a policy now."""
        is_dynamic = isinstance(policy, Dynamic)
        if is_dynamic and not self.gamma_max:
            raise MissingFeature(
                "policy.dynamic: the worker has no drafter (its gamma_max is 0); serve a checkpoint with one, or set "
                "policy.off"
            )
        check_bounds(policy, self.gamma_max)
        if is_dynamic and not (profile := self._profile()).is_usable:
            raise MissingFeature(f"policy.dynamic: {profile.detail}")

    def set(
        self,
        policy: Policy | None,
        *,
        priority: int | None = None,
        expected_revision: int | None,
        effective_step: int,
        set_by: str,
        now: float,
    ) -> PolicyState:
        """Replaces a policy and raises the revision.

        policy: None with a priority lets its requests follow the others again.
        priority: whose policy it is; None sets that of all requests whose priority has none of its own.
        expected_revision: the revision the caller read; None sets whatever is in force.
        set_by, now: what the state says of who set it and when, Unix time in seconds.

        Raises StaleRevision when another revision is in force, InvalidRequest when the policy cannot be served,
        MissingFeature when it needs what this server does not have.
        """
        state = self.state
        if expected_revision is not None and expected_revision != state.revision:
            raise StaleRevision(
                f"the policy is at revision {state.revision} ({describe(state.policy, state.classes)}), not "
                f"{expected_revision}; read it again"
            )
        if policy is not None:
            self.check(policy)
        elif priority is None:
            raise InvalidRequest("policy", "none is given; set off, fixed or dynamic")
        self.state = PolicyState(
            policy=policy if priority is None and policy is not None else state.policy,
            revision=state.revision + 1,
            effective_step=effective_step,
            classes=state.classes if priority is None else _with_class(state.classes, priority, policy),
            set_by=set_by,
            set_at=now,
            num_changes=state.num_changes + 1,
        )
        self.announce()
        return self.state

    def replace(self, state: PolicyState) -> None:
        """Puts a whole state in force, of a higher revision; priorities have the policies that it names."""
        assert state.revision > self.state.revision, f"revision {state.revision} follows {self.state.revision}"
        self.state = replace(state, num_changes=self.state.num_changes + 1)
        self.announce()

    def fit(self, gamma_max: int, *, effective_step: int, now: float) -> None:
        """Takes the limit of a worker that came back. Policies beyond it are lowered, under a new revision; what an
        earlier limit lowered stays so."""
        self.gamma_max = gamma_max
        before = self.state
        self.state = lowered_state(before, gamma_max, effective_step=effective_step, now=now)
        if self.state is not before:
            self.announce()


def _with_class(
    classes: tuple[tuple[int, Policy], ...], priority: int, policy: Policy | None
) -> tuple[tuple[int, Policy], ...]:
    """The classes, rising, with one replaced or removed. Raises InvalidRequest."""
    own = dict(classes)
    if policy is None:
        if priority not in own:
            known = ", ".join(map(str, own)) or "none has"
            raise InvalidRequest("priority", f"{priority} has no policy of its own to remove; those that have: {known}")
        del own[priority]
    else:
        own[priority] = policy
    if len(own) > MAX_CLASSES:
        known = ", ".join(str(one) for one, _ in classes)
        raise InvalidRequest(
            "priority", f"{MAX_CLASSES} priorities have a policy of their own already ({known}); remove one first"
        )
    return tuple(sorted(own.items(), key=lambda item: item[0]))
