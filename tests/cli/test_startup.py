"""What is printed while ranks start and when they stand: one rank as ever, several each by its number."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from fakes.worker import describe
from rich.console import Console

from configs.schema import ParallelSettings
from runtime.cli import startup
from runtime.cli.startup import StartupProgress, accounting_table, model_line

EVENTS = [
    (0, "launch", 0, 1),
    (1, "launch", 0, 1),
    (1, "launch", 1, 1),
    (1, "weights", 10, 100),
    (0, "launch", 1, 1),
    (0, "weights", 0, 0),
    (1, "weights", 100, 100),
]


def printed(monkeypatch: pytest.MonkeyPatch, parallel: ParallelSettings, events, *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    monkeypatch.setattr(startup, "ERR", console)
    with StartupProgress(parallel) as progress:
        for event in events:
            progress(*event)
    return console.file.getvalue()


def text_of(table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_one_rank_has_a_line_per_stage_without_its_number(monkeypatch):
    lines = printed(monkeypatch, ParallelSettings(), [event for event in EVENTS if event[0] == 0])
    assert lines == "launch\nweights\n"


def test_several_ranks_have_a_line_per_rank_and_stage(monkeypatch):
    lines = printed(monkeypatch, ParallelSettings(tp=2), EVENTS)
    assert lines == "rank 0: launch\nrank 1: launch\nrank 1: weights\nrank 0: weights\n"


def test_a_terminal_shows_one_bar_per_rank_with_its_present_stage(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(startup, "ERR", console)
    with StartupProgress(ParallelSettings(dp=2)) as progress:
        for event in EVENTS[:-1]:
            progress(*event)
        tasks = [(task.description, task.completed, task.total) for task in progress._bars.tasks]
        assert tasks == [("rank 0: weights", 0, None), ("rank 1: weights", 10, 100)], "an unknown total is no old one"
    assert all(task.finished for task in progress._bars.tasks)
    assert "rank 1: weights" in console.file.getvalue()


def test_the_accounting_is_told_once_and_parameters_by_rank():
    rank = describe(accounting=(("all", "5 MiB"),), parameter_bytes=3 << 20)
    assert text_of(accounting_table([rank])).count("MiB") == 1
    several = text_of(accounting_table([rank, replace(rank, rank=1, parameter_bytes=5 << 19)]))
    assert several.count("5 MiB") == 2, "the row of the accounting, and 2.5 MiB"
    assert "parameters, by rank" in several
    assert "3, 2.5 MiB" in several


def test_the_model_line_says_whose_parameters_it_counts():
    rank = describe(num_parameters=7_700_000)
    assert model_line(rank) == "fake, 7.70 M parameters, float32 on cpu, reference numerics"
