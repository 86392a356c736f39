"""The policies in force: what may be set, for whom, what a smaller worker makes of them, and who is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.schema import DynamicSettings, SpeculationSettings
from runtime.front.errors import InvalidRequest, MissingFeature, StaleRevision
from runtime.verification.policy import (
    MAX_CLASSES,
    Dynamic,
    Fixed,
    Off,
    Policy,
    PolicyState,
    PolicyStore,
    initial_policy,
)
from runtime.verification.view import ProfileState, ProfileStatus

OK = ProfileStatus(state=ProfileState.OK, detail="measured here")
NOW = 1000.0
WHO = "ipv4:127.0.0.1:5"
THREE = Fixed(3)


def store_of(
    policy: Policy = THREE,
    *,
    classes: tuple[tuple[int, Policy], ...] = (),
    gamma_max: int = 4,
    profile: ProfileStatus = OK,
) -> PolicyStore:
    start = PolicyState(policy=policy, revision=5, effective_step=1, classes=classes, set_by="settings", set_at=1.0)
    return PolicyStore(start, gamma_max=gamma_max, profile=lambda: profile)


def put(
    store: PolicyStore,
    policy: Policy | None,
    priority: int | None = None,
    *,
    expected: int | None = None,
    step: int = 9,
) -> PolicyState:
    return store.set(policy, priority=priority, expected_revision=expected, effective_step=step, set_by=WHO, now=NOW)


def test_a_policy_says_who_set_it_when_and_from_which_step_on():
    store = store_of()
    state = put(store, Dynamic(gamma_max=2), expected=5)
    assert state is store.state
    assert (state.policy, state.revision, state.effective_step) == (Dynamic(gamma_max=2), 6, 9)
    assert (state.set_by, state.set_at, state.classes, state.num_changes) == (WHO, NOW, (), 1)
    again = put(store, Dynamic(gamma_max=2), step=10)
    assert (again.revision, again.effective_step, again.num_changes) == (7, 10, 2), "the same one again counts"


def test_a_stale_revision_changes_nothing_and_says_what_is_in_force():
    store = store_of(classes=((3, Off()),))
    before = store.state
    with pytest.raises(StaleRevision, match=r"at revision 5 \(fixed gamma=3; priority 3: off\), not 4"):
        put(store, Off(), expected=4)
    assert store.state is before


def test_a_priority_has_a_policy_of_its_own_until_it_is_removed():
    store = store_of()
    put(store, Off(), 7)
    state = put(store, Fixed(1), -2)
    assert state.classes == ((-2, Fixed(1)), (7, Off())), "rising"
    assert (state.of(7), state.of(-2), state.of(0)) == (Off(), Fixed(1), Fixed(3))
    state = put(store, Fixed(2))
    assert (state.policy, state.classes) == (Fixed(2), ((-2, Fixed(1)), (7, Off()))), "the others have no say"
    state = put(store, Fixed(4), 7)
    assert state.classes == ((-2, Fixed(1)), (7, Fixed(4)))
    state = put(store, None, 7)
    assert (state.policy, state.classes, state.of(7), state.revision) == (Fixed(2), ((-2, Fixed(1)),), Fixed(2), 10)


def test_what_no_priority_has_cannot_be_removed():
    for store, known in ((store_of(), "none has"), (store_of(classes=((1, Off()), (4, Off()))), "1, 4")):
        with pytest.raises(InvalidRequest, match=f"^priority: 3 has no policy of its own to remove.*: {known}"):
            put(store, None, 3)
        assert store.state.revision == 5


def test_no_policy_at_all_is_refused():
    with pytest.raises(InvalidRequest, match=r"^policy: none is given; set off, fixed or dynamic"):
        put(store_of(), None)


def test_so_many_priorities_may_have_a_policy_and_no_more():
    store = store_of()
    for priority in range(MAX_CLASSES):
        put(store, Off(), priority)
    before = store.state
    with pytest.raises(InvalidRequest, match=rf"^priority: {MAX_CLASSES} priorities .* remove one first"):
        put(store, Off(), 99)
    assert store.state is before
    assert put(store, Fixed(1), 3).of(3) == Fixed(1), "one that is there may change"
    put(store, None, 0)
    assert put(store, Off(), 99).of(99) == Off()


@pytest.mark.parametrize("priority", [None, 3])
@pytest.mark.parametrize(
    ("policy", "field", "words"),
    [
        (Fixed(5), "policy.fixed.gamma", r"5 is not within 0\.\.4"),
        (Dynamic(gamma_max=5), "policy.dynamic.gamma_max", r"5 is not within 0\.\.4"),
        (Dynamic(gamma_min=5), "policy.dynamic.gamma_min", r"5 is not within 0\.\.4"),
        (Dynamic(gamma_min=3, gamma_max=2), "policy.dynamic.gamma_min", "3 is above gamma_max, 2"),
        (Dynamic(itl_limit_ms=0.0), "policy.dynamic.itl_limit_ms", "0 is no time above 0"),
        (Dynamic(itl_limit_ms=-1.0), "policy.dynamic.itl_limit_ms", "-1 is no time"),
        (Dynamic(itl_limit_ms=float("inf")), "policy.dynamic.itl_limit_ms", "inf is no time"),
        (Dynamic(itl_limit_ms=float("nan")), "policy.dynamic.itl_limit_ms", "nan is no time"),
        (Dynamic(min_gain=-0.1), "policy.dynamic.min_gain", "-0.1 is not from 0 to 1"),
        (Dynamic(min_gain=float("nan")), "policy.dynamic.min_gain", "nan is not"),
        (Dynamic(min_survival=1.5), "policy.dynamic.min_survival", "1.5 is not from 0 to 1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(policy: Policy, field: str, words: str, priority: int | None):
    store = store_of()
    told: list[PolicyState] = []
    store.add_listener(told.append)
    with pytest.raises(InvalidRequest, match=words) as refused:
        put(store, policy, priority)
    assert refused.value.field == field
    assert (store.state.revision, told) == (5, [])


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(0),
        Fixed(4),
        Dynamic(),
        Dynamic(gamma_min=4, gamma_max=4, itl_limit_ms=1e-3, min_gain=0.0, min_survival=1.0),
        Dynamic(gamma_max=0, min_gain=1.0),
    ],
    ids=str,
)
def test_the_ends_of_the_bounds_are_taken(policy: Policy):
    assert put(store_of(), policy).policy == policy


@pytest.mark.parametrize("priority", [None, 3])
@pytest.mark.parametrize("state", [state for state in ProfileState if state is not ProfileState.OK])
def test_dynamic_needs_a_profile_that_is_good_and_says_what_is_wrong_with_it(state: ProfileState, priority: int | None):
    profile = ProfileStatus(state=state, detail="no profile of this machine; run `outrider profile`")
    store = store_of(profile=profile)
    with pytest.raises(MissingFeature, match=r"no profile of this machine; run `outrider profile`"):
        put(store, Dynamic(), priority)
    assert store.state.revision == 5
    with pytest.raises(InvalidRequest):
        put(store, Dynamic(gamma_max=9), priority)
    assert put(store, Fixed(2), priority).revision == 6, "the others need none"


def test_dynamic_needs_a_drafter():
    store = store_of(Off(), gamma_max=0)
    with pytest.raises(MissingFeature, match="no drafter"):
        put(store, Dynamic())
    with pytest.raises(InvalidRequest, match=r"policy\.fixed\.gamma"):
        put(store, Fixed(1))


def test_a_smaller_worker_lowers_every_policy_under_one_new_revision():
    wide = Dynamic(gamma_min=3, gamma_max=4, itl_limit_ms=8.0, min_gain=0.2)
    store = store_of(Fixed(4), classes=((1, wide), (2, Dynamic()), (3, Off()), (4, Fixed(1))))
    told: list[PolicyState] = []
    store.add_listener(told.append)
    store.fit(2, effective_step=40, now=NOW)
    state = store.state
    assert (state.policy, state.revision, state.effective_step, state.num_changes) == (Fixed(2), 6, 40, 1)
    assert state.classes == (
        (1, replace(wide, gamma_min=2, gamma_max=2)),
        (2, Dynamic()),
        (3, Off()),
        (4, Fixed(1)),
    )
    assert "at most 2 tokens" in state.set_by
    assert (state.set_at, told) == (NOW, [state])
    with pytest.raises(InvalidRequest, match=r"within 0\.\.2"):
        put(store, Fixed(3))
    store.fit(4, effective_step=50, now=NOW)
    assert store.state is state, "what was lowered stays so"
    assert told == [state]
    assert put(store, Fixed(4)).policy == Fixed(4)


def test_a_worker_without_a_drafter_leaves_nothing_to_draft():
    store = store_of(Dynamic(), classes=((1, Fixed(2)), (2, Dynamic(gamma_max=1))))
    store.fit(0, effective_step=2, now=NOW)
    assert (store.state.policy, store.state.classes) == (Off(), ((1, Off()), (2, Off())))


def test_listeners_hear_every_change_until_they_leave():
    store = store_of()
    told: tuple[list[PolicyState], list[PolicyState]] = ([], [])
    removals = [store.add_listener(one.append) for one in told]
    first = put(store, Off())
    removals[0]()
    removals[0]()
    second = put(store, Off(), 3)
    store.announce()
    assert told == ([first], [first, second, second])
    removals[1]()
    put(store, Fixed(1))
    assert len(told[1]) == 3


def test_a_listener_may_leave_while_it_is_told():
    store = store_of()
    told: list[int] = []

    def once(state: PolicyState) -> None:
        told.append(state.revision)
        leave()

    leave = store.add_listener(once)
    store.add_listener(lambda state: told.append(-state.revision))
    put(store, Off())
    put(store, Off())
    assert told == [6, -6, -7]


@pytest.mark.parametrize(
    ("settings", "gamma_max", "policy"),
    [
        ({"policy": "off"}, 4, Off()),
        ({"policy": "fixed", "gamma": 3}, 4, Fixed(3)),
        ({"policy": "fixed", "gamma": 3}, 2, Fixed(2)),
        ({"policy": "fixed", "gamma": 3}, 0, Off()),
        ({"policy": "dynamic"}, 4, Dynamic()),
        ({"policy": "dynamic"}, 0, Off()),
        (
            {
                "policy": "dynamic",
                "dynamic": DynamicSettings(gamma_min=3, gamma_max=5, itl_limit_ms=20.0, min_gain=0.1, min_survival=0.3),
            },
            2,
            Dynamic(gamma_min=2, gamma_max=2, itl_limit_ms=20.0, min_gain=0.1, min_survival=0.3),
        ),
    ],
)
def test_the_settings_policy_is_lowered_to_the_worker_at_start(settings: dict, gamma_max: int, policy: Policy):
    assert initial_policy(SpeculationSettings(**settings), gamma_max) == policy
