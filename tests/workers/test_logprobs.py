"""Log-probabilities that a rank tells: transformers' own, in the same bits whatever is drafted and wherever cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import tiny
from oracles.days import by_day
from oracles.driver import Driver, Live
from oracles.ranks import load_worker

from workers.demands import Constraint, Shaping, TokenLogprob
from workers.logprobs import BLOCK, likeliest, score
from workers.probe import trace_sequences
from workers.step import Worker

PROMPT = [5, 9, 200, 31, 31, 7, 120, 44, 8]
LONG = [(37 * i + i * i) % 250 + 1 for i in range(BLOCK + 9)]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint, about half of whose drafts stand, and transformers' model of it."""

    path: Path
    lm: Any

    @torch.no_grad()
    def log_laws(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the token behind each, [T, V]."""
        return self.lm(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("logprobs") / "base"
    lm, _ = tiny.write(path, "base", agree=0.7)
    return Tiny(path, lm)


@pytest.fixture(scope="module")
def worker(made: Tiny) -> Worker:
    return load_worker(made.path, numerics="reference", max_running=6, max_model_len=160)


@dataclass
class Told:
    """What a sequence was told of."""

    output: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)


def step(driver: Driver, told: dict[int, Told], members: Sequence[Live] | None = None, **how: Any) -> None:
    """Steps, and takes in what is told; nothing is told of those who want nothing."""
    members = driver.unfinished if members is None else members
    result = driver.step(members, **how)
    registers = driver.worker.rank.registers
    for column, live in enumerate(members):
        told.setdefault(live.epoch, Told())
        for kind, found, wanted in (
            ("output", result.logprobs, registers.num_logprobs[live.slot]),
            ("prompt", result.prompt_logprobs, registers.num_prompt_logprobs[live.slot]),
        ):
            some = found[column] if found else ()
            assert wanted is not None or not some
            assert all(len(each.top) == wanted for each in some)
            assert kind == "prompt" or wanted is None or len(some) == len(result.emitted[column])
            getattr(told[live.epoch], kind).extend(some)


def run(driver: Driver, **how: Any) -> dict[int, Told]:
    told: dict[int, Told] = {}
    while driver.unfinished:
        step(driver, told, **how)
    return told


def agrees(found: Sequence[TokenLogprob], tokens: Sequence[int], laws_TV: torch.Tensor) -> None:
    assert [each.token for each in found] == list(tokens)
    for each, law_V in zip(found, laws_TV, strict=True):
        assert each.logprob == pytest.approx(float(law_V[each.token]), abs=1e-4)
        values = [logprob for _, logprob in each.top]
        assert values == pytest.approx(law_V.topk(len(values)).values.tolist(), abs=1e-4)
        assert values == pytest.approx([float(law_V[token]) for token, _ in each.top], abs=1e-4)
        assert values == sorted(values, reverse=True)
        assert all(value == torch.tensor(value).item() for value in values), "exact in float32"


SEQUENCES: list[dict[str, Any]] = [
    {"prompt": PROMPT, "num_logprobs": 3, "num_prompt_logprobs": 2},
    {"prompt": LONG, "num_logprobs": 0, "temperature": 0.8, "top_k": 20, "seed": 3, "num_prompt_logprobs": 0},
    {"prompt": [300], "temperature": 1.0, "seed": 4, "num_prompt_logprobs": 4},
    {
        "prompt": PROMPT[:4],
        "num_logprobs": 5,
        "temperature": 1.0,
        "seed": 5,
        "shaping": Shaping(bias=((7, 3.0), (9, -2.0)), frequency=0.5, repetition=1.3),
    },
    {"prompt": PROMPT[3:], "temperature": 1.0, "coupled": False, "seed": 6},
]
"""All ways of wanting and not wanting; all but the last say the same whatever is drafted."""


def add_all(driver: Driver, chosen: Sequence[dict[str, Any]] = SEQUENCES) -> list[Live]:
    return [driver.add(**{"max_tokens": 15 + i, **fields}) for i, fields in enumerate(chosen)]


@pytest.mark.parametrize("gamma", by_day({str(gamma): gamma for gamma in (0, 1, 3)}, count=2))
def test_they_are_those_of_the_models_own_logits_before_any_processing(made: Tiny, gamma: int) -> None:
    """In default numerics, drawn drafts and all."""
    driver = Driver(load_worker(made.path, max_running=6, max_model_len=160))
    lives = add_all(driver)
    told = run(driver, gamma=gamma, chunks={live.slot: 50 for live in lives})
    for live, fields in zip(lives, SEQUENCES, strict=True):
        laws_TV = made.log_laws(live.prompt + live.out)
        found, first = told[live.epoch], len(live.prompt) - 1
        if "num_logprobs" in fields:
            agrees(found.output, live.out, laws_TV[first:-1])
        if "num_prompt_logprobs" in fields:
            agrees(found.prompt, live.prompt[1:], laws_TV[:first])
    if gamma:
        assert any(accepted for live in lives for _, accepted in live.results)


@pytest.fixture(scope="module")
def plain(worker: Worker) -> list[tuple[list[int], Told]]:
    """Streams and what was told of them, without drafts and with whole prompts."""
    driver = Driver(worker)
    lives = add_all(driver, SEQUENCES[:-1])
    told = run(driver)
    return [(live.out, told[live.epoch]) for live in lives]


@pytest.mark.parametrize("gamma", by_day({str(gamma): gamma for gamma in (1, 3, 8)}))
def test_no_bit_depends_on_drafts_chunks_budgets_or_company(
    worker: Worker, plain: list[tuple[list[int], Told]], gamma: int
) -> None:
    rng, driver = random.Random(gamma), Driver(worker, seed=gamma)
    lives = add_all(driver, SEQUENCES[:-1])
    told: dict[int, Told] = {}
    while driver.unfinished:
        members = rng.sample(driver.unfinished, rng.randint(1, len(driver.unfinished)))
        chunks = {live.slot: rng.randint(1, 40) for live in members}
        budget, slack = rng.choice((0, 2, 100)), rng.choice((0, 3))
        step(driver, told, members, gamma=gamma, chunks=chunks, budget=budget, slack=slack)
    assert [(live.out, told[live.epoch]) for live in lives] == plain
    assert any(accepted for live in lives for _, accepted in live.results)


def forge(driver: Driver, streams: dict[int, list[int]], gamma: int, *, right: bool) -> None:
    """Replaces the drafts that wait by the tokens to come, or by others."""
    for live in driver.unfinished:
        if not live.waiting:
            continue
        for j in range(gamma):
            position = len(live.out) + j
            token = streams[live.epoch][position] if position < len(streams[live.epoch]) else 0
            cell = len(live.prompt) + position
            driver.worker.rank.pools.token_log[live.slot, cell] = token if right else (token + 1) % 250


@pytest.mark.parametrize("right", [True, False], ids=["all stand", "all fall"])
@pytest.mark.parametrize("gamma", by_day({"1": 1, "3": 3}))
def test_drafts_that_all_stand_and_drafts_that_all_fall(
    worker: Worker, plain: list[tuple[list[int], Told]], gamma: int, right: bool
) -> None:
    driver = Driver(worker, seed=9)
    lives = add_all(driver, SEQUENCES[:-1])
    streams = {live.epoch: out for live, (out, _) in zip(lives, plain, strict=True)}
    told: dict[int, Told] = {}
    while driver.unfinished:
        forge(driver, streams, gamma, right=right)
        step(driver, told, gamma=gamma)
    assert [(live.out, told[live.epoch]) for live in lives] == plain
    for live in lives:
        assert all(accepted == right * drafts for drafts, accepted in live.results[1:-1])


@pytest.mark.parametrize("position", by_day({str(position): position for position in range(5)}, count=2))
def test_a_stop_token_and_the_limit_cut_them_where_they_cut_the_run(
    worker: Worker, plain: list[tuple[list[int], Told]], position: int
) -> None:
    out, told = plain[0]
    count = out.index(out[position]) + 1
    for end in ({"stop_token_ids": (out[position],)}, {"max_tokens": count}):
        driver = Driver(worker)
        (live,) = add_all(driver, [{**SEQUENCES[0], **end}])
        streams = {live.epoch: out}
        cut: dict[int, Told] = {}
        while driver.unfinished:
            forge(driver, streams, 8, right=True)
            step(driver, cut, gamma=8)
        assert (live.out, cut[live.epoch]) == (out[:count], Told(told.output[:count], told.prompt))


@pytest.mark.parametrize("gamma", [0, 3])
def test_the_end_of_a_constraint_cuts_them_and_its_masks_leave_them_alone(gamma: int) -> None:
    choice = Constraint(kind="choice", text='["nothing of the kind", "the end of it"]')
    driver = Driver(load_worker(max_running=1, max_model_len=64))
    (live,) = add_all(driver, [{"prompt": PROMPT, "max_tokens": 40, "num_logprobs": 1, "constraint": choice}])
    told = run(driver, gamma=gamma)
    assert len(live.out) < 40
    rank = driver.worker.rank
    (trace,) = trace_sequences(rank.model, rank.ops, [live.prompt + live.out], lambda i: 99)
    agrees(told[live.epoch].output, live.out, trace.logits[len(PROMPT) - 1 : -1].double().log_softmax(-1))


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_of_a_prompt_they_are_the_same_wherever_it_is_cut(
    worker: Worker, plain: list[tuple[list[int], Told]], chunk: int
) -> None:
    driver = Driver(worker)
    busy = driver.add([60, 61], 30)
    for _ in range(2):
        driver.step(gamma=3)
    (live,) = add_all(driver, SEQUENCES[:1])
    told: dict[int, Told] = {}
    while not live.decoding:
        num_before = len(told[live.epoch].prompt) if told else 0
        step(driver, told, [busy, live], gamma=3, chunks={live.slot: chunk})
        num_new = len(told[live.epoch].prompt) - num_before
        assert num_new == (chunk if not live.decoding else (len(PROMPT) - 1) % chunk)
    assert told[live.epoch].prompt == plain[0][1].prompt
    assert len(told[live.epoch].prompt) == len(PROMPT) - 1


def test_a_prompt_longer_than_a_block_of_rows_in_one_pass_and_in_two(
    worker: Worker, plain: list[tuple[list[int], Told]]
) -> None:
    fields, expected = SEQUENCES[1], plain[1][1].prompt
    assert len(expected) == len(LONG) - 1 > BLOCK
    for chunk in (BLOCK - 1, BLOCK, BLOCK + 1):
        driver = Driver(worker)
        (live,) = add_all(driver, [{**fields, "max_tokens": 1}])
        told = run(driver, chunks={live.slot: chunk})
        assert told[live.epoch].prompt == expected


def test_a_prompt_of_one_token_has_none(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add([7], 3, num_prompt_logprobs=2)
    assert driver.step().prompt_logprobs == ()


def test_where_nobody_wants_any_there_are_no_columns_and_whoever_had_the_slot_before_does_not_count(
    worker: Worker,
) -> None:
    driver = Driver(worker)
    live = driver.add([7, 8], 3, num_logprobs=1, num_prompt_logprobs=1)
    result = driver.step(gamma=2)
    assert (len(result.logprobs[0]), len(result.prompt_logprobs[0])) == (1, 1)
    driver.remove(live)
    for _ in range(6):  # all slots
        driver.add([9, 10], 3)
    result = driver.step(gamma=2)
    assert (result.logprobs, result.prompt_logprobs) == ((), ())


@pytest.fixture
def gathers(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every gathering of whole rows of logits."""
    rows: list[int] = []
    vocabulary = worker.rank.model.vocabulary
    whole: Callable[[torch.Tensor], torch.Tensor | None] = vocabulary.gather

    def gather(logits_RP: torch.Tensor) -> torch.Tensor | None:
        rows.append(len(logits_RP))
        return whole(logits_RP)

    monkeypatch.setattr(vocabulary, "gather", gather)
    return rows


def test_greedy_batches_gather_whole_rows_only_where_they_are_wanted(worker: Worker, gathers: list[int]) -> None:
    """And then the target's: drafts are found as before."""
    driver = Driver(worker)
    live = driver.add(PROMPT, 9)
    driver.step(gamma=3)
    driver.step(gamma=3)
    assert gathers == []
    driver.remove(live)
    live = driver.add(PROMPT, 9, num_logprobs=1)
    driver.step(gamma=3, chunks={live.slot: 4})
    driver.step(gamma=3)
    driver.step(gamma=3)
    assert gathers == [32, 32], "one for each pass that sampled, padded"


def test_no_more_tokens_are_told_than_there_are(made: Tiny) -> None:
    driver = Driver(load_worker(made.path, max_running=1, max_model_len=32))
    driver.add([7, 8], 1, num_logprobs=10**6)
    ((one,),) = driver.step().logprobs
    assert sorted(token for token, _ in one.top) == list(range(driver.worker.description.vocab_size))


def in_order(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 300])
def test_the_likeliest_come_by_logit_and_then_by_id(vocab_size: int) -> None:
    logits_RV = torch.randint(-3, 3, (40, vocab_size), generator=torch.Generator().manual_seed(1)).float()
    logits_RV[:3] = 2.0
    logits_RV[3, ::2] = float("-inf")
    for count in sorted({0, 1, min(5, vocab_size), vocab_size}):
        expected = [in_order(row)[:count] for row in logits_RV.tolist()]
        assert likeliest(logits_RV, count).tolist() == expected


@pytest.mark.parametrize("vocab_size", [3, 251, 4097])
def test_rows_do_not_depend_on_each_other_or_on_their_place(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits_RV = 9 * torch.randn(BLOCK, vocab_size, generator=generator)
    token_R = torch.randint(vocab_size, (BLOCK,), generator=generator)
    together = score(logits_RV, token_R, 3)
    for rows in ([0], [BLOCK - 1], [5, 2], list(range(7)), list(range(BLOCK - 1, 20, -1))):
        assert torch.equal(score(logits_RV[rows], token_R[rows], 3), together[rows])
    fewer = score(logits_RV, token_R, 1)
    assert torch.equal(fewer[:, :3], together[:, :3])
