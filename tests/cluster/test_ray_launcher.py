"""A rank as a Ray actor: the same life as a child process, with Ray to start it. The supervisor is the real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from fakes import echo_worker
from fakes.supervised import begun, is_gone

from configs.schema import ClusterSettings, ModelSettings, ServeSettings
from runtime.cluster.ray_launcher import RayLauncher
from runtime.cluster.supervisor import WorkerSupervisor
from workers.channel import LOOPBACK
from workers.plan import StepTimeout, WorkerLost

TESTS = Path(__file__).parents[1]

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(autouse=True)
def _fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def supervisor_of(state_dir: Path, load: str = "well", **cluster: object) -> WorkerSupervisor:
    settings = ServeSettings(
        model=ModelSettings.model_validate({"path": load, "numerics": "reference", "device": "cpu"}),
        cluster=ClusterSettings.model_validate({"worker_threads": 2, **cluster}),
        state_dir=state_dir,
    )
    return WorkerSupervisor(settings, RayLauncher(settings.cluster, state_dir, factory=echo_worker.FACTORY))


def test_an_actor_serves_and_is_replaced_when_it_dies_or_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with begun(supervisor_of(tmp_path, step_timeout_s=1)) as (supervisor, first):
            assert first.epoch == 1
            assert first.link.address.startswith(LOOPBACK)
            result = await first.link.execute(echo_worker.plan(1, 1))
            threads = 2
            assert result.emitted == ((2, 1, 1, threads), (5, 9, 1, threads))
            assert dict(first.description.accounting)["MKL_CBWR"] == "COMPATIBLE"

            os.kill(echo_worker.pid_of(first.description), signal.SIGKILL)
            assert "Ray actor" in await asyncio.wait_for(first.lost, 2)
            with pytest.raises(WorkerLost):
                await first.link.execute(echo_worker.plan(2, 1))

            second = await supervisor.restart("killed")
            with pytest.raises(StepTimeout):
                await asyncio.wait_for(second.link.execute(echo_worker.plan(1, 2, echo_worker.UID_STOPS)), 5)
            third = await supervisor.restart("hung")
            assert is_gone(echo_worker.pid_of(second.description))
            assert (await third.link.execute(echo_worker.plan(1, 3))).epoch == 3
        assert is_gone(echo_worker.pid_of(third.description))

    asyncio.run(run())


def test_an_actor_that_dies_while_loading_leaves_its_last_words(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor = supervisor_of(tmp_path, "death")
        with pytest.raises(WorkerLost, match=r"failed at stage '\w+': Ray actor (.|\n)*last words of the worker"):
            await supervisor.start(lambda *_: None)
        await supervisor.stop()

    asyncio.run(run())


def test_the_local_ray_runs_no_api_server_which_would_ask_clouds_about_this_machine() -> None:
    import ray

    session = Path(ray.get_runtime_context().worker.node.get_session_dir_path()).name
    commands = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands.append((entry / "cmdline").read_bytes().decode(errors="replace"))
    ours = [command for command in commands if session in command]
    assert any("gcs_server" in command for command in ours)
    assert [command for command in ours if "dashboard/dashboard.py" in command] == []
