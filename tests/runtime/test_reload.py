"""The configuration, read again: what is safe comes into force, the rest is named, a bad one changes nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest
from fakes.config_desk import BASE, Desk, changed
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.changes import changed_keys, value_of, with_values_of
from configs.load import key_paths, load_settings
from configs.schema import ServeSettings, SpeculationSettings
from runtime.front.errors import RefusedSettings
from runtime.in_force import SettingsInForce
from runtime.reload import LIVE_KEYS, NEEDS_RESTART, NEEDS_REVISION, Reloaded, Reloader, SettingsSource
from runtime.status import Reloads


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_what_is_safe_is_in_force_at_once_and_the_rest_is_named(desk: Desk) -> None:
    reloaded = desk.reload(
        changed(
            scheduler={"max_waiting": 9, "default_max_tokens": 3, "max_step_tokens": 64},
            server={"port": 50099, "drain_s": 4.0, "withdraw_s": 2.0, "stall_s": 1.5, "coalesce_ms": 0.0},
            logs={"level": "error", "texts": True},
        )
    )
    assert set(reloaded.applied) == {
        *("scheduler.max_waiting", "scheduler.default_max_tokens", "logs.level"),
        *("server.drain_s", "server.withdraw_s", "server.stall_s", "server.coalesce_ms"),
    }
    assert reloaded.held_back == dict.fromkeys(
        ("scheduler.max_step_tokens", "server.port", "logs.texts"), NEEDS_RESTART
    )
    now = desk.settings.now
    assert (now.scheduler.max_waiting, now.server.drain_s, now.logs.level) == (9, 4.0, "error")
    assert (now.scheduler.max_step_tokens, now.server.port, now.logs.texts) == (512, 50051, False)
    assert desk.reloader.status() == Reloads(applied=1, held_back=3)


def test_a_second_time_brings_nothing_new(desk: Desk) -> None:
    document = changed(scheduler={"max_waiting": 9}, server={"port": 50099})
    desk.reload(document)
    again = desk.reload()
    assert (again.applied, set(again.held_back)) == ((), {"server.port"})
    assert str(Reloaded()) == "nothing has changed"
    assert desk.reload(BASE).applied == ("scheduler.max_waiting",), "and back"
    assert desk.reloader.status() == Reloads(applied=2)


def test_the_command_line_comes_before_the_file_as_at_the_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path, overrides={"scheduler.max_waiting": 1})
    assert desk.reload(changed(scheduler={"max_waiting": 9}, server={"drain_s": 8.0})).applied == ("server.drain_s",)
    assert desk.settings.now.scheduler.max_waiting == 1


@pytest.mark.parametrize(("revision", "in_force"), [(6, 5), (9, 8), (7, 5)])
def test_a_policy_of_a_higher_revision_takes_over(tmp_path: Path, revision: int, in_force: int) -> None:
    desk = Desk(tmp_path, revision=in_force)
    new = changed(speculation={"policy": "dynamic", "dynamic": {"gamma_min": 1}, "gamma": 3, "revision": revision})
    reloaded = desk.reload(new)
    assert set(reloaded.applied) == {
        f"speculation.{name}" for name in ("policy", "dynamic.gamma_min", "gamma", "revision")
    }
    [taken] = desk.policies.taken
    assert (taken.policy, taken.dynamic.gamma_min, taken.gamma, taken.revision) == ("dynamic", 1, 3, revision)
    assert desk.settings.now.speculation == taken


@pytest.mark.parametrize("revision", [5, 6, 8])
def test_one_of_no_higher_revision_than_operators_have_set_is_named_and_let_be(tmp_path: Path, revision: int) -> None:
    desk = Desk(tmp_path, revision=8)
    reloaded = desk.reload(changed(speculation={"policy": "off", "revision": revision}, scheduler={"max_waiting": 8}))
    assert reloaded.applied == ("scheduler.max_waiting",)
    assert set(reloaded.held_back) == {"speculation.policy"} | ({"speculation.revision"} if revision != 5 else set())
    assert set(reloaded.held_back.values()) == {NEEDS_REVISION}
    assert desk.policies.taken == []
    assert desk.settings.now.speculation.policy == "fixed"


BAD: dict[str, object] = {
    "no yaml": "scheduler: [",
    "a tab": "scheduler:\n\tmax_waiting: 3",
    "a list": "- 1\n- 2",
    "a text": "just words",
    "twice": "scheduler: {max_waiting: 3}\nscheduler: {max_waiting: 4}",
    "an unknown key": changed(scheduler={"max_witing": 3}),
    "an unknown block": {"schedular": {}},
    "a value for a block": {"scheduler": 3},
    "a block for a value": changed(scheduler={"max_waiting": {"at": 3}}),
    "a text for a number": changed(scheduler={"max_waiting": "many"}),
    "below its range": changed(scheduler={"max_waiting": -1}),
    "nothing": changed(scheduler={"max_waiting": None}),
    "no number": changed(server={"drain_s": float("nan")}),
    "no time": changed(server={"stall_s": 0}),
    "past its range": changed(server={"coalesce_ms": 1001}),
    "no level": changed(logs={"level": "loud"}),
    "no policy": changed(speculation={"policy": "sometimes", "revision": 9}),
    "a draft too long": changed(speculation={"gamma": 9, "revision": 9}),
    "bounds out of order": changed(speculation={"dynamic": {"gamma_min": 6, "gamma_max": 2}, "revision": 9}),
    "a checkpoint that is gone": changed(model={"path": "/nowhere"}),
    "steps too small": changed(scheduler={"max_step_tokens": 3}),
    "a layout that is none": changed(parallel={"tp": 2, "dp": 2, "ep": 3}),
    "half of a certificate": changed(server={"tls": {"key": "/k"}}),
    "a port for two": changed(server={"port": 50060}, operator={"port": 50060}),
    # Each by itself is fine; the longer buffers need a restart, and the draft would not fit those that are there.
    "what does not go with what stays": changed(speculation={"gamma": 4, "revision": 9}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_one_changes_nothing_and_says_why(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = {"speculation.gamma_max": 3} if case == "what does not go with what stays" else {}
    desk = Desk(tmp_path, overrides=overrides)
    heard: list[ServeSettings] = []
    desk.settings.add_listener(heard.append)
    before = desk.settings.now
    bad = BAD[case]
    if isinstance(bad, dict):  # along with a change that would be fine by itself
        bad = {**bad, "access": {"max_connection_idle_s": 5.0}}
    with caplog.at_level(logging.INFO), pytest.raises(RefusedSettings, match="stays as it was: ") as caught:
        desk.reload(bad)
    assert desk.settings.now is before
    assert heard == []
    assert desk.policies.taken == []
    status = desk.reloader.status()
    assert (status.applied, status.refused) == (0, 1)
    assert status.problem in str(caught.value)
    [line] = [record for record in caplog.records if record.name == "outrider.audit"]
    assert (line.levelname, status.problem in line.getMessage()) == ("ERROR", True)
    assert desk.reload(changed(scheduler={"max_waiting": 11})).applied == ("scheduler.max_waiting",), "the next counts"
    assert desk.reloader.status() == Reloads(applied=1, refused=1)


def test_what_who_asked_does_not_wait_for_is_read_all_the_same(desk: Desk) -> None:
    async def scenario() -> None:
        desk.write(changed(scheduler={"max_waiting": 8}))
        asking = asyncio.create_task(desk.reloader.reload("ipv4:127.0.0.1:1"))
        while not desk.reloader._turn.locked():
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())
    assert desk.settings.now.scheduler.max_waiting == 7
    desk.look(times=2)
    assert desk.settings.now.scheduler.max_waiting == 8


def test_a_storm_of_signals_is_two_readings_and_the_newest_is_in_force(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on may have read what was there before the last signal; one more reads what is there now."""
    load, loads, release = SettingsSource.load, [], threading.Event()

    def slow(source: SettingsSource) -> ServeSettings:
        loads.append(settings := load(source))
        release.wait(10)
        return settings

    async def scenario() -> None:
        desk.reloader.reload_soon()
        while not loads:
            await asyncio.sleep(0)
        desk.write(changed(scheduler={"max_waiting": 8}))
        for _ in range(1000):
            desk.reloader.reload_soon()
        release.set()
        while desk.reloader._tasks:
            await asyncio.sleep(0)
        assert len(loads) == 2
        desk.write(changed(scheduler={"max_waiting": 9}))
        desk.reloader.reload_soon()
        while desk.reloader._tasks:
            await asyncio.sleep(0)

    monkeypatch.setattr(SettingsSource, "load", slow)
    asyncio.run(scenario())
    assert (len(loads), desk.settings.now.scheduler.max_waiting) == (3, 9)
    assert desk.reloader.status() == Reloads(applied=2)


def test_what_does_not_go_with_what_stays_is_refused_as_a_whole(tmp_path: Path) -> None:
    """The file is good; it would be in force after a restart, and half of it cannot be before."""
    desk = Desk(tmp_path)
    desk.settings.replace(
        desk.settings.now.model_copy(update={"speculation": SpeculationSettings(gamma=2, gamma_max=3, revision=5)})
    )
    new = changed(speculation={"gamma": 4, "revision": 9}, scheduler={"max_waiting": 8})
    with pytest.raises(RefusedSettings, match=r"gamma is 4 but gamma_max is 3.*speculation.gamma_max.*restart"):
        desk.reload(new)
    assert desk.settings.now.scheduler.max_waiting == 7


@given(st.lists(st.sampled_from(("good", "bad", "same", "held")), max_size=6))
@settings(max_examples=settings.default.max_examples // 4)
def test_whatever_comes_in_whatever_order_the_last_good_one_is_in_force(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str]
) -> None:
    desk, most, refused = Desk(tmp_path_factory.mktemp("desk")), 7, 0
    for number, kind in enumerate(kinds):
        if kind == "bad":
            refused += 1
            with pytest.raises(RefusedSettings):
                desk.reload(changed(scheduler={"max_waiting": -number - 1}, server={"drain_s": 99.0}))
            continue
        if kind == "good":
            most = 100 + number
        desk.reload(changed(scheduler={"max_waiting": most}, server={"port": 50099 if kind == "held" else 50051}))
    assert (desk.settings.now.scheduler.max_waiting, desk.settings.now.server.drain_s) == (most, 3.0)
    assert desk.reloader.status().refused == refused
    assert bool(desk.reloader.status().problem) == (kinds[-1:] == ["bad"])


def test_who_asks_for_it_is_on_record(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        desk.reload(changed(scheduler={"max_waiting": 8}, server={"port": 50099}), peer="ipv4:127.0.0.1:1")
        desk.reload()
    assert caplog.messages == [
        "ipv4:127.0.0.1:1 read the configuration again: scheduler.max_waiting in force; server.port needs a restart",
        "server read the configuration again: server.port needs a restart",
    ]


def test_without_a_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    reloader = Reloader(SettingsInForce(load_settings(None, {})))
    assert asyncio.run(reloader.reload()) == Reloaded()
    asyncio.run(reloader.look())
    assert reloader.status() == Reloads()


def test_every_live_key_is_a_setting_and_can_be_told_apart() -> None:
    assert set(LIVE_KEYS) <= set(key_paths(ServeSettings))
    base = load_settings(None, {})
    other = load_settings(None, {"server.drain_s": 99.0, "speculation.dynamic.gamma_min": 1, "cache.page_size": 32})
    assert list(changed_keys(base, other)) == ["cache.page_size", "speculation.dynamic.gamma_min", "server.drain_s"]
    merged = with_values_of(base, other, ["server.drain_s"])
    assert list(changed_keys(base, merged)) == ["server.drain_s"]
    assert value_of(merged, "server.drain_s") == 99.0
