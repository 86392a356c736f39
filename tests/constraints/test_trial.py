"""A constraint that nobody has compiled is tried where it harms nobody: whatever it does there, it is refused or taken,
in bounded time, and the next one is as good as before."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from constraints.tiny_tokenizers import constraint, ids, write_tokenizer
from fakes.dangerous_constraints import DANGEROUS
from oracles.days import by_day, on_turn

from configs.load import demo_checkpoint
from workers.constraints import trial as trial_module
from workers.constraints import trial_process
from workers.constraints.compiler import Compiler, ConstraintError, mask_of
from workers.constraints.trial import TOO_MUCH, Trials
from workers.demands import MAX_PREPARING, Constraint

ABOUT: tuple[Path, int, list[int]] = (demo_checkpoint() / "tokenizer.json", 4096, [0])
GOOD = constraint("regex", "[ab]{3}c")


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials(*ABOUT)


def processes(trials: Trials) -> list[subprocess.Popen[str]]:
    return [process._process for process in trials._idle]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Every process that is started."""
    made: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        made.append(real(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(trial_module.subprocess, "Popen", popen)
    return made


@pytest.mark.parametrize("of", by_day(DANGEROUS))
def test_what_would_end_a_rank_or_keep_it_busy_is_refused_and_the_next_is_taken(trials: Trials, of: Constraint) -> None:
    with pytest.raises(ConstraintError) as caught:
        trials.try_out(of)
    assert str(caught.value) == TOO_MUCH
    assert trials.try_out(GOOD) > 0


@on_turn(0, of=2)
def test_it_is_the_processors_time_that_is_bounded_and_not_the_machines_load(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "MAX_WAIT_S", 60.0)
    with pytest.raises(ConstraintError, match="too much"):
        Trials(*ABOUT).try_out(DANGEROUS["thousands of options"])
    # By its own bounds, whichever it meets first on this machine: time on the processor, or memory. Nobody killed it.
    assert [process.returncode for process in started] in ([-signal.SIGPROF], [-signal.SIGABRT])


def test_one_process_serves_all_who_come_one_after_the_other(started: list[subprocess.Popen[str]]) -> None:
    trials = Trials(*ABOUT)
    assert started == []
    for text in ("a", "b", "ab"):
        trials.try_out(constraint("regex", text))
        with pytest.raises(ConstraintError, match="character 1: unclosed group"):
            trials.try_out(constraint("regex", f"({text}"))
    assert len(started) == 1
    assert started[0].poll() is None


@on_turn(1, of=2)
def test_many_large_ones_are_taken_one_after_the_other(started: list[subprocess.Popen[str]]) -> None:
    """Each is bounded by itself: what others took before it counts for nothing."""
    trials = Trials(*ABOUT)
    for number in range(60):
        assert trials.try_out(constraint("regex", "ab"[number % 2] * (30_000 - number))) >= trial_process.MIN_SIZE_BYTES
    assert len(started) <= 3


def test_a_process_that_keeps_too_much_is_replaced(started: list[subprocess.Popen[str]]) -> None:
    trials = Trials(*ABOUT)
    trials.try_out(GOOD)
    (first,) = started
    process = trials._idle[0]
    ask = process.ask
    process.ask = lambda *asked: ask(*asked).replace('"is_worn": false', '"is_worn": true')  # type: ignore[method-assign, union-attr]
    assert trials.try_out(GOOD) > 0
    assert first.poll() is not None
    assert trials.try_out(GOOD) > 0
    assert len(started) == 2


def test_as_many_processes_as_there_are_callers_and_no_more() -> None:
    trials = Trials(*ABOUT)
    told: list[int] = []

    def work(number: int) -> None:
        told.extend(trials.try_out(constraint("regex", f"a{{{1 + number}}}b{{{1 + i}}}")) for i in range(5))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(MAX_PREPARING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 5 * MAX_PREPARING
    assert 1 <= len(trials._idle) <= MAX_PREPARING


def test_one_that_was_killed_while_it_had_nothing_to_do_is_not_asked(trials: Trials) -> None:
    trials.try_out(GOOD)
    (old,) = processes(trials)
    old.kill()
    old.wait()
    trials.try_out(GOOD)
    assert processes(trials) != [old]


def test_one_that_does_not_answer_is_killed_in_time(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, as on a machine that has no time for it."""
    trials.try_out(GOOD)
    (old,) = processes(trials)
    monkeypatch.setattr(trial_module, "MAX_WAIT_S", 0.1)
    old.send_signal(signal.SIGSTOP)
    with pytest.raises(ConstraintError, match="too much"):
        trials.try_out(GOOD)
    assert old.returncode == -signal.SIGKILL
    monkeypatch.undo()
    trials.try_out(GOOD)


def test_processes_end_with_their_trials(started: list[subprocess.Popen[str]]) -> None:
    trials = Trials(*ABOUT)
    trials.try_out(GOOD)
    del trials
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_they_end_with_the_process_that_started_them_even_if_it_is_killed() -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from workers.constraints.trial import Trials
        from workers.demands import Constraint
        trials = Trials(Path({str(ABOUT[0])!r}), 4096, [0])
        trials.try_out(Constraint(kind="regex", text="a"))
        print(trials._idle[0]._process.pid, flush=True)
        time.sleep(100)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Opened while it lives: a pidfd tells of the end of a process that is nobody's child here.
        descriptor = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert _ends_within(descriptor, 10.0)
    finally:
        os.close(descriptor)


def _ends_within(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_they_inherit_nothing_but_their_pipes() -> None:
    """No socket of the rank: a peer would wait for the end of a link that it holds open."""
    with socket.socket() as held:
        os.set_inheritable(held.fileno(), True)
        fresh = Trials(*ABOUT)
        fresh.try_out(GOOD)
        (process,) = processes(fresh)
        open_files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
    assert all(name.startswith(("pipe:", "/dev/null")) for name in open_files), open_files


def test_no_torch_is_imported_there() -> None:
    code = "import sys, workers.constraints.trial_process; print('torch' in sys.modules, 'grpc' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]


def test_it_goes_behind_others_and_is_bounded(trials: Trials) -> None:
    trials.try_out(GOOD)
    (process,) = processes(trials)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= trial_process.NICENESS
    assert 0 < resource.prlimit(process.pid, resource.RLIMIT_AS)[0] < 2**31


def refuse_processes(*arguments: object, **options: object) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def end_at_once(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    return REAL_POPEN([sys.executable, "-c", "pass"], **options)


REAL_POPEN = subprocess.Popen


@pytest.mark.parametrize("popen", [refuse_processes, end_at_once])
def test_where_no_process_can_be_started_it_is_said(monkeypatch: pytest.MonkeyPatch, popen: Callable[..., Any]) -> None:
    trials = Trials(*ABOUT)
    monkeypatch.setattr(trial_module.subprocess, "Popen", popen)
    with pytest.raises(ConstraintError, match=r"cannot be compiled: .*start"):
        trials.try_out(GOOD)
    monkeypatch.undo()
    trials.try_out(GOOD)


def test_a_tokenizer_that_cannot_be_read_is_told_from_there_too(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        Trials(tmp_path / "tokenizer.json", 4, [0]).try_out(GOOD)


def test_a_good_one_that_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes there it takes the rank again."""
    monkeypatch.setattr(trial_process, "MAX_COMPILE_S", -1.0)
    monkeypatch.setattr(trial_process.resource, "setrlimit", lambda *limit: None)  # not of this process
    tokenizer = trial_process.load_tokenizer(*ABOUT)
    answer = json.loads(trial_process._answer(tokenizer, GOOD, 0))
    assert answer["problem"] == TOO_MUCH


def test_a_compiler_compiles_what_was_tried_and_nothing_else(tmp_path: Path) -> None:
    about = (write_tokenizer(tmp_path, ["a", "b"]), 3, [2])
    compiler = Compiler(*about, Trials(*about).try_out)
    for of in DANGEROUS.values():
        with pytest.raises(ConstraintError, match="not made ready"):
            compiler.matcher(of)
    with pytest.raises(ConstraintError) as caught:
        compiler.prepare(next(iter(DANGEROUS.values())))
    assert str(caught.value) == TOO_MUCH
    compiler.prepare(constraint("regex", "ab"))
    assert ids(mask_of(compiler.matcher(constraint("regex", "ab")), 3)) == {0}
