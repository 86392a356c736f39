"""What only other processes can find out, asked of them: `python -m MODULE ...`, one JSON object on standard output.
Knows no check."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from runtime.cluster.launcher import source_roots


class ChildFailed(Exception):
    """It said nothing that can be used; the text is its last line, or that it took too long."""


def ask_child(
    *command: str, timeout_s: float, given: str = "", environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """command: module and arguments. given: its standard input. What it starts ends with it. Raises ChildFailed."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_our_packages(), **(environment or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(given, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"nothing came of it within {timeout_s:g} s") from None
    finally:
        _end(process)
    try:
        found = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in (err or out).splitlines() if line.strip()]
        raise ChildFailed(lines[-1].strip() if lines else f"it ended with status {process.returncode}") from None
    assert isinstance(found, dict)
    return found


def _our_packages() -> dict[str, str]:
    path = [*source_roots(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)} if path else {}


def _end(process: subprocess.Popen[str]) -> None:
    """With the processes that it started, which share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            stream.close()
