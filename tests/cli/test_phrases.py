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


def test_shares_of_nothing_are_none():
    assert phrases.use(3, 4) == "3 / 4 (75%)"
    assert phrases.use(0, 0) == "0 / 0"
    assert phrases.ratio(1, 0) is None
    assert phrases.optional(None, ".2f") == "–"
    assert phrases.acceptance([3, 1, 0], [4, 4, 0]) == (0.75, 0.25)
    assert phrases.by_position(()) == "–"
