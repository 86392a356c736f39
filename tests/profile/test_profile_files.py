"""Profiles on disk: the schema is the code's, files are whole or not there, and only one that fits is used."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, timedelta
from pathlib import Path

import jsonschema
import pytest
from fakes import profiles
from fakes.worker import FakeGroup, describe

from configs.schema import SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.life import begin_life
from runtime.policies import Found, ProfileSource
from runtime.profile import files
from runtime.profile.document import Profile
from runtime.profile.identity import digest, identity_of
from runtime.profile.obtain import STAGE, ProfileFinder
from runtime.profile.schema import schema_text
from runtime.scheduler.queue import WaitingQueue
from runtime.verification.view import ProfileState, ProfileStatus
from workers.plan import WorkerLost

ROOT = Path(__file__).parents[2]
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    """The profiles that are shipped are not these tests' business."""
    monkeypatch.setattr(files, "BUNDLED", tmp_path / "installed")


def kept(state_dir: Path, *, age: timedelta = timedelta(0), **identity) -> Path:
    """A profile under state_dir, so old on the day of the tests."""
    profile = profiles.profile(profiles.grid(), **identity).model_copy(update={"created": profiles.CREATED - age})
    path = files.profile_path(state_dir, profile.identity)
    files.write(profile, path)
    return path


def look(state_dir: Path, *, days: float = 30, explicit: Path | None = None, **identity):
    wanted = profiles.identity(**identity)
    return files.find(state_dir, wanted, now=profiles.CREATED, max_age_days=days, explicit=explicit)


def test_the_committed_schema_is_that_of_the_code():
    assert (ROOT / "docs" / "profile.schema.json").read_text() == schema_text()


def test_a_profile_keeps_its_schema(tmp_path):
    written = json.loads(kept(tmp_path).read_text())
    schema = json.loads(schema_text())
    jsonschema.validate(written, schema)
    del written["cells"][0]["step"]["median"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written, schema)


def test_what_is_written_is_read(tmp_path):
    profile = profiles.profile(profiles.grid(), tiers=(8, 16))
    files.write(profile, tmp_path / "deep" / "down.json")
    assert files.read(tmp_path / "deep" / "down.json") == profile
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["down.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = kept(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, other: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        files.write(profiles.profile(profiles.grid(loads=(1,))), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_name_tells_the_deployment_apart(tmp_path):
    names = {kept(tmp_path).name, kept(tmp_path, tp=2).name, kept(tmp_path, checkpoint="other").name}
    assert len(names) == 3
    assert {name.rsplit("-", 1)[0] for name in names} == {"fake-cpu-dp1tp1ep1", "fake-cpu-dp1tp2ep1"}
    assert digest(profiles.identity()) in kept(tmp_path).name


def test_one_that_fits_is_used(tmp_path):
    path = kept(tmp_path, age=3 * DAY)
    kept(tmp_path, tp=2)
    found, status = look(tmp_path)
    assert found is not None
    assert found.path == path
    assert status.state is ProfileState.OK
    assert str(path) in status.detail


def test_of_several_that_fit_the_newest_is_used(tmp_path):
    newer = profiles.profile(profiles.grid(loads=(1,)))
    for name, age in (("a", 2), ("b", 1), ("c", 3)):
        each = newer.model_copy(update={"created": profiles.CREATED - age * DAY})
        files.write(each, tmp_path / "profiles" / f"{name}.json")
    assert look(tmp_path)[0].path.name == "b.json"


def test_none_at_all_is_missing(tmp_path):
    found, status = look(tmp_path)
    assert found is None
    assert status.state is ProfileState.MISSING
    assert str(tmp_path / "profiles") in status.detail
    assert "`outrider profile`" in status.detail


def test_an_old_one_is_stale(tmp_path):
    kept(tmp_path, age=5 * DAY)
    assert look(tmp_path, days=5)[1].state is ProfileState.OK
    found, status = look(tmp_path, days=4.5)
    assert found is None
    assert status.state is ProfileState.STALE
    assert "5.0 days" in status.detail
    assert "4.5" in status.detail
    assert "`outrider profile`" in status.detail


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("machines", ("two cores",), "machines is two cores, here it is one core"),
        ("machines", ("",), "machines is unknown, here it is one core"),
        ("torch_version", "1", "torch_version is 1, here it is 2"),
        ("dp", 2, "dp is 2, here it is 1"),
        ("gamma_max", 4, "gamma_max is 4, here it is 8"),
        ("worker_threads", 3, "worker_threads is 3, here it is 1"),
    ],
)
def test_one_of_another_deployment_is_foreign_and_says_why(tmp_path, field, value, text):
    kept(tmp_path, **{field: value})
    kept(tmp_path, **{field: value}, model_type="quite another", page_size=1)
    found, status = look(tmp_path)
    assert found is None
    assert status.state is ProfileState.FOREIGN
    assert text in status.detail
    assert "page_size" not in status.detail
    assert "`outrider profile`" in status.detail


def test_every_field_of_the_identity_counts(tmp_path):
    kept(tmp_path)
    for name, value in profiles.identity().model_dump().items():
        other = (*value, "x") if isinstance(value, tuple) else value * 2 if isinstance(value, int) else value + "x"
        assert look(tmp_path, **{name: other})[1].state is ProfileState.FOREIGN, name


def test_installed_ones_come_after(tmp_path):
    installed = kept(tmp_path / "installed")
    assert look(tmp_path / "state")[0].path == installed
    own = kept(tmp_path / "state", age=20 * DAY)
    assert look(tmp_path / "state")[0].path == own
    assert look(tmp_path / "state", days=10)[0].path == installed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "an object"),
        ('{"schema_version": 2}', "schema_version"),
        ('{"schema_version": 1}', "identity"),
        (profiles.profile(profiles.grid()).model_dump_json().replace('"rows":1,', '"rows":0,'), "rows"),
        (profiles.profile(profiles.grid()).model_dump_json().replace('"tiers":[]', '"tiers":[8,8]'), "tiers"),
        (profiles.profile(profiles.grid()).model_dump_json().replace('"context":64.0', '"context":1e999'), "context"),
    ],
)
def test_a_broken_file_is_named_and_passed_over(tmp_path, caplog, text, problem):
    path = kept(tmp_path)
    broken = path.with_name("broken.json")
    broken.write_text(text)
    with caplog.at_level(logging.WARNING):
        found, status = look(tmp_path)
    assert status.state is ProfileState.OK
    assert found.path == path
    assert str(broken) in caplog.text
    assert problem in caplog.text
    with pytest.raises(files.ProfileFileError, match=problem):
        files.read(broken)


def test_a_named_file_is_the_only_one_that_is_looked_at(tmp_path):
    kept(tmp_path)
    other = kept(tmp_path / "elsewhere", tp=2)
    assert look(tmp_path, explicit=other)[1].state is ProfileState.FOREIGN
    assert look(tmp_path, explicit=other, tp=2)[0].path == other
    found, status = look(tmp_path, explicit=tmp_path / "none.json")
    assert found is None
    assert status.state is ProfileState.MISSING
    assert "speculation.profile" in status.detail
    assert "none.json" in status.detail


STEP_TOKENS = 40


def served(state_dir: Path) -> tuple[FakeGroup, ServeSettings]:
    rank = describe(num_pages=(400, 400), max_model_len=200, num_slots=1)
    settings = ServeSettings(
        state_dir=state_dir,
        scheduler=SchedulerSettings(max_step_tokens=STEP_TOKENS),
        speculation=SpeculationSettings(gamma_max=4, gamma=4),
    )
    return FakeGroup(rank, max_step_tokens=STEP_TOKENS), settings


def find(group: FakeGroup, settings: ServeSettings, *, may_measure: bool, told: list[tuple] | None = None) -> Found:
    finder: ProfileSource = ProfileFinder(settings, now=lambda: profiles.CREATED.astimezone(UTC))
    progress = (lambda *step: None) if told is None else (lambda *step: told.append(step))
    return asyncio.run(finder.find(group, progress, may_measure=may_measure))


def test_a_server_takes_what_it_finds(tmp_path):
    group, settings = served(tmp_path)
    fields = identity_of(settings, group.mesh, group.ranks).model_dump()
    path = kept(tmp_path, **fields)
    found = find(group, settings, may_measure=True)
    assert found.status == ProfileStatus(state=ProfileState.OK, detail=found.status.detail)
    assert str(path) in found.status.detail
    assert found.costs.gamma_max == 4
    assert found.life is None
    assert group.plans == []


def test_a_server_measures_only_where_it_may(tmp_path):
    group, settings = served(tmp_path)
    found = find(group, settings, may_measure=False)
    assert (found.costs, found.life, found.status.state) == (None, None, ProfileState.MISSING)
    assert group.plans == []


def test_what_a_server_measures_is_kept_for_the_next(tmp_path):
    group, settings = served(tmp_path)
    told: list[tuple] = []
    found = find(group, settings, may_measure=True, told=told)
    assert found.status.state is ProfileState.OK
    assert found.costs.at(1, 64) is not None
    assert {step[:2] for step in told} == {(0, STAGE)}
    assert told[-1][2] == told[-1][3]
    assert group.tenants == []
    assert group.violations == []
    life = begin_life(group, WaitingQueue(), settings, found.life, now_s=0)
    assert life.scheduler.next_step_id == group.plans[-1].step_id + 1
    again, _ = served(tmp_path)
    assert find(again, settings, may_measure=True).status == found.status
    assert again.plans == []


def test_what_cannot_be_kept_is_used_all_the_same(tmp_path, caplog):
    group, settings = served(tmp_path / "file")
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        found = find(group, settings, may_measure=True)
    assert found.status.state is ProfileState.OK
    assert found.costs is not None
    assert "not kept" in caplog.text


def test_a_measurement_that_fails_midway_leaves_the_ranks_empty(tmp_path, monkeypatch):
    group, settings = served(tmp_path)
    group.corrupt_uids.add(3)  # the books end a sequence whose counts do not fit
    found = find(group, settings, may_measure=True)
    assert found.costs is None
    assert found.status.state is ProfileState.MISSING
    assert "no profile could be measured" in found.status.detail
    assert found.life.scheduler.next_step_id == group.plans[-1].step_id + 1
    assert group.tenants == []


def test_a_rank_that_is_lost_is_the_engines_business(tmp_path):
    group, settings = served(tmp_path)

    async def lost() -> None:
        group.lose(WorkerLost("gone"))
        await ProfileFinder(settings).find(group, lambda *step: None, may_measure=True)

    with pytest.raises(WorkerLost, match="gone"):
        asyncio.run(lost())


def test_where_nothing_is_drafted_nothing_is_measured(tmp_path):
    _, settings = served(tmp_path)
    found = find(FakeGroup(describe(gamma_max=0)), settings, may_measure=True)
    assert found.status.state is ProfileState.MISSING
    assert "gamma_max is 0" in found.status.detail


def test_shipped_profiles_are_whole():
    for path in (ROOT / "configs" / "profiles").glob("*.json"):
        profile = files.read(path)
        assert isinstance(profile, Profile)
        assert files.profile_path(Path(), profile.identity).name == path.name


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cells", 0, "step", "median"), 0.0),
        (("cells", 0, "step", "median"), 1e300),
        (("cells", 0, "num_sequences"), 10**400),
        (("cells", 0, "rows"), 2**31),
        (("cells", 0, "context"), 1e300),
        (("tiers",), [10**30]),
        (("identity", "gamma_max"), 10**7),
    ],
)
def test_figures_that_nobody_measured_are_no_profile(tmp_path, place, value):
    """Prices of nothing, or of more than arrays hold, would fail in the first step that is planned by them."""
    path = kept(tmp_path)
    content = part = json.loads(path.read_text())
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(files.ProfileFileError, match=place[0]):
        files.read(path)
    assert look(tmp_path)[1].state is ProfileState.MISSING


def test_a_profile_of_the_future_counts_as_stale(tmp_path):
    kept(tmp_path, age=-400 * DAY)
    assert look(tmp_path)[1].state is ProfileState.STALE
