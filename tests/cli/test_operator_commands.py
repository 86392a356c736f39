"""The operator's commands over real fronts: what each server said, which did not answer, and how the command ended."""

from __future__ import annotations

import io
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fakes.commands import closed_port, outrider_in_loop, silent_port
from fakes.front import in_loop, request_for, serving, status_of
from rich.console import Console
from typer.testing import CliRunner

from outrider.v1 import operator_pb2, types_pb2
from parallel.mesh import Mesh
from runtime.cli import console
from runtime.cli.main import app
from runtime.cli.options import ADDRESS_VARIABLE, checked_addresses
from runtime.cli.replicas import Answer, Failure, Replicas, gravest
from runtime.cli.requests import requests_table

COMMANDS = [
    *[("policy", "get"), ("policy", "set", "off"), ("policy", "off"), ("status",), ("status", "--json")],
    ("policy", "shadow", "show"),
    *[("requests",), ("requests", "--json"), ("abort", "x"), ("drain",), ("drain", "--no-wait"), ("resume",)],
    *[("reload",), ("check",), ("top", "--interval-s", "0.1")],
]


@pytest.fixture
def outrider(monkeypatch):
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    return outrider_in_loop(monkeypatch)


@pytest.fixture
def dead():
    with closed_port() as address:
        yield address


def at(*addresses: str) -> list[str]:
    return [part for address in addresses for part in ("--address", address)]


@asynccontextmanager
async def two_fronts(**options):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(**options)) for _ in range(2)]


@asynccontextmanager
async def open_streams(front, *request_ids: str, **fields):
    """Requests that run, one step old; their streams are read by nobody."""
    calls = [front.client.call(request_for(request_id=name, **fields)) for name in request_ids]
    await front.engine.until(lambda: len(front.engine.live) == len(request_ids))
    front.engine.step()
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@in_loop
async def test_a_server_that_is_gone_hides_no_other_ones_answer(outrider, dead, command):
    async with two_fronts() as (one, two):
        result = await outrider(*command, *at(one.address, dead, two.address))
        alone = await outrider(*command, *at(dead))
    assert result.exit_code == (console.EXIT_UNAVAILABLE), result.output
    if command[0] == "abort":  # its lines are of ids
        assert "x: not live on any server that answered" in result.stderr
    else:
        assert one.address in result.stdout
        assert two.address in result.stdout
    assert f"error: {dead}: UNAVAILABLE: " in result.stderr
    assert alone.exit_code == console.EXIT_UNAVAILABLE
    assert alone.stderr.startswith("error: UNAVAILABLE: "), "one server alone needs no name"
    assert alone.stderr.count("\n") == 1


@in_loop
async def test_a_silent_server_costs_the_timeout_and_no_more(outrider):
    with silent_port() as silent:
        async with serving() as front:
            result = await outrider("policy", "get", *at(silent, front.address), "--timeout-s", "0.2")
    assert result.stdout.startswith(f"{front.address}: fixed, gamma 4 (revision 1, in force from step 1)\n")
    assert result.stderr == f"error: {silent}: DEADLINE_EXCEEDED: no answer within 0.2 s\n"
    assert result.exit_code == console.EXIT_UNAVAILABLE


@in_loop
async def test_a_server_that_comes_back_answers_the_next_question():
    with closed_port() as address:
        pass
    async with Replicas([address], timeout_s=5.0) as replicas:
        for _ in range(3):
            (failure,) = await replicas.ask(lambda client: client.get_policy())
            assert isinstance(failure, Failure)
        async with serving(settings={"server.port": int(address.rpartition(":")[2])}):
            (answer,) = await replicas.ask(lambda client: client.get_policy())
    assert isinstance(answer, Answer), "no back-off of an old channel is waited for"


@in_loop
async def test_an_address_given_twice_is_asked_once(outrider):
    async with serving() as front:
        result = await outrider("policy", "off", *at(front.address, front.address))
        assert result.stdout == "off (revision 2, in force from step 1)\n"
        assert front.engine.policies.state.revision == 2


@in_loop
async def test_servers_come_from_the_environment_where_none_is_given(outrider, monkeypatch, dead):
    async with two_fronts() as (one, two):
        monkeypatch.setenv(ADDRESS_VARIABLE, f"{one.address}, {two.address},{one.address}")
        result = await outrider("policy", "get")
        chosen = await outrider("policy", "get", *at(two.address))
    assert [line.split(": ")[0] for line in result.stdout.splitlines()[::2]] == [one.address, two.address]
    assert chosen.stdout.startswith("fixed, gamma 4 ("), "an option wins over the environment"


def test_empty_places_in_the_environment_are_nobody(monkeypatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, " 127.0.0.1:2, ,127.0.0.1:1,")
    assert checked_addresses(None) == ["127.0.0.1:2", "127.0.0.1:1"]


def test_without_a_word_the_default_address_is_asked(monkeypatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, "  ")
    assert checked_addresses(None) == [console.DEFAULT_ADDRESS]
    monkeypatch.delenv(ADDRESS_VARIABLE)
    assert checked_addresses([]) == [console.DEFAULT_ADDRESS]


@pytest.mark.parametrize("text", ["localhost", "127.0.0.1:1,x", "127.0.0.1:1;127.0.0.1:2"])
def test_a_bad_address_in_the_environment_is_called_by_the_variables_name(monkeypatch, text):
    monkeypatch.setenv(ADDRESS_VARIABLE, text)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith(f"error: {ADDRESS_VARIABLE} ")
    assert "not of the form host:port" in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_one_bad_address_among_several_is_refused_before_anyone_is_asked(dead, command):
    result = CliRunner().invoke(app, [*command, *at(dead, "::1:50051")])
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith("error: --address '::1:50051': ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "set", "dynamic", "--gamma", "2"),
        ("policy", "off", "--gamma", "2"),
        ("policy", "get", "--timeout-s", "0"),
        ("policy", "get", "--timeout-s", "nan"),
        ("status", "--timeout-s", "inf"),
        ("requests", "--limit", "0"),
        ("requests", "--limit", "1001"),
        ("abort",),
        ("abort", ""),
        ("abort", "caf\udce9"),
        ("drain", "--wait-s", "-1"),
        ("drain", "--wait-s", "1", "--no-wait"),
        ("top", "--interval-s", "0.05"),
        ("top", "--interval-s", "nan"),
        ("top", "--count", "0"),
        ("top", "--once", "--count", "2"),
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused_before_anyone_is_asked(dead, arguments):
    result = CliRunner().invoke(app, [*arguments, *at(dead)])
    assert result.exit_code == console.EXIT_USAGE, result.output
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    ("codes", "worst"), [((), 0), ((0, 0), 0), ((0, 4), 4), ((4, 5, 0), 5), ((5, 1, 4), 1), ((1, 0), 1)]
)
def test_the_gravest_code_is_the_one_that_a_second_try_helps_least(codes, worst):
    assert gravest(codes) == worst
    assert gravest(reversed(codes)) == worst


@in_loop
async def test_a_policy_is_set_everywhere_and_guarded_by_each_servers_own_revision(outrider):
    async with two_fronts() as (one, two):
        both = at(one.address, two.address)
        await outrider("policy", "off", *at(two.address))
        result = await outrider("policy", "set", "fixed", "--gamma", "2", "--expected-revision", "1", *both)
        read = await outrider("policy", "get", *both)
    assert result.stdout == f"{one.address}: fixed, gamma 2 (revision 2, in force from step 1)\n"
    assert result.stderr == (
        f"error: {two.address}: ABORTED: the policy is at revision 2 (off), not 1; read it again\n"
    )
    assert result.exit_code == console.EXIT_REFUSED
    assert read.stdout.splitlines()[2] == f"{two.address}: off (revision 2, in force from step 1)"


@in_loop
async def test_a_draft_longer_than_the_server_allows_is_its_to_refuse(outrider):
    async with serving() as front:
        result = await outrider("policy", "set", "fixed", "--gamma", "9", *at(front.address))
    assert result.exit_code == console.EXIT_REFUSED
    assert "policy.fixed.gamma: 9 is not within 0..8" in result.stderr


@in_loop
async def test_status_shows_a_server_with_its_ranks_pools_and_counters(outrider):
    async with (
        serving(steps_by_itself=False, mesh=Mesh(dp=2, tp=1, ep=2)) as front,
        open_streams(front, "a", "b", "c", max_tokens=20),
    ):
        result = await outrider("status", *at(front.address))
        for request_id in ("x" * 2000, "a"):
            await status_of(front.client.call(request_for(request_id=request_id)))
        front.engine.set_serving(False)
        lost = await outrider("status", *at(front.address))
    assert result.exit_code == 0
    rows = {
        line.strip("│ ").split("  ")[0]: line.strip("│ ").split("  ")[-1].strip() for line in result.stdout.splitlines()
    }
    assert front.address in result.stdout.splitlines()[0]
    assert rows["state"] == "serving"
    assert rows["model"] == "demo: qwen3_next, 7.70 M parameters, float32, default numerics"
    assert rows["layout"] == "dp 2 x tp 1, ep 2"
    assert rows["policy"] == "fixed, gamma 4 (revision 1, in force from step 1)"
    assert rows["requests"] == "3 running, 0 / 1024 (0%) waiting"
    assert rows["step"] == "1, epoch 1, 0 restarts"
    assert rows["so far"] == "3 requests taken, 0 finished, 0 aborted, 0 failed; 0 refused"
    assert rows["tokens"] == "3 read, 9 emitted in 3 passes"
    assert rows["tokens per pass"] == "3.00"
    assert rows["acceptance"] == "1.00 1.00"
    assert "outrider 0.1.0" in rows["versions"]
    assert re.search(r"1 +fake-1 +fake:2 +cpu +29\.37 MiB", result.stdout)
    assert re.search(r"0 +2 +slots +2 / 64 \(3%\)", result.stdout)
    assert re.search(r"1 +1 +slots +1 / 64 \(2%\)", result.stdout)
    assert re.search(r"pages: target +4 / 1000 \(0%\)", result.stdout)
    assert "outage" not in rows
    assert "recovering" in lost.stdout
    assert re.search(r"outage +a rank has ended", lost.stdout)
    assert "errors" not in rows
    assert re.search(r"errors .*DuplicateRequest 1, InvalidRequest 1", lost.stdout)
    assert re.search(r"outages +ranks lost 1 times, \d\.\d s without them", lost.stdout)
    assert re.search(r"1 +– +– +cpu", lost.stdout), "between lives a rank has no place"


@in_loop
async def test_status_as_json_is_one_document_with_an_entry_per_server(outrider, dead):
    async with serving() as front:
        result = await outrider("status", "--json", *at(front.address, dead))
    answered, failed = json.loads(result.stdout)
    assert (answered["address"], failed["address"]) == (front.address, dead)
    assert failed["error"].startswith("UNAVAILABLE: ")
    assert set(answered) == {"address", "answer"}
    status = answered["answer"]
    assert status["state"] == "SERVER_STATE_SERVING"
    assert status["policy"]["policy"] == {"fixed": {"gamma": 4}}
    assert status["waiting"] == 0, "a zero is a figure"
    assert status["counters"]["emitted"] == "0"
    assert status["batches"][0]["pools"][1]["pages_total"] == 1000
    assert result.exit_code == console.EXIT_UNAVAILABLE


@in_loop
async def test_requests_are_listed_with_their_counts(outrider):
    async with serving(steps_by_itself=False) as front, open_streams(front, "a[b]", max_tokens=20, priority=-3):
        queued = front.client.call(request_for(request_id="late"))
        await front.engine.until(lambda: len(front.engine.live) == 2)
        result = await outrider("requests", *at(front.address))
        first = await outrider("requests", "--limit", "1", *at(front.address))
        document = await outrider("requests", "--json", *at(front.address))
        queued.cancel()
    title, headings, running, waiting = result.stdout.splitlines()
    assert title == "2 live"
    assert headings.split()[:2] == ["request", "state"]
    assert running.split()[:10] == ["a[b]", "decoding", "0", "-3", "1", "3", "/", "20", "3.00", "100%"]
    assert waiting.split()[:4] == ["late", "waiting", "–", "0"]
    assert first.stdout.splitlines()[0] == "1 of 2 live"
    assert "late" not in first.stdout
    (entry,) = json.loads(document.stdout)
    assert entry["answer"]["total"] == 2
    assert [one["request_id"] for one in entry["answer"]["requests"]] == ["a[b]", "late"]
    assert "dp_rank" not in entry["answer"]["requests"][1]


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (None, "request state dp rank priority prompt output per pass accepted age waited"),
        (120, "request state dp rank priority prompt output per pass accepted age waited"),
        (80, "request state output per pass accepted age"),
        (50, "request state age"),
        (20, "request state"),
    ],
)
def test_a_narrow_terminal_costs_figures_and_never_an_id(width, headings):
    request_id = "71be14f705d44d2a994ef53a8df439af"
    usage = types_pb2.Usage(prompt_tokens=4, completion_tokens=139, rounds=50, drafted=200, accepted=90)
    one = operator_pb2.RequestStatus(
        request_id=request_id,
        state="REQUEST_STATE_DECODING",
        dp_rank=0,
        max_tokens=400,
        usage=usage,
        age_s=3.3,
        waited_s=1.2,
    )
    table = requests_table([one, one], width)
    assert " ".join(str(column.header) for column in table.columns) == headings
    printed = io.StringIO()
    Console(file=printed, width=max(width or 0, 43)).print(table)
    assert width is None or printed.getvalue().count(request_id) == 2
    if width == 120:
        row = "71be14f705d44d2a994ef53a8df439af decoding 0 0 4 139 / 400 2.78 45% 3.3 s 1.2 s"
        assert " ".join(printed.getvalue().splitlines()[1].split()) == row


@in_loop
async def test_abort_ends_requests_and_says_which_server_knew_them(outrider):
    async with (
        two_fronts(steps_by_itself=False) as (one, two),
        open_streams(one, "left") as (left,),
        open_streams(two, "right", "other") as (right, other),
    ):
        both = at(one.address, two.address)
        result = await outrider("abort", "right", "left", "right", *both)
        assert (await status_of(left))[0].name == "ABORTED"
        assert (await status_of(right))[0].name == "ABORTED"
        unknown = await outrider("abort", "other", "nobody", *both)
        alone = await outrider("abort", "nobody", *at(one.address))
        assert len(two.engine.live) == 0
        assert (await status_of(other))[0].name == "ABORTED"
    assert result.exit_code == 0
    assert result.stdout == f"right: aborted on {two.address}\nleft: aborted on {one.address}\n"
    assert unknown.exit_code == console.EXIT_REFUSED
    assert unknown.stdout == f"other: aborted on {two.address}\n"
    assert unknown.stderr == "error: nobody: not live on any server that answered; it has ended, or never was\n"
    assert alone.exit_code == console.EXIT_REFUSED
    assert alone.stderr == "error: nobody: not live; it has ended, or never was\n"


@in_loop
async def test_check_names_what_is_violated_and_where(outrider, dead):
    async with two_fronts(mesh=Mesh(dp=2, tp=1, ep=2)) as (one, two):
        fine = await outrider("check", *at(one.address))
        two.engine.rank_violations[1].append("slot 3 [used] is free too")
        result = await outrider("check", *at(one.address, two.address, dead))
    assert (fine.exit_code, fine.stdout) == (0, "all invariants hold; 2 ranks checked\n")
    assert result.exit_code == console.EXIT_NO, "a violation counts more than a server that is not there"
    assert result.stdout == (
        f"{one.address}: all invariants hold; 2 ranks checked\n"
        f"{two.address}: 1 violation; 2 ranks checked\n  rank 1: slot 3 [used] is free too\n"
    )


@in_loop
async def test_check_asks_in_vain_while_ranks_are_lost(outrider):
    async with serving() as front:
        front.engine.set_serving(False)
        result = await outrider("check", *at(front.address))
    assert result.exit_code == console.EXIT_UNAVAILABLE
