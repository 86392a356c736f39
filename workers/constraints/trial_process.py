"""The process that constraints are tried in: `python -m workers.constraints.trial_process`, started by `trial`.

Reads lines and answers each: about the tokenizer first, then constraints. Whatever one of them does, it does here: the
processor's time, memory and stack that it may take are bounded, and going beyond ends the process. No torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer

from workers.constraints.compiler import ConstraintError, compile_matcher, load_tokenizer
from workers.constraints.trial import TOO_MUCH
from workers.demands import Constraint

MAX_COMPILE_S = 1.0
"""On a processor. The rank takes as long again, beside its steps."""

MAX_CPU_S = 2.0
"""With what is told of a fault, and where. Beyond it the kernel ends the process."""

MAX_MEMORY_BYTES = 512 * 2**20
"""For one constraint."""

MAX_KEPT_BYTES = 128 * 2**20
"""That the process may not have given back after some; then another one takes its place."""

STACK_BYTES = 2**20
"""A thread of a rank has at least twice that: what comes to its end there does so here before."""

NICENESS = 10
"""Steps go first, on a machine that has nothing to spare."""

MIN_SIZE_BYTES = 100_000
"""Of a matcher, whatever the memory that it was found room in had been before."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the rank, and this ends with it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    file, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    try:
        tokenizer = load_tokenizer(Path(file), vocab_size, eos_token_ids)
    except ConstraintError as error:
        print(json.dumps({"problem": str(error)}), file=answers, flush=True)
        return
    _bound()
    least_bytes = _memory_bytes()[1]
    print(json.dumps({"problem": ""}), file=answers, flush=True)
    for line in sys.stdin:
        # Beside this thread, which hears of the rank's end at any time.
        asked = Constraint(**json.loads(line))
        told = partial(_answer, tokenizer, asked, least_bytes)
        threading.Thread(target=lambda told=told: print(told(), file=answers, flush=True)).start()
    os._exit(0)


def _bound() -> None:
    """From here on. What a crash says of itself is for nobody: who asked hears of it."""
    os.nice(NICENESS)
    most_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]  # what threads have of it if nobody says otherwise
    threading.stack_size(STACK_BYTES if most_bytes == resource.RLIM_INFINITY else min(STACK_BYTES, most_bytes // 2))
    threading.excepthook = lambda told: os._exit(1)  # a panic of the compiler
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _answer(tokenizer: LLTokenizer, constraint: Constraint, least_bytes: int) -> str:
    """least_bytes: what the process had before the first one."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    reserved_bytes, before_bytes = _memory_bytes()
    most_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (reserved_bytes + MAX_MEMORY_BYTES, most_bytes))
    began_s = time.process_time()
    problem, size_bytes = "", 0
    try:
        matcher = compile_matcher(tokenizer, constraint)
        size_bytes = max(MIN_SIZE_BYTES, _memory_bytes()[1] - before_bytes)
        del matcher
    except ConstraintError as error:
        problem = str(error)
    except MemoryError:
        problem = TOO_MUCH
    except Exception as error:  # nobody else to tell it to; the next constraint is as good as before
        problem = f"it cannot be compiled: {type(error).__name__}: {error}"
    if not problem and time.process_time() - began_s > MAX_COMPILE_S:
        problem = TOO_MUCH
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    is_worn = _memory_bytes()[1] - least_bytes > MAX_KEPT_BYTES
    return json.dumps({"problem": problem, "size_bytes": size_bytes, "is_worn": is_worn})


def _memory_bytes() -> tuple[int, int]:
    """Reserved, and in use."""
    reserved, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(reserved) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()
