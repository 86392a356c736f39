"""Puts a deployment together: settings, launcher, supervisor, engine, hub, front. Knows no terminal and no torch."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from configs.schema import ServeSettings
from parallel.mesh import Mesh
from runtime.cluster.launcher import Launcher
from runtime.cluster.supervisor import GroupSupervisor, launcher_for
from runtime.engine import Engine
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import Unavailable
from runtime.front.hub import StreamHub
from runtime.front.metrics_server import MetricsServer
from runtime.front.server import FrontServer
from runtime.front.tokenizer import Tokenizer
from runtime.front.vllm.presence import VLLM_ENGINE, why_absent
from runtime.in_force import SettingsInForce
from runtime.link import RankProgress
from runtime.listening import doors_of
from runtime.observe.observation import Observation
from runtime.profile.obtain import ProfileFinder
from runtime.reload import Reloader, SettingsSource
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus, Moment, ServerState
from runtime.verification.policy import describe
from runtime.warm_up import warm_up
from workers.models.layouts import check_layout
from workers.plan import WorkerDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class _FrontFiles:
    """What the front reads of a checkpoint: tokenizer and chat template, sampling defaults."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults

    @classmethod
    def load(cls, path: Path) -> _FrontFiles:
        """Raises LoadError that names the file."""
        return cls(tokenizer=Tokenizer.load(path), defaults=SamplingDefaults.load(path))


class Deployment:
    """One model on a group of ranks behind one gRPC front; all but the ranks lives in this process."""

    def __init__(
        self,
        settings: ServeSettings,
        launcher: Launcher | None = None,
        *,
        keeps_state: bool = False,
        source: SettingsSource | None = None,
    ) -> None:
        """settings: as `load_settings` gives them, with the checkpoint's path set. launcher: who starts ranks; unset
        takes the one that the settings name. keeps_state: the policy and what is learnt of drafts outlast it, in
        `state_dir`, and those of an earlier server are taken up. source: where the settings are from, to be read again
        while it runs; None reads none again.

        Raises SettingsError where traces are wanted and cannot be made."""
        assert settings.model.path is not None, "settings without a checkpoint"
        self._in_force = in_force = SettingsInForce(settings)
        self._path = settings.model.path
        self._supervisor = GroupSupervisor(settings, launcher or launcher_for(settings))
        self._hub = StreamHub(in_force)
        self._observation = Observation(settings)
        self._engine = Engine(
            in_force,
            self._supervisor,
            self._hub,
            profiles=ProfileFinder(settings),
            trial=warm_up,
            state_dir=settings.state_dir if keeps_state else None,
            observer=self._observation,
        )
        self._files: _FrontFiles | None = None
        self._reloader = Reloader(in_force, source, self._engine.policies, watched=lambda: self._front.watched)
        self._front = FrontServer(in_force, self._reloader, self._observation)
        self._watching: asyncio.Task[None] | None = None
        self._metrics = MetricsServer(settings, self.look)

    async def start(self, progress: RankProgress) -> None:
        """Returns when requests are served. `stop` must follow, also where this raises or is cancelled.

        Raises OSError (the address cannot be listened on, state_dir cannot be written), LoadError (the layout does not
        suit the model; tokenizer, chat template or sampling defaults, by file) or WorkerError (a rank cannot start or
        load, or generates nonsense; the text names it).
        """
        for door in doors_of(self._settings):
            door.check_free()
        _check_writable(self._settings.state_dir)
        check_layout(self._path, Mesh.of(self._settings.parallel))
        await self._front.listen()
        self._metrics.start()  # a start that takes minutes is no target that is down
        self._watching = asyncio.create_task(self._reloader.watch(), name="files")
        self._files = files = await self._load_beside_ranks(progress)
        self._observation.spell_with(files.tokenizer.decode)
        await self._front.open(self._engine, self._hub, files.tokenizer, defaults=files.defaults)

    async def _load_beside_ranks(self, progress: RankProgress) -> _FrontFiles:
        """Reads the front's files in a thread while the ranks start. An error of the files ends the ranks' start, and
        is the one that is raised where both fail."""
        loading = asyncio.ensure_future(asyncio.to_thread(_FrontFiles.load, self._path))
        starting = asyncio.ensure_future(self._engine.start(progress))
        try:
            await asyncio.wait({loading, starting}, return_when=asyncio.FIRST_EXCEPTION)
            files = await loading
            await starting
        finally:
            # A thread cannot be ended; what it still brings is let go.
            loading.cancel()
            starting.cancel()
            await asyncio.gather(loading, starting, return_exceptions=True)
        return files

    async def withdraw(self) -> None:
        """Has health send requests elsewhere, and takes those that still come for `server.withdraw_s`. `stop` is to
        follow. One that an operator has drained takes none anyway: there is nothing to wait for."""
        self._engine.withdraw()
        if self._engine.status().state is not ServerState.DRAINING:
            await asyncio.sleep(self._settings.server.withdraw_s)

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuses new requests, gives running ones `drain_s` seconds, ends front and ranks.

        drain_s: `server.drain_s` if left out. Idempotent; may be cancelled, and called again with less patience.
        """
        self._engine.wind_down()
        await self._front.stop(drain_s)
        await self._metrics.stop()
        await self._engine.stop(0)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._observation.close()

    @property
    def address(self) -> str:
        """host:port where clients reach us; known while `start` loads, and after."""
        return self._front.address

    @property
    def operator_address(self) -> str:
        """host:port where operators reach us; `address` where they share it."""
        return self._front.operator_address

    @property
    def metrics_address(self) -> str | None:
        """host:port of the metrics; None where they are not served."""
        return self._metrics.address

    @property
    def description(self) -> WorkerDescription:
        """What rank 0 said of itself when it was loaded."""
        return self._engine.description

    @property
    def ranks(self) -> tuple[WorkerDescription, ...]:
        """What each rank said of itself, in order."""
        return self._engine.ranks

    @property
    def mesh(self) -> Mesh:
        """How the ranks are laid out."""
        return self._engine.mesh

    @property
    def engine(self) -> Engine:
        """The part that schedules. What clients may ask of it, they ask over gRPC; this is for tests and tools."""
        return self._engine

    @property
    def reloader(self) -> Reloader:
        """What reads the configuration again."""
        return self._reloader

    @property
    def settings(self) -> SettingsInForce:
        """What it goes by at the moment."""
        return self._in_force

    @property
    def num_calls(self) -> int:
        """Calls that generate, at the moment."""
        return self._front.status().open_calls

    @property
    def supervisor(self) -> GroupSupervisor:
        """The part that keeps the ranks alive; for tests and tools, which may end a rank behind its back."""
        return self._supervisor

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the front uses, for tests and tools; known once `start` has returned."""
        assert self._files is not None, "not started"
        return self._files.tokenizer

    def look(self) -> Moment:
        """A moment of the front, and of the engine once its ranks are loaded."""
        try:
            engine = self._engine.status()
        except Unavailable:
            engine = None
        return Moment(engine=engine, front=self._front.status())

    def statistics(self) -> EngineStatistics:
        """A moment of the engine."""
        return self._engine.statistics()

    def check_books(self) -> list[str]:
        """Violated invariants of the host's books; empty when all hold."""
        return self._engine.check_books()

    @property
    def _settings(self) -> ServeSettings:
        return self._in_force.now

    def facts(self) -> list[tuple[str, str]]:
        """What was started and where, as rows to print."""
        rows = [("front", self.address)]
        if self.operator_address != self.address:
            rows.append(("operators", self.operator_address))
        if self._front.health_address is not None:
            rows.append(("health", self._front.health_address))
        absence = why_absent()
        rows.append(("gateways", f"{VLLM_ENGINE} is " + (f"not served: {absence}" if absence else "served, too")))
        if self._metrics.address is not None:
            rows.append(("metrics", f"http://{self._metrics.address}/metrics"))
        rows += [("layout", _layout_line(self.mesh)), *_speculation_rows(self._engine.status())]
        rows += [
            (f"rank {rank}", f"{launched.address} ({launched.name})")
            for rank, launched in enumerate(self._supervisor.launched)
        ]
        if self._settings.cluster.launcher == "ray":
            import ray

            whose = "joined" if self._settings.cluster.ray_address else "started here"
            rows.append(("ray", f"{ray.get_runtime_context().gcs_address} ({whose})"))
        return rows


def _speculation_rows(status: EngineStatus) -> list[tuple[str, str]]:
    """The policy in force, where it is from, and what a dynamic one goes by."""
    state, view = status.policy, status.speculation
    rows = [("policy", f"{describe(state.policy, state.classes)} (revision {state.revision}, by {state.set_by})")]
    if view.fallback:
        rows.append(("", f"runs as a fixed draft length: {view.fallback}"))
    elif view.profile.is_usable:
        rows.append(("profile", view.profile.detail))
    return rows


def _layout_line(mesh: Mesh) -> str:
    """Sizes of the layout, and what they come to."""
    ranks = "1 rank" if mesh.size == 1 else f"{mesh.size} ranks"
    experts = ", each with whole experts of its own" if mesh.spreads_experts else ""
    return f"{mesh}: {ranks}{experts}"


def _check_writable(state_dir: Path) -> None:
    """Raises OSError that names the setting: ranks log there, and their own word for it would come late."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(state_dir, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OSError(
            f"state_dir {state_dir} cannot be written: {error.strerror}; set state_dir to a folder that can"
        ) from None
