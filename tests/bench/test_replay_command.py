"""`outrider bench` with dynamic policies, and `outrider bench replay`, as their users meet them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.bench_process import ITSELF, LIMIT_S, TINY, bench, start
from oracles.days import on_turn

from runtime.bench.asked import Asked
from runtime.bench.document import Report
from runtime.bench.load import Closed, Open, Share, parse_policies
from runtime.cli import bench_replay as bench_replay_module
from runtime.cli.bench_options import own_settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), "Measure speed and speculation by policy and load"),
        (("measure", "--help"), "Measure speed and speculation by policy and load"),
        (("replay", "--help"), "First the model's own greedy answers are recorded"),
    ],
)
def test_measuring_is_what_bench_does_unless_replay_is_named(arguments, words):
    result = bench(*arguments)
    assert result.exit_code == 0
    assert words in " ".join(result.stdout.split())
    assert ("--acceptance" in result.stdout) == (arguments[0] == "replay")


@pytest.mark.parametrize(
    ("arguments", "loads", "repeats"),
    [
        ((), [*map(Closed, (1, 4, 16, 64)), Share(0.5)], 5),
        (("--quick",), [Closed(1), Closed(16)], 2),
        (("--concurrency", "2"), [Closed(2)], 5),
        (("--rate", "3,0.9x", "--quick"), [Share(0.9), Open(3.0)], 2),
    ],
)
def test_a_replay_is_every_load_with_every_kind_of_drafts(arguments, loads, repeats, monkeypatch):
    asked: list[Asked] = []

    async def noted(what, outputs, address) -> None:
        asked.append(what)

    monkeypatch.setattr(bench_replay_module, "bench_run", noted)
    assert bench("replay", *arguments).exit_code == 0
    assert bench("replay", *arguments, "--acceptance", "own", "--repeats", "3").exit_code == 0
    every, own = asked
    acceptances = [0.3, 0.9] if "--quick" in arguments else [None, 0.3, 0.6, 0.9]
    assert list(every.loads) == [replace(load, acceptance=one) for one in acceptances for load in loads]
    assert every.records
    assert every.temperature == 0
    assert every.repeats == repeats
    assert str(every.policies[-1]) == "dynamic"
    assert every.settings.speculation.drafter == "oracle"
    assert every.settings.speculation.measure_profile
    assert own.settings.speculation.drafter == "mtp"
    assert (list(own.loads), own.repeats) == (loads, 3)


def test_a_profile_is_measured_where_a_policy_needs_one_unless_the_settings_say_otherwise():
    flags = {"checkpoint": None, "launcher": None}
    plain, dynamic = parse_policies(["off,fixed:2"]), parse_policies(["off,dynamic"])
    assert not own_settings(None, [], flags, plain).speculation.measure_profile
    assert own_settings(None, [], flags, dynamic).speculation.measure_profile
    refused = own_settings(None, ["speculation.measure_profile=false"], flags, dynamic)
    assert not refused.speculation.measure_profile
    assert refused.cluster.launcher == "process"


@on_turn(1, of=3)
def test_a_dynamic_policy_is_measured_with_a_profile_that_a_server_of_its_own_makes(tmp_path):
    arguments = (*TINY, "--concurrency", "2", "--policy", "off,dynamic:max=2", "--json", "dynamic.json")
    process = start("bench", *arguments, cwd=tmp_path)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    assert "hardware profile" in err
    report = Report.model_validate_json((tmp_path / "dynamic.json").read_text())
    [_, dynamic] = report.groups
    assert (dynamic.policy, dynamic.lengths) == ("dynamic:max=2", None)
    work = dynamic.figures.work
    assert work.fallback == ""
    assert work.predicted_steps > 0
    assert 0 < work.gamma_mean <= 2
    assert sum(work.steps_by_gamma) == dynamic.figures.steps
    assert report.identity.profile.startswith(".outrider/profiles/")
    assert f"dynamic plans with the profile {report.identity.profile}" in out
    assert report.verdict is None


@on_turn(0, of=3)
def test_a_replay_records_the_real_model_and_its_drafts_stand_as_often_as_asked(tmp_path):
    arguments = (*TINY, "--max-tokens", "16", "--concurrency", "2", "--policy", "off,fixed:3")
    replaying = (*arguments, "--acceptance", "0,1", "--json", "replay.json")
    process = start("bench", "replay", *replaying, cwd=tmp_path, program=ITSELF)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    assert err.count("recording what is answered without drafts") == 1
    report = Report.model_validate_json((tmp_path / "replay.json").read_text())
    assert report.identity.model.drafter == "oracle"
    assert [load.acceptance for load in report.plan.loads] == [0.0, 1.0]
    assert len(report.cells) == 4
    for group in report.groups:
        figures = group.figures
        assert (figures.recording.compared, figures.finished) == (2, 2)
        work = figures.work
        if group.policy == "fixed:3":
            assert work.admitted > 0
            # Those of a request's end may lie beyond the recording, and are wrong on purpose.
            stood = work.accepted / work.admitted
            assert stood == 0 if group.load.acceptance == 0 else stood > 0.5
    assert report.verdict is None
    assert "fixed:3" in out
