"""Groups whose links are sealed: certificates are read anew for every life, and the secret is seen by nobody but the
runtime and its ranks, whoever starts them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from fakes import echo_worker
from fakes.certificates import make_authority
from fakes.supervised import begun

from configs.access import WorkerTlsSettings
from configs.schema import ClusterSettings, ModelSettings, ParallelSettings, ServeSettings, WorkerSettings
from runtime.cluster.launcher import LaunchedWorker, Launcher
from runtime.cluster.supervisor import GroupSupervisor, RunningGroup, launcher_for
from workers.channel import LOOPBACK
from workers.plan import LoadError, WorkerLost
from workers.terms import LinkTerms

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


class Overhearing:
    """A launcher that keeps the secrets it was given."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.secrets: set[str] = set()

    async def launch(self, settings: WorkerSettings, epoch: int, terms: LinkTerms) -> LaunchedWorker:
        self.secrets.add(terms.secret)
        return await self._launcher.launch(settings, epoch, terms)

    async def close(self) -> None:
        await self._launcher.close()


def supervisor_of(folder: Path, launcher: str, tls: WorkerTlsSettings) -> tuple[GroupSupervisor, Overhearing]:
    settings = ServeSettings(
        model=ModelSettings.model_validate({"path": "well", "device": "cpu"}),
        parallel=ParallelSettings(tp=2),
        cluster=ClusterSettings.model_validate({"launcher": launcher, "tls": tls}),
        state_dir=folder,
    )
    made = launcher_for(settings)
    made._factory = echo_worker.FACTORY  # type: ignore[attr-defined]
    overhearing = Overhearing(made)
    return GroupSupervisor(settings, overhearing), overhearing


async def step(group: RunningGroup, step_id: int) -> None:
    await asyncio.wait_for(group.link.execute(echo_worker.plan(step_id, group.epoch)), 10)


def sealed(folder: Path) -> WorkerTlsSettings:
    made = make_authority(folder).issue("links", LOOPBACK)
    return WorkerTlsSettings(certificate=made.certificate, key=made.key, ca=folder / "authority.pem")


@pytest.mark.parametrize("launcher", ["process", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.full])])
def test_links_take_certificates_as_they_are_when_a_life_begins(
    tmp_path: Path, launcher: str, request: pytest.FixtureRequest
) -> None:
    if launcher == "ray":
        request.getfixturevalue("ray_cluster")
    tls = sealed(tmp_path / "tls")

    async def run() -> None:
        supervisor, overhearing = supervisor_of(tmp_path, launcher, tls)
        async with begun(supervisor) as (_, group):
            await step(group, 1)
            sealed(tmp_path / "tls")  # another authority, and what it issued
            await step(group, 2)
            group = await supervisor.restart("certificates have changed")
            await step(group, 3)

            make_authority(tmp_path / "tls").issue("links", "192.0.2.1")
            text = r"cluster\.tls\.certificate: .*links\.pem does not bear the name 127\.0\.0\.1; "
            with pytest.raises(WorkerLost, match=text):
                await supervisor.restart("the certificate is of another machine")
            assert tls.key is not None
            tls.key.unlink()
            with pytest.raises(
                LoadError, match=r"^cluster\.tls\.key: there is no file .*links\.key\.pem; put it there"
            ):
                await supervisor.restart("the key is gone")
            sealed(tmp_path / "tls")
            await step(await supervisor.restart("all is well again"), 4)
        assert len(overhearing.secrets) == 4, "every life has a secret of its own"

    asyncio.run(run())


def test_the_secret_is_in_no_argument_environment_or_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def run() -> None:
        supervisor, overhearing = supervisor_of(tmp_path, "process", WorkerTlsSettings())
        async with begun(supervisor) as (_, group):
            await step(group, 1)
            (secret,) = overhearing.secrets
            for launched in supervisor.launched:
                folder = Path("/proc") / str(launched.pid)
                assert b"workers.main" in (folder / "cmdline").read_bytes()
                assert "OMP_NUM_THREADS" in (folder / "environ").read_text()
                assert not any(secret in (folder / name).read_text() for name in ("cmdline", "environ"))
        logs = [path.read_text() for path in (tmp_path / "logs").iterdir()]
        assert len(logs) == 2
        assert not any(secret in text for text in [*logs, caplog.text])

    asyncio.run(run())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_secret_is_in_nothing_that_ray_shows_or_keeps(tmp_path: Path) -> None:
    async def run() -> None:
        supervisor, overhearing = supervisor_of(tmp_path, "ray", WorkerTlsSettings())
        async with begun(supervisor) as (_, group):
            await step(group, 1)
            (secret,) = overhearing.secrets
            shown = what_ray_knows()
            assert {"rank-0-epoch-1", "WorkerActor.open"} <= {name for name in NAMED if any(name in s for s in shown)}
            assert not any(secret in text for text in shown)

    asyncio.run(run())


NAMED = ("rank-0-epoch-1", "WorkerActor.open")


def what_ray_knows() -> list[str]:
    """What its server tells dashboards of actors, tasks and processes, what it stores, and every file of its session,
    logs among them."""
    import ray
    from ray._private import state

    seen: Any = state.state._connect_and_get_accessor()
    kept = ray._private.worker.global_worker.gcs_client
    values = [kept.internal_kv_get(key, space) for space in (None, b"fun") for key in kept.internal_kv_keys(b"", space)]
    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    tables = (seen.get_actor_table(None, None), seen.get_task_events(), seen.get_worker_table())
    return [
        text.decode(errors="replace") for text in (*values, *files, *(row for rows in tables for row in rows)) if text
    ]
