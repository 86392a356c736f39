"""The operator's commands as processes of their own: in pipes, on a terminal, and under Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path

from fakes.front import in_loop, request_for, serving

from runtime.cli import console

ROOT = Path(__file__).parents[2]
OUTRIDER = [sys.executable, "-c", "from runtime.cli.main import main; main()"]
PIPE = asyncio.subprocess.PIPE


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto"))
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    return {**plain, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "40"}


@in_loop
async def test_a_reader_that_leaves_ends_the_command_without_a_word():
    async with serving() as front:
        call = ("top", "--interval-s", "0.1", "--count", "1000", "--address", front.address)
        script = ' "$@" | head -n 1'
        process = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", script, "bash", *OUTRIDER, *call),
            env=environment(),
            stdout=PIPE,
            stderr=PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0
    assert out.decode().strip() == front.address
    assert err == b""


@in_loop
async def test_piped_output_has_no_colours_and_no_lines_cut_to_the_terminals_width():
    async with serving() as front:
        call = ("status", "--address", front.address)
        process = await asyncio.create_subprocess_exec(*OUTRIDER, *call, env=environment(), stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b" not in out
    assert max(map(len, out.decode().splitlines())) > 90
    assert "7.70 M parameters, float32, default numerics" in out.decode()


@in_loop
async def test_ctrl_c_ends_the_waiting_and_leaves_the_server_draining():
    async with serving(steps_by_itself=False) as front:
        stream = front.client.call(request_for())
        await front.engine.until(lambda: len(front.engine.live) == 1)
        call = ("drain", "--address", front.address)
        process = await asyncio.create_subprocess_exec(*OUTRIDER, *call, env=environment(), stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        said = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert not front.engine.is_serving
        assert len(front.engine.live) == 1
        stream.cancel()
    assert said == b"draining: 0 running, 1 waiting\n"
    assert process.returncode == console.EXIT_INTERRUPTED
    assert err == b"not waiting any longer; the servers drain on until `outrider resume`\n"


@in_loop
async def test_on_a_terminal_top_draws_until_ctrl_c_which_is_its_ordinary_end():
    async with serving() as front:
        terminal, end = pty.openpty()
        call = ("top", "--interval-s", "0.1", "--address", front.address)
        process = await asyncio.create_subprocess_exec(*OUTRIDER, *call, env=environment(), stdout=end, stderr=PIPE)
        os.close(end)
        drawn = await asyncio.to_thread(read_until, terminal, b"restarts", 3)
        process.send_signal(signal.SIGINT)
        rest = await asyncio.to_thread(read_until, terminal, b"\x1b[?25h", 1)
        _, err = await process.communicate()
        os.close(terminal)
    assert drawn.count(b"tokens/s") >= 3, "drawn again and again"
    assert b"\x1b[" in drawn
    assert b"\x1b[?25h" in rest, "the cursor is back"
    assert (process.returncode, err) == (0, b"")


@in_loop
async def test_ctrl_c_is_the_ordinary_end_of_a_watch_and_its_lines_come_as_they_happen():
    async with serving() as front:
        call = ("policy", "watch", "--json", "--address", front.address)
        process = await asyncio.create_subprocess_exec(*OUTRIDER, *call, env=environment(), stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        revisions = []
        for gamma in range(3):
            line = json.loads(await process.stdout.readline())
            revisions.append(line["answer"]["revision"])
            await front.client.set_policy(gamma)
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        await front.engine.until(lambda: front.engine.policies.num_listeners == 0)
    assert revisions == ["1", "2", "3"]
    assert (process.returncode, out, err) == (0, b"", b"")


def read_until(terminal: int, word: bytes, times: int) -> bytes:
    """What is drawn until the word was, so many times, or the drawer has ended."""
    drawn = b""
    while drawn.count(word) < times:
        try:
            drawn += os.read(terminal, 4096)
        except OSError:  # nobody holds the other end
            break
    return drawn
