"""Other checkpoints and number formats behind the same front: bfloat16, no drafter, sharded files, small pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import pytest
from flow.house import heldout, open_house, request
from oracles import tiny

from configs.load import demo_checkpoint


def copy_of_demo(directory: Path) -> Path:
    """The bundled checkpoint without its recipe, free to be changed."""
    copy = directory / "model"
    shutil.copytree(demo_checkpoint(), copy, ignore=shutil.ignore_patterns("recipe", "heldout.jsonl"))
    return copy


def test_bfloat16_serves_and_speculates() -> None:
    with open_house(model__dtype="bfloat16") as house:
        house.set_policy(4)
        replies = house.run(
            house.generate_all(
                [request(p, 24, ignore_eos=True, temperature=t) for p in heldout(4) for t in (0.0, 1.0)], 8
            )
        )
        assert all(len(r.ids) == 24 for r in replies)
        assert 0 < sum(r.usage.accepted for r in replies) < sum(r.usage.drafted for r in replies)
        house.check_baseline()


def test_a_checkpoint_without_a_drafter_serves_plain_decoding(tmp_path: Path) -> None:
    path = copy_of_demo(tmp_path)
    tiny.drop_mtp(path)
    with open_house() as house:
        house.set_policy(None)
        expected = house.run(house.generate(request("def f(", 16, ignore_eos=True))).ids
    with open_house(model__path=path) as house:
        reply = house.run(house.generate(request("def f(", 16, ignore_eos=True)))
        assert reply.ids == expected
        assert reply.usage.drafted == 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            house.set_policy(2)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_sharded_files_and_small_pages_give_the_same_tokens(tmp_path: Path) -> None:
    path = copy_of_demo(tmp_path)
    tiny.shard(path, 3)
    assert len(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]) > 3
    outs = []
    for settings in ({}, {"model__path": path, "cache__page_size": 1, "scheduler__max_step_tokens": 13}):
        with open_house(**settings) as house:
            replies = house.run(house.generate_all([request(p, 20, ignore_eos=True) for p in heldout(3, 20)], 3))
            outs.append([r.ids for r in replies])
            house.check_baseline()
    assert outs[0] == outs[1]
