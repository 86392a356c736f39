"""The server's policy while it is measured: switched by compare and set, and put back however the run ends."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from fakes.bench import session_of
from fakes.front import in_loop, serving
from fakes.policies import SOUND_PROFILE

from runtime.bench.borrowed_policy import UNFINISHED, message_of
from runtime.bench.errors import BenchError
from runtime.bench.load import Policy, Slot, parse_policies
from runtime.verification.view import SpeculationView


@in_loop
async def test_a_switch_over_somebody_elses_is_refused_and_theirs_stays(monkeypatch) -> None:
    async with serving(run_length=1) as front:
        switch_policy, calls = front.client.switch_policy, 0

        async def switch_after_somebody(policy, **kwargs):
            nonlocal calls
            calls += 1
            if calls == 2:
                await switch_policy(message_of(Policy(5)))
            return await switch_policy(policy, **kwargs)

        monkeypatch.setattr(front.client, "switch_policy", switch_after_somebody)
        session = session_of(front)
        with pytest.raises(BenchError, match="somebody else changed the server's policy"):
            await session.run()
        state = await front.client.get_policy()
        assert (state.policy.fixed.gamma, state.revision) == (5, 3)
        assert session.policy_left == ""


@in_loop
async def test_a_policy_that_was_never_switched_is_not_put_back() -> None:
    async with serving() as front:

        def fail(slot: Slot) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await session_of(front, note_cell=fail).run()
        assert (await front.client.get_policy()).revision == 1


@pytest.mark.parametrize("policy", parse_policies(["off,fixed:0,fixed:2,dynamic,dynamic:min=1:max=3:itl=30"]), ids=str)
@pytest.mark.parametrize("is_done", [False, True])
def test_a_switch_without_an_answer_is_looked_up_and_put_back_if_it_is_ours(is_done, policy, monkeypatch) -> None:
    @in_loop
    async def check() -> None:
        async with serving() as front:
            front.engine.policies.view = SpeculationView(profile=SOUND_PROFILE)
            switch_policy, calls = front.client.switch_policy, 0

            async def switch_without_answer(asked, **kwargs):
                nonlocal calls
                calls += 1
                if calls > 1:
                    return await switch_policy(asked, **kwargs)
                if is_done:
                    await switch_policy(asked, **kwargs)
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost"
                )

            monkeypatch.setattr(front.client, "switch_policy", switch_without_answer)
            session = session_of(front, policies=(policy,))
            with pytest.raises(grpc.aio.AioRpcError, match="lost"):
                await session.run()
            state = await front.client.get_policy()
            assert (state.policy.fixed.gamma, state.revision) == (4, 3 if is_done else 1)
            assert session.policy_left == ""

    check()


@in_loop
async def test_one_cancellation_does_not_end_the_putting_back_and_a_second_one_does(monkeypatch) -> None:
    async with serving(run_length=1) as front:
        switch_policy = front.client.switch_policy
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def switch_late(policy, **kwargs):
            if policy.fixed.gamma == 4:
                reached.set()
                await goes_on.wait()
            return await switch_policy(policy, **kwargs)

        monkeypatch.setattr(front.client, "switch_policy", switch_late)
        for insists in (False, True):
            reached.clear()
            goes_on.clear()
            session = session_of(front)
            running = asyncio.create_task(session.run())
            await reached.wait()
            running.cancel()
            await asyncio.wait((running,), timeout=0)
            assert not running.done()
            running.cancel() if insists else goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert session.policy_left == (UNFINISHED if insists else "")
            assert (await front.client.get_policy()).policy.fixed.gamma == (2 if insists else 4)
            assert len(session.runs) == 2


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_was_cancelled_ends_at_once_when_it_is_cancelled_again(at, monkeypatch) -> None:
    @in_loop
    async def check() -> None:
        async with serving(run_length=1) as front:
            whole, reached, calls = front.client.switch_policy, asyncio.Event(), 0
            running: asyncio.Task[None]

            async def hang(*args, **kwargs):
                # As the second cell is switched to, or as the policy is put back after it.
                nonlocal calls
                calls += 1
                if calls == at:
                    reached.set()
                    await asyncio.Event().wait()
                return await whole(*args, **kwargs)

            def interrupt() -> None:
                if at == 3 and calls == 2 and not running.cancelling():
                    running.cancel()

            monkeypatch.setattr(front.client, "switch_policy", hang)
            session = session_of(front, note_request=interrupt)
            running = asyncio.create_task(session.run())
            await reached.wait()
            if at == 2:
                running.cancel()
                await asyncio.wait((running,), timeout=0)
            assert not running.done()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert session.policy_left == UNFINISHED

    check()
