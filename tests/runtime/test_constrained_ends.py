"""Sequences that a rank ends: their constraint is met, or cannot be followed any further. Nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.engine_house import LENGTH, House, asynchronous, house
from fakes.requests import request
from fakes.worker import true_stream

from runtime.front.errors import InvalidRequest
from runtime.request import Finish, FinishReason, Request
from workers.demands import Constraint
from workers.plan import RankEnd, StepPlan, StepResult


def constrained(uid: int, *, max_tokens: int = 12, stop_strings: tuple[str, ...] = ()) -> Request:
    plain = request(uid, max_tokens=max_tokens)
    return replace(
        plain,
        sampling=replace(plain.sampling, constraint=Constraint(kind="regex", text="a+")),
        stopping=replace(plain.stopping, stop_strings=stop_strings, eos_token_ids=()),
    )


def end_by_rank(h: House, uid: int, at: int, end: RankEnd) -> list[int]:
    """Has the rank end a sequence with its token number `at`, cutting its run there. Returns how many were cut off."""
    group, seen, cut = h.source.group, [0], []
    run = group.run

    def ended(plan: StepPlan) -> StepResult:
        (dp_rank,) = group.dp_ranks
        result = run(plan)
        (batch,), (found,) = plan.batches, result.batches
        column = next((i for i, slot in enumerate(batch.slots) if dp_rank.tenants[slot].new.uid == uid), None)
        if column is None or not found.emitted[column]:
            return result
        left = at - seen[0]
        seen[0] += len(found.emitted[column])
        if left > len(found.emitted[column]):
            return result
        cut.append(len(found.emitted[column]) - left)
        emitted = tuple(tokens[:left] if i == column else tokens for i, tokens in enumerate(found.emitted))
        ends = tuple(end if i == column else RankEnd.NONE for i in range(len(batch.slots)))
        problems = ("takes too much",) if end is RankEnd.BROKEN else ()
        return replace(result, batches=(replace(found, emitted=emitted, ends=ends, problems=problems),))

    group.run = ended  # type: ignore[method-assign]
    return cut


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("stop_strings", [(), ("never",)], ids=["", "with a verdict"])
@asynchronous
async def test_a_constraint_that_is_met_ends_a_run_in_its_middle(at: int, stop_strings: tuple[str, ...]) -> None:
    async with house() as h:
        mine, other = constrained(1, stop_strings=stop_strings), constrained(2)
        cut = end_by_rank(h, 1, at, RankEnd.CONSTRAINT)
        h.engine.submit(mine)
        h.engine.submit(other)
        await h.sink.wait_for_end(1, 2)
        assert h.sink.end_of(1) == Finish(reason=FinishReason.CONSTRAINT)
        assert tuple(h.sink.tokens[1]) == true_stream(mine)[:at]
        assert h.sink.end_of(2) == LENGTH
        assert tuple(h.sink.tokens[2]) == true_stream(other)
        (*_, last) = (event for event in h.sink.token_events if event.uid == 1)
        assert last.usage.completion == at
        assert last.usage.trimmed == cut[0]


@pytest.mark.parametrize("at", [1, 3, 6])
@asynchronous
async def test_a_constraint_that_breaks_ends_its_request_with_the_fields_name(at: int) -> None:
    async with house() as h:
        mine, other = constrained(1), constrained(2)
        end_by_rank(h, 1, at, RankEnd.BROKEN)
        h.engine.submit(mine)
        h.engine.submit(other)
        await h.sink.wait_for_end(1, 2)
        error = h.sink.end_of(1)
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.problem) == ("constraint.regex", "takes too much")
        assert tuple(h.sink.tokens[2]) == true_stream(other)
