"""`outrider profile` as its users meet it: what it prints and writes, refusals before anything starts, real ranks."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from fakes import profiles
from fakes.supervised import ranks
from oracles.days import on_turn
from rich.console import Console
from typer.testing import CliRunner

from configs.load import load_settings
from runtime.cli import bench_files
from runtime.cli import profile as command
from runtime.cli.console import EXIT_INTERRUPTED, EXIT_NO, EXIT_REFUSED, EXIT_START, EXIT_USAGE
from runtime.cluster.supervisor import GroupSupervisor, launcher_for
from runtime.life import begin_life
from runtime.profile import deployment, files
from runtime.profile.deployment import measure_deployment
from runtime.profile.document import Profile
from runtime.profile.drive import ProfileError
from runtime.profile.forecast import Forecast
from runtime.profile.obtain import ProfileFinder
from runtime.profile.page import TEMPLATE, page
from runtime.profile.pinned import PinnedPlanner
from runtime.profile.table import facts, speed_table, step_table
from runtime.request import Request, SamplingParams, StopParams
from runtime.scheduler.queue import WaitingQueue
from runtime.verification.view import ProfileState
from workers.plan import LoadError

FEW = {"loads": (1, 4), "drafts": (0, 1, 2, 4)}
HALF = profiles.grid(lambda *at: tuple(part / 2 for part in profiles.linear(*at)), contexts=(64,), sampled=False, **FEW)
BOTH = profiles.profile([*profiles.grid(**FEW), *HALF], tiers=(8, 800))
ALONE = profiles.profile(HALF[:1])
APP = typer.Typer()
APP.add_typer(command.profile, name="profile")


@APP.command()
def other() -> None:
    """A command alone would lose its name."""


def outrider(*arguments: str):
    return CliRunner().invoke(APP, ["profile", *arguments])


def small(tmp_path: Path, **settings):
    """Settings of a deployment that is measured in a second."""
    return load_settings(
        None,
        {
            "cluster.launcher": "process",
            "state_dir": str(tmp_path),
            "cache.max_running": 1,
            "cache.max_model_len": 160,
            "speculation.gamma_max": 1,
            "speculation.gamma": 1,
        }
        | {key.replace("__", "."): value for key, value in settings.items()},
    )


@pytest.fixture
def measuring(monkeypatch):
    """Takes the place of ranks and their measurement: gives this profile, or raises."""
    outcome: list[Profile | Exception] = [BOTH]
    asked: list = []

    async def instead(settings, starting, measuring, *, quick):
        asked.append((settings, quick))
        starting(0, "launch", 1, 1)
        measuring(0, 10, "1 sequence, sampled, context 64")
        measuring(10, 10, "2 sequences, sampled, context 64")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    monkeypatch.setattr(deployment, "measure_deployment", instead)
    return outcome, asked


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def test_what_is_measured_is_shown_and_kept_where_serve_looks(tmp_path, measuring):
    _, asked = measuring
    result = outrider("--quick", "--tp", "2", "--max-running", "3", "--set", f"state_dir={tmp_path}")
    assert result.exit_code == 0, result.output
    (settings, quick) = asked[0]
    assert quick
    assert (settings.parallel.tp, settings.cache.max_running, settings.cluster.launcher) == (2, 3, "process")
    path = files.profile_path(tmp_path, BOTH.identity)
    assert files.read(path) == BOTH
    assert f"wrote {path}" in result.stderr
    assert "2 sequences, sampled, context 64" in result.stderr
    assert "ms per step, greedy" in result.stdout
    assert "tokens/s, sampled" in result.stdout


def test_a_launcher_that_is_named_is_used(tmp_path, measuring):
    _, asked = measuring
    for option in ("--set cluster.launcher=ray", "--launcher ray"):
        assert outrider(*option.split(), "--set", f"state_dir={tmp_path}").exit_code == 0
    assert [settings.cluster.launcher for settings, _ in asked] == ["ray", "ray"]


@pytest.mark.parametrize("name", ["x" * 255, "dangling"])
def test_a_profile_that_cannot_be_written_where_it_belongs_is_kept_elsewhere(tmp_path, measuring, name):
    """What no check beforehand sees: a name that leaves no room for a file beside it, a link into nowhere."""
    out = tmp_path / name
    if name == "dangling":
        out.symlink_to(tmp_path / "nowhere" / "profile.json")
    result = outrider("--out", str(out), "--set", f"state_dir={tmp_path / 'state'}")
    assert result.exit_code == 1, result.output
    assert "tokens/s, sampled" in result.stdout
    (instead,) = re.findall(r"wrote (\S+); move it", result.stderr)
    assert files.read(Path(instead)) == BOTH
    shutil.rmtree(Path(instead).parent)


def test_files_that_are_named_are_written(tmp_path, measuring):
    measuring[0][0] = ALONE
    out, html = tmp_path / "profile.json", tmp_path / "profile.html"
    result = outrider("--out", str(out), "--html", str(html), "--set", f"state_dir={tmp_path / 'state'}")
    assert result.exit_code == 0, result.output
    assert files.read(out) == ALONE
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "state" / "profiles").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "/"], "--out /: is a directory"),
        (["--out", "/no/such/folder/x.json"], "no such directory"),
        (["--html", "/no/such/folder/x.html"], "--html /no/such/folder/x.html"),
        (["--out", "x.json", "--html", "x.json"], "--out and --html both name x.json"),
        (["--set", "state_dir=/dev/null/x"], "state_dir /dev/null/x"),
        (["--tp", "0"], "parallel.tp"),
        (["--model", "/nowhere"], "model.path"),
        (["--config", "none"], "none: no such file"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(measuring, arguments, text):
    result = outrider(*arguments)
    assert result.exit_code == EXIT_USAGE
    assert text in result.stderr
    assert measuring[1] == []


def test_a_link_that_leads_to_itself_is_told_and_no_riddle(tmp_path, measuring):
    (tmp_path / "loop").symlink_to("loop")
    measuring[0][0] = ALONE
    result = outrider("--html", str(tmp_path / "loop"), "--set", f"state_dir={tmp_path / 'state'}")
    assert "Traceback" not in result.output
    assert f"--html {tmp_path / 'loop'}" in result.stderr
    assert result.exit_code == EXIT_NO


def test_the_page_without_matplotlib_is_refused_first(tmp_path, measuring, monkeypatch):
    monkeypatch.setattr(bench_files.importlib.util, "find_spec", lambda name: None)
    result = outrider("--html", str(tmp_path / "x.html"))
    assert result.exit_code == EXIT_USAGE
    assert "pip install" in result.stderr
    assert measuring[1] == []


@pytest.mark.parametrize(
    ("error", "code"), [(ProfileError("too small"), EXIT_REFUSED), (LoadError("rank 0 failed"), EXIT_START)]
)
def test_what_ends_a_measurement_is_told(tmp_path, measuring, error, code):
    measuring[0][0] = error
    result = outrider("--set", f"state_dir={tmp_path}")
    assert result.exit_code == code
    assert str(error) in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_newest_of_the_layout_is_shown(tmp_path):
    one, two = profiles.profile(profiles.grid()), profiles.profile(profiles.grid(), tp=2)
    old = one.model_copy(update={"created": profiles.CREATED.replace(year=2029)})
    for number, each in enumerate((old, one, two)):
        files.write(each, tmp_path / "profiles" / f"{number}.json")
    result = outrider("show", "--set", f"state_dir={tmp_path}")
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "profiles" / "1.json") in result.stdout
    result = outrider("show", "--set", f"state_dir={tmp_path}", "--set", "parallel.tp=2")
    assert str(tmp_path / "profiles" / "2.json") in result.stdout
    result = outrider("show", "--set", f"state_dir={tmp_path}", "--set", "parallel.dp=7")
    assert result.exit_code == EXIT_USAGE
    assert "dp 7" in result.stderr
    assert "outrider profile" in result.stderr


def test_a_named_profile_is_shown(tmp_path):
    path, html = tmp_path / "it.json", tmp_path / "it.html"
    files.write(ALONE, path)
    result = outrider("show", str(path), "--html", str(html))
    assert result.exit_code == 0, result.output
    assert "tokens/s: by formula" in result.stdout
    assert "Predicted tokens per second" in html.read_text()
    path.write_text("{}")
    result = outrider("show", str(path))
    assert result.exit_code == EXIT_USAGE
    assert str(path) in result.stderr


def test_steps_and_speeds_are_those_of_the_costs():
    forecast = Forecast.of(profiles.profile(profiles.grid()))
    step = sum(profiles.linear(4, 64, 2, 12))
    assert forecast.step_ms(4, 2) == pytest.approx(step)
    assert forecast.tokens_per_s(4, 2, 0.5) == pytest.approx(4 * 1.75 / step * 1000)
    cells = re.split(r"\s{2,}", next(line for line in text_of(step_table(forecast, sampled=True)).splitlines()
                                     if line.strip().startswith("4 ")).strip())  # fmt: skip
    assert cells == ["4", *(f"{forecast.step_ms(4, gamma):.1f}" for gamma in (0, 1, 2, 3, 4, 5, 8))]
    speeds = text_of(speed_table(forecast, sampled=True))
    assert f"{forecast.tokens_per_s(8, 8, 0.9):.0f}" in speeds


def test_two_data_parallel_ranks_bring_twice_the_tokens():
    one, two = (Forecast.of(profiles.profile(profiles.grid(), dp=dp)) for dp in (1, 2))
    assert two.tokens_per_s(4, 2, 0.7) == pytest.approx(2 * one.tokens_per_s(4, 2, 0.7))


def test_the_best_length_is_the_shortest_of_equals():
    flat = profiles.grid(lambda load, context, drafts, rows: (1.0, 0.0))
    forecast = Forecast.of(profiles.profile(flat))
    assert forecast.best_gamma(1, 0.0, forecast.gammas) == 0
    assert forecast.best_gamma(1, 0.5, forecast.gammas) == 8


def test_facts_say_what_was_measured():
    told = dict(facts(BOTH))
    assert told["machine"].startswith("one core; cpu")
    assert told["tiers"] == "rows are padded to 8, up to 800"
    assert "median" in told["measured"]


class _Balanced(HTMLParser):
    """Fails on tags that are not closed in order, and on anything that would be fetched."""

    VOID = {"meta", "br", "hr", "link", "img", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert tag not in ("script", "link", "img")
        assert not (given.get("href") or given.get("xlink:href") or "#").startswith("http")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("cells", [BOTH.cells, ALONE.cells], ids=["both kinds", "one cell"])
def test_the_page_needs_nothing_else(cells):
    html = page(profiles.profile(cells, model_type="<b>bold</b>"))
    parser = _Balanced()
    parser.feed(html)
    assert parser.open == []
    assert "<b>bold" not in html
    assert "matplotlib.org" not in html
    assert html.count("<svg") >= 3
    assert TEMPLATE.is_file()


@on_turn(2, of=3)
def test_a_server_measures_real_ranks_and_goes_on_with_them(tmp_path):
    settings = small(tmp_path)

    async def live() -> None:
        supervisor = GroupSupervisor(settings, launcher_for(settings))
        try:
            group = await supervisor.start(lambda *_: None)
            found = await ProfileFinder(settings).find(group, lambda *_: None, may_measure=True)
            assert found.status.state is ProfileState.OK, found.status
            queue = WaitingQueue()
            life = begin_life(group, queue, settings, found.life, now_s=0)
            queue.push(
                Request(
                    uid=1,
                    request_id="after",
                    prompt=(5, 6, 7),
                    sampling=SamplingParams(temperature=0.0),
                    stopping=StopParams(max_tokens=4),
                )
            )
            result = await group.link.execute(life.scheduler.plan(PinnedPlanner(gamma=1)))
            assert len(result.batches[0].emitted[0]) == 1
            assert await group.link.check_integrity() == [[]]
        finally:
            await supervisor.stop()

    asyncio.run(live())
    (path,) = (tmp_path / "profiles").iterdir()
    profile = files.read(path)
    assert profile.identity.checkpoint
    assert all(profile.identity.machines)
    cells = {(cell.sampled, cell.waiting, cell.rows): cell for cell in profile.cells}
    assert set(cells) == {(sampled, *kind) for sampled in (False, True) for kind in ((0, 1), (1, 1), (1, 2))}
    for cell in cells.values():
        parts = cell.target.median + cell.verify.median + cell.commit.median + cell.draft.median
        assert 0 < parts < cell.step.median * 1.5
    # One that draws a draft runs the drafter.
    assert cells[True, 1, 2].draft.median > cells[True, 0, 1].draft.median


LAYOUTS = {"dp": (2, 1, 1), "tp": (1, 2, 1), "dp with whole experts": (2, 1, 2), "tp with whole experts": (1, 2, 2)}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_several_ranks_are_measured(tmp_path, layout):
    dp, tp, ep = layout
    settings = small(tmp_path, parallel__dp=dp, parallel__tp=tp, parallel__ep=ep)
    profile = asyncio.run(measure_deployment(settings, lambda *_: None, lambda *_: None, quick=True))
    assert ranks() == set()
    assert (profile.identity.dp, profile.identity.tp, profile.identity.ep) == layout
    assert len(profile.identity.machines) == 2
    assert profile.identity.collectives == "gloo"
    if tp > 1 or ep > 1:
        assert all(cell.collective.median > 0 for cell in profile.cells)
    assert (profile.imbalance is not None) == (ep > 1)
    if profile.imbalance is not None:
        assert 1 <= profile.imbalance.p50 <= profile.imbalance.p95 <= 2
        assert all(cell.dispatch.median > 0 for cell in profile.cells)


@pytest.mark.full
def test_an_end_midway_leaves_no_ranks(tmp_path):
    settings = small(tmp_path)
    before = ranks()

    async def interrupted() -> None:
        begun = asyncio.Event()
        work = asyncio.create_task(
            measure_deployment(settings, lambda *_: None, lambda done, total, text: begun.set() if done else None)
        )
        await begun.wait()
        assert ranks() - before
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(interrupted())
    assert ranks() == before


def test_a_signal_ends_the_command_as_interrupted(tmp_path, monkeypatch):
    ended = []

    async def instead(settings, starting, measuring, *, quick):
        measuring(0, 10, "1 sequence, sampled, context 64")
        try:
            os.kill(os.getpid(), 2)
            await asyncio.Event().wait()
        finally:
            ended.append("ranks")

    monkeypatch.setattr(deployment, "measure_deployment", instead)
    result = outrider("--set", f"state_dir={tmp_path}")
    assert result.exit_code == EXIT_INTERRUPTED
    assert ended == ["ranks"]
    assert list(tmp_path.iterdir()) == []
