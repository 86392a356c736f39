"""Cells measured on a real front over a scripted engine: what is recorded, what is put back, and what an end leaves."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from fakes.bench import asked_of
from fakes.front import Front, in_loop, serving

from runtime.bench.completion import generate_request
from runtime.bench.load import Open, Policy, Slot
from runtime.bench.prepare import BenchError, prepare
from runtime.bench.prompts import Prompts
from runtime.bench.session import Session
from runtime.bench.workload import Prompt, WorkloadError

PROMPTS = Prompts(ids=((5, 6), (7, 8, 9)), max_tokens=(6, 4))


def session_of(front: Front, *, note_cell=lambda slot: None, note_request=lambda: None, **changes: object) -> Session:
    return Session(front.client, asked_of(**changes), PROMPTS, note_cell=note_cell, note_request=note_request)


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
    assert [request.report_rounds for request in front.engine.submitted] == [True] * 4 + [False] * 4


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
        set_policy = front.client.set_policy
        running: asyncio.Task[None]

        async def set_and_be_cancelled(*args, **kwargs):
            state = await set_policy(*args, **kwargs)
            running.cancel()  # before the session has the answer
            await asyncio.sleep(0)
            return state

        monkeypatch.setattr(front.client, "set_policy", set_and_be_cancelled)
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
        assert session.policy_left.startswith("ABORTED: ")


@in_loop
async def test_requests_that_fail_are_recorded_by_code() -> None:
    async with serving(run_length=1) as front:

        def drain() -> None:
            front.engine.drain()

        session = session_of(front, policies=(Policy(None),), warmup=0, note_request=drain)
        await session.run()
        [run] = session.runs
    assert {record.completion.failure for record in run.records} == {"UNAVAILABLE"}
    assert len(run.records) == 4


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
async def test_preparing_reads_who_is_served_and_turns_texts_into_ids() -> None:
    async with serving() as front:
        workload = [
            Prompt(content="def main():"),
            Prompt(content=(1, 2, 3), max_tokens=9),
            Prompt(content="never sent"),
        ]
        asked = asked_of(requests=2, prompt_tokens=2)
        found = await prepare(front.client, asked, workload)
        text = await front.client.tokenize("def main():")
    assert found.prompts == Prompts(ids=(tuple(text[:2]), (1, 2)), max_tokens=(6, 9))
    assert found.identity.model.model_type == "qwen3_next"
    assert found.identity.devices == ["cpu"]
    assert not found.identity.own_server
    assert found.plan.prompts == 2


@in_loop
async def test_random_prompts_of_a_model_that_is_not_the_demo_need_its_tokenizer() -> None:
    async with serving(settings={"model.served_name": "other"}) as front:
        with pytest.raises(WorkloadError, match="name the tokenizer of other with --tokenizer DIR"):
            await prepare(front.client, asked_of(workload="random"), None)
    async with serving() as front:
        found = await prepare(front.client, asked_of(workload="random", prompt_tokens=11), None)
        assert {len(ids) for ids in found.prompts.ids} == {11}


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ([Prompt(content=(4096,))], "prompt 1: id 4096 is past the vocabulary of 4096 ids"),
        ([Prompt(content=(1,)), Prompt(content=(1,) * 510)], "prompt 2: 510 tokens and 6 more are past the context"),
        ([Prompt(content=(1,), max_tokens=600)], "prompt 1: 1 tokens and 600 more"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_named(workload, words) -> None:
    @in_loop
    async def check() -> None:
        async with serving() as front:
            with pytest.raises(WorkloadError) as caught:
                await prepare(front.client, asked_of(), workload)
        assert str(caught.value).startswith(words)

    check()


@in_loop
async def test_a_server_that_drains_or_drafts_too_little_is_not_measured() -> None:
    async with serving() as front:
        with pytest.raises(BenchError, match="--policy fixed:9: this server drafts at most 8 tokens"):
            await prepare(front.client, asked_of(policies=(Policy(9),)), [Prompt(content="x")])
        await front.client.drain()
        with pytest.raises(BenchError, match="the server is draining and refuses requests"):
            await prepare(front.client, asked_of(), [Prompt(content="x")])
        assert front.engine.submitted == []


@in_loop
async def test_a_request_of_text_is_the_same_as_one_of_its_ids() -> None:
    async with serving() as front:
        ids = await front.client.tokenize("import os")
        for prompt in ("import os", ids):
            request = generate_request(prompt, 3, report_rounds=False)
            _ = [frame async for frame in front.client.generate(request)]
        one, other = front.engine.submitted
    assert one.prompt == other.prompt == tuple(ids)
