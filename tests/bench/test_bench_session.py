"""Cells measured on a real front over a scripted engine: what is recorded, what is put back, and what an end leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest
from fakes.bench import PROMPTS, asked_of, session_of
from fakes.engine import DESCRIPTION
from fakes.front import Front, in_loop, serving
from fakes.policies import SOUND_PROFILE
from fakes.requests import request

from outrider.v1 import operator_pb2
from runtime.bench import condition
from runtime.bench import session as session_module
from runtime.bench.errors import BenchError
from runtime.bench.load import Closed, Open, Policy, Slot, parse_policies
from runtime.bench.prompts import Prompts
from runtime.bench.session import Session
from runtime.verification.policy import Fixed
from runtime.verification.view import SpeculationView


@in_loop
async def test_every_cell_is_measured_in_order_and_the_policy_is_as_before() -> None:
    slots: list[Slot] = []
    num_requests = 0

    def count() -> None:
        nonlocal num_requests
        num_requests += 1

    async with serving(run_length=1) as front:
        before = await front.client.get_policy()
        asked = asked_of(repeats=2, loads=(*asked_of().loads, Open(2000.0)))
        session = Session(front.client, asked, PROMPTS, note_cell=slots.append, note_request=count)
        await session.run()
        after = await front.client.get_policy()
    assert (after.policy, after.revision) == (before.policy, before.revision + 9)
    assert session.policy_left == ""
    assert slots == asked.slots() == [run.slot for run in session.runs]
    assert num_requests == asked.total_requests == len(front.engine.submitted)
    for run in session.runs:
        assert [len(record.completion.tokens) for record in run.records] == [6, 4, 6, 4]
        assert run.counts.emitted == 20
        assert len(run.readings) == (4 if run.slot.repeat == 0 else 0)
        assert all(record.completion.num_passes == len(record.completion.tokens) for record in run.records)
        assert not any(record.completion.rounds for record in run.records)
        assert len(run.memory) >= 2


@in_loop
async def test_requests_carry_ids_limits_and_seeds_of_their_own() -> None:
    async with serving(run_length=1) as front:
        await session_of(front, policies=(Policy(None),), seed=40, temperature=0.5, warmup=0).run()
        sent = front.engine.submitted[4:]
    assert [request.prompt for request in sent] == [(5, 6), (7, 8, 9)] * 2
    assert [request.sampling.seed for request in sent] == [40, 41, 42, 43]
    assert [request.stopping.max_tokens for request in sent] == [6, 4, 6, 4]
    assert [request.report.rounds for request in front.engine.submitted] == [True] * 4 + [False] * 4


@in_loop
async def test_a_cancelled_run_keeps_its_cells_and_puts_the_policy_back() -> None:
    async with serving(run_length=1) as front:
        await front.client.set_policy(7)
        running: asyncio.Task[None]

        def interrupt(slot: Slot) -> None:
            if slot.repeat == 1 and slot.policy == Policy(None):
                running.cancel()

        session = session_of(front, note_cell=interrupt, repeats=3)
        running = asyncio.create_task(session.run())
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [(run.slot.repeat, run.slot.policy) for run in session.runs] == [
            (0, Policy(None)),
            (0, Policy(2)),
            (1, Policy(2)),
        ]
        assert (await front.client.get_policy()).policy.fixed.gamma == 7
        assert session.duration_s > 0


@in_loop
async def test_a_run_that_is_cancelled_while_the_policy_is_switched_puts_it_back(monkeypatch) -> None:
    async with serving(run_length=1) as front:
        switch_policy, num_switches = front.client.switch_policy, 0
        running: asyncio.Task[None]

        async def switch_and_be_cancelled(policy, **kwargs):
            nonlocal num_switches
            num_switches += 1
            state = await switch_policy(policy, **kwargs)
            if num_switches == 1:
                running.cancel()  # before the session has the answer
                await asyncio.sleep(0)
            return state

        monkeypatch.setattr(front.client, "switch_policy", switch_and_be_cancelled)
        session = session_of(front)
        running = asyncio.create_task(session.run())
        with pytest.raises(asyncio.CancelledError):
            await running
        assert session.runs == []
        assert session.policy_left == ""
        assert (await front.client.get_policy()).policy.fixed.gamma == 4
        assert (await front.client.get_policy()).revision == 3


@in_loop
async def test_a_policy_that_somebody_else_sets_ends_the_run_and_stays() -> None:
    async with serving(run_length=1) as front:
        calls = 0
        meddling: list[asyncio.Task[object]] = []

        def meddle() -> None:
            nonlocal calls
            calls += 1
            if calls == 10:  # inside the second cell
                meddling.append(asyncio.create_task(front.client.set_policy(5)))

        session = session_of(front, note_request=meddle)
        with pytest.raises(BenchError, match="somebody else changed the server's policy"):
            await session.run()
        assert len(session.runs) == 1
        assert (await front.client.get_policy()).policy.fixed.gamma == 5
        assert session.policy_left == ""


@in_loop
async def test_requests_that_fail_are_recorded_by_code_with_what_the_server_said() -> None:
    """All of them: one that never ends has the only slot."""
    full = replace(DESCRIPTION, num_slots=1)
    async with serving(steps_by_itself=False, max_waiting=0, description=full) as front:
        front.engine.submit(request(999))
        session = session_of(front, policies=(Policy(None),), loads=(Closed(4),), repeats=2, warmup=4)
        await session.run()
    for run in session.runs:
        for records in (run.records, run.readings or run.warmup):
            assert len(records) == 4
            failed = [one.completion for one in records if one.completion.failure]
            assert {one.failure for one in failed} == {"RESOURCE_EXHAUSTED"}
            assert all("queue" in one.failure_text for one in failed)


@in_loop
async def test_a_request_that_the_server_takes_for_malformed_ends_the_run_with_its_text() -> None:
    async with serving(run_length=1) as front:
        prompts = Prompts(ids=((5,), (99_999,)), max_tokens=(6, 6))
        session = Session(front.client, asked_of(), prompts, note_cell=lambda slot: None, note_request=lambda: None)
        with pytest.raises(BenchError, match=r"the server refuses prompt 2 as malformed: .*99999"):
            await session.run()
        assert session.runs == []
        assert (await front.client.get_policy()).policy.fixed.gamma == 4


def regaining(front: Front, monkeypatch) -> None:
    """Ranks that were lost come back once somebody has seen that they are."""
    get_status = front.client.get_status

    async def seen():
        status = await get_status()
        if status.state == operator_pb2.SERVER_STATE_RECOVERING:
            front.engine.set_serving(True)
        return status

    monkeypatch.setattr(front.client, "get_status", seen)
    monkeypatch.setattr(condition, "POLL_S", 0.0)


@pytest.mark.parametrize("at", [2, 6])
def test_a_cell_in_which_ranks_were_lost_is_measured_anew(at, monkeypatch) -> None:
    @in_loop
    async def check() -> None:
        calls = 0
        async with serving(run_length=1) as front:

            def lose_once() -> None:
                nonlocal calls
                calls += 1
                if calls == at:
                    front.engine.set_serving(False)

            regaining(front, monkeypatch)
            session = session_of(front, note_request=lose_once)
            await session.run()
            assert (await front.client.get_policy()).policy.fixed.gamma == 4
        assert [run.measured_anew for run in session.runs] == [1, 0]
        for run in session.runs:
            assert not any(record.completion.failure for record in (*run.records, *run.readings))
            assert run.counts.emitted == 20

    check()


@in_loop
async def test_a_server_that_loses_its_ranks_again_and_again_is_not_measured(monkeypatch) -> None:
    async with serving(run_length=1) as front:

        def lose() -> None:
            if front.engine.is_serving:
                front.engine.set_serving(False)

        regaining(front, monkeypatch)
        session = session_of(front, note_request=lose)
        with pytest.raises(BenchError, match="2 at a time, off: the server lost its ranks in each of 3 measurements"):
            await session.run()
        assert session.runs == []
        assert session.policy_left == ""


@in_loop
async def test_ranks_that_do_not_come_back_end_the_run(monkeypatch) -> None:
    monkeypatch.setattr(condition, "POLL_S", 0.0)
    monkeypatch.setattr(condition, "RECOVERY_S", 0.0)
    async with serving(run_length=1) as front:

        def lose(slot: Slot) -> None:
            if slot.policy == Policy(2):
                front.engine.set_serving(False)

        session = session_of(front, note_cell=lose)
        with pytest.raises(BenchError, match=r"recovering \(a rank has ended\) and did not serve again in 0 s"):
            await session.run()
        assert len(session.runs) == 1


@pytest.mark.parametrize(("end", "words"), [("drain", "is draining"), ("close_intake", "is stopping")])
@pytest.mark.parametrize("at", [10, 14])
def test_a_server_that_drains_or_stops_meanwhile_ends_the_run_and_keeps_the_cells(end, words, at) -> None:
    @in_loop
    async def check() -> None:
        calls = 0
        async with serving(run_length=1) as front:

            def stop() -> None:
                nonlocal calls
                calls += 1
                if calls == at:  # in what goes before the second cell, and in itself
                    getattr(front.engine, end)()

            session = session_of(front, note_request=stop)
            with pytest.raises(BenchError, match=words):
                await session.run()
            assert len(session.runs) == 1
            assert (await front.client.get_policy()).policy.fixed.gamma == 4

    check()


@in_loop
async def test_memory_is_sampled_in_a_cell_and_a_sample_that_fails_costs_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(session_module, "SAMPLE_S", 0.0)
    async with serving(run_length=1) as front:
        prompts = Prompts(ids=((5, 6),), max_tokens=(400,))
        session = Session(
            front.client,
            asked_of(policies=(Policy(None),)),
            prompts,
            note_cell=lambda slot: None,
            note_request=lambda: None,
        )
        await session.run()
        assert len(session.runs[0].memory) > 2
        assert max(use.slots for use in session.runs[0].memory) > 0

        get_status, calls, num_failed = front.client.get_status, 0, 0

        def count() -> None:
            nonlocal calls
            calls += 1

        async def failing():
            nonlocal num_failed
            if 5 <= calls < 8:
                num_failed += 1
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
            return await get_status()

        monkeypatch.setattr(front.client, "get_status", failing)
        session = session_of(front, policies=(Policy(None),), note_request=count)
        await session.run()
        assert num_failed > 0
        assert len(session.runs) == 1


@in_loop
async def test_a_server_that_is_gone_is_an_error_and_what_was_measured_stays() -> None:
    async with serving(run_length=1) as front:
        stopping: list[asyncio.Task[None]] = []

        def stop(slot: Slot) -> None:
            if slot.policy == Policy(2):
                stopping.append(asyncio.create_task(front.server.stop(0)))

        session = session_of(front, note_cell=stop)
        with pytest.raises(grpc.aio.AioRpcError):
            await session.run()
        await asyncio.gather(*stopping)
    assert len(session.runs) == 1
    assert session.policy_left.startswith("UNAVAILABLE: ")


@in_loop
async def test_what_is_planned_is_counted_from_the_cell_on_and_sampled_in_it(monkeypatch) -> None:
    monkeypatch.setattr(session_module, "SAMPLE_S", 0.0)
    dynamic = parse_policies(["dynamic:max=3"])[0]
    async with serving(run_length=1) as front:
        front.engine.policies.view = SpeculationView(
            profile=SOUND_PROFILE, steps_by_gamma=(5, 7), budget_sum=30, predicted_steps=4, predicted_sum_s=1.0
        )

        def plan_on() -> None:
            view = front.engine.policies.view
            front.engine.policies.view = replace(
                view,
                gamma=2,
                budget=6,
                predicted_s=0.25,
                measured_s=0.5,
                steps_by_gamma=(5, 7, sum(view.steps_by_gamma[2:]) + 1),
                budget_sum=view.budget_sum + 6,
                predicted_steps=view.predicted_steps + 1,
                predicted_sum_s=view.predicted_sum_s + 0.25,
                fallback="measured long ago",
            )

        session = session_of(front, policies=(dynamic,), note_request=plan_on)
        await session.run()
        assert front.engine.policies.state.policy == Fixed(4)
    [run] = session.runs
    assert (run.plans.steps_by_gamma, run.plans.budget_sum, run.plans.predicted_steps) == ((0, 0, 4), 24, 4)
    assert run.plans.predicted_sum_s == 1.0
    assert len(run.moments) == len(run.memory) - 1
    assert (run.moments[-1].gamma, run.moments[-1].budget) == (2, 6)
    assert [moment.at_s for moment in run.moments] == sorted(moment.at_s for moment in run.moments)
    assert run.fallback == "measured long ago"
