"""Putting a deployment together: files are read while ranks start, and whichever fails, nothing is left running."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.engine_house import asynchronous
from fakes.worker import FakeGroup, FakeSource, describe

import runtime.serve
from configs.load import demo_checkpoint, load_settings
from configs.schema import ServeSettings
from runtime.front.client import OutriderClient
from runtime.link import RankProgress
from runtime.serve import Deployment
from workers.plan import LoadError, WorkerLost


@dataclass(frozen=True, slots=True)
class Launched:
    address: str
    name: str


class Supervisor(FakeSource):
    """Starts `dp` fake ranks once it is told to. `start_error`: what the start ends with instead."""

    def __init__(self, dp: int) -> None:
        super().__init__(describe(vocab_size=4096), dp=dp)
        self.launched: tuple[Launched, ...] = ()
        self.has_begun = asyncio.Event()
        self.may_start = asyncio.Event()
        self.was_cancelled = False
        self.start_error: Exception | None = None

    async def start(self, progress: RankProgress) -> FakeGroup:
        self.has_begun.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.start_error is not None:
            raise self.start_error
        group = await super().start(progress)
        self.launched = tuple(
            Launched(f"127.0.0.1:{4000 + rank}", f"process {rank}") for rank in range(group.mesh.size)
        )
        return group


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deployment, Supervisor]]:
    def build(path: Path | None = None, dp: int = 2, **more: object) -> tuple[Deployment, Supervisor]:
        supervisors: list[Supervisor] = []

        def supervisor(settings: ServeSettings, launcher: object) -> Supervisor:
            supervisors.append(Supervisor(settings.parallel.dp))
            return supervisors[0]

        monkeypatch.setattr(runtime.serve, "GroupSupervisor", supervisor)
        settings = {"server.port": 0, "cluster.launcher": "process", "parallel.dp": dp, "parallel.ep": dp, **more}
        deployment = Deployment(load_settings(None, settings | ({"model.path": path} if path else {})))
        return deployment, supervisors[0]

    return build


def checkpoint_with(directory: Path, name: str, text: str) -> Path:
    """The demo's small files, one of them another."""
    for file in demo_checkpoint().glob("*.json"):
        shutil.copy(file, directory)
    (directory / name).write_text(text)
    return directory


def ignore(rank: int, stage: str, done: int, total: int) -> None:
    pass


def run(scenario: Callable[[], object]) -> None:
    asynchronous(scenario)()  # type: ignore[arg-type]


def test_a_deployment_tells_its_layout_and_where_each_rank_is(deploy) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy(dp=2)
        supervisor.may_start.set()
        await deployment.start(ignore)
        facts = dict(deployment.facts())
        assert facts["front"] == deployment.address
        assert facts["layout"] == "dp2 tp1 ep2: 2 ranks, each with whole experts of its own"
        assert facts["rank 0"] == "127.0.0.1:4000 (process 0)"
        assert facts["rank 1"] == "127.0.0.1:4001 (process 1)"
        async with OutriderClient(deployment.address) as client:
            assert deployment.tokenizer.decode(await client.tokenize("x = 1")) == "x = 1"
        supervisor.launched = ()
        assert "rank 0" not in dict(deployment.facts()), "between lives nothing runs"
        await deployment.stop(0)
        assert supervisor.is_stopped

    run(scenario)


def test_one_rank_is_called_so(deploy) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy(dp=1)
        supervisor.may_start.set()
        await deployment.start(ignore)
        assert dict(deployment.facts())["layout"] == "dp1 tp1 ep1: 1 rank"
        await deployment.stop(0)

    run(scenario)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("generation_config.json", '{"top_p": 7}')],
    ids=["tokenizer", "sampling"],
)
def test_files_that_cannot_be_read_end_the_start_though_ranks_would_start_for_ever(
    deploy, tmp_path: Path, name: str, text: str
) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy(checkpoint_with(tmp_path, name, text))
        with pytest.raises(LoadError, match=name):
            await deployment.start(ignore)
        assert supervisor.was_cancelled or not supervisor.has_begun.is_set()
        await deployment.stop(0)
        assert supervisor.is_stopped

    run(scenario)


def test_what_cannot_be_served_starts_no_rank(deploy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "state"
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    choose = r"choose another with operator\.host and operator\.port"

    async def scenario() -> None:
        for refused, error, match in (
            (deploy(**{"operator.port": port}), OSError, f":{port} for operators: Address already in use; {choose}"),
            (deploy(dp=9), LoadError, "dp9 tp1 ep9 does not suit this model: 8 experts are too few for 9 ranks"),
            (deploy(state_dir=nowhere), OSError, f"state_dir {nowhere} cannot be written: .*; set state_dir to"),
        ):
            deployment, supervisor = refused
            with pytest.raises(error, match=match):
                await deployment.start(ignore)
            assert not supervisor.has_begun.is_set()
            await deployment.stop(0)

    with taken:
        run(scenario)


def test_files_are_read_while_ranks_start(deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy()
        loop = asyncio.get_running_loop()
        load = runtime.serve.Tokenizer.load

        def load_and_let_start(path: Path):
            assert not supervisor.groups, "no rank has started yet"
            tokenizer = load(path)
            loop.call_soon_threadsafe(supervisor.may_start.set)
            return tokenizer

        monkeypatch.setattr(runtime.serve.Tokenizer, "load", load_and_let_start)
        await deployment.start(ignore)
        assert deployment.tokenizer.decode([66])
        await deployment.stop(0)

    run(scenario)


def test_of_two_failures_that_of_the_files_is_told(deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy(checkpoint_with(tmp_path, "tokenizer.json", "{"))
        supervisor.start_error = WorkerLost("rank 1 of 2: killed by signal 9")
        supervisor.may_start.set()
        with pytest.raises(LoadError, match=r"tokenizer\.json"):
            await deployment.start(ignore)
        await deployment.stop(0)

    run(scenario)


def test_ranks_that_do_not_start_are_told_as_they_are(deploy) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy()
        supervisor.start_error = WorkerLost("rank 1 of 2: killed by signal 9")
        supervisor.may_start.set()
        with pytest.raises(WorkerLost, match="rank 1 of 2: killed by signal 9"):
            await deployment.start(ignore)
        await deployment.stop(0)
        assert supervisor.is_stopped

    run(scenario)


def test_a_start_that_is_cancelled_takes_its_ranks_along(deploy) -> None:
    async def scenario() -> None:
        deployment, supervisor = deploy()
        starting = asyncio.create_task(deployment.start(ignore))
        await supervisor.has_begun.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert supervisor.was_cancelled
        await deployment.stop(0)

    run(scenario)
