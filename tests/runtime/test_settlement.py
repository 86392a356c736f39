"""Results that do not fit their plan are refused before anything is booked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.requests import request

from runtime.request import ReportParams, Request, Round, Usage, sequences_of
from runtime.settlement import Outcome, outcomes, settle
from workers.demands import TokenLogprob
from workers.plan import BatchPlan, BatchResult, StalePlan, StepPlan, StepResult

BATCH = BatchPlan(
    slots=(4,), epochs=(2,), num_known=(1,), num_drafts=(2,), samples=(True,), max_committed=(5,), num_unfed=(0,)
)
FOUND = BatchResult(
    emitted=((7, 8),),
    drafted=((7, 9),),
    num_admitted=(2,),
    num_accepted=(1,),
    scores=((0.0,) * 2,),
    acceptance=((1.0, 0.0),),
    margins=((0.5, 0.25),),
)
PLAN = StepPlan(step_id=1, epoch=1, batches=(BATCH,), report_margins=True)
RESULT = StepResult(step_id=1, epoch=1, batches=(FOUND,))
BEFORE = Usage(prompt=3, completion=1, rounds=1)


def outcome() -> Outcome:
    (one,) = outcomes(PLAN, RESULT)
    return one


def test_a_reported_round_carries_the_margins_of_its_tokens() -> None:
    event = settle(request(1, report_rounds=True), BEFORE, outcome())
    assert event.rounds == (Round(drafted=(7, 9), accepted=1, emitted=(7, 8), margins=(0.5, 0.25)),)
    assert settle(request(1), BEFORE, outcome()).rounds == (), "margins asked for by another sequence go nowhere"


def test_the_margins_of_a_result_are_read_only_if_the_plan_asked_for_them() -> None:
    (one,) = outcomes(replace(PLAN, report_margins=False), replace(RESULT, batches=(replace(FOUND, margins=()),)))
    assert one.margins == ()
    assert settle(request(1), BEFORE, one).tokens == (7, 8)


def test_a_result_without_the_margins_that_were_asked_for_answers_another_plan() -> None:
    with pytest.raises(StalePlan, match=r"1 sequences on data-parallel rank 0, its result \[1, 1, 1, 1, 1, 1, 0\]"):
        outcomes(PLAN, replace(RESULT, batches=(replace(FOUND, margins=()),)))


def test_a_reported_round_with_a_margin_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 margins for 2 emitted tokens"):
        settle(request(1, report_rounds=True), BEFORE, replace(outcome(), margins=(0.5,)))


def test_columns_of_all_batches_come_in_order_with_their_rank() -> None:
    plan = replace(PLAN, batches=(BatchPlan(), BATCH, BATCH))
    found = outcomes(plan, replace(RESULT, batches=(BatchResult(), FOUND, replace(FOUND, emitted=((7,),)))))
    assert [(one.dp_rank, one.slot, one.emitted) for one in found] == [(1, 4, (7, 8)), (2, 4, (7,))]


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_a_result_with_batches_too_few_or_too_many_answers_another_plan(num_batches: int) -> None:
    with pytest.raises(StalePlan, match=f"2 batches, its result {num_batches}"):
        outcomes(replace(PLAN, batches=(BATCH,) * 2), replace(RESULT, batches=(FOUND,) * num_batches))


@pytest.mark.parametrize("name", ["emitted", "drafted", "num_admitted", "num_accepted", "margins"])
def test_the_lengths_of_every_batch_are_checked_before_any_is_booked(name: str) -> None:
    short = replace(FOUND, **{name: ()})
    with pytest.raises(StalePlan, match="on data-parallel rank 1"):
        outcomes(replace(PLAN, batches=(BATCH,) * 2), replace(RESULT, batches=(FOUND, short)))


@pytest.mark.parametrize("name", ["step_id", "epoch"])
def test_the_result_of_another_step_or_life_is_stale(name: str) -> None:
    with pytest.raises(StalePlan, match="was answered by"):
        outcomes(PLAN, replace(RESULT, **{name: 9}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_admitted": 3},
        {"num_accepted": 3},
        {"drafted": (7,)},
        {"emitted": ()},
        {"emitted": (7, 8, 9)},
        {"emitted": (7,)},
    ],
    ids=["admitted", "accepted", "drafted", "nothing", "too many", "cut without an end"],
)
def test_counts_that_contradict_each_other_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="request 1"):
        settle(request(1), BEFORE, replace(outcome(), **changes))


def told(tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token=token, logprob=-0.5, top=((3, -0.25),)) for token in tokens)


def curious(*, num_logprobs: int | None = None, num_prompt_logprobs: int | None = None) -> Request:
    report = ReportParams(num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs)
    return replace(request(1), report=report)


PLAN_COLUMNS = ("slots", "epochs", "num_known", "num_drafts", "samples", "max_committed", "num_unfed")
RESULT_COLUMNS = ("emitted", "drafted", "num_admitted", "num_accepted", "scores", "acceptance", "margins")


def test_log_probabilities_of_a_result_reach_their_columns() -> None:
    batch = replace(BATCH, **{name: getattr(BATCH, name) * 2 for name in PLAN_COLUMNS})
    found = replace(
        FOUND,
        **{name: getattr(FOUND, name) * 2 for name in RESULT_COLUMNS},
        logprobs=((), told((7, 8))),
        prompt_logprobs=(told((1,)), ()),
    )
    first, second = outcomes(replace(PLAN, batches=(batch,)), replace(RESULT, batches=(found,)))
    assert (first.logprobs, first.prompt_logprobs) == ((), told((1,)))
    assert (second.logprobs, second.prompt_logprobs) == (told((7, 8)), ())
    assert outcome().logprobs == outcome().prompt_logprobs == ()


def test_an_event_has_the_log_probabilities_of_its_tokens_where_they_are_wanted() -> None:
    found = replace(outcome(), logprobs=told((7, 8)))
    assert settle(curious(num_logprobs=0), BEFORE, found).logprobs == told((7, 8))
    assert settle(request(1), BEFORE, found).logprobs == (), "those that another sequence wants go nowhere"


@pytest.mark.parametrize("tokens", [(), (7,), (8, 7), (7, 8, 9)])
def test_log_probabilities_that_are_missing_or_of_other_tokens_are_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(tokens)} log-probabilities do not fit the 2 emitted tokens"):
        settle(curious(num_logprobs=1), BEFORE, replace(outcome(), logprobs=told(tokens)))


def test_the_first_event_alone_has_those_of_the_prompt() -> None:
    one = curious(num_prompt_logprobs=1)
    known = told(one.prompt[1:])
    assert settle(one, Usage(prompt=3), outcome(), known).prompt_logprobs == known
    assert settle(one, BEFORE, outcome()).prompt_logprobs == ()
    assert settle(request(1), Usage(prompt=3), outcome()).prompt_logprobs == ()
    short = replace(one, prompt=one.prompt[:1])
    assert settle(short, Usage(prompt=1), outcome()).prompt_logprobs == ()


def test_of_several_sequences_the_first_alone_has_those_of_the_prompt() -> None:
    first, second = sequences_of(replace(curious(num_prompt_logprobs=1), n=2))
    known = told(first.prompt[1:])
    assert settle(first, Usage(prompt=3), outcome(), known).prompt_logprobs == known
    assert settle(second, Usage(prompt=3), outcome()).prompt_logprobs == ()


@pytest.mark.parametrize("change", [lambda known: known[1:], lambda known: known[::-1], lambda known: known * 2])
def test_a_part_of_the_prompt_that_is_missing_or_comes_twice_is_refused(change: object) -> None:
    one = curious(num_prompt_logprobs=1)
    with pytest.raises(ValueError, match="do not fit the 2 tokens behind the first of the prompt"):
        settle(one, Usage(prompt=3), outcome(), change(told(one.prompt[1:])))  # type: ignore[operator]
