"""A whole deployment on fake ranks, from its first word of health to its last: trial, recovery, withdrawal, stop."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml
from fakes.engine_house import asynchronous
from fakes.front import request_for, status_of
from fakes.worker import FakeGroup, FakeSource, describe
from grpc_health.v1 import health_pb2, health_pb2_grpc
from oracles.metric_laws import parse

import runtime.serve
from configs.schema import ServeSettings
from outrider.v1 import operator_pb2, types_pb2
from runtime.front.calls import STOPPED
from runtime.front.client import OutriderClient
from runtime.front.health import INFERENCE
from runtime.reload import SettingsSource
from runtime.serve import Deployment
from runtime.verification.policy import Fixed, Off
from runtime.warm_up import WarmUpFailed
from workers.plan import WorkerLost

Code = grpc.StatusCode
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Supervisor(FakeSource):
    """launched: none; the ranks are no processes. sick: epochs whose ranks find something wrong with themselves."""

    launched = ()

    def __init__(self, *, gated: bool = False, sick: tuple[int, ...] = ()) -> None:
        super().__init__(describe(vocab_size=4096), gated=gated)
        self._sick = sick

    def _next(self) -> FakeGroup:
        group = super()._next()
        if group.epoch in self._sick:
            group.rank_violations[0] = ["a page is lost"]
        return group


@dataclass
class Site:
    deployment: Deployment
    supervisor: Supervisor
    client: OutriderClient
    starting: asyncio.Task[None]

    def watch(self, service: str) -> grpc.aio.UnaryStreamCall:
        return health_pb2_grpc.HealthStub(self.client.channel).Watch(health_pb2.HealthCheckRequest(service=service))

    async def generate(self) -> int:
        """Tokens that came."""
        return sum([len(frame.token_ids) async for frame in self.client.generate(request_for(max_tokens=6))])


@asynccontextmanager
async def site(
    monkeypatch: pytest.MonkeyPatch,
    supervisor: Supervisor | None = None,
    *,
    path: Path | None = None,
    keeps_state: bool = False,
    **settings: object,
) -> AsyncIterator[Site]:
    """A deployment that has begun to start, and listens; stopped at the end. path: its settings file."""
    supervisor = supervisor or Supervisor()
    monkeypatch.setattr(runtime.serve, "GroupSupervisor", lambda settings, launcher: supervisor)
    overrides = {"server.port": 0, "cluster.launcher": "process", **settings}
    source = SettingsSource(path=path, overrides=overrides)
    loaded: ServeSettings = source.load()
    deployment = Deployment(loaded, keeps_state=keeps_state, source=source)
    starting = asyncio.create_task(deployment.start(lambda *done: None))
    listening = asyncio.Event()
    listen = deployment._front.listen

    async def listen_and_tell() -> None:
        await listen()
        listening.set()

    monkeypatch.setattr(deployment._front, "listen", listen_and_tell)
    try:
        async with asyncio.timeout(20):
            await listening.wait()
            async with OutriderClient(deployment.address) as client:
                yield Site(deployment, supervisor, client, starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await deployment.stop(0)
    assert supervisor.is_stopped
    assert supervisor.violations == []


async def let_start(one: Site) -> int:
    """Lets steps answer until it has started; how many that took."""
    num_steps = 0
    while not one.starting.done():
        if one.supervisor.groups and one.supervisor.group.is_waiting:
            one.supervisor.group.let_go()
            num_steps += 1
        await asyncio.sleep(0)
    return num_steps


@asynchronous
async def test_health_says_serving_when_a_generation_has_been_seen_and_not_before() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(gated=True)) as one:
            live, ready = one.watch(""), one.watch(INFERENCE)
            assert [(await each.read()).status for each in (live, ready)] == [SERVING, NOT_SERVING]
            while not (one.supervisor.groups and one.supervisor.group.is_waiting):
                await asyncio.sleep(0)
            assert await status_of(one.client.call(request_for())) == (
                Code.UNAVAILABLE,
                "the server is starting; try again later",
            )
            assert await let_start(one) > 2
            assert (await ready.read()).status == SERVING
            one.supervisor.group.gated = False
            assert await one.generate() == 6
            status = await one.client.get_status()
            assert (status.counters.submitted, status.counters.emitted) == (1, 6), "the trial is nobody's request"


@asynchronous
async def test_a_server_that_starts_can_be_scraped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(gated=True)) as one:
            address = one.deployment.metrics_address
            assert address is not None
            early = parse(await asyncio.to_thread(_scrape, address))
            assert early["outrider_build_info"]
            assert "outrider_state" not in early
            await let_start(one)
            assert parse(await asyncio.to_thread(_scrape, address))["outrider_state"][("serving",)] == 1


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read(), "utf-8")


@asynchronous
async def test_ranks_that_fail_their_trial_end_the_start() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(sick=(1,))) as one:
            with pytest.raises(WarmUpFailed, match="a page is lost"):
                await one.starting


@asynchronous
async def test_a_start_is_left_in_the_middle_of_the_trial() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(gated=True)) as one:
            while not (one.supervisor.groups and one.supervisor.group.is_waiting):
                await asyncio.sleep(0)
            one.starting.cancel()
            await asyncio.gather(one.starting, return_exceptions=True)
            async with asyncio.timeout(5):
                await one.deployment.stop(1000)


@asynchronous
async def test_ranks_that_come_back_sick_are_replaced_before_health_says_serving() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(sick=(2,))) as one:
            await one.starting
            live, ready = one.watch(""), one.watch(INFERENCE)
            assert [(await each.read()).status for each in (live, ready)] == [SERVING, SERVING]
            one.supervisor.group.lose(WorkerLost("gone"))
            assert [(await ready.read()).status for _ in range(2)] == [NOT_SERVING, SERVING]
            assert [group.epoch for group in one.supervisor.groups] == [1, 2, 3]
            assert await one.client.check_health("") == SERVING
            assert await one.generate() == 6


@asynchronous
async def test_a_withdrawal_takes_requests_and_a_rank_that_is_lost_in_it_changes_no_word_of_health() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, **{"server.withdraw_s": 1000.0}) as one:
            await one.starting
            ready = one.watch(INFERENCE)
            assert (await ready.read()).status == SERVING
            withdrawing = asyncio.create_task(one.deployment.withdraw())
            assert (await ready.read()).status == NOT_SERVING
            assert await one.generate() == 6
            one.supervisor.hold_restarts = True
            one.supervisor.group.lose(WorkerLost("gone"))
            while (await one.client.get_status()).state != operator_pb2.SERVER_STATE_RECOVERING:
                await asyncio.sleep(0)
            assert (await status_of(one.client.call(request_for())))[0] is Code.UNAVAILABLE
            one.supervisor.release_restarts.set()
            while (await one.client.get_status()).state != operator_pb2.SERVER_STATE_WITHDRAWING:
                await asyncio.sleep(0)
            assert await one.generate() == 6, "taken again, while routers still hear of the end"
            assert not withdrawing.done()
            assert await one.client.check_health(INFERENCE) == NOT_SERVING
            withdrawing.cancel()
            await asyncio.gather(withdrawing, return_exceptions=True)
            stopping = asyncio.create_task(one.deployment.stop())
            await stopping


@asynchronous
async def test_a_stop_in_a_recovery_waits_for_those_that_wait_and_no_longer_than_it_may() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, Supervisor(gated=True), **{"server.drain_s": 0.05}) as one:
            await let_start(one)
            calls = [one.client.call(request_for(max_tokens=6)) for _ in range(6)]
            while (await one.client.get_status()).counters.submitted != 6:
                await asyncio.sleep(0)
            one.supervisor.hold_restarts = True
            one.supervisor.group.lose(WorkerLost("gone"))
            await one.deployment.stop()
            told = [await status_of(call) for call in calls]
            assert {code for code, _ in told} == {Code.UNAVAILABLE}
            lost = [text for _, text in told if "a worker was lost" in text]
            ended = [text for _, text in told if "this server has stopped" in text]
            assert 1 <= len(lost) <= 4, "those that ran, for which there are 4 slots"
            assert len(lost) + len(ended) == 6


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_stop_while_a_constraint_is_made_ready(is_in_time: bool) -> None:
    @asynchronous
    async def scenario() -> None:
        with pytest.MonkeyPatch.context() as patch:
            async with site(patch, **{"server.drain_s": 1000.0 if is_in_time else 0.05}) as one:
                await one.starting
                asked, ready = asyncio.Event(), asyncio.Event()

                async def prepare(constraint: object) -> str:
                    asked.set()
                    await ready.wait()
                    return ""

                one.supervisor.group.prepare = prepare  # type: ignore[method-assign]
                constraint = types_pb2.Constraint(regex="[ab]")
                call = one.client.call(request_for(max_tokens=6, constraint=constraint))
                await asked.wait()
                stopping = asyncio.create_task(one.deployment.stop())
                while (await one.client.get_status()).state != operator_pb2.SERVER_STATE_STOPPING:
                    await asyncio.sleep(0)
                assert (await status_of(one.client.call(request_for())))[0] is Code.UNAVAILABLE
                if is_in_time:
                    ready.set()
                    assert sum([len(frame.token_ids) async for frame in call]) == 6
                else:
                    assert await status_of(call) == (Code.UNAVAILABLE, STOPPED)
                await stopping

    scenario()


@asynchronous
async def test_one_that_was_drained_withdraws_at_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, **{"server.withdraw_s": 1000.0}) as one:
            await one.starting
            await one.client.drain()
            async with asyncio.timeout(5):
                await one.deployment.withdraw()
                await one.deployment.stop()


@asynchronous
async def test_a_policy_of_a_new_configuration_takes_over_and_is_not_kept(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("state")
    path = folder / "serve.yaml"

    def write(**speculation: object) -> None:
        path.write_text(yaml.safe_dump({"state_dir": str(folder), "speculation": {"gamma": 3, **speculation}}))

    write()
    with pytest.MonkeyPatch.context() as patch:
        async with site(patch, path=path, keeps_state=True) as one:
            await one.starting
            policies = one.deployment.engine.policies
            await one.client.set_policy(1)
            write(policy="off", revision=2)
            held = {held.key for held in (await one.client.reload()).held_back}
            assert held == {"speculation.policy", "speculation.revision"}, "an operator came after it"
            assert (policies.state.policy, policies.state.revision) == (Fixed(1), 2)
            write(policy="off", revision=7)
            assert len((await one.client.reload()).applied) == 2
            assert (policies.state.policy, policies.state.revision) == (Off(), 7)
            assert policies.state.effective_step == one.deployment.engine.status().step + 1
            assert await one.generate() == 6
            assert (await one.client.set_policy(2)).revision == 8
        async with site(patch, path=path, keeps_state=True) as again:
            await again.starting
            assert (await again.client.get_policy()).revision == 8
