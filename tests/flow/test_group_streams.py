"""Whole houses of two and four ranks over real gRPC: their streams are those of one rank.

Bitwise in reference numerics. In default numerics a difference is told with its position and logit gap, and is a tie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from flow.house import House, Reply, heldout, open_house, request
from oracles import tiny
from oracles.days import by_day, on_turn

from outrider.v1 import inference_pb2
from runtime.bench.comparison import PolicyRun, first_difference
from runtime.bench.completion import Completion, rounds_of

LAYOUTS = {
    "tp2": {"parallel__tp": 2},
    "tp2_ep2": {"parallel__tp": 2, "parallel__ep": 2},
    "dp2_ep2": {"parallel__dp": 2, "parallel__ep": 2},
}
FOUR_RANKS = {"parallel__tp": 2, "parallel__dp": 2, "parallel__ep": 4}
TOKENS = 20


def requests(count: int) -> list[inference_pb2.GenerateRequest]:
    """Greedy and seeded ones in turn."""
    return [
        request(prompt, TOKENS, ignore_eos=True, **({"temperature": 1.0, "seed": 40 + i} if i % 2 else {}))
        for i, prompt in enumerate(heldout(count, 30))
    ]


def streams(house: House, gamma: int | None, count: int) -> list[list[int]]:
    house.set_policy(gamma)
    replies = house.run(house.generate_all(requests(count), count))
    drafted, accepted = (sum(getattr(r.usage, name) for r in replies) for name in ("drafted", "accepted"))
    assert (0 < accepted < drafted) if gamma else drafted == 0
    house.check_baseline()
    return [reply.ids for reply in replies]


@contextlib.contextmanager
def house_of(layout: dict[str, int], launcher: str = "process", **settings: object) -> Iterator[House]:
    with open_house(cluster__launcher=launcher, **layout, **settings) as house:
        yield house


@on_turn(1, of=2)
@pytest.mark.parametrize("layout", by_day(LAYOUTS))
def test_two_ranks_say_what_one_says(reference_house: House, layout: dict[str, int]) -> None:
    plain = streams(reference_house, None, 6)
    with house_of(layout, model__numerics="reference") as house:
        assert [streams(house, gamma, 6) for gamma in (None, 3)] == [plain, plain]


@on_turn(1, of=2)
def test_four_ranks_say_what_one_says(tmp_path: Path) -> None:
    """Peer order: with two ranks every exchange has but one other side."""
    tiny.write(tmp_path / "tiny", "base", agree=0.7)
    (tmp_path / "tiny" / "tokenizer.json").symlink_to(_tokenizer())
    found = []
    for layout in ({}, FOUR_RANKS):
        settings = {"model__path": tmp_path / "tiny", "model__numerics": "reference", "cache__max_model_len": 64}
        with house_of(layout, **settings) as house:
            found.append([_ids_of_token_requests(house, gamma) for gamma in (None, 2)])
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("layout", by_day(LAYOUTS))
def test_default_numerics_part_at_ties_only(house: House, layout: dict[str, int]) -> None:
    one = run_of(house)
    with house_of(layout, "ray") as many:
        difference = first_difference(one, run_of(many))
    # The text tells position, tokens and logit gap.
    assert difference is None or difference.is_tie("float32"), difference.explain("float32")


def run_of(house: House) -> PolicyRun:
    house.set_policy(2)
    asked = [request(prompt, 48, ignore_eos=True) for prompt in heldout(8, 60)]
    for one in asked:
        one.report_rounds = True
    replies = house.run(house.generate_all(asked, 8))
    house.check_baseline()
    return PolicyRun(policy="γ=2", completions=tuple(map(_completion, replies)))


def _completion(reply: Reply) -> Completion:
    rounds = tuple(round_ for frame in reply.frames for round_ in rounds_of(frame))
    return Completion(tokens=tuple(reply.ids), rounds=rounds, num_passes=len(rounds), sent_s=0.0, frames=())


def _ids_of_token_requests(house: House, gamma: int | None) -> list[list[int]]:
    house.set_policy(gamma)
    asked = []
    for i in range(6):
        one = request("", 12, ignore_eos=True, **({"temperature": 1.0, "seed": 9 + i} if i % 2 else {}))
        one.token_ids.ids.extend(range(3 + i, 8 + 3 * i))
        asked.append(one)
    replies = house.run(house.generate_all(asked, 6))
    house.check_baseline()
    return [reply.ids for reply in replies]


def _tokenizer() -> Path:
    from configs.load import demo_checkpoint

    return demo_checkpoint() / "tokenizer.json"
