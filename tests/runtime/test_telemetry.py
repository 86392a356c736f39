"""The metrics: what they say is what the engine did, in every scrape, and their names are what routers look for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.a_moment import FRONT, an_engine
from fakes.advice import VIEW
from fakes.engine_house import SETTINGS, House, asynchronous, house, settle_down
from fakes.requests import request
from oracles.metric_laws import Scrape, check_laws, check_rise, parse
from prometheus_client import CollectorRegistry, generate_latest

from runtime.front.errors import Overloaded, Unavailable
from runtime.histogram import Histogram
from runtime.status import EngineStatus, FrontStatus, Moment
from runtime.telemetry import METRICS, EngineCollector, FrontRow, HistogramRow, Row
from runtime.verification.policy import Dynamic, Fixed, Off, PolicyState
from runtime.verification.view import ProfileState, ProfileStatus, SpeculationView
from workers.plan import WorkerLost

ROUTERS_LOOK_FOR = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_success",
}


def scrape(look: Callable[[], EngineStatus | None], front: FrontStatus = FRONT) -> Scrape:
    registry = CollectorRegistry()
    registry.register(EngineCollector("a model", lambda: Moment(engine=look(), front=front)))
    return parse(generate_latest(registry).decode())


def test_names_are_unique_and_routers_find_theirs():
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    assert {name.removesuffix("_total") for name in names} >= ROUTERS_LOOK_FOR
    assert all(name.startswith(("vllm:", "outrider_")) for name in names)


def test_the_documents_tell_every_metric():
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = [
        f"| `{row.name}` | {_kind(row)} | {', '.join(f'`{label}`' for label in row.labels)} | {row.meaning} |"
        for row in METRICS
    ]
    assert [row for row in rows if row not in text] == []
    assert text.count("| `vllm:") + text.count("| `outrider_") == len(rows)


def _kind(row: Row | FrontRow | HistogramRow) -> str:
    return "histogram" if isinstance(row, HistogramRow) else row.kind.name.lower()


EXPECTED: Scrape = {
    "vllm:num_requests_running": {(): 63},
    "vllm:num_requests_waiting": {(): 61},
    "vllm:kv_cache_usage_perc": {(): 599 / 800},
    "vllm:cache_config_info": {("4", "24"): 1},
    "vllm:prefix_cache_queries_total": {(): 0},
    "vllm:prefix_cache_hits_total": {(): 0},
    "vllm:num_preemptions_total": {(): 0},
    "vllm:prompt_tokens_total": {(): 404},
    "vllm:generation_tokens_total": {(): 73},
    "vllm:request_success_total": {
        ("stop",): 410 + 411 + 412 + 414,
        ("length",): 413 + 415,
        ("abort",): 416,
        ("error",): 417,
    },
    "vllm:spec_decode_num_drafts_total": {(): 99},
    "vllm:spec_decode_num_draft_tokens_total": {(): 187},
    "vllm:spec_decode_num_accepted_tokens_total": {(): 119},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {("0",): 75, ("1",): 44},
    "vllm:time_to_first_token_seconds_sum": {(): 505},
    "vllm:inter_token_latency_seconds_sum": {(): 506},
    "vllm:e2e_request_latency_seconds_sum": {(): 500},
    "vllm:request_queue_time_seconds_sum": {(): 501},
    "vllm:request_prefill_time_seconds_sum": {(): 502},
    "vllm:request_decode_time_seconds_sum": {(): 503},
    "vllm:request_inference_time_seconds_sum": {(): 507},
    "vllm:request_time_per_output_token_seconds_sum": {(): 508},
    "vllm:request_prompt_tokens_sum": {(): 509},
    "vllm:request_params_n_sum": {(): 510},
    "vllm:request_params_max_tokens_sum": {(): 511},
    "vllm:request_generation_tokens_sum": {(): 504},
    "vllm:request_generation_tokens_count": {(): 504 + 505 + 506},
    "vllm:request_generation_tokens_bucket": {("1.0",): 504, ("2.0",): 1009, ("+Inf",): 1515},
    "outrider_build_info": {("7.0.8", "7.0.7", "", "7.0.9", "7.0.6"): 1},
    "outrider_model_info": {("2", "float32", "2", "fake", "reference", "1"): 1},
    "outrider_state": {
        ("serving",): 0,
        ("stalled",): 0,
        ("withdrawing",): 0,
        ("draining",): 1,
        ("recovering",): 0,
        ("stopping",): 0,
    },
    "outrider_uptime_seconds": {(): 114},
    "outrider_restarts_total": {(): 113},
    "outrider_rank_losses_total": {(): 120},
    "outrider_outage_seconds_total": {(): 121.5},
    "outrider_rpc_errors_total": {("Forbidden",): 703, ("InvalidRequest",): 702, ("Overloaded",): 701},
    "outrider_reloads_total": {
        ("settings", "taken"): 710,
        ("settings", "refused"): 711,
        ("identities", "taken"): 713,
        ("identities", "refused"): 714,
        ("certificates", "taken"): 715,
        ("certificates", "refused"): 716,
    },
    "outrider_reload_refused": {("settings",): 1, ("identities",): 0, ("certificates",): 1},
    "outrider_settings_held_back": {(): 712},
    "outrider_certificate_expiry_timestamp_seconds": {("certificates",): 717.5},
    "outrider_open_calls": {(): 704},
    "outrider_open_streams": {(): 705},
    "outrider_requests_submitted_total": {(): 401},
    "outrider_requests_ended_total": {
        ("eos",): 410,
        ("stop_token",): 411,
        ("stop_string",): 412,
        ("length",): 413,
        ("constraint",): 414,
        ("time_limit",): 415,
        ("aborted",): 416,
        ("failed",): 417,
    },
    "outrider_requests_refused_total": {("Overloaded",): 402, ("Unavailable",): 403},
    "outrider_waiting_requests": {("high",): 420, ("normal",): 421, ("low",): 422},
    "outrider_longest_wait_seconds": {(): 423.5},
    "outrider_queue_wait_seconds_sum": {("high",): 550, ("normal",): 551, ("low",): 552},
    "outrider_running_requests": {("0",): 31, ("1",): 32},
    "outrider_slots_used": {("0",): 51, ("1",): 52},
    "outrider_slots_free": {("0",): 41, ("1",): 42},
    "outrider_pages_used": {("0", "target"): 99, ("0", "drafter"): 300, ("1", "target"): 98, ("1", "drafter"): 299},
    "outrider_pages_free": {("0", "target"): 201, ("0", "drafter"): 100, ("1", "target"): 202, ("1", "drafter"): 101},
    "outrider_policy": {("off",): 0, ("fixed",): 1, ("dynamic",): 0},
    "outrider_policy_info": {("", "fixed", ""): 1},
    "outrider_policy_fallback": {(): 1},
    "outrider_gamma_current": {(): 6},
    "outrider_budget_current": {(): VIEW.budget},
    "outrider_gamma_changes_total": {(): 116},
    "outrider_steps_total": {(): 71},
    "outrider_rounds_total": {(): 72},
    "outrider_emitted_tokens_total": {(): 73},
    "outrider_trimmed_tokens_total": {(): 74},
    "outrider_drafted_tokens_total": {("0",): 99, ("1",): 88},
    "outrider_admitted_tokens_total": {("0",): 87, ("1",): 76},
    "outrider_accepted_tokens_total": {("0",): 75, ("1",): 44},
    "outrider_accepted_prefix_rounds_total": {("0",): 24, ("1",): 31, ("2",): 44},
    "outrider_gamma_steps_total": {("0",): 631, ("1",): 632, ("2",): 633},
    "outrider_verify_budget_rows_total": {(): 634},
    "outrider_zero_budget_steps_total": {(): 629},
    "outrider_explored_steps_total": {(): 630},
    "outrider_rollback_tokens_total": {(): 87 + 76 - 75 - 44},
    "outrider_predicted_steps_total": {(): 625},
    "outrider_predicted_step_seconds_total": {(): 626.5},
    "outrider_measured_step_seconds_total": {(): 627.5},
    "outrider_prediction_error_seconds_total": {(): 628.5},
    "outrider_draft_survival": {("0",): 0.875, ("1",): 0.5},
    "outrider_calibration_error": {("0",): 0.03125, ("1",): 0.0625},
    "outrider_calibration_version": {(): 635},
    "outrider_profile_state": {("ok",): 0, ("missing",): 0, ("stale",): 1, ("foreign",): 0},
    "outrider_shadow_steps": {(): 601},
    "outrider_shadow_agreed_steps": {(): 602},
    "outrider_shadow_tokens": {("in_force",): 603.5, ("shadow",): 605.5},
    "outrider_shadow_step_seconds": {("in_force",): 604.5, ("shadow",): 606.5},
    "outrider_step_duration_seconds_sum": {(): 520},
    "outrider_engine_overhead_seconds_sum": {(): 521},
    "outrider_rank_seconds_total": {(): 101},
    "outrider_step_seconds_total": {("target",): 102, ("verify",): 103, ("commit",): 104, ("draft",): 105},
    "outrider_exchange_seconds_total": {("all",): 106, ("dispatch",): 107, ("combine",): 108},
    "outrider_execute_seconds_total": {(): 111},
    "outrider_host_seconds_total": {(): 112},
    "outrider_expert_steps_total": {(): 109},
    "outrider_expert_imbalance_total": {(): 110.5},
}


def test_each_metric_is_read_off_its_own_figure():
    found = scrape(an_engine)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    told = {name.removesuffix("_sum").removesuffix("_bucket").removesuffix("_count") for name in EXPECTED}
    assert {row.name for row in METRICS} == told


def test_before_there_is_an_engine_the_figures_of_the_front_are_told_alone():
    found = scrape(lambda: None)
    assert set(found) == {row.name for row in METRICS if isinstance(row, FrontRow)}
    assert {"outrider_build_info", "outrider_rpc_errors_total", "outrider_reload_refused"} <= set(found)
    assert found == {name: EXPECTED[name] for name in found}


def test_the_policy_off_drafts_nothing():
    found = scrape(lambda: replace(an_engine(), policy=PolicyState(policy=Off(), revision=1, effective_step=1)))
    assert found["outrider_gamma_current"] == {(): 0}
    assert found["outrider_policy"] == {("off",): 1, ("fixed",): 0, ("dynamic",): 0}


def test_a_dynamic_policy_is_told_with_what_it_chose_and_each_priority_has_a_sample():
    classes = ((-2, Dynamic(itl_limit_ms=9.0)), (3, Fixed(1)))
    policy = PolicyState(policy=Dynamic(), revision=40, effective_step=1, classes=classes, num_changes=3)
    found = scrape(lambda: replace(an_engine(), policy=policy))
    assert found["outrider_policy"] == {("off",): 0, ("fixed",): 0, ("dynamic",): 1}
    assert found["outrider_policy_info"] == {
        ("throughput", "dynamic", ""): 1,
        ("goodput", "dynamic", "-2"): 1,
        ("", "fixed", "3"): 1,
    }
    assert found["outrider_gamma_current"] == {(): 2}, "of the newest step"
    assert found["outrider_gamma_changes_total"] == {(): 3}, "the revision began higher"


def test_without_a_shadow_or_drafts_there_are_no_samples_of_them():
    bare = SpeculationView(profile=ProfileStatus(state=ProfileState.OK, detail="measured here"))
    found = scrape(lambda: replace(an_engine(), speculation=bare))
    for name in ("shadow_steps", "shadow_agreed_steps", "shadow_tokens", "shadow_step_seconds", "draft_survival"):
        assert f"outrider_{name}" not in found
    assert found["outrider_profile_state"][("ok",)] == 1
    assert found["outrider_policy_fallback"] == {(): 0}


@asynchronous
async def test_a_finished_request_is_told_with_its_times() -> None:
    async with house(gated=True) as h:
        await h.engine.policies.set(Off())
        h.now_s = 100.0
        h.engine.submit(request(1, num_prompt=4, max_tokens=3))
        h.now_s = 102.0
        await settle_down()  # it has its slot, and its first step waits
        found = scrape(h.engine.status)
        check_laws(found)
        assert found["vllm:num_requests_running"] == {(): 1}
        assert found["vllm:prompt_tokens_total"] == {(): 0}
        for now_s in (105.0, 106.0, 107.0):
            h.now_s = now_s
            await h.step()
        await h.sink.wait_for_end(1)
        found = scrape(h.engine.status)
        check_laws(found)
        assert found["vllm:time_to_first_token_seconds_sum"] == {(): 5.0}
        assert found["vllm:request_queue_time_seconds_sum"] == {(): 2.0}
        assert found["vllm:request_prefill_time_seconds_sum"] == {(): 3.0}
        assert found["vllm:request_decode_time_seconds_sum"] == {(): 2.0}
        assert found["vllm:e2e_request_latency_seconds_sum"] == {(): 7.0}
        assert found["vllm:inter_token_latency_seconds_sum"] == {(): 2.0}
        assert found["vllm:inter_token_latency_seconds_count"] == {(): 2}
        assert found["vllm:prompt_tokens_total"] == {(): 4}
        assert found["vllm:generation_tokens_total"] == {(): 3}
        assert found["vllm:request_generation_tokens_bucket"][("2.0",)] == 0
        assert found["vllm:request_generation_tokens_bucket"][("5.0",)] == 1
        assert found["vllm:request_success_total"] == {("stop",): 0, ("length",): 1, ("abort",): 0, ("error",): 0}
        assert found["outrider_gamma_current"] == {(): 0}
        assert found["outrider_gamma_changes_total"] == {(): 1}
        assert found["outrider_policy"] == {("off",): 1, ("fixed",): 0, ("dynamic",): 0}


@asynchronous
async def test_refusals_are_told_by_reason() -> None:
    async with house(gated=True) as h:
        for uid in range(1, 8):
            h.engine.submit(request(uid, max_tokens=2))
        with pytest.raises(Overloaded):
            h.engine.submit(request(8, max_tokens=2))
        h.engine.drain()
        for uid in (9, 10):
            with pytest.raises(Unavailable):
                h.engine.submit(request(uid, max_tokens=2))
        found = scrape(h.engine.status)
        check_laws(found)
        expected = {("InvalidRequest",): 0, ("DuplicateRequest",): 0, ("Overloaded",): 1, ("Unavailable",): 2}
        assert found["outrider_requests_refused_total"] == expected
        assert found["outrider_requests_submitted_total"] == {(): 7}
        assert found["outrider_state"][("draining",)] == 1


@pytest.mark.parametrize("dp", [1, 2])
def test_laws_hold_under_load_cancellation_loss_and_changes_of_policy(dp: int) -> None:
    """A random hour of an operator: every scrape in it obeys, and counters only rise."""
    chance = random.Random(dp)

    async def act(h: House, uid: int) -> None:
        match chance.randrange(8):
            case 0:
                h.engine.abort(chance.randint(1, uid))
            case 1:
                h.engine.abort_by_id([f"r{chance.randint(1, uid)}", "nobody"])
            case 2:
                await h.engine.policies.set(chance.choice([Off(), Fixed(1), Fixed(4)]))
            case 3 if h.source.group.is_waiting and chance.random() < 0.2:
                h.source.group.lose(WorkerLost("a test"))
            case 4:
                (h.engine.drain if chance.random() < 0.3 else h.engine.resume)()

    @asynchronous
    async def scenario() -> None:
        async with house(dp=dp, gated=True) as h:
            before = scrape(h.engine.status)
            for uid in range(1, 150):
                h.now_s += chance.random()
                with contextlib.suppress(Overloaded, Unavailable):
                    stops = {"stop_strings": ("x",)} if chance.random() < 0.4 else {}
                    h.sink.stop_after[uid] = chance.randint(1, 9)
                    lengths = {"num_prompt": chance.randint(1, 9), "max_tokens": chance.randint(1, 9)}
                    h.engine.submit(request(uid, **lengths, **stops))
                await act(h, uid)
                for _ in range(chance.randrange(4)):
                    if h.source.group.is_waiting:
                        await h.step()
                    await settle_down()
                after = scrape(h.engine.status)
                check_laws(after)
                check_rise(before, after)
                before = after
            ended = before["outrider_requests_ended_total"]
            assert all(ended[(end,)] for end in ("length", "stop_string", "aborted", "failed")), ended
            assert before["outrider_restarts_total"][()] > 0
            assert before["outrider_trimmed_tokens_total"][()] > 0
            h.source.group.gated = False

    scenario()


def test_a_histogram_counts_up_to_and_including_its_bounds():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    view = histogram.view()
    assert (view.counts, view.total, view.count) == ((2, 2, 2), 107.5, 6)


assert SETTINGS.scheduler.max_waiting == 3, "the refusals above count on it"
