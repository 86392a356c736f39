"""The policy over restarts of a whole engine: kept where it can be, and never as a worker lowered it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.engine_house import SETTINGS, asynchronous, settle_down
from fakes.front_sink import RecordingSink
from fakes.worker import FakeSource, describe

from runtime.engine import Engine
from runtime.in_force import SettingsInForce
from runtime.verification.policy import Fixed, Off
from workers.plan import WorkerLost

WHO = "ipv4:10.0.0.7:1"


@asynccontextmanager
async def life(state_dir: Path, *, revision: int = 1, gamma_max: int = 4) -> AsyncIterator[tuple[Engine, FakeSource]]:
    """A server's life over one folder. revision: of the settings, which ask for fixed drafts of 3."""
    speculation = SETTINGS.speculation.model_copy(update={"revision": revision})
    settings = SETTINGS.model_copy(update={"speculation": speculation})
    source = FakeSource(describe(gamma_max=gamma_max))
    engine = Engine(SettingsInForce(settings), source, RecordingSink(), state_dir=state_dir)
    await engine.start()
    try:
        yield engine, source
    finally:
        await engine.stop(0)


def test_a_policy_is_in_force_after_a_restart_until_the_settings_are_newer(tmp_path: Path) -> None:
    @asynchronous
    async def scenario() -> None:
        async with life(tmp_path) as (engine, _):
            assert (engine.policies.state.policy, engine.policies.state.revision) == (Fixed(3), 1)
            await engine.policies.set(Off(), set_by=WHO)
            state = await engine.policies.set(Fixed(4), priority=2, set_by=WHO)
        async with life(tmp_path) as (engine, _):
            again = engine.policies.state
            assert (again.policy, again.classes, again.revision) == (Off(), ((2, Fixed(4)),), 3)
            assert (again.set_by, again.set_at, again.effective_step) == (WHO, state.set_at, 1)
        async with life(tmp_path, revision=4) as (engine, _):
            newer = engine.policies.state
            assert (newer.policy, newer.classes, newer.revision) == (Fixed(3), (), 4)
            await engine.policies.set(Fixed(1), 4)
        async with life(tmp_path, revision=4) as (engine, _):
            assert (engine.policies.state.policy, engine.policies.state.revision) == (Fixed(1), 5)

    scenario()


def test_what_a_worker_lowers_is_not_kept_so(tmp_path: Path) -> None:
    @asynchronous
    async def scenario() -> None:
        async with life(tmp_path) as (engine, source):
            await engine.policies.set(Fixed(4))
            source.description = describe(gamma_max=2)
            source.group.lose(WorkerLost("gone"))
            await settle_down()
            assert (engine.policies.state.policy, engine.policies.state.revision) == (Fixed(2), 3)
        async with life(tmp_path, gamma_max=2) as (engine, _):
            assert (engine.policies.state.policy, engine.policies.state.revision) == (Fixed(2), 3)
        async with life(tmp_path) as (engine, _):
            assert (engine.policies.state.policy, engine.policies.state.revision) == (Fixed(4), 2)

    scenario()


def test_a_policy_that_cannot_be_kept_is_in_force_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @asynchronous
    async def scenario() -> None:
        (tmp_path / "state").write_text("no folder")
        async with life(tmp_path / "state") as (engine, _):
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                state = await engine.policies.set(Off(), set_by=WHO)
            assert engine.policies.state == state
            assert state.policy == Off()
            assert {record.name for record in caplog.records} >= {"outrider.audit"}
            assert all("will not survive a restart" in line for line in caplog.messages)

    scenario()
