"""The commands against a live server: real processes, real gRPC, and a rank whose text is known beforehand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from fakes.counting_worker import WRONG_TOKEN, truth
from fakes.servers import printed_until_ready
from typer.testing import CliRunner

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from runtime.cli import console
from runtime.cli.main import app
from runtime.front.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
"""Past this a command hangs; none takes a tenth of it."""


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "tests"))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fakes.outrider_counting", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True)


@dataclass
class Finished:
    code: int
    out: str
    err: str


def finish(process: subprocess.Popen[str]) -> Finished:
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Finished(process.returncode, out, err)


def outrider(*arguments: str, cwd: Path) -> Finished:
    return finish(start(*arguments, cwd=cwd))


def ask(server: Server, *arguments: str) -> Finished:
    """A command in this process, put to a server."""
    result = CliRunner().invoke(app, [*arguments, "--address", server.address])
    return Finished(result.exit_code, result.stdout, result.stderr)


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    worker_pid: int


@contextlib.contextmanager
def serving(cwd: Path, *arguments: str) -> Iterator[Server]:
    """A server that has said it is ready; killed on leaving unless it has ended."""
    process = start("serve", "--launcher", "process", "--port", "0", *arguments, cwd=cwd)
    try:
        printed, address = printed_until_ready(process)
        worker = re.search(r"\(process (\d+)\)", printed)
        assert worker, printed + (process.stderr.read() if process.stderr else "")
        yield Server(process, address, int(worker[1]))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_checkpoint())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serve_prints_accounting_and_answers_at_the_printed_address(tmp_path):
    with serving(tmp_path) as server:
        assert ask(server, "health").out == "SERVING\n"
        server.process.terminate()
        ended = finish(server.process)
    assert ended.code == 0
    assert not is_alive(server.worker_pid)


def test_generate_streams_the_text_to_standard_output_and_the_counts_to_standard_error(server, tokenizer):
    result = ask(server, "generate", "x", "--max-tokens", "12", "--seed", "5")
    assert result.code == 0
    assert result.out == tokenizer.decode([truth(position) for position in range(12)]) + "\n"
    assert result.err.startswith("length: 12 tokens in ")
    assert result.err.endswith("seed 5\n")


def test_generate_reads_a_prompt_and_stops_before_a_string(server, tokenizer):
    text = tokenizer.decode([truth(position) for position in range(20)])
    result = ask(server, "generate", "x", "--stop", text[10:14])
    assert result.out == text[: text.index(text[10:14])] + "\n"
    assert result.err.startswith("stop_string: ")


def test_show_rounds_spells_the_rejected_drafts_before_their_replacement(server, tokenizer):
    assert ask(server, "policy", "set", "fixed", "--gamma", "4").code == 0
    result = ask(server, "generate", "x", "--max-tokens", "6", "--show-rounds")
    assert result.code == 0
    _, _, body = result.out.partition("\n")
    # Round 1 is the prompt's own; then drafts 1, 2 stand and 3 (with 4 behind it) falls; then 4, 5 stand.
    own, wrong = tokenizer.decode([truth(3)]), tokenizer.decode([WRONG_TOKEN])
    kept = [tokenizer.decode([truth(position)]) for position in range(6)]
    first, rejected = f"{{{kept[0]}}}", f"[-{wrong}{kept[4]}-]"
    assert body.startswith(first + kept[1] + kept[2] + rejected + f"{{{own}}}" + kept[4] + kept[5])


def test_a_reader_that_goes_away_is_no_failure(server, tmp_path):
    many = ("generate", "x", "--max-tokens", "400", "--address", server.address)
    for arguments in (many, (*many, "--show-rounds"), ("settings",)):
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "fakes.outrider_counting", *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=write_end, stderr=subprocess.PIPE, text=True
        )
        os.close(write_end)
        os.close(read_end)
        ended = finish(process)
        assert (ended.code, ended.err) == (0, ""), arguments


def test_a_prompt_on_standard_input_that_is_not_text_is_one_line(server):
    result = CliRunner().invoke(app, ["generate", "-", "--address", server.address], input=b"caf\xe9")
    assert result.exit_code == console.EXIT_USAGE
    assert result.stderr.startswith("error: standard input is not UTF-8 text: ")
    assert result.stderr.count("\n") == 1


def test_a_server_of_its_own_serves_one_completion_and_leaves_nothing_behind(tokenizer, tmp_path):
    result = outrider("generate", "x", "--max-tokens", "5", "--gamma", "2", cwd=tmp_path)
    assert result.code == 0
    assert result.out == tokenizer.decode([truth(position) for position in range(5)]) + "\n"
    assert "5 tokens in 3 passes" in result.err


def test_the_policy_is_read_switched_and_guarded(server):
    def policy(*arguments: str) -> Finished:
        return ask(server, "policy", *arguments)

    before = re.search(r"revision (\d+)", policy("get").out)
    assert before
    switched = policy("set", "fixed", "--gamma", "2", "--expected-revision", before[1])
    assert switched.out.startswith(f"fixed, gamma 2 (revision {int(before[1]) + 1}, ")
    assert policy("get").out.startswith(switched.out)
    stale = policy("set", "off", "--expected-revision", before[1])
    assert (stale.code, stale.err.startswith("error: ABORTED: ")) == (console.EXIT_REFUSED, True)
    assert policy("set", "off").out.startswith("off (")


def test_a_refused_request_is_one_line_and_code_5(server):
    result = ask(server, "generate", "x", "--top-p", "0")
    assert result.code == console.EXIT_REFUSED
    assert re.fullmatch(r"error: INVALID_ARGUMENT: sampling\.top_p: .*\n", result.err)


def test_a_taken_port_is_found_before_anything_is_loaded(server, tmp_path):
    port = server.address.rpartition(":")[2]
    result = outrider("serve", "--launcher", "process", "--port", port, cwd=tmp_path)
    assert result.code == console.EXIT_START
    assert (
        result.err == f"error: cannot listen on {server.address}: Address already in use; choose another with "
        "server.host and server.port\n"
    )


def test_a_server_on_an_ipv6_address_is_found_free_or_taken_and_reached(tmp_path, tokenizer):
    with serving(tmp_path, "--host", "::1") as server:
        assert re.fullmatch(r"\[::1\]:\d+", server.address)
        assert ask(server, "health").out == "SERVING\n"
        port = server.address.rpartition(":")[2]
        taken = outrider("serve", "--launcher", "process", "--host", "::1", "--port", port, cwd=tmp_path)
    assert taken.code == console.EXIT_START
    assert taken.err.startswith(f"error: cannot listen on {server.address}: Address already in use; ")


def test_a_host_without_an_address_is_named(tmp_path):
    result = outrider("serve", "--launcher", "process", "--host", "300.1.2.3", cwd=tmp_path)
    assert result.code == console.EXIT_START
    assert re.fullmatch(r"error: cannot listen on '300\.1\.2\.3': .+; give server\.host an address .+\n", result.err)


def test_a_checkpoint_that_cannot_be_loaded_ends_serve_with_the_tensor_named(tmp_path):
    result = outrider("serve", "--launcher", "process", "--port", "0", "--served-name", "badly", cwd=tmp_path)
    assert result.code == console.EXIT_START
    assert "model.norm.weight: missing from the checkpoint" in result.err
    assert "Traceback" not in result.err


def test_ctrl_c_while_loading_ends_cleanly(tmp_path):
    process = start("serve", "--launcher", "process", "--port", "0", "--served-name", "hang", cwd=tmp_path)
    assert process.stderr
    for line in process.stderr:
        if line.startswith("weights"):
            break
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping\n"
    assert finish(process).code == 0
    logs = list((tmp_path / ".outrider" / "logs").iterdir())
    assert len(logs) == 1
    assert not any(str(tmp_path) in command for command in command_lines("workers.main"))


def command_lines(part: str) -> list[str]:
    """Working directories of all processes whose command line holds `part`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if part in (entry / "cmdline").read_text():
                found.append(os.readlink(entry / "cwd"))
    return found


def test_a_running_stream_finishes_after_the_first_signal(tmp_path):
    with serving(tmp_path, "--set", "server.drain_s=1000", "--set", "server.max_frame_tokens_unread=100000") as server:
        with grpc.insecure_channel(server.address) as channel:
            request = inference_pb2.GenerateRequest(text="x", stopping=types_pb2.Stopping(max_tokens=4000))
            frames = iter(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
            first = next(frames)
            server.process.send_signal(signal.SIGINT)
            received = list(first.token_ids) + [token for frame in frames for token in frame.token_ids]
        assert received == [truth(position) for position in range(4000)]
        assert finish(server.process).code == 0


def test_the_second_signal_ends_a_stream_that_would_go_on(tmp_path):
    for_ever = ("--set", "server.drain_s=1000", "--set", "cluster.step_timeout_s=1000")
    with (
        serving(tmp_path, "--served-name", "stick", *for_ever) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        frames = iter(
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
        )
        assert next(frames).token_ids == [truth(0)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout
        assert server.process.stdout.readline().startswith("draining: ")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(frames)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert finish(server.process).code == 0
    assert not is_alive(server.worker_pid)


def test_the_demo_streams_then_compares_policies(tokenizer, tmp_path):
    result = outrider("demo", "--launcher", "process", "--prompts", "2", "--max-tokens", "24", cwd=tmp_path)
    assert result.code == 0
    assert tokenizer.decode([truth(position) for position in range(24)]) in result.out
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if re.match(r"off|γ=\d", line)}
    assert rows["off"][2:] == ["1.00", "–", "baseline"]
    # 23 tokens after the first, three a pass: 8 passes. Drafts 1 and 2 always stand, 3 never.
    assert rows["γ=2"][2:] == ["2.88", "1.00", "1.00", "yes"]
    assert rows["γ=4"][2:] == ["2.88", "1.00", "1.00", "0.00", "0.00", "yes"]
    assert "cold start" in result.out


def test_the_readme_client_runs_as_written(server, tokenizer, tmp_path):
    snippet = re.search(r"<!-- client -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet
    code = snippet[1].replace("127.0.0.1:50051", server.address)
    assert code != snippet[1]
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    text, _, counts = ran.stdout.rstrip("\n").rpartition("\n")
    assert text == tokenizer.decode([truth(position) for position in range(96)])
    assert re.fullmatch(r"\d+ of \d+ drafts accepted in \d+ passes", counts)


@pytest.mark.parametrize("layout", [("--tp", "2"), ("--dp", "2", "--ep", "2")], ids=["tp2", "dp2 ep2"])
def test_two_ranks_are_started_shown_by_number_and_serve(tmp_path, tokenizer, layout):
    process = start("serve", "--launcher", "process", "--port", "0", *layout, cwd=tmp_path)
    try:
        printed, address = printed_until_ready(process)
        assert address, process.stderr.read() if process.stderr else ""
        ranks = dict(re.findall(r"rank (\d) +(127\.0\.0\.1:\d+ \(.*?process \d+\))", printed))
        assert sorted(ranks) == ["0", "1"]
        assert "2 ranks" in printed
        assert "parameters, by rank" in printed
        assert printed.count("memory accounting") == 1
        for _ in range(3):
            result = CliRunner().invoke(app, ["generate", "x", "--max-tokens", "12", "--address", address])
            assert result.stdout == tokenizer.decode([truth(position) for position in range(12)]) + "\n"
        process.terminate()
        ended = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert ended.code == 0
    assert {f"rank {rank}: launch" for rank in (0, 1)} < set(ended.err.splitlines())
    assert not any(str(tmp_path) in folder for folder in command_lines("workers.main"))
