"""What nobody has compiled yet is compiled in another process first: it may take all that it likes, or that process's
life. Knows no tokens and no steps.

    rank ── {"kind", "text"} ──→ workers.constraints.trial_process
         ←── {"problem", "size_bytes", "is_worn"} ──    or its end

A process is started when one is wanted, serves one constraint after the other, as many at a time as there are callers,
and ends with whoever started it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from workers.constraints.compiler import ConstraintError
from workers.demands import Constraint

log = logging.getLogger(__name__)

TOO_MUCH = "it takes too much time, memory or depth to compile; simplify it"

MAX_START_S = 10.0
"""Until a process has read the tokenizer; half a second for most."""

MAX_WAIT_S = 8.0
"""For its answer. It ends by itself after a part of that on a processor; on a busy machine it waits for one."""


class Trials:
    """Of one rank. May be asked from several threads."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._about = json.dumps([str(tokenizer_file), vocab_size, list(eos_token_ids)])
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def try_out(self, constraint: Constraint) -> int:
        """Returns about how many bytes it takes when compiled. Raises ConstraintError with what is wrong with it, or
        where it takes too much, or where no process can be started."""
        process = self._take() or self._start()
        told = process.ask(json.dumps(asdict(constraint)), MAX_WAIT_S)
        if told is None:
            log.warning(
                "a %s constraint of %d characters took too much to compile", constraint.kind, len(constraint.text)
            )
            raise ConstraintError(TOO_MUCH)
        answer = json.loads(told)
        if answer["is_worn"]:
            process.end()
        elif process.lives:
            with self._lock:
                self._idle.append(process)
        if answer["problem"]:
            raise ConstraintError(answer["problem"])
        return int(answer["size_bytes"])

    def _take(self) -> _Process | None:
        """One that lives and has nothing to do."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if process.lives:
                return process

    def _start(self) -> _Process:
        try:
            process = _Process()
            told = process.ask(self._about, MAX_START_S)
        except (OSError, RuntimeError) as error:  # no more processes, or threads, than the machine lets us have
            log.error("no process for constraints can be started: %s", error)
            raise ConstraintError(f"it cannot be compiled: no process for that can be started ({error})") from None
        if told is None:
            raise ConstraintError(f"it cannot be compiled: the process for that did not start in {MAX_START_S:g} s")
        if problem := json.loads(told)["problem"]:
            process.end()
            raise ConstraintError(problem)
        return process


class _Process:
    """Ends when it is let go of."""

    def __init__(self) -> None:
        # Pipes that only the two have: when one ends the other one hears it. Modules are found where ours were.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.constraints.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self.end = weakref.finalize(self, _end, self._process)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: str, max_wait_s: float) -> str | None:
        """What it answers; None, and its end, where it does not. Raises RuntimeError where no thread can be started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        watch = threading.Timer(max_wait_s, give_up)
        watch.daemon = True
        try:
            watch.start()
        except RuntimeError:
            self.end()
            raise
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            told = self._process.stdout.readline()
        except OSError:
            told = ""
        finally:
            watch.cancel()
            watch.join()
        answered = told.endswith("\n")
        if not answered or late.is_set():
            self.end()
        return told if answered else None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # what was not written yet; nobody reads it any more
            continue
