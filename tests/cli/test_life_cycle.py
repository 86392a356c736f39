"""The life of a served process, by its signals: what it prints, what routers and clients see, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
import yaml
from cli.test_live import Server, ask, finish, is_alive, serving, start
from fakes.counting_worker import truth

from configs.schema import ServeSettings
from outrider.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from runtime.cli import console
from runtime.cli.serve import _end
from runtime.in_force import SettingsInForce

READY = ("health", "--service", "outrider.v1.InferenceService")


def write(path: Path, **blocks: dict[str, object]) -> Path:
    beside = path.with_suffix(".new")
    beside.write_text(yaml.safe_dump(blocks))
    beside.rename(path)
    return path


def line(server: Server) -> str:
    """The next one on standard output."""
    assert server.process.stdout
    return server.process.stdout.readline()


def error_line(server: Server, holding: str) -> str:
    """The next one on standard error that holds a text."""
    assert server.process.stderr
    for text in server.process.stderr:
        if holding in text:
            return text
    raise AssertionError(f"no line with {holding!r}")


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process acts on a signal itself."""
    (mask,) = (text.split()[1] for text in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in text)
    return bool(int(mask, 16) >> (number - 1) & 1)


def num_tokens(server: Server) -> int:
    """Of a request that leaves their number to the server."""
    with grpc.insecure_channel(server.address) as channel:
        frames = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
        return sum(len(frame.token_ids) for frame in frames)


def test_a_configuration_is_read_again_by_signal_and_by_change_and_the_end_is_withdrawn_in_steps(tmp_path):
    """One process for all of it: the start costs seconds."""
    path = write(tmp_path / "serve.yaml", scheduler={"default_max_tokens": 5}, server={"withdraw_s": 1000.0})
    with serving(tmp_path, "--config", str(path), "--set", "server.drain_s=1000") as server:
        assert num_tokens(server) == 5

        path.write_text("scheduler: {default_max_tokens: none of them}")
        server.process.send_signal(signal.SIGHUP)
        assert "stays as it was: " in error_line(server, "read the configuration again")
        assert num_tokens(server) == 5

        write(path, scheduler={"default_max_tokens": 7}, server={"withdraw_s": 1000.0})
        assert "scheduler.default_max_tokens in force" in error_line(server, "read the configuration again")
        assert num_tokens(server) == 7

        with grpc.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            frames = iter(
                stub.Generate(inference_pb2.GenerateRequest(text="x", stopping=types_pb2.Stopping(max_tokens=4000)))
            )
            next(frames)
            server.process.send_signal(signal.SIGTERM)
            assert line(server).startswith(
                "withdrawing: health says NOT_SERVING, and requests are taken for 1000 s more"
            )
            assert ask(server, *READY).code == console.EXIT_NO
            assert ask(server, "health").out == "SERVING\n"
            assert num_tokens(server) == 7, "routers may not know yet"
            assert ask(server, "status").code == 0
            assert ask(server, "resume").code == console.EXIT_UNAVAILABLE, "it ends all the same"

            os.kill(server.worker_pid, signal.SIGKILL)
            with pytest.raises(grpc.RpcError) as caught:
                list(frames)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # The ranks are started anew at this moment, or have just come; somebody insists.
        server.process.send_signal(signal.SIGTERM)
        ended = finish(server.process)
    assert ended.code == 0
    assert "Traceback" not in ended.err
    assert not is_alive(server.worker_pid)


def test_a_stream_that_outlasts_the_drain_is_told_and_the_process_ends_well(tmp_path):
    for_ever = ("--set", "server.drain_s=0.2", "--set", "cluster.step_timeout_s=1000")
    with (
        serving(tmp_path, "--served-name", "stick", *for_ever) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        frames = iter(
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="x"))
        )
        assert next(frames).token_ids == [truth(0)]
        server.process.send_signal(signal.SIGTERM)
        assert line(server).startswith("draining: streams have 0.2 s to finish, 1 are open; ")
        with pytest.raises(grpc.RpcError) as caught:
            next(frames)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "this server has stopped; ask another one",
        )
        ended = finish(server.process)
    assert (ended.code, ended.out) == (0, "stopped\n")
    assert not is_alive(server.worker_pid)


def test_a_stop_signal_before_anything_is_loaded_ends_well(tmp_path):
    process = start("serve", "--launcher", "process", "--port", "0", "--served-name", "hang", cwd=tmp_path)
    assert process.stderr
    for text in process.stderr:
        if text.startswith("launch"):
            break
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, "Traceback" in ended.err) == (0, False)


def test_a_hang_up_before_anything_is_loaded_ends_nothing(tmp_path):
    process = start("serve", "--launcher", "process", "--port", "0", "--served-name", "hang", cwd=tmp_path)
    while not catches(process.pid, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.stderr
    assert any(text.startswith("launch") for text in process.stderr), "it went on"
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 0


def test_a_drain_goes_by_the_limit_that_is_in_force_when_it_begins():
    """The configuration may change while routers are still to hear of the stop."""

    class Stopping:
        settings = SettingsInForce(ServeSettings())
        num_calls = 0
        drains: ClassVar[list[float]] = []

        async def withdraw(self):
            now = self.settings.now
            self.settings.replace(now.model_copy(update={"server": now.server.model_copy(update={"drain_s": 77.0})}))

        async def stop(self, drain_s):
            self.drains.append(drain_s)

    async def scenario():
        await _end(Stopping(), asyncio.Event())

    asyncio.run(scenario())
    assert Stopping.drains == [77.0]


def test_whoever_reads_its_output_may_leave_and_streams_still_finish(tmp_path):
    """As `outrider serve | tee` has it, where Ctrl-C ends tee first."""
    with (
        serving(tmp_path, "--set", "server.drain_s=1000") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        frames = iter(
            stub.Generate(inference_pb2.GenerateRequest(text="x", stopping=types_pb2.Stopping(max_tokens=1000)))
        )
        num_before = len(next(frames).token_ids)
        assert server.process.stdout
        server.process.stdout.close()
        server.process.send_signal(signal.SIGTERM)
        assert num_before + sum(len(frame.token_ids) for frame in frames) == 1000
        ended = finish(server.process)
    assert ended.code == 0
    assert "Traceback" not in ended.err
