"""What a rank says it runs on, and what its profile is known by."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
from oracles.ranks import load_worker

from workers import machine
from workers.machine import name_machine

CPU = torch.device("cpu")


def test_the_cpu_is_named_with_the_threads_of_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Fast CPU @ 2.60GHz\nprocessor\t: 1\nmodel name\t: B\n"
    )
    monkeypatch.setattr(machine, "_CPU_INFO", info)
    assert name_machine(CPU, 1) == "Fast CPU @ 2.60GHz, 1 thread"
    assert name_machine(CPU, 4) == "Fast CPU @ 2.60GHz, 4 threads"


@pytest.mark.parametrize("text", [None, "", "processor\t: 0\nmodel name\t:\n", "Processor : AArch64\n"])
def test_where_linux_tells_no_name_the_architecture_stands_in(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    monkeypatch.setattr(machine, "_CPU_INFO", info)
    assert name_machine(CPU, 2) == f"{platform.machine()}, 2 threads"


def test_a_loaded_rank_says_what_its_profile_depends_on() -> None:
    worker = load_worker(max_running=2, max_model_len=64)
    assert worker.description.machine == name_machine(CPU, 1)
    assert worker.description.torch_version == torch.__version__
    assert re.fullmatch("[0-9a-f]{64}", worker.description.checkpoint)
    assert worker.description.row_multiple == worker.rank.ops.row_multiple
