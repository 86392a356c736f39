"""The policy that outlasts a server: which one is in force at start, and what becomes of files that hold none."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import SpeculationSettings
from runtime.verification.policy import Dynamic, Fixed, Off, PolicyState, check_bounds
from runtime.verification.policy_file import PolicyFile, choose, state_at_start

WHO = "ipv4:10.0.0.7:41234"
KEPT = PolicyState(
    policy=Dynamic(gamma_min=1, itl_limit_ms=12.5, min_survival=0.25),
    revision=7,
    effective_step=300,
    classes=((-3, Off()), (2, Fixed(4))),
    set_by=WHO,
    set_at=1_700_000_000.5,
    num_changes=6,
)
SETTINGS = SpeculationSettings(policy="fixed", gamma=3, revision=1)


@pytest.fixture
def file(tmp_path: Path) -> PolicyFile:
    return PolicyFile(tmp_path / "state" / "policy.json")


def start(file: PolicyFile | None, speculation: SpeculationSettings = SETTINGS, gamma_max: int = 8) -> PolicyState:
    return state_at_start(speculation, gamma_max, file=file, now=5.0)


def content(**changes: object) -> str:
    entry = {"schema": 1, "revision": 7, "policy": {"kind": "off"}, "classes": [], "set_by": WHO, "set_at": 1.0}
    return json.dumps(entry | changes)


def test_what_is_kept_is_read_as_it_was(file: PolicyFile):
    assert file.load() is None
    file.save(KEPT)
    kept = PolicyFile(file.path).load()
    assert kept is not None
    assert (kept.policy, kept.classes, kept.revision) == (KEPT.policy, KEPT.classes, KEPT.revision)
    assert (kept.set_by, kept.set_at) == (KEPT.set_by, KEPT.set_at)
    assert (kept.effective_step, kept.num_changes) == (1, 0), "steps and changes are of a server's life"
    assert os.listdir(file.path.parent) == ["policy.json"], "nothing is left beside it"


gammas = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)
policies = st.one_of(
    st.just(Off()),
    gammas.map(Fixed),
    st.builds(
        lambda bounds, **others: Dynamic(gamma_min=min(bounds), gamma_max=max(bounds), **others),
        st.tuples(gammas, gammas),
        itl_limit_ms=st.none() | st.floats(min_value=1e-9, max_value=1e9),
        min_gain=shares,
        min_survival=shares,
    ),
    st.builds(Dynamic, min_gain=shares),
)


@given(
    policy=policies,
    classes=st.dictionaries(st.integers(-(2**31), 2**31 - 1), policies, max_size=16),
    revision=st.integers(1, 2**63 - 1),
    set_by=st.text(),
)
@settings(max_examples=40, deadline=None)
def test_every_policy_comes_back(tmp_path_factory, policy, classes, revision, set_by):
    state = PolicyState(
        policy=policy, revision=revision, effective_step=1, classes=tuple(sorted(classes.items())), set_by=set_by
    )
    file = PolicyFile(tmp_path_factory.mktemp("kept") / "policy.json")
    file.save(state)
    assert file.load() == state


def test_the_kept_policy_is_in_force_after_a_restart_and_the_log_says_whose_it_is(
    file: PolicyFile, caplog: pytest.LogCaptureFixture
):
    file.save(KEPT)
    with caplog.at_level(logging.INFO):
        state = start(PolicyFile(file.path))
    assert (state.policy, state.classes, state.revision) == (KEPT.policy, KEPT.classes, 7)
    assert (state.set_by, state.set_at, state.effective_step, state.num_changes) == (WHO, KEPT.set_at, 1, 0)
    [line] = caplog.messages
    for words in (str(file.path), WHO, "2023-11-", "revision 7", "fixed gamma=3, is not applied", "priority 2: fixed"):
        assert words in line


def test_without_a_kept_policy_the_settings_have_their_own_revision(file: PolicyFile):
    for kept in (None, file):
        state = start(kept, SpeculationSettings(policy="off", revision=4))
        assert (state.policy, state.revision, state.classes, state.set_at) == (Off(), 4, (), 5.0)
        assert "settings" in state.set_by
    assert not file.path.exists(), "a start keeps nothing"


def test_settings_of_a_higher_revision_take_over(file: PolicyFile, caplog: pytest.LogCaptureFixture):
    file.save(KEPT)
    with caplog.at_level(logging.INFO):
        state = start(file, SpeculationSettings(policy="off", revision=8))
    assert (state.policy, state.revision, state.classes) == (Off(), 8, ())
    [line] = caplog.messages
    for words in (str(file.path), WHO, "is not applied", "off, revision 8"):
        assert words in line
    assert file.load() is not None, "it is replaced by the next change only"


@pytest.mark.parametrize(("configured", "wins"), [(6, "kept"), (7, "kept"), (8, "configured")])
def test_the_newer_revision_wins_and_of_equals_the_kept_one(configured: int, wins: str):
    seed = PolicyState(policy=Off(), revision=configured, effective_step=1)
    assert choose(KEPT, seed) is (KEPT if wins == "kept" else seed)
    assert choose(None, seed) is seed


def test_a_kept_policy_is_lowered_to_the_worker_and_the_file_stays_as_it_is(file: PolicyFile):
    file.save(KEPT)
    before = file.path.read_bytes()
    state = start(file, gamma_max=2)
    assert (state.policy, state.classes, state.revision) == (KEPT.policy, ((-3, Off()), (2, Fixed(2))), 8)
    assert "at most 2 tokens" in state.set_by
    assert start(file, gamma_max=0).policy == Off()
    assert file.path.read_bytes() == before
    assert start(file).classes == KEPT.classes, "a worker of before has it whole"


BROKEN = {
    "no JSON": "{",
    "nothing": "",
    "a list": "[]",
    "depth": "[" * 100_000,
    "another schema": content(schema=2),
    "schema of a truth": content(schema=True),
    "no revision": json.dumps({"schema": 1}),
    "revision 0": content(revision=0),
    "a long revision": content(revision=10**400),
    "a part of a revision": content(revision=1.5),
    "an unknown field": content(gamma=3),
    "an unknown kind": content(policy={"kind": "adaptive"}),
    "a kind that is a list": content(policy={"kind": []}),
    "no kind": content(policy={"gamma": 3}),
    "no gamma": content(policy={"kind": "fixed"}),
    "a negative gamma": content(policy={"kind": "fixed", "gamma": -1}),
    "a gamma of off": content(policy={"kind": "off", "gamma": 1}),
    "half a dynamic": content(policy={"kind": "dynamic", "gamma_min": 1}),
    "a share of two": content(
        policy={
            "kind": "dynamic",
            "gamma_min": 0,
            "gamma_max": None,
            "itl_limit_ms": None,
            "min_gain": 2,
            "min_survival": 0,
        }
    ),
    "classes of none": content(classes=None),
    "a class of nothing": content(classes=[3]),
    "a priority twice": content(classes=[{"priority": 1, "policy": {"kind": "off"}}] * 2),
    "too many classes": content(classes=[{"priority": n, "policy": {"kind": "off"}} for n in range(17)]),
    "a far priority": content(classes=[{"priority": 2**31, "policy": {"kind": "off"}}]),
    "nobody": content(set_by=None),
    "no time": content(set_at="yesterday"),
    "a time that never is": content(set_at=float("nan")),
    "a far time": content(set_at=10**400),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_kept_aside_and_the_configured_policy_used(
    file: PolicyFile, text: str, caplog: pytest.LogCaptureFixture
):
    file.path.parent.mkdir()
    file.path.write_text(text)
    state = start(file)
    assert (state.policy, state.revision) == (Fixed(3), 1)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    for words in (str(file.path), "the configured one is used", "policy.json.broken; repair it"):
        assert words in record.getMessage()
    file.save(KEPT)
    assert (file.path.parent / "policy.json.broken").read_text() == text
    assert file.load() is not None


def test_bytes_that_are_no_text_are_a_broken_file_and_no_earlier_one_is_lost(file: PolicyFile):
    file.path.parent.mkdir()
    for data in (b"\xff", b"\xfe", b"\xfd"):
        file.path.write_bytes(data)
        assert file.load() is None
    kept = {path.name: path.read_bytes() for path in file.path.parent.iterdir()}
    assert kept == {
        "policy.json.broken": b"\xff",
        "policy.json.broken-2": b"\xfe",
        "policy.json.broken-3": b"\xfd",
    }


def test_what_stands_in_the_place_of_the_file_is_moved_aside(file: PolicyFile, caplog: pytest.LogCaptureFixture):
    file.path.mkdir(parents=True)
    assert start(file).policy == Fixed(3)
    assert str(file.path) in caplog.text
    file.save(KEPT)
    assert file.load() is not None


def test_a_policy_that_cannot_be_written_is_said_in_both_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "state").write_text("no folder")  # root may write wherever a folder is
    file = PolicyFile(tmp_path / "state" / "policy.json")
    assert file.keep(KEPT) is False
    ours, audit = sorted(caplog.records, key=lambda record: record.name == "outrider.audit")
    assert (ours.levelno, audit.name) == (logging.ERROR, "outrider.audit")
    for record in (ours, audit):
        assert "revision 7" in record.getMessage()
        assert "will not survive a restart" in record.getMessage()
    assert str(file.path) in ours.getMessage()
    assert WHO in audit.getMessage()
    (tmp_path / "state").unlink()
    assert file.keep(KEPT) is True
    assert file.load() is not None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    file: PolicyFile, monkeypatch: pytest.MonkeyPatch
):
    file.save(KEPT)
    before = file.path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    newer = PolicyState(policy=Off(), revision=8, effective_step=1)
    with pytest.raises(OSError, match="No space left"):
        file.save(newer)
    assert (file.path.read_bytes(), os.listdir(file.path.parent)) == (before, ["policy.json"])
    monkeypatch.undo()
    file.save(newer)
    assert file.load() == newer


def test_saves_that_overtake_each_other_leave_the_newest(file: PolicyFile):
    states = [PolicyState(policy=Fixed(revision % 5), revision=revision, effective_step=1) for revision in range(1, 33)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(file.save, [*states[::-2], *states[::2]]))
    assert file.load() == states[-1]


@pytest.mark.parametrize("limit_ms", [5e-324, 1e18, 1.7e308])
def test_whatever_limit_is_accepted_is_read_back(tmp_path: Path, limit_ms: float) -> None:
    policy = Dynamic(itl_limit_ms=limit_ms)
    check_bounds(policy, 8)
    file = PolicyFile(tmp_path / "policy.json")
    file.save(PolicyState(policy=policy, revision=2**53 + 7, effective_step=1))
    found = file.load()
    assert found is not None
    assert (found.policy, found.revision) == (policy, 2**53 + 7)


def test_a_name_that_cannot_be_printed_is_set_aside(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path / "policy.json")
    file.save(PolicyState(policy=Off(), revision=3, effective_step=1, set_by="somebody"))
    file.path.write_text(file.path.read_text().replace("somebody", "\\ud800"))
    assert file.load() is None
    assert (tmp_path / "policy.json.broken").exists()


def test_two_servers_that_share_a_folder_for_a_while_never_put_an_older_policy_over_a_newer(
    file: PolicyFile, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling restart: the old server goes on for as long as its streams do."""
    old, new = file, PolicyFile(file.path)
    old.save(KEPT)
    new.save(dataclasses.replace(KEPT, revision=9, policy=Off()))
    with caplog.at_level(logging.WARNING):
        assert old.keep(dataclasses.replace(KEPT, revision=8, policy=Fixed(1)))
    assert "another server keeps policy revision 9 there; this one's, 8, is in force and not kept" in caplog.text
    kept = PolicyFile(file.path).load()
    assert (kept.revision, kept.policy) == (9, Off())
    old.save(dataclasses.replace(KEPT, revision=10))
    assert PolicyFile(file.path).load().revision == 10


def test_a_policy_comes_over_what_nobody_can_read(file: PolicyFile) -> None:
    file.path.parent.mkdir()
    file.path.write_text("{")
    file.save(KEPT)
    assert PolicyFile(file.path).load().revision == KEPT.revision
