"""Messages about policies without a server: both ways, with every default and every refusal that needs no engine."""

from __future__ import annotations

import pytest
from fakes.a_moment import an_engine
from fakes.advice import ADVICE, SHADOW, VIEW

from outrider.v1 import operator_pb2
from runtime.front import policy_messages
from runtime.front.errors import InvalidRequest
from runtime.verification.policy import Dynamic, Fixed, Off, Policy, PolicyState
from runtime.verification.view import ProfileState

Message = operator_pb2.VerificationPolicy
THROUGHPUT, GOODPUT = operator_pb2.OBJECTIVE_THROUGHPUT, operator_pb2.OBJECTIVE_GOODPUT


def dynamic(**fields: object) -> Message:
    return Message(dynamic=Message.Dynamic(**fields))


@pytest.mark.parametrize(
    ("message", "policy"),
    [
        (Message(off={}), Off()),
        (Message(fixed={}), Fixed(0)),
        (Message(fixed={"gamma": 7}), Fixed(7)),
        (dynamic(), Dynamic()),
        (dynamic(gamma_max=0, min_gain=0.0), Dynamic(gamma_max=0, min_gain=0.0)),
        (dynamic(objective=operator_pb2.OBJECTIVE_UNSPECIFIED, itl_limit_ms=9), Dynamic(itl_limit_ms=9.0)),
        (dynamic(objective=THROUGHPUT), Dynamic()),
        (dynamic(objective=GOODPUT, itl_limit_ms=0), Dynamic(itl_limit_ms=0.0)),
        (
            dynamic(gamma_min=1, gamma_max=5, itl_limit_ms=12.5, min_gain=0.25, min_survival=0.125),
            Dynamic(gamma_min=1, gamma_max=5, itl_limit_ms=12.5, min_gain=0.25, min_survival=0.125),
        ),
    ],
    ids=str,
)
def test_a_policy_is_read_with_its_defaults(message: Message, policy: Policy):
    assert policy_messages.policy_of(message) == policy


@pytest.mark.parametrize(
    "policy",
    [Off(), Fixed(0), Fixed(3), Dynamic(), Dynamic(gamma_min=1, gamma_max=2, itl_limit_ms=8.0, min_survival=0.5)],
    ids=str,
)
def test_a_policy_that_is_told_may_be_set_again(policy: Policy):
    assert policy_messages.policy_of(policy_messages.policy_message(policy)) == policy


def test_the_objective_is_told_by_name():
    assert policy_messages.policy_message(Dynamic()).dynamic.objective == THROUGHPUT
    goodput = policy_messages.policy_message(Dynamic(itl_limit_ms=8.0)).dynamic
    assert (goodput.objective, goodput.itl_limit_ms, goodput.HasField("gamma_max")) == (GOODPUT, 8.0, False)


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        (Message(), "policy", "none is given; set off, fixed or dynamic"),
        (dynamic(objective=GOODPUT), "policy.dynamic.itl_limit_ms", "is missing"),
        (dynamic(objective=THROUGHPUT, itl_limit_ms=5), "policy.dynamic.itl_limit_ms", "leave it out"),
        (dynamic(objective=7), "policy.dynamic.objective", "7 is unknown; choose OBJECTIVE_THROUGHPUT, OBJECTIVE_GOOD"),
    ],
    ids=str,
)
def test_what_makes_no_sense_on_any_server_is_refused_by_field(message: Message, field: str, words: str):
    with pytest.raises(InvalidRequest, match=words) as refused:
        policy_messages.policy_of(message)
    assert refused.value.field == field


def test_a_priority_without_a_policy_asks_for_the_others():
    request = operator_pb2.SetVerificationPolicyRequest
    assert policy_messages.change_of(request(priority=0)) == (None, 0)
    assert policy_messages.change_of(request(priority=-3, policy=Message(off={}))) == (Off(), -3)
    assert policy_messages.change_of(request(policy=Message(off={}))) == (Off(), None)
    for message in (request(), request(priority=1, policy=Message())):
        with pytest.raises(InvalidRequest, match=r"^policy: none is given"):
            policy_messages.change_of(message)


def test_a_state_tells_classes_and_who_set_it():
    state = PolicyState(
        policy=Fixed(2),
        revision=9,
        effective_step=44,
        classes=((-1, Off()), (4, Dynamic(gamma_max=3))),
        set_by="ipv4:10.0.0.7:1",
        set_at=1234.5,
    )
    message = policy_messages.policy_state_message(state, fallback="no profile")
    assert (message.policy.fixed.gamma, message.revision, message.effective_step) == (2, 9, 44)
    assert [(one.priority, policy_messages.policy_of(one.policy)) for one in message.classes] == list(state.classes)
    assert (message.set_by, message.set_at, message.fallback) == ("ipv4:10.0.0.7:1", 1234.5, "no profile")


@pytest.mark.parametrize("state", ProfileState)
def test_every_state_of_a_profile_has_its_word(state: ProfileState):
    told = policy_messages.profile_state_message(state)
    assert operator_pb2.ProfileState.Name(told) == f"PROFILE_STATE_{state.name}"
    assert len(operator_pb2.ProfileState.keys()) == len(ProfileState) + 1


def test_every_figure_of_the_planner_goes_to_its_own_field():
    statistics = an_engine().statistics
    message = policy_messages.speculation_message(VIEW, statistics)
    own = {"profile", "profile_detail", "rollback_tokens", "shadow"}
    for field in message.DESCRIPTOR.fields:
        if field.name not in own:
            told, known = getattr(message, field.name), getattr(VIEW, field.name)
            assert (tuple(told) if isinstance(known, tuple) else told) == known, field.name
    assert (message.profile, message.profile_detail) == (operator_pb2.PROFILE_STATE_STALE, "measured in spring")
    assert message.rollback_tokens == 87 + 76 - 75 - 44
    assert policy_messages.policy_of(message.shadow.policy) == SHADOW.policy
    for field in message.shadow.DESCRIPTOR.fields:
        if field.name != "policy":
            told, known = getattr(message.shadow, field.name), getattr(SHADOW, field.name)
            assert (tuple(told) if isinstance(known, tuple) else told) == known, field.name
    assert not policy_messages.shadow_message(None).HasField("policy")


def test_every_figure_of_advice_goes_to_its_own_field():
    message = policy_messages.advice_message(ADVICE)
    assert (message.num_sequences, message.context, message.acceptance, message.best_gamma) == (17, 1300, 0.6875, 2)
    assert tuple(message.survival_by_position) == ADVICE.survival_by_position
    assert message.sentence == ADVICE.sentence
    for told, known in zip(message.advice, ADVICE.advice, strict=True):
        for field in told.DESCRIPTOR.fields:
            assert getattr(told, field.name) == getattr(known, field.name), field.name
