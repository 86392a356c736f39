"""The engine end to end on fake ranks: events, verdicts, usage, aborts, refusals, policies."""

from __future__ import annotations

import pytest
from fakes.engine_house import LENGTH, SETTINGS, asynchronous, house, settle_down
from fakes.front_sink import RecordingSink
from fakes.requests import request
from fakes.worker import FakeSource, margin_of, true_stream, true_token

from configs.schema import SchedulerSettings
from runtime.engine import Engine
from runtime.front.errors import (
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleRevision,
    Unavailable,
)
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason
from runtime.verification.policy import Fixed, Off
from workers.plan import StepPlan, StepResult


@asynchronous
async def test_each_request_gets_its_own_tokens_and_one_end() -> None:
    async with house() as h:
        requests = [request(uid, num_prompt=uid, max_tokens=3 + uid) for uid in range(1, 4)]
        for each in requests:
            h.engine.submit(each)
        await h.sink.wait_for_end(1, 2, 3)
        for each in requests:
            assert tuple(h.sink.tokens[each.uid]) == true_stream(each)
            assert h.sink.end_of(each.uid) == LENGTH
        # All came in before the first round, so they share every batch.
        assert h.engine.statistics().steps < 9


@asynchronous
async def test_usage_and_statistics_count_the_same_things() -> None:
    async with house() as h:
        h.engine.submit(request(1, max_tokens=20, report_rounds=True))
        await h.sink.wait_for_end(1)
        await settle_down()
        usage, statistics = h.sink.usage[1], h.engine.statistics()
        rounds = [the_round for event in h.sink.token_events for the_round in event.rounds]
        assert all(r.margins == tuple(map(margin_of, r.emitted)) for r in rounds)
        assert usage.completion == 20 == usage.accepted + usage.rounds - usage.trimmed
        assert (usage.prompt, usage.seed) == (3, 1)
        assert usage.rounds == len(rounds) == statistics.rounds == statistics.steps
        assert usage.drafted == sum(len(r.drafted) for r in rounds) == statistics.drafted == 3 * (usage.rounds - 1)
        assert usage.admitted == usage.drafted == statistics.admitted
        assert usage.accepted == sum(r.accepted for r in rounds) == statistics.accepted > 0
        by_position = [sum(r.accepted > k for r in rounds) for k in range(4)]
        assert list(statistics.accepted_per_position) == by_position
        assert statistics.drafted_per_position == (usage.rounds - 1,) * 3 + (0,)
        assert statistics.emitted == 20
        assert statistics.timings.total_s == statistics.steps
        assert statistics.timings.target_s == statistics.steps / 2
        assert statistics.host_s > 0
        assert statistics.execute_s > 0
        assert statistics.overhead_s == statistics.execute_s + statistics.host_s - statistics.steps


@asynchronous
async def test_statistics_of_several_ranks_add_up_and_time_is_that_of_the_slowest() -> None:
    async with house(dp=3, gated=True) as h:
        requests = [request(uid, max_tokens=8) for uid in (1, 2, 3, 4)]
        for each in requests:
            h.engine.submit(each)
        await settle_down()
        statistics = h.engine.statistics()
        assert [use.running for use in statistics.dp_ranks] == [2, 1, 1]
        assert (statistics.running, statistics.slots_used, statistics.slots_free) == (4, 4, 8)
        assert [[pool.used for pool in use.pages] for use in statistics.dp_ranks] == [[8, 8], [4, 4], [4, 4]]
        assert [(pool.group, pool.used, pool.free) for pool in statistics.pages] == [
            ("target", 16, 20),
            ("drafter", 16, 20),
        ]
        assert statistics.expert_imbalance is None, "nothing was computed yet"
        h.source.group.gated = False
        h.source.group.let_go()
        await h.sink.wait_for_end(1, 2, 3, 4)
        await settle_down()
        for each in requests:
            assert tuple(h.sink.tokens[each.uid]) == true_stream(each)
        after = h.engine.statistics()
        assert after.emitted == 32
        assert after.rounds == sum(h.sink.usage[uid].rounds for uid in (1, 2, 3, 4))
        # Rank r takes r + 1 seconds.
        assert after.timings.total_s == 3 * after.steps
        assert (after.timings.collective_s, after.timings.dispatch_s) == (3 * after.steps / 16, 3 * after.steps / 32)
        assert after.timings.combine_s == 3 * after.steps / 64
        # Rank 0 computed the rows of two sequences and each of the others those of one, while all ran.
        rows = [
            [sum(batch.num_known) + sum(batch.num_drafts) for batch in plan.batches]
            for plan in h.source.plans
            if plan.num_sequences
        ]
        shares = [max(each) * 3 / sum(each) for each in rows]
        assert shares[0] == 1.5
        assert after.expert_steps == after.steps == len(shares)
        assert after.expert_imbalance == pytest.approx(sum(shares) / len(shares))


@asynchronous
async def test_each_ranks_start_is_reported_and_the_layout_known() -> None:
    source = FakeSource(dp=2)
    engine = Engine(SettingsInForce(SETTINGS), source, RecordingSink())
    heard: list[tuple[int, str, int, int]] = []
    await engine.start(lambda *what: heard.append(what))
    assert heard == [(0, "launch", 1, 1), (1, "launch", 1, 1)]
    assert (engine.mesh.dp, engine.mesh.tp, engine.mesh.ep) == (2, 1, 2)
    assert [rank.rank for rank in engine.ranks] == [0, 1]
    assert engine.description == engine.ranks[0]
    await engine.stop(0)


@asynchronous
async def test_an_abort_on_one_rank_leaves_the_others_as_they_were() -> None:
    async with house(dp=2, gated=True) as h:
        h.engine.submit(request(1, max_tokens=12))
        h.engine.submit(request(2, max_tokens=12))
        await h.step()
        before = h.engine.statistics().dp_ranks
        h.engine.abort(1)
        after = h.engine.statistics().dp_ranks
        assert (after[0].running, after[0].slots_used) == (0, 0)
        assert after[1] == before[1]
        # The plan in flight names the aborted one; its answer finds nobody.
        await h.step()
        first, second = h.source.group.plans[-1].batches
        assert (len(first.released_slots), first.slots) == (1, ())
        assert (second.released_slots, len(second.slots)) == ((), 1)
        h.source.group.gated = False
        h.source.group.let_go()
        await h.sink.wait_for_end(2)
        assert tuple(h.sink.tokens[2]) == true_stream(request(2, max_tokens=12))


@asynchronous
async def test_the_queue_holds_what_no_rank_takes() -> None:
    async with house(dp=2, gated=True, num_slots=1) as h:
        for uid in range(1, 6):
            h.engine.submit(request(uid))
        await settle_down()
        with pytest.raises(Overloaded):
            h.engine.submit(request(6))
        statistics = h.engine.statistics()
        assert (statistics.running, statistics.waiting) == (2, 3)


@asynchronous
async def test_the_end_says_what_matched() -> None:
    """A stop token is told apart from the end of sequence, and either from the length; the token itself is kept."""
    async with house() as h:
        by_stop = request(1, max_tokens=20)
        position = next(i for i in range(3, 20) if true_token(by_stop.prompt, i) not in true_stream(by_stop)[:i])
        stop_id = true_token(by_stop.prompt, position)
        uid_of_eos = next(
            uid for uid in range(2, 1000) if 3 < len(true_stream(request(uid, max_tokens=20, eos=True))) < 20
        )
        h.engine.submit(request(1, max_tokens=20, stop_token_ids=(stop_id,)))
        h.engine.submit(request(uid_of_eos, max_tokens=20, eos=True))
        await h.sink.wait_for_end(1, uid_of_eos)
        assert h.sink.end_of(1) == Finish(reason=FinishReason.STOP_TOKEN, stop_token_id=stop_id)
        assert tuple(h.sink.tokens[1]) == true_stream(by_stop)[: position + 1]
        assert h.sink.end_of(uid_of_eos) == Finish(reason=FinishReason.EOS)
        assert h.sink.tokens[uid_of_eos][-1] == 0


@asynchronous
async def test_events_reach_the_front_after_the_next_plan_reached_the_worker() -> None:
    async with house() as h:
        plans_at_delivery: list[tuple[int, int]] = []
        h.sink.on_deliver = lambda events: plans_at_delivery.append((len(h.source.group.plans), len(events)))
        h.engine.submit(request(1, max_tokens=30))
        await h.sink.wait_for_end(1)
        assert [plans for plans, _ in plans_at_delivery] == list(range(2, len(plans_at_delivery) + 2))


@asynchronous
async def test_a_sequence_with_stop_strings_waits_for_its_verdict_and_others_do_not_lag() -> None:
    async with house() as h:
        h.sink.stop_after[1] = 4
        plans_at_delivery: list[tuple[int, tuple[int, ...]]] = []
        h.sink.on_deliver = lambda events: plans_at_delivery.append(
            (len(h.source.group.plans), tuple(event.uid for event in events))
        )
        h.engine.submit(request(1, max_tokens=12, stop_strings=("x",)))
        h.engine.submit(request(2, max_tokens=12))
        await h.sink.wait_for_end(1, 2)
        assert plans_at_delivery[:3] == [(1, (1,)), (2, (2,)), (2, (1,))]
        assert h.sink.end_of(1) == "stop string"
        tokens = tuple(h.sink.tokens[1])
        assert 4 <= len(tokens) < 8
        assert tokens == true_stream(request(1, max_tokens=12))[: len(tokens)]
        assert h.sink.end_of(2) == LENGTH


@asynchronous
async def test_a_stop_string_goes_before_the_end_that_its_event_had_and_cuts_its_tokens() -> None:
    """The match may complete in the very event that ends the request, at its last token or before."""
    async with house() as h:
        for uid, stop_after in ((1, 12), (2, 11), (3, 99)):
            h.sink.stop_after[uid] = stop_after
            h.engine.submit(request(uid, max_tokens=12, stop_strings=("x",)))
        await h.sink.wait_for_end(1, 2, 3)
        assert all(event.needs_verdict for event in h.sink.token_events)
        assert [h.sink.end_of(uid) for uid in (1, 2, 3)] == ["stop string", "stop string", LENGTH]
        statistics = h.engine.statistics()
        num_cut = len(h.sink.tokens[2]) - 11
        assert statistics.requests.ended == {FinishReason.STOP_STRING: 2, FinishReason.LENGTH: 1}
        assert statistics.emitted == sum(map(len, h.sink.tokens.values())) - num_cut == 35
        assert statistics.trimmed == sum(usage.trimmed for usage in h.sink.usage.values()) + num_cut
        assert statistics.requests.output_tokens.total == statistics.emitted
        assert statistics.check_integrity() == []


@asynchronous
async def test_a_verdict_that_does_not_come_ends_the_request_not_the_engine() -> None:
    async with house() as h:
        h.sink.gives_verdicts = False
        h.engine.submit(request(1, stop_strings=("x",)))
        h.engine.submit(request(2))
        await h.sink.wait_for_end(1, 2)
        assert isinstance(h.sink.end_of(1), InternalError)
        assert h.sink.end_of(2) == LENGTH


@asynchronous
async def test_an_abort_returns_slot_and_pages_at_once_and_nothing_more_is_heard() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, max_tokens=12))
        h.engine.submit(request(2, max_tokens=12))
        await h.step()
        await h.step()
        heard = len(h.sink.tokens[1])
        used = h.num_pages_used
        h.engine.abort(1)
        assert h.num_pages_used == used // 2
        h.engine.abort(1)
        h.engine.abort(77)
        await h.step()
        (batch,) = h.source.group.plans[-1].batches
        assert batch.released_slots != ()
        assert len(batch.slots) == 1
        assert len(h.sink.tokens[1]) == heard
        assert h.sink.ends[1] == []
        h.engine.submit(request(3, request_id="request-1"))


@asynchronous
async def test_an_abort_drops_tokens_that_are_not_yet_delivered() -> None:
    """The abort comes between the plan that follows those tokens and their delivery."""
    async with house() as h:
        run = h.source.group.run

        def abort_at_second_plan(plan: StepPlan) -> StepResult:
            if len(h.source.group.plans) == 1:
                h.engine.abort(1)
            return run(plan)

        h.source.group.run = abort_at_second_plan  # type: ignore[method-assign]
        h.engine.submit(request(1))
        await settle_down()
        assert len(h.source.group.plans) >= 2
        assert h.sink.batches == []


@asynchronous
async def test_an_abort_takes_a_waiting_request_out_of_the_queue() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        await settle_down()
        h.engine.submit(request(2))
        h.engine.abort(2)
        assert h.engine.statistics().waiting == 0


@asynchronous
async def test_refusals_are_synchronous_and_leave_nothing() -> None:
    async with house(gated=True, num_slots=1) as h:
        h.engine.submit(request(1))
        with pytest.raises(DuplicateRequest):
            h.engine.submit(request(2, request_id="request-1"))
        with pytest.raises(InvalidRequest):
            h.engine.submit(request(2, num_prompt=50))
        await settle_down()
        for uid in (2, 3, 4):
            h.engine.submit(request(uid))
        with pytest.raises(Overloaded):
            h.engine.submit(request(5))
        assert h.engine.statistics().waiting == 3
        assert h.engine.statistics().running == 1


@asynchronous
async def test_before_the_start_everything_is_unavailable() -> None:
    engine = Engine(SettingsInForce(SETTINGS), FakeSource(), RecordingSink())
    for act in (
        lambda: engine.submit(request(1)),
        lambda: engine.description,
        lambda: engine.policies.state,
        engine.statistics,
    ):
        with pytest.raises(Unavailable):
            act()
    assert engine.next_uid() != engine.next_uid()


@asynchronous
async def test_a_step_size_that_does_not_suit_the_worker_fails_the_start_and_leaves_no_worker() -> None:
    source = FakeSource()
    engine = Engine(
        SettingsInForce(SETTINGS.model_copy(update={"scheduler": SchedulerSettings(max_step_tokens=4)})),
        source,
        RecordingSink(),
    )
    with pytest.raises(ValueError, match="max_step_tokens is 4"):
        await engine.start()
    assert source.is_stopped


@asynchronous
async def test_a_policy_is_in_force_from_the_step_it_names() -> None:
    async with house(gated=True) as h:
        h.engine.submit(request(1, max_tokens=20))
        await settle_down()
        assert (h.engine.policies.state.policy, h.engine.policies.state.revision) == (Fixed(3), 1)
        state = await h.engine.policies.set(Off(), expected_revision=1)
        assert (state.policy, state.revision) == (Off(), 2)
        for _ in range(3):
            await h.step()
        gammas = {plan.step_id: (plan.gamma, plan.feed_drafter) for plan in h.source.group.plans}
        assert gammas[state.effective_step - 1] == (3, True)
        assert gammas[state.effective_step] == (0, False)
        with pytest.raises(StaleRevision):
            await h.engine.policies.set(Fixed(1), expected_revision=1)
        with pytest.raises(InvalidRequest, match=r"5 is not within 0\.\.4"):
            await h.engine.policies.set(Fixed(5))
        assert h.engine.policies.state == state
        assert (await h.engine.policies.set(Fixed(4))).revision == 3


@asynchronous
async def test_a_checkpoint_without_a_drafter_is_served_plainly() -> None:
    async with house(gamma_max=0, cache_groups=("target",), num_pages=(12,)) as h:
        assert h.engine.policies.state.policy == Off()
        h.engine.submit(request(1))
        await h.sink.wait_for_end(1)
        assert h.sink.usage[1].drafted == 0
