"""Words for figures: policies and states also of newer servers, times in two units, shares of nothing."""

from __future__ import annotations

import pytest

from outrider.v1 import operator_pb2
from runtime.cli import phrases


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.0 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min 0 s"),
        (3599.9, "59 min 59 s"),
        (3600.0, "1 h 0 min"),
        (86399.0, "23 h 59 min"),
        (86400.0, "1 d 0 h"),
        (1e6, "11 d 13 h"),
    ],
)
def test_a_duration_takes_two_units_at_most(seconds, said):
    assert phrases.duration(seconds) == said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"off": {}}, "off"),
        ({"fixed": {"gamma": 0}}, "fixed, gamma 0"),
        ({"dynamic": {}}, "dynamic"),
        ({"dynamic": {"min_gain": 0.01, "objective": "OBJECTIVE_THROUGHPUT"}}, "dynamic"),
        ({"dynamic": {"gamma_min": 2}}, "dynamic, gamma 2..max"),
        ({"dynamic": {"gamma_max": 0}}, "dynamic, gamma 0..0"),
        (
            {"dynamic": {"gamma_min": 1, "gamma_max": 5, "itl_limit_ms": 12.5, "min_gain": 0.0, "min_survival": 0.25}},
            "dynamic, gamma 1..5, steps within 12.5 ms, gain of at least 0, survival of at least 0.25",
        ),
        ({}, "a policy that this command does not know"),
    ],
)
def test_a_policy_is_named(policy, said):
    assert phrases.policy_name(operator_pb2.VerificationPolicy(**policy)) == said


def test_a_state_of_a_newer_server_is_a_number():
    assert phrases.server_state(operator_pb2.SERVER_STATE_RECOVERING) == "recovering"
    assert phrases.request_state(operator_pb2.REQUEST_STATE_DECODING) == "decoding"
    assert phrases.server_state(operator_pb2.GetStatusResponse(state=77).state) == "state 77"
    assert phrases.request_state(operator_pb2.RequestStatus(state=78).state) == "state 78"
    assert phrases.profile_state(operator_pb2.PROFILE_STATE_FOREIGN) == "foreign"
    assert phrases.profile_state(operator_pb2.SpeculationStatus(profile=79).profile) == "state 79"


def test_a_state_has_lines_for_what_is_not_usual():
    plain = operator_pb2.VerificationPolicyState(policy={"off": {}}, revision=3, effective_step=9)
    assert phrases.describe_policy(plain) == "off (revision 3, in force from step 9)"
    assert phrases.policy_lines(plain) == phrases.setter_line(plain) == []
    full = operator_pb2.VerificationPolicyState(
        policy={"dynamic": {}},
        classes=[{"priority": -1, "policy": {"fixed": {"gamma": 2}}}],
        set_by="ipv4:10.0.0.7:1",
        fallback="no profile",
    )
    assert phrases.policy_lines(full) == [
        "priority -1: fixed, gamma 2",
        "dynamic runs as a fixed draft length: no profile",
    ]
    assert phrases.setter_line(full) == ["set by ipv4:10.0.0.7:1 at –"]
    assert len(phrases.moment(1.0)) == len("1970-01-01 00:00:01")


def test_shares_of_nothing_are_none():
    assert phrases.use(3, 4) == "3 / 4 (75%)"
    assert phrases.use(0, 0) == "0 / 0"
    assert phrases.ratio(1, 0) is None
    assert phrases.optional(None, ".2f") == "–"
    assert phrases.acceptance([3, 1, 0], [4, 4, 0]) == (0.75, 0.25)
    assert phrases.by_position(()) == "–"
