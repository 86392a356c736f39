"""`outrider policy` over real fronts: every form of set, the shadow, advice and a watch; and what each refuses."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields, replace

import pytest
import typer
from fakes.advice import ADVICE, SHADOW, VIEW
from fakes.commands import closed_port, outrider_in_loop, silent_port
from fakes.front import in_loop, serving
from fakes.policies import NO_PROFILE, SOUND_PROFILE
from typer.testing import CliRunner

from runtime.cli import console
from runtime.cli.main import app
from runtime.cli.policy_flags import PolicyFlags, check_flags
from runtime.verification.policy import Dynamic, Fixed, Off
from runtime.verification.view import SpeculationView

WHEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
PEER = r"ipv4:127\.0\.0\.1:\d+"
MEASURED = SpeculationView(profile=SOUND_PROFILE)


@pytest.fixture
def outrider(monkeypatch):
    return outrider_in_loop(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        (("off",), Off()),
        (("set", "off"), Off()),
        (("set", "fixed", "--gamma", "3"), Fixed(3)),
        (("set", "dynamic"), Dynamic()),
        (("set", "dynamic", "--gamma-max", "0", "--min-gain", "0"), Dynamic(gamma_max=0, min_gain=0.0)),
        (("set", "dynamic", "--objective", "throughput", "--gamma-min", "1"), Dynamic(gamma_min=1)),
        (("set", "dynamic", "--itl-limit-ms", "25"), Dynamic(itl_limit_ms=25.0)),
        (
            (
                *("set", "dynamic", "--gamma-min", "1", "--gamma-max", "5", "--objective", "goodput"),
                *("--itl-limit-ms", "12.5", "--min-gain", "0.25", "--min-survival", "0.5"),
            ),
            Dynamic(gamma_min=1, gamma_max=5, itl_limit_ms=12.5, min_gain=0.25, min_survival=0.5),
        ),
    ],
    ids=str,
)
@in_loop
async def test_each_form_sets_its_policy_for_all_or_for_one_priority(outrider, arguments, policy):
    async with serving() as front:
        front.engine.policies.view = MEASURED
        result = await outrider("policy", *arguments, "--expected-revision", "1", "--address", front.address)
        assert front.engine.policies.state.policy == policy
        own = await outrider("policy", *arguments, "--priority", "-3", "--address", front.address)
        assert front.engine.policies.state.classes == ((-3, policy),)
    assert (result.exit_code, own.exit_code) == (0, 0), result.output + own.output
    assert re.fullmatch(r".* \(revision 2, in force from step 1\)\n", result.stdout)
    assert "\n  priority -3: " in own.stdout


@pytest.mark.parametrize("remove", [("set", "follow"), ("clear",)], ids=" ".join)
@in_loop
async def test_a_priority_follows_the_others_again(outrider, remove):
    async with serving() as front:
        at = ("--address", front.address)
        await outrider("policy", "off", "--priority", "2", *at)
        result = await outrider("policy", *remove, "--priority", "2", "--expected-revision", "2", *at)
        assert (front.engine.policies.state.classes, front.engine.policies.state.policy) == ((), Fixed(4))
        again = await outrider("policy", *remove, "--priority", "2", *at)
    assert result.stdout == "fixed, gamma 4 (revision 3, in force from step 1)\n"
    assert again.exit_code == console.EXIT_REFUSED
    assert "priority: 2 has no policy of its own" in again.stderr


@in_loop
async def test_get_tells_classes_and_who_and_when_and_why_dynamic_runs_as_something_else(outrider):
    async with serving() as front:
        at = ("--address", front.address)
        first = await outrider("policy", "get", *at)
        front.engine.policies.view = MEASURED
        await outrider("policy", "set", "dynamic", "--gamma-max", "5", *at)
        await outrider("policy", "set", "fixed", "--gamma", "1", "--priority", "4", *at)
        front.engine.policies.view = SpeculationView(profile=NO_PROFILE, fallback="the profile [went] stale")
        result = await outrider("policy", "get", *at)
        status = await outrider("status", *at)
    assert re.fullmatch(
        rf"fixed, gamma 4 \(revision 1, in force from step 1\)\n  set by the settings of this server at {WHEN}\n",
        first.stdout,
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "dynamic, gamma 0..5 (revision 3, in force from step 1)"
    assert re.fullmatch(rf"  set by {PEER} at {WHEN}", lines[1])
    assert lines[2:] == [
        "  priority 4: fixed, gamma 1",
        "  dynamic runs as a fixed draft length: the profile [went] stale",
    ]
    for line in lines:
        assert line.strip() in status.stdout


@in_loop
async def test_a_dynamic_policy_is_asked_for_and_the_answer_says_what_is_missing(outrider):
    async with serving() as front:
        result = await outrider("policy", "set", "dynamic", "--address", front.address)
        assert front.engine.policies.state.revision == 1
    assert result.exit_code == console.EXIT_REFUSED
    assert result.stderr == f"error: FAILED_PRECONDITION: policy.dynamic: {NO_PROFILE.detail}\n"


DYNAMIC_FLAGS = {
    "--gamma-min": 0,
    "--gamma-max": 0,
    "--objective": "throughput",
    "--itl-limit-ms": 5.0,
    "--min-gain": 0.0,
    "--min-survival": 0.0,
}


@pytest.mark.parametrize(
    ("mode", "flag", "value", "words"),
    [
        *[
            (mode, flag, value, f"{flag} goes with dynamic, not with {mode}")
            for mode in ("off", "fixed", "follow", "show")
            for flag, value in DYNAMIC_FLAGS.items()
        ],
        ("off", "--gamma", 1, "--gamma goes with fixed, not with off"),
        ("dynamic", "--gamma", 0, "--gamma goes with fixed, not with dynamic"),
        ("dynamic", "--objective", "goodput", "--objective goodput needs --itl-limit-ms"),
    ],
)
def test_a_flag_that_does_not_go_with_the_mode_is_refused_by_name(mode, flag, value, words, capsys):
    own = {"gamma": 1} if mode == "fixed" else {}
    flags = PolicyFlags(**own, **{flag.removeprefix("--").replace("-", "_"): value})
    with pytest.raises(typer.Exit) as ended:
        check_flags(mode, flags)
    assert ended.value.exit_code == console.EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_every_flag_is_asked_of_some_mode():
    assert {name.removeprefix("--").replace("-", "_") for name in DYNAMIC_FLAGS} | {"gamma"} == {
        field.name for field in fields(PolicyFlags)
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "fixed"), "fixed needs --gamma N"),
        (("shadow", "fixed"), "fixed needs --gamma N"),
        (("set", "off", "--gamma-min", "1"), "--gamma-min goes with dynamic, not with off"),
        (("shadow", "dynamic", "--gamma", "1"), "--gamma goes with fixed, not with dynamic"),
        (("set", "follow"), "follow needs --priority N"),
        (("set", "follow", "--priority", "1", "--gamma", "1"), "--gamma goes with fixed, not with follow"),
        (("shadow", "show", "--min-gain", "0.1"), "--min-gain goes with dynamic, not with show"),
        (
            ("set", "dynamic", "--objective", "throughput", "--itl-limit-ms", "5"),
            "--itl-limit-ms goes with --objective goodput, not with throughput",
        ),
        (("clear",), ""),
        (("set", "adaptive"), ""),
        (("set", "off", "--priority", "2147483648"), ""),
        (("advise", "--sequences", "0"), ""),
        (("advise", "--sequences", "4097"), ""),
        (("advise", "--context", "0"), ""),
        (("watch", "--timeout-s", "nan"), ""),
        (("shadow", "follow"), ""),
        (("shadow", "off", "--priority", "1"), ""),
    ],
    ids=str,
)
def test_what_makes_no_policy_is_refused_before_anyone_is_asked(arguments, words):
    with closed_port() as dead:
        result = CliRunner().invoke(app, ["policy", *arguments, "--address", dead])
    assert (result.exit_code, result.stdout) == (console.EXIT_USAGE, "")
    assert result.stderr.startswith(f"error: {words}" if words else "Usage:")


@in_loop
async def test_what_only_the_server_can_judge_it_refuses_by_field(outrider):
    async with serving() as front:
        front.engine.policies.view = MEASURED
        for arguments, field in (
            (("--gamma-max", "9"), "gamma_max: 9 is not within 0..8"),
            (("--gamma-min", "3", "--gamma-max", "2"), "gamma_min: 3 is above gamma_max, 2"),
            (("--itl-limit-ms", "nan"), "itl_limit_ms: nan is no time"),
            (("--min-gain", "2"), "min_gain: 2 is not from 0 to 1"),
        ):
            for form in ("set", "shadow"):
                result = await outrider("policy", form, "dynamic", *arguments, "--address", front.address)
                assert result.exit_code == console.EXIT_REFUSED
                assert f"INVALID_ARGUMENT: policy.dynamic.{field}" in result.stderr


@in_loop
async def test_a_shadow_is_set_compared_and_ended(outrider):
    async with serving() as front:
        at = ("--address", front.address)
        none = await outrider("policy", "shadow", "show", *at)
        refused = await outrider("policy", "shadow", "fixed", "--gamma", "2", *at)
        front.engine.policies.view = MEASURED
        new = await outrider("policy", "shadow", "dynamic", "--gamma-max", "2", *at)
        assert front.engine.policies.view.shadow.policy == Dynamic(gamma_max=2)
        view = replace(SHADOW, steps=100, agreed=75, tokens=300.0, step_s=2.0, shadow_tokens=350.0, shadow_step_s=2.5)
        front.engine.policies.view = replace(MEASURED, shadow=replace(view, steps_by_gamma=(60, 0, 40)))
        shown = await outrider("policy", "shadow", "show", *at)
        ended = await outrider("policy", "shadow", "off", *at)
        assert front.engine.policies.view.shadow is None
    assert (none.exit_code, none.stdout, ended.stdout) == (0, "no shadow\n", "no shadow\n")
    assert (refused.exit_code, NO_PROFILE.detail in refused.stderr) == (console.EXIT_REFUSED, True)
    assert new.stdout == "shadow dynamic, gamma 0..2: no step planned yet\n"
    assert shown.stdout.splitlines() == [
        "shadow dynamic, gamma 0..3, steps within 40 ms: 100 steps, 75% of them with the draft length in force",
        "  in force: 150.0 tokens/s predicted, 3.00 tokens and 20.00 ms per step",
        "  shadow:   140.0 tokens/s predicted, 3.50 tokens and 25.00 ms per step",
        "  draft lengths of the shadow: 0 in 60, 2 in 40",
    ]


@in_loop
async def test_advice_is_a_row_per_draft_length_with_the_best_one_marked_and_a_sentence(outrider):
    with closed_port() as dead:
        async with serving() as front:
            at = ("--address", front.address)
            refused = await outrider("policy", "advise", *at)
            front.engine.policies.view, front.engine.policies.advice = MEASURED, ADVICE
            result = await outrider("policy", "advise", *at)
            await outrider("policy", "advise", "--sequences", "4096", "--context", "1", *at)
            both = await outrider("policy", "advise", *at, "--address", dead)
            assert front.engine.policies.advised == [(None, None), (4096, 1), (None, None)]
    assert (refused.exit_code, NO_PROFILE.detail in refused.stderr) == (console.EXIT_REFUSED, True)
    title, headings, *rows, sentence = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert title == "17 sequences of 1300 tokens; acceptance 0.69, survival by position 0.75 0.44"
    assert headings == "gamma budget tokens geometric step ms tokens/s"
    assert rows == [
        "0 0 1.00 1.00 10.00 1700.0",
        "1 20 1.50 1.62 11.00 1711.0",
        "2 40 2.00 2.25 12.00 1722.0 best",
    ]
    assert sentence == ADVICE.sentence
    assert both.stdout.startswith(f"{front.address}: 17 sequences")
    assert both.exit_code == console.EXIT_UNAVAILABLE


@in_loop
async def test_advice_is_drawn_into_a_page_where_it_can_be_written(outrider, tmp_path):
    async with serving() as front:
        front.engine.policies.view, front.engine.policies.advice = MEASURED, ADVICE
        written = await outrider("policy", "advise", "--html", str(tmp_path / "a.html"), "--address", front.address)
        refused = await outrider("policy", "advise", "--html", str(tmp_path), "--address", front.address)
    assert (written.exit_code, refused.exit_code) == (0, console.EXIT_USAGE)
    assert ADVICE.sentence in (tmp_path / "a.html").read_text()
    assert "is a directory; name a file in it" in refused.stderr


@in_loop
async def test_the_status_has_the_planner_in_it(outrider):
    async with serving() as front:
        front.engine.policies.view = VIEW
        result = await outrider("status", "--address", front.address)
        document = await outrider("status", "--json", "--address", front.address)
    for words in (
        "gamma 2, budget 621 in the newest step; 629 steps without budget, 630 to learn",
        "1002.40 ms per step predicted, 1004.00 measured, mean error 1005.60",
        "stale: measured in spring",
        "0.88 0.50",
        "dynamic runs as a fixed draft length: the profile is stale",
        "shadow dynamic, gamma 0..3, steps within 40 ms: 601 steps",
    ):
        assert words in result.stdout
    (entry,) = json.loads(document.stdout)
    assert entry["answer"]["speculation"]["profile"] == "PROFILE_STATE_STALE"
    assert entry["answer"]["speculation"]["steps_by_gamma"] == ["631", "632", "633"]


async def watched(outrider, front, *arguments: str, changes: int):
    """What a watch prints of the state in force and of some changes, until the server stops."""
    watching = asyncio.create_task(outrider("policy", "watch", *arguments, "--address", front.address))
    await front.engine.until(lambda: front.engine.policies.num_listeners == 1)
    told = front.client.watch_policy()
    await told.read()
    for gamma in range(changes):
        front.engine.step_id = 10 + gamma
        await front.client.switch_policy((await front.client.get_policy()).policy, priority=gamma)
        await told.read()
    told.cancel()
    await front.server.stop(0)
    return await watching


@in_loop
async def test_a_watch_prints_a_line_per_change_and_says_why_it_ended(outrider):
    async with serving() as front:
        result = await watched(outrider, front, changes=2)
    lines = result.stdout.splitlines()
    first = rf"{WHEN} step 1 revision 1 by the settings of this server: fixed, gamma 4"
    assert re.fullmatch(first, lines[0])
    assert re.fullmatch(
        rf"{WHEN} step 11 revision 3 by {PEER}: fixed, gamma 4; priority 0: .*; priority 1: .*", lines[-1]
    )
    assert 2 <= len(lines) <= 3
    assert result.exit_code == console.EXIT_UNAVAILABLE
    assert result.stderr == "error: UNAVAILABLE: this server is stopping; ask another one\n"


@in_loop
async def test_a_watch_for_scripts_prints_an_object_per_line(outrider):
    async with serving() as front:
        result = await watched(outrider, front, "--json", changes=1)
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    assert {entry["address"] for entry in entries} == {front.address}
    assert entries[0]["answer"]["policy"] == {"fixed": {"gamma": 4}}
    last = entries[-1]["answer"]
    assert (last["revision"], last["effective_step"], last["classes"][0]["priority"]) == ("2", "10", 0)


@in_loop
async def test_a_watch_of_servers_that_say_nothing_ends_and_names_them(outrider):
    with silent_port() as silent, closed_port() as dead:
        result = await outrider(*("policy", "watch", "--address", silent, "--address", dead, "--timeout-s", "0.2"))
    assert result.exit_code == console.EXIT_UNAVAILABLE
    assert result.stdout == ""
    assert f"error: {silent}: DEADLINE_EXCEEDED: no answer within 0.2 s\n" in result.stderr
    assert f"error: {dead}: UNAVAILABLE: " in result.stderr


@in_loop
async def test_a_prompt_may_cap_its_own_drafts(outrider):
    async with serving([65, 66]) as front:
        for given, cap in (((), None), (("--max-drafts", "0"), 0), (("--max-drafts", "3"), 3)):
            result = await outrider("generate", "a", "--max-tokens", "2", *given, "--address", front.address)
            assert result.exit_code == 0, result.output
            assert front.engine.submitted[-1].max_drafts == cap
