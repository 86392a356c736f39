"""What a rank would take, reckoned without loading it, is what a loaded one takes; and processes meet."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from configs.load import demo_checkpoint, load_settings
from parallel.rendezvous import c10d
from runtime.cluster.supervisor import worker_settings
from runtime.doctor.child import ask_child
from workers import checkup
from workers.loading import load_rank


def settings_with(**changes: Any) -> Any:
    return worker_settings(load_settings(None, {key.replace("__", "."): value for key, value in changes.items()}), 0)


def test_the_reckoning_agrees_with_a_rank_that_is_loaded() -> None:
    settings = settings_with(cache__memory_mib=64)
    found = checkup.checkpoint(settings)
    loaded = load_rank(settings, lambda stage, done, total: None).description
    assert found["problem"] == ""
    assert found["parameter_bytes"] == [loaded.parameter_bytes]
    assert (found["checkpoint"], found["machine"], found["torch"]) == (
        loaded.checkpoint,
        loaded.machine,
        loaded.torch_version,
    )
    assert (found["num_slots"], found["gamma_max"], found["dtype"]) == (
        loaded.num_slots,
        loaded.gamma_max,
        loaded.dtype,
    )
    pages = sum((count + 1) * size for count, size in zip(loaded.num_pages, loaded.page_bytes, strict=True))
    assert found["state_bytes"] == pages + (loaded.num_slots + 1) * loaded.slot_bytes + loaded.record_bytes


@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 1, 1), (1, 2, 2)])
def test_every_rank_of_a_layout_is_looked_at(tp: int, dp: int, ep: int) -> None:
    found = checkup.checkpoint(settings_with(parallel__tp=tp, parallel__dp=dp, parallel__ep=ep))
    assert found["problem"] == ""
    assert len(found["parameter_bytes"]) == tp * dp
    whole = checkup.checkpoint(settings_with())["parameter_bytes"][0]
    assert whole / 2 < math.fsum(found["parameter_bytes"]) / (tp * dp) < whole


def test_problems_come_in_the_words_of_the_loader(tmp_path: Path) -> None:
    assert "raise cache.memory_mib" in checkup.checkpoint(settings_with(cache__memory_mib=1))["problem"]
    source = demo_checkpoint()
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    problem = checkup.checkpoint(settings_with(model__path=tmp_path))["problem"]
    assert "misshapen" in problem
    assert "model.norm.weight" in problem


def test_devices_are_told_as_json() -> None:
    found = json.loads(json.dumps(checkup.devices()))
    assert found["gloo"] is True
    assert isinstance(found["gpus"], list)


def test_ranks_meet_over_gloo_and_add_up() -> None:
    """In threads here; in processes, which import torch each, in the full run."""
    store = c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(checkup.join_collectives, "gloo", 1, 2, address, 20.0)
        assert checkup._add_up(store, "gloo", 0, 2, 20.0) == 3
        assert joined.result() == {}


@pytest.mark.full
def test_two_processes_meet_over_gloo_and_add_up() -> None:
    found = ask_child("workers.checkup", "collectives", "gloo", "--size=2", "--timeout-s=60", timeout_s=120)
    assert found == {"problem": ""}


def test_who_does_not_come_is_a_problem_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.sys, "executable", "/bin/true")
    found = checkup.collectives("gloo", 2, 0.5)
    assert found["problem"]
