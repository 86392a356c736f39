"""Figures of a cell from requests with known times: exact values, and what repeats together make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes.bench import NO_LIMITS, completion_of, record_of, round_of, run_of
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import operator_pb2
from runtime.bench import document
from runtime.bench.completion import Frame
from runtime.bench.counters import MemoryUse, PlanCounts, PlanMoment, ServerCounts, peak
from runtime.bench.drafting import Drafts
from runtime.bench.figures import figures_of, keeps, lengths_of, spread
from runtime.bench.load import Bounds, Policy
from runtime.bench.percentiles import percentile

FIGURES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)

# Due at 0, sent at 0.5; a token at 1, three at 4, two at 5; the last frame brings none, at 6.
RECORD = record_of(
    replace(
        completion_of(
            [round_of(0, 0), round_of(2, 2), round_of(1, 2)], sent_s=0.5, times_s=[1.0, 4.0, 5.0], tokens=range(6)
        ),
        frames=(
            Frame(at_s=1.0, num_tokens=1),
            Frame(at_s=4.0, num_tokens=3),
            Frame(at_s=5.0, num_tokens=2),
            Frame(at_s=6.0, num_tokens=0),
        ),
    )
)


@given(FIGURES, st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


@given(FIGURES)
def test_a_spread_is_ordered_and_within_what_was_observed(values):
    found = spread(values)
    assert found.count == len(values)
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= max(values)
    assert spread([]) == document.Spread(count=0, mean=None, p50=None, p90=None, p99=None)


def test_latencies_count_from_the_moment_a_request_was_due():
    found = figures_of([replace(run_of(), records=(RECORD,))], NO_LIMITS).latencies
    assert found.first_token_ms.mean == 1000
    assert found.request_ms.mean == 6000
    assert found.schedule_lag_ms.mean == 500


def test_a_frames_gap_is_divided_over_its_tokens_and_frames_without_any_have_none():
    assert RECORD.frame_gaps_s == [3.0, 1.0]
    assert RECORD.token_gaps_s == [1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, True),
        ({"first_token_ms": 1000.0}, True),
        ({"first_token_ms": 999.0}, False),
        ({"token_gap_ms": 800.0}, True),
        ({"token_gap_ms": 799.0}, False),
        ({"request_ms": 6000.0}, True),
        ({"request_ms": 5999.0}, False),
    ],
)
def test_a_request_keeps_limits_on_its_first_token_its_mean_gap_and_its_end(limits, kept):
    assert keeps(RECORD, NO_LIMITS.model_copy(update=limits)) is kept


def test_what_failed_is_counted_by_code_and_in_no_latency():
    failed = completion_of([round_of(0, 0)], failure="UNAVAILABLE")
    never = completion_of([], failure="RESOURCE_EXHAUSTED")
    fine = completion_of([round_of(0, 0), round_of(1, 2)])
    found = figures_of([run_of(failed, never, failed, fine, elapsed_s=4.0)], NO_LIMITS)
    assert found.failures == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 2}
    assert (found.requests, found.finished) == (4, 1)
    assert found.latencies.request_ms.count == 1
    assert found.rates.tokens_per_s == 3 / 4
    assert found.rates.requests_per_s == found.rates.requests_within_limits_per_s == 1 / 4


def test_a_cell_in_which_all_failed_has_figures_still():
    found = figures_of([run_of(completion_of([], failure="UNAVAILABLE"))], NO_LIMITS)
    assert found.finished == 0
    assert found.rates.tokens_per_s == 0
    assert found.tokens_per_pass is None
    assert found.time_per_token is None
    assert found.overhead_per_step_ms is None
    assert lengths_of([run_of(completion_of([], failure="UNAVAILABLE"))]) is None


COUNTS = ServerCounts(
    steps=10,
    emitted=20,
    drafted_by_position=(8, 8),
    admitted_by_position=(8, 7),
    accepted_by_position=(6, 3),
    rank_s=0.95,
    target_s=0.5,
    verify_s=0.1,
    commit_s=0.15,
    draft_s=0.2,
    execute_s=1.15,
    host_s=0.1,
)


def test_time_per_token_is_split_into_parts_that_add_up_and_overhead_is_per_step():
    found = figures_of([run_of(counts=COUNTS)], NO_LIMITS)
    assert found.time_per_token.model_dump() == pytest.approx(
        {
            "draft_ms": 10,
            "verify_ms": 30,
            "state_ms": 7.5,
            "host_and_link_ms": 15,
            "total_ms": 62.5,
        }
    )
    assert found.overhead_per_step_ms == pytest.approx(30)
    assert found.drafts == Drafts(drafted=[8, 8], admitted=[8, 7], accepted=[6, 3])


def test_repeats_are_taken_together():
    one = completion_of([round_of(0, 0), round_of(1, 2), round_of(2, 2)])
    runs = [run_of(one, elapsed_s=2.0, counts=COUNTS), run_of(one, one, elapsed_s=4.0, counts=COUNTS, repeat=1)]
    found = figures_of(runs, NO_LIMITS)
    assert found.elapsed_s == 6
    assert found.rates.tokens_per_s == 18 / 6
    assert found.latencies.request_ms.count == 3
    assert (found.decode_passes, found.tokens_per_pass) == (6, 15 / 6)
    assert found.drafts.drafted == [16, 16]
    assert found.memory.samples == 2
    assert found.tokens_of_others == 40 - 18


def test_lengths_are_of_the_requests_that_reported_their_rounds():
    told = run_of(completion_of([round_of(0, 0), round_of(2, 2), round_of(0, 2)], at_length=False))
    silent = run_of(completion_of([round_of(0, 0), round_of(1, 2)], at_length=False), repeat=1, reads=False)
    found = lengths_of([told, silent])
    assert found.accepted_prefixes == [1, 0, 1]
    assert found.by_survival == found.tokens_per_full_round == 2.0
    assert lengths_of([silent]) is None
    off = run_of(completion_of([round_of(0, 0), round_of(0, 0)], at_length=False), policy=Policy(None))
    assert lengths_of([off]).accepted_prefixes == [1]


def test_work_is_summed_over_repeats_and_predictions_are_means_per_step():
    plans = PlanCounts(
        steps_by_gamma=(2, 0, 6), budget_sum=40, rollback_tokens=5, zero_budget_steps=1, explored_steps=2,
        predicted_steps=4, predicted_sum_s=0.04, measured_sum_s=0.06, error_sum_s=0.03,
    )  # fmt: skip
    run = replace(run_of(counts=COUNTS), plans=plans)
    found = figures_of([run, replace(run, fallback="too old")], NO_LIMITS).work
    assert (found.steps_by_gamma, found.gamma_mean) == ([4, 0, 12], 1.5)
    assert (found.budget_sum, found.budget_per_step) == (80, 5.0)
    assert (found.drafted, found.admitted, found.accepted, found.rollback_tokens) == (32, 30, 18, 10)
    assert (found.zero_budget_steps, found.explored_steps, found.predicted_steps) == (2, 4, 8)
    assert (found.predicted_ms, found.measured_ms, found.error_ms) == pytest.approx((10.0, 15.0, 7.5))
    assert found.fallback == "too old"
    nothing = figures_of([run_of()], NO_LIMITS).work
    assert (nothing.gamma_mean, nothing.budget_per_step, nothing.predicted_ms, nothing.fallback) == (
        None,
        None,
        None,
        "",
    )


def test_rounds_of_a_policy_without_one_length_have_no_lengths():
    told = run_of(completion_of([round_of(0, 0), round_of(2, 2)]), policy=Policy(None, Bounds(gamma_max=2)))
    assert lengths_of([told]) is None
    assert figures_of([told], NO_LIMITS).tokens_per_pass == 3.0


def test_counters_differ_by_what_happened_between_two_moments():
    before = operator_pb2.Counters(steps=3, drafted_by_position=[5, 4], rank_s=1.5)
    after = operator_pb2.Counters(steps=10, drafted_by_position=[9, 6, 2], rank_s=4.0)
    found = ServerCounts.of(after) - ServerCounts.of(before)
    assert (found.steps, found.drafted_by_position, found.rank_s) == (7, (4, 2, 2), 2.5)
    assert (found + found).drafted_by_position == (8, 4, 4)
    speculation = operator_pb2.SpeculationStatus(
        gamma=3, budget=9, predicted_s=0.5, measured_s=0.25, steps_by_gamma=[1, 2], budget_sum=9, rollback_tokens=4
    )
    assert PlanCounts.of(speculation) == PlanCounts(steps_by_gamma=(1, 2), budget_sum=9, rollback_tokens=4)
    moment = PlanMoment.of(speculation, 1.5)
    assert (moment.at_s, moment.gamma, moment.budget, moment.predicted_s, moment.measured_s) == (1.5, 3, 9, 0.5, 0.25)


def test_memory_is_summed_over_ranks_and_the_largest_sample_counts():
    status = operator_pb2.GetStatusResponse(
        ranks=[operator_pb2.RankStatus(parameter_bytes=100), operator_pb2.RankStatus(parameter_bytes=10)],
        batches=[
            operator_pb2.BatchStatus(
                slots_used=used,
                slot_bytes=7,
                record_bytes=1000,
                pools=[
                    operator_pb2.PoolStatus(pages_used=2, page_bytes=3),
                    operator_pb2.PoolStatus(pages_used=used, page_bytes=5),
                ],
            )
            for used in (1, 4)
        ],
    )
    use = MemoryUse.of(status)
    assert use == MemoryUse(parameters=110, records=2000, slots=35, pages=37)
    assert peak([use, replace(use, pages=40), replace(use, slots=0)]) == replace(use, pages=40)


def test_tokens_that_failed_requests_received_are_no_others():
    failed = completion_of([round_of(0, 0), round_of(1, 2)], failure="UNAVAILABLE")
    fine = completion_of([round_of(0, 0), round_of(1, 2)])
    assert figures_of([run_of(fine, failed, counts=replace(COUNTS, emitted=8))], NO_LIMITS).tokens_of_others == 2


def test_what_failed_before_a_cell_is_counted_apart_and_the_first_text_of_each_code_is_kept():
    def failed(code: str, text: str):
        return record_of(replace(completion_of([], failure=code), failure_text=text))

    fine = record_of(completion_of([round_of(0, 0)]))
    run = replace(
        run_of(completion_of([round_of(0, 0)])),
        records=(fine, failed("UNAVAILABLE", "one"), failed("UNAVAILABLE", "two")),
        readings=(fine, failed("UNAVAILABLE", "three")),
        warmup=(failed("INTERNAL", "four"),),
        measured_anew=2,
    )
    found = figures_of([run, run], NO_LIMITS)
    assert found.failures == {"UNAVAILABLE": 4}
    assert found.failures_before == {"INTERNAL": 2, "UNAVAILABLE": 2}
    assert found.failure_texts == {"INTERNAL": "four", "UNAVAILABLE": "one"}
    assert found.measured_anew == 4
