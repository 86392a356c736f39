"""`outrider bench` as its users meet it: refusals before anything starts, real servers, Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.bench import asked_of
from fakes.bench_process import ITSELF, LIMIT_S, TINY, bench, start
from fakes.commands import closed_port
from fakes.servers import printed_until_ready
from typer import Exit

from runtime.bench.document import Report
from runtime.bench.errors import BenchError
from runtime.cli import bench_run as bench_run_module
from runtime.cli.bench_files import Outputs
from runtime.cli.bench_options import own_settings
from runtime.cli.bench_run import _finished
from runtime.cli.console import EXIT_INTERRUPTED, EXIT_NO, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE
from runtime.front.client import OutriderClient


@dataclass(frozen=True)
class Server:
    address: str
    folder: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """A running server whose text is known beforehand."""
    folder = tmp_path_factory.mktemp("server")
    process = start("serve", "--launcher", "process", "--port", "0", "--set", "metrics.port=none", cwd=folder)
    try:
        printed, address = printed_until_ready(process)
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address), printed
        yield Server(address, folder)
    finally:
        process.kill()
        process.communicate()


def policy_of(server: Server) -> tuple[int, int]:
    """Present γ and revision."""

    async def ask() -> tuple[int, int]:
        async with OutriderClient(server.address) as client:
            state = await client.get_policy()
            return state.policy.fixed.gamma, state.revision

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "sometimes"), "--policy 'sometimes': not off, fixed:N or dynamic"),
        (("--concurrency", "0"), "--concurrency '0': give whole numbers from 1"),
        (("--rate", "-1"), "--rate '-1': give requests per second"),
        (("--address", "127.0.0.1:1", "--set", "cache.page_size=32"), "leave out --address"),
        (("--address", "127.0.0.1:1", "--launcher", "ray"), "leave out --address"),
        (("--temperature", "inf"), "--temperature inf: give a number"),
        (("--itl-limit-ms", "inf"), "--itl-limit-ms inf: give a number"),
        (("--tokenizer", "x"), "--tokenizer goes with --address and --workload random"),
        (("--prompts", "x", "--workload", "random"), "--prompts takes the place of --workload"),
        (("--variant", "with,some"), "--variant 'some': choose of with, without, with+ngram, without+ngram"),
        (("--edit-every", "4"), "--edit-every goes with --workload code-edit; leave it out"),
        (("replay", "--prompts", "x", "--workload", "chat"), "--prompts takes the place of --workload"),
        (("--prompts", "/nowhere/x.jsonl"), "/nowhere/x.jsonl: No such file"),
        (("--set", "server.prot=1"), "server.prot: unknown key"),
        (("--json", "/"), "--json /: is a directory; name a file in it"),
        (
            ("--json", "/tmp/x.txt", "--html", "/tmp/../tmp/x.txt"),
            "--json and --html both name /tmp/../tmp/x.txt; name two",
        ),
        (("--concurrency", "9" * 5000), "give whole numbers from 1"),
        (("--html", "/nowhere/x.html"), "--html /nowhere/x.html: no such directory"),
        (("measure", "--policy", "dynamic:max=x"), "--policy 'dynamic:max=x': max is 'x'; give drafts per round"),
        (("/nowhere", "--requests", "2"), "model.path: /nowhere: no such directory"),
        (("replay", "--acceptance", "1.5"), "--acceptance '1.5': give probabilities from 0 to 1, or own, as in own"),
        (("replay", "--acceptance", "ours"), "--acceptance 'ours': give probabilities from 0 to 1"),
        (("replay", "--rate", "0x"), "--rate '0x': give a share of plain decoding's rate, above 0"),
        (("replay", "--rate", "fastx"), "--rate 'fastx': give a share of plain decoding's rate, above 0"),
        (("replay", "--policy", "sometimes"), "--policy 'sometimes': not off, fixed:N or dynamic"),
        (("replay", "--address", "127.0.0.1:1", "--config", "x"), "leave out --address"),
        (("replay", "/nowhere"), "model.path: /nowhere: no such directory"),
        (("replay", "--html", "/nowhere/x.html"), "--html /nowhere/x.html: no such directory"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_started(arguments, words):
    result = bench(*arguments)
    assert result.exit_code == EXIT_USAGE, result.output
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_page_without_matplotlib_names_the_extra_before_anything_is_started(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    result = bench("--html", str(tmp_path / "x.html"))
    assert result.exit_code == EXIT_USAGE
    assert "pip install 'outrider[bench]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_child_processes_are_the_weakest_default_of_launchers(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("cluster:\n  launcher: ray\n")
    flags = {"checkpoint": None, "launcher": None}
    assert own_settings(None, [], flags, []).cluster.launcher == "process"
    assert own_settings(None, ["cluster.launcher=ray"], flags, []).cluster.launcher == "ray"
    assert own_settings(str(file), [], flags, []).cluster.launcher == "ray"
    assert own_settings(str(file), [], {**flags, "launcher": "process"}, []).cluster.launcher == "process"
    assert own_settings(str(file), ["cluster.worker_threads=2"], flags, []).server.port == 0


def test_a_server_that_is_not_there_is_one_line_and_code_4():
    with closed_port() as address:
        result = bench("--address", address)
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stderr.startswith("error: UNAVAILABLE: ")


def test_a_running_server_is_measured_and_has_its_policy_back(server, tmp_path):
    before, files = policy_of(server), (tmp_path / "bench.json", tmp_path / "bench.html")
    loads = ("--concurrency", "1,4", "--rate", "50", "--policy", "off,fixed:4")
    result = bench(
        "--address",
        server.address,
        *TINY,
        *loads,
        "--max-tokens",
        "25",
        "--json",
        str(files[0]),
        "--html",
        str(files[1]),
    )
    assert result.exit_code == 0, result.output
    gamma, revision = policy_of(server)
    assert (gamma, revision) == (before[0], before[1] + 7)
    report = Report.model_validate_json(files[0].read_text())
    assert report.complete
    assert len(report.cells) == len(report.groups) == 6
    assert not report.identity.own_server
    for group in report.groups:
        assert group.figures.finished == group.figures.requests == 2
        assert group.figures.tokens_of_others == 0
        # Two drafts of four always stand, the third never: 24 tokens after the first in 8 passes.
        drafting = group.policy == "fixed:4"
        assert group.figures.tokens_per_pass == (3.0 if drafting else 1.0)
        assert group.lengths.by_survival == group.lengths.tokens_per_full_round == (3.0 if drafting else 1.0)
        assert group.lengths.acceptance_rate == (pytest.approx(2 / 3) if drafting else None)
        assert group.figures.memory.parameter_bytes == 4
        assert group.figures.memory.slot_bytes % 1000 == 0
    assert [comparison.identical for comparison in report.comparisons] == [2, 2, 2]
    assert "<svg" in files[1].read_text()
    assert "2 of 2 prompts identical" in result.stdout


def test_a_file_that_cannot_be_written_ends_with_1_and_costs_neither_the_table_nor_the_other(server, tmp_path):
    html_file, full = tmp_path / "x.html", tmp_path / "full"
    full.symlink_to("/dev/full")
    where = ("--address", server.address, *TINY, "--concurrency", "2", "--policy", "off")
    result = bench(*where, "--json", str(full), "--html", str(html_file))
    assert result.exit_code == EXIT_NO, result.output
    assert "what clients see" in result.stdout
    assert "<svg" in html_file.read_text()
    assert f"error: --json {full}: No space left on device; it was not written" in result.stderr


def test_a_policy_that_the_server_cannot_serve_is_refused_and_nothing_is_switched(server):
    before = policy_of(server)
    result = bench("--address", server.address, *TINY, "--policy", "off,fixed:9")
    assert result.exit_code == EXIT_REFUSED
    assert "--policy fixed:9: this server drafts at most 8 tokens" in result.stderr
    assert policy_of(server) == before


def test_a_server_that_drains_is_not_measured(server):
    async def switch(name: str) -> None:
        async with OutriderClient(server.address) as client:
            await getattr(client, name)()

    asyncio.run(switch("drain"))
    try:
        result = bench("--address", server.address, *TINY)
    finally:
        asyncio.run(switch("resume"))
    assert result.exit_code == EXIT_REFUSED
    assert "the server is draining and refuses requests" in result.stderr


def test_ctrl_c_keeps_the_cells_that_are_done_and_puts_the_policy_back(server, tmp_path):
    before = policy_of(server)
    arguments = (
        "--address",
        server.address,
        *TINY,
        "--repeats",
        "1000",
        "--concurrency",
        "2",
        "--policy",
        "off,fixed:2",
    )
    process = start("bench", *arguments, "--json", "some.json", "--html", "some.html", cwd=tmp_path)
    assert process.stderr
    for line in process.stderr:
        if line.startswith("cell 4/"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_INTERRUPTED, err
    assert "stopping" in err
    report = Report.model_validate_json((tmp_path / "some.json").read_text())
    assert not report.complete
    assert report.cells_planned == 2000
    assert 3 <= len(report.cells) < 2000
    assert f"ended early: {len(report.cells)} of 2000 cells were measured" in out
    assert "Ended early" in (tmp_path / "some.html").read_text()
    gamma, revision = policy_of(server)
    assert gamma == before[0]
    assert revision > before[1]


def test_a_second_signal_ends_what_the_first_one_has_end_in_order():
    async def check() -> None:
        signals = SimpleNamespace(asked=asyncio.Event(), insisted=asyncio.Event())
        measuring, putting_back = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                measuring.set()
                await asyncio.Event().wait()
            finally:
                putting_back.set()
                await asyncio.Event().wait()

        waiting = asyncio.create_task(_finished(asyncio.create_task(work()), signals))
        await measuring.wait()
        signals.asked.set()
        await putting_back.wait()
        assert not waiting.done()
        signals.insisted.set()
        assert await waiting is False

    asyncio.run(check())


@pytest.mark.parametrize(("left", "error"), [("UNAVAILABLE: gone", BenchError("too bad")), ("late", None)])
def test_a_policy_that_was_left_and_the_error_are_both_told(left, error, monkeypatch, capsys):
    class Measuring:
        policy_left = left

        def __init__(self, asked) -> None:
            pass

        async def run(self, address) -> None:
            if error is not None:
                raise error

        def report(self) -> None:
            return None

    monkeypatch.setattr(bench_run_module, "_Measuring", Measuring)
    work = bench_run_module.bench_run(asked_of(), Outputs(json=None, html=None), "127.0.0.1:1")
    if error is None:
        asyncio.run(work)
    else:
        with pytest.raises(Exit) as caught:
            asyncio.run(work)
        assert caught.value.exit_code == EXIT_REFUSED
    told = capsys.readouterr().err
    assert f"the policy of before was not put back: {left}; set it with outrider policy set" in told
    assert ("error: too bad" in told) is (error is not None)


def test_requests_that_fail_are_told_by_code_and_end_the_command_with_1(tmp_path):
    # Eight slots and no queue: of sixteen clients half are refused.
    arguments = (
        *TINY,
        "--set",
        "scheduler.max_waiting=0",
        "--concurrency",
        "16",
        "--requests",
        "32",
        "--policy",
        "off",
    )
    process = start("bench", *arguments, "--json", "failed.json", cwd=tmp_path)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_NO, err
    [group] = Report.model_validate_json((tmp_path / "failed.json").read_text()).groups
    figures = group.figures
    assert set(figures.failures) == {"RESOURCE_EXHAUSTED"}
    assert figures.finished + figures.failures["RESOURCE_EXHAUSTED"] == figures.requests == 32
    assert figures.finished >= 8
    assert f"failed, 16 at a time, off: {figures.failures['RESOURCE_EXHAUSTED']} RESOURCE_EXHAUSTED of 32" in out


def test_a_server_of_its_own_is_measured_on_the_real_model(tmp_path):
    # Long enough that memory is sampled while requests run.
    longer = ("--max-tokens", "100", "--workload", "random", "--prompt-tokens", "9")
    arguments = (*TINY, *longer, "--concurrency", "2", "--policy", "off,fixed:2")
    process = start("bench", *arguments, "--json", "own.json", cwd=tmp_path, program=ITSELF)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    report = json.loads((tmp_path / "own.json").read_text())
    assert report["identity"]["own_server"]
    assert report["identity"]["model"]["name"] == "demo"
    assert report["plan"]["prompt_tokens"]["p99"] == 9
    assert report["identity"]["settings"]["server"]["port"] == 0
    for group in report["groups"]:
        assert group["figures"]["rates"]["tokens_per_s"] > 0
        assert group["figures"]["time_per_token"]["verify_ms"] > 0
        assert group["figures"]["memory"]["page_bytes"] > 0
    assert "greedy output, 2 at a time, fixed:2 beside off: " in out
