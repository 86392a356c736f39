"""A rank's step: the same streams whatever is drafted, chunked, admitted or switched; runs end where they must."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable

import pytest
import torch
from oracles import tiny
from oracles.days import by_day
from oracles.driver import Driver, Live
from oracles.ranks import load_worker
from tokenizers import Tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from configs.load import demo_checkpoint
from configs.schema import CacheSettings
from state.accounting import plan_memory
from workers.demands import Typical
from workers.draft.confidence import SCORE_LIMIT
from workers.plan import StalePlan
from workers.step import Worker

GAMMAS = (0, 1, 2, 4, 8)


@pytest.fixture(scope="module")
def worker() -> Worker:
    return load_worker(numerics="reference", max_running=8, max_model_len=160)


@functools.cache
def corpus() -> list[int]:
    text = "".join(
        json.loads(line)["prompt"] for line in (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()[:60]
    )
    return Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json")).encode(text).ids


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Pieces of held-out text, a single token among the lengths."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(corpus()) - 40) for _ in range(count)]
    return [corpus()[start : start + rng.choice((1, 2, 5, 17, 33, 40))] for start in starts]


def streams(worker: Worker, drive: Callable[[Driver], None], **fields: object) -> list[list[int]]:
    driver = Driver(worker, seed=5)
    for i, prompt in enumerate(prompts(4)):
        driver.add(prompt, 24 + i, **{"seed": 90 + i, **fields})  # type: ignore[arg-type]
    live = list(driver.live)
    drive(driver)
    for sequence in live:
        driver.remove(sequence)
    driver.step([])
    assert worker.check_integrity() == []
    return [sequence.out for sequence in live]


@pytest.mark.parametrize(
    "fields",
    by_day({"greedy": {}, "coupled": {"temperature": 1.0}, "top_k": {"temperature": 0.7, "top_k": 5}}),
)
def test_speculation_changes_no_token(worker: Worker, fields: dict[str, object]) -> None:
    plain = streams(worker, lambda d: d.run(0), **fields)
    for gamma in GAMMAS[1:]:
        assert streams(worker, lambda d, gamma=gamma: d.run(gamma), **fields) == plain  # type: ignore[misc]


def test_policy_chunks_budgets_and_company_change_no_token(worker: Worker) -> None:
    plain = streams(worker, lambda d: d.run(0), temperature=0.9)
    accepted = 0

    def erratic(driver: Driver) -> None:
        nonlocal accepted
        rng = random.Random(11)
        while waiting := [live for live in driver.live if not live.finished]:
            members = rng.sample(waiting, rng.randint(1, len(waiting)))
            chunks = {live.slot: rng.randint(1, 20) for live in members}
            gamma = rng.choice(GAMMAS)
            budget = rng.choice((0, 1, 3, 7, 10**6))
            for live in members:
                live.cap = rng.choice((0, 2, 8, 8))
            driver.step_id += rng.choice((0, 0, 0, 10**6))  # as late in the life of an engine as that
            driver.step(
                members,
                gamma=gamma,
                chunks=chunks,
                budget=budget,
                forced=rng.choice((0, 0, 1, 3)),
                floor=rng.choice((0.0, 0.0, 0.3)),
                feed=gamma > 0 or rng.random() < 0.5,
                slack=rng.choice((0, 9)),
            )
        accepted += sum(a for live in driver.live for _, a in live.results)

    for _ in range(3):
        assert streams(worker, erratic, temperature=0.9) == plain
    assert accepted > 0


def test_drafts_are_accepted_and_rejected(worker: Worker) -> None:
    driver = Driver(worker)
    live = driver.add(prompts(1)[0], 60)
    driver.run(4)
    outcomes = {accepted for drafts, accepted in live.results if drafts == 4}
    assert {0, 4} <= outcomes or len(outcomes) >= 3, outcomes
    proposer = worker.rank.proposer
    assert proposer is not None
    verified, accepted = proposer.counts().verified, proposer.counts().accepted
    assert all(0 < a < v for a, v in zip(accepted[:4], verified[:4], strict=True))
    assert list(accepted) == sorted(accepted, reverse=True), "a draft stands only if all before it do"
    driver.remove(live)


def test_drafts_with_the_targets_noise_stand_more_often() -> None:
    """0.42 of the coupled drafts; 0.08 where the drafter takes the noise of a neighbouring position."""
    driver = Driver(load_worker())
    lives = [driver.add(prompt, 40, temperature=1.0, seed=9 + i) for i, prompt in enumerate(prompts(12))]
    driver.run(2)
    rounds = [outcome for live in lives for outcome in live.results]
    assert sum(accepted for _, accepted in rounds) > 0.25 * sum(drafts for drafts, _ in rounds)


@pytest.fixture(scope="module")
def plain(worker: Worker) -> list[int]:
    """The first greedy stream without speculation."""
    return streams(worker, lambda d: d.run(0))[0]


@pytest.mark.parametrize("position", by_day({str(position): position for position in range(6)}, count=3))
def test_a_stop_token_ends_an_accepted_run_in_its_middle(worker: Worker, plain: list[int], position: int) -> None:
    stop = plain[position]
    expected = plain[: plain.index(stop) + 1]
    for gamma in (0, 3, 8):
        out = streams(worker, lambda d, gamma=gamma: d.run(gamma), stop_token_ids=(stop,))  # type: ignore[misc]
        assert out[0] == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_max_tokens_ends_an_accepted_run_in_its_middle(worker: Worker, limit: int) -> None:
    driver = Driver(worker, seed=1)
    long = driver.add(prompts(1)[0], 30)
    short = driver.add(prompts(1)[0], limit)
    driver.run(8)
    assert short.out == long.out[:limit]


@pytest.mark.parametrize("boundary", [-1, 0, 1, 2])
def test_first_and_last_token_at_a_page_boundary(worker: Worker, boundary: int) -> None:
    prompt = prompts(30, seed=3)
    prompt = [t for p in prompt for t in p][: 32 + boundary]
    outs = []
    for gamma in (0, 2, 8):
        driver = Driver(worker, seed=2)
        live = driver.add(prompt, 16 - boundary)
        driver.run(gamma)
        outs.append(live.out)
    assert outs[0] == outs[1] == outs[2]
    assert len(outs[0]) == 16 - boundary


def test_drafter_resumes_after_a_pause_longer_than_its_window() -> None:
    worker = load_worker(max_running=2, max_model_len=160, hidden_window=4)
    driver = Driver(worker)
    live = driver.add([5, 6, 7, 8, 9] * 4, 100)
    for gamma, steps in ((3, 4), (0, 9), (3, 6), (0, 2), (3, 30)):
        for _ in range(steps):
            if not live.finished:
                driver.step(gamma=gamma)
    pools = worker.rank.pools
    assert int(pools.gap_end[live.slot]) > int(pools.gap_start[live.slot]) > 0
    # A score of NaN, which a gap holds, becomes the lowest one.
    assert bool((pools.score[live.slot, :3] > -SCORE_LIMIT).all()), "the drafter looked into its gap"
    assert any(accepted == 3 for _, accepted in live.results[-20:])
    assert bool(pools.draft_law[live.slot].isnan().all()), "greedy drafts keep no law"
    driver = Driver(worker)
    plain = driver.add([5, 6, 7, 8, 9] * 4, 100)
    driver.run(0)
    assert live.out == plain.out[: len(live.out)]


@pytest.mark.parametrize("gamma", [1, 4])
def test_drafts_follow_the_oracles_chain(gamma: int, tmp_path: object) -> None:
    """Laws of the chained module, each given the drafts before it, equal the oracle's."""
    lm, mtp = tiny.reference(demo_checkpoint())
    worker = load_worker(max_running=2)
    driver = Driver(worker)
    live = driver.add(prompts(5, seed=8)[4] * 2, 40, temperature=1.0, coupled=False, seed=3)
    rounds = 0
    while not live.finished and rounds < 6:
        driver.step(gamma=gamma, chunks={live.slot: 7})
        if not live.out or live.finished:
            continue
        rounds += 1
        pools = worker.rank.pools
        known = live.prompt + live.out
        drafts = pools.token_log[live.slot, len(known) : len(known) + gamma].tolist()
        with torch.no_grad():
            hidden = lm(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True).hidden_states[
                -1
            ][0]
            tokens = torch.tensor(known[1:])
            for j in range(gamma):
                logits, recycled = mtp(tokens, hidden)
                torch.testing.assert_close(pools.draft_law[live.slot, j], logits[-1].softmax(-1), rtol=2e-3, atol=1e-5)
                tokens = torch.cat([tokens, torch.tensor(drafts[j : j + 1])])
                hidden = torch.cat([hidden, recycled[-1:]])


def test_stale_plans_are_refused(worker: Worker) -> None:
    driver = Driver(worker)
    live = driver.add([1, 2, 3], 4)
    plan = driver.plan([live])
    worker.execute(plan)
    with pytest.raises(StalePlan, match="after step"):
        worker.execute(plan)
    live.epoch += 1
    live.fed = 3
    live.out = [0]
    with pytest.raises(StalePlan, match="epoch"):
        worker.execute(driver.plan([live]))


def test_accounting_equals_what_is_allocated(worker: Worker) -> None:
    rank, description = worker.rank, worker.description
    planned = plan_memory(
        rank.model.state_layout,
        CacheSettings(memory_mib=512, page_size=description.page_size, max_running=description.num_slots),
        max_model_len=description.max_model_len,
        max_step_tokens=512,
        gamma_max=description.gamma_max,
        hidden_window=rank.pools.sizes.hidden_window,
        drafting=True,
    )
    assert rank.pools.size_bytes == planned.total_bytes <= 512 << 20


class Calls(TorchDispatchMode):
    """Counts operators, and those that read from the device, outside workers/ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.uploads = 0
        self.synchronising: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        self.uploads += func.name() == "aten::lift_fresh"  # a tensor made of host numbers
        if func.name() in {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::item",
            "aten::masked_select",
            "aten::is_nonzero",
            "aten::equal",
        }:
            self.synchronising.append(func.name())
        return func(*args, **(kwargs or {}))


def decode_calls(worker: Worker, count: int, gamma: int, fields: dict[str, object], **how: object) -> Calls:
    driver = Driver(worker)
    for i in range(count):
        driver.add([3 + i, 4, 5], 60, seed=i, **fields)  # type: ignore[arg-type]
    for _ in range(3):
        driver.step(gamma=gamma)
    plan = driver.plan(driver.live, gamma=gamma, **how)  # type: ignore[arg-type]
    with Calls() as calls:
        worker.execute(plan)
    return calls


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "coupled": False, "top_k": 9},
        {"temperature": 1.0, "typical": Typical()},
    ],
    ids=["greedy", "coupled", "standard", "lossy"],
)
def test_calls_do_not_grow_with_the_batch_and_nothing_reads_the_device(gamma: int, fields: dict[str, object]) -> None:
    worker = load_worker(max_running=16)
    one, many = decode_calls(worker, 1, gamma, fields), decode_calls(worker, 16, gamma, fields)
    assert many.count < 1.1 * one.count, (one.count, many.count)
    assert many.synchronising == one.synchronising == []
    assert many.uploads == one.uploads == 1, "host numbers reach the device in one staged copy"


def test_log_probabilities_are_read_with_the_report_alone() -> None:
    worker = load_worker(max_running=16)
    one, many = (decode_calls(worker, count, 3, {"num_logprobs": 2}) for count in (1, 16))
    assert many.count < 1.1 * one.count, (one.count, many.count)
    assert many.synchronising == one.synchronising == []
    assert many.uploads == one.uploads == 2, "and who wants them"


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "coupled": False}], ids=["greedy", "standard"])
def test_admission_of_some_reads_the_device_no_more_than_that_of_all(fields: dict[str, object]) -> None:
    worker = load_worker(max_running=16)
    how: dict[str, object] = {"budget": 2, "forced": 1, "floor": 0.1}
    one, many = (decode_calls(worker, count, 3, fields, **how) for count in (1, 16))
    assert many.count < 1.1 * one.count, (one.count, many.count)
    assert many.synchronising == one.synchronising == []
    assert many.uploads == one.uploads == 1


def test_mixed_prefill_and_decode_share_a_step(worker: Worker) -> None:
    """One busy decode, one long chunked prefill, one fresh prompt: every row order gives the same tokens."""
    outs = set()
    for seed in range(3):
        driver = Driver(worker, seed=seed)
        first = driver.add(prompts(1)[0], 30)
        for _ in range(3):
            driver.step(gamma=3)
        members: list[Live] = [driver.add(p, 12) for p in prompts(3, seed=6)]
        everyone = [first, *members]
        random.Random(seed).shuffle(everyone)
        driver.step(everyone, gamma=3, chunks={m.slot: 5 for m in members})
        driver.run(3)
        outs.add((tuple(first.out), *(tuple(m.out) for m in members)))
    assert len(outs) == 1
