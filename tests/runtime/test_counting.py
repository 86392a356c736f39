"""The laws of counting are checked, and each is seen when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.engine_house import asynchronous, house
from fakes.requests import request

from runtime.live import EarlyEnd
from runtime.request import FinishReason
from runtime.statistics import EngineStatistics

BREAKS: dict[str, Callable[[EngineStatistics], EngineStatistics]] = {
    "more admitted than drafted": lambda s: replace(
        s, admitted_per_position=(s.drafted_per_position[0] + 1, *s.admitted_per_position[1:])
    ),
    "more accepted than admitted": lambda s: replace(
        s, accepted_per_position=(s.admitted_per_position[0] + 1, *s.accepted_per_position[1:])
    ),
    "a later draft stood more often": lambda s: replace(
        s, drafted_per_position=(*s.drafted_per_position[:-1], s.drafted_per_position[0] + 1)
    ),
    "a token too many": lambda s: replace(s, emitted=s.emitted + 1),
    "a trimmed token forgotten": lambda s: replace(s, trimmed=s.trimmed + 1),
    "a round forgotten": lambda s: replace(s, rounds=s.rounds - 1),
    "a request that never ended": lambda s: replace(s, requests=replace(s.requests, submitted=99)),
    "a request that ended twice": lambda s: replace(
        s, requests=replace(s.requests, ended={**s.requests.ended, EarlyEnd.ABORTED: 1})
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_law_is_told(name: str) -> None:
    @asynchronous
    async def scenario() -> None:
        async with house() as h:
            for uid in (1, 2):
                h.engine.submit(request(uid, max_tokens=12))
            await h.sink.wait_for_end(1, 2)
            statistics = h.engine.statistics()
            assert statistics.check_integrity() == []
            assert statistics.requests.ended == {FinishReason.LENGTH: 2}
            assert statistics.accepted > 0
            problems = BREAKS[name](statistics).check_integrity()
            assert len(problems) >= 1
            assert all(problem.startswith("counters: ") for problem in problems)

    scenario()


@asynchronous
async def test_accepted_prefixes_are_rounds_by_how_many_drafts_stood() -> None:
    async with house() as h:
        for uid in range(1, 5):
            h.engine.submit(request(uid, max_tokens=20, report_rounds=True))
        await h.sink.wait_for_end(1, 2, 3, 4)
        rounds = [the_round for event in h.sink.token_events for the_round in event.rounds if the_round.drafted]
        expected = tuple(sum(the_round.accepted == length for the_round in rounds) for length in range(5))
        assert h.engine.statistics().accepted_prefixes == expected
        assert sum(map(bool, expected)) > 2
