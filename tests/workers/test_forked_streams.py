"""Sequences that fork say what they would have said alone, bit for bit: same tokens, same drafts, same rounds.

Reference numerics, a hybrid model whose drafter is right about as often as not, pages of 4 tokens, and NaN wherever no
sequence lives. Families of all kinds of prompts run together, so that forks meet decodes, chunks and each other.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import tiny
from oracles.days import by_day
from oracles.group import GroupOfWorkers
from oracles.served_group import ServedGroup, Stream

from parallel.mesh import ONE_RANK, Mesh
from runtime.life import Life
from runtime.request import Request, SamplingParams, StopParams, sequences_of
from runtime.verification.policy import Fixed, Off, Policy
from state.layout import TARGET_GROUP
from workers.draft.confidence import SCORE_LIMIT
from workers.plan import StalePlan

PAGE, N, TOKENS = 4, 3, 7
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 2 * PAGE + 1, 30)
KINDS = {
    "greedy": SamplingParams(temperature=0.0, seed=5),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=2**63 + 7, coupled=True),
}
ENDED = ((0,), (1,), (2,), (0, 1), (1, 0), (2, 0))
"""Which of a family end, in order."""
SOME = (1, PAGE + 1, PAGE + 2, 30)

Open = Callable[..., ServedGroup]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families") / "base"
    tiny.write(path, "base", agree=0.7)
    return path


@pytest.fixture(scope="module")
def serve(checkpoint: Path) -> Iterator[Open]:
    """A scheduler on ranks of a mesh; all on the same ones, one after the other."""
    lives: dict[Mesh, Life] = {}

    @functools.cache
    def load(mesh: Mesh) -> GroupOfWorkers:
        group = GroupOfWorkers.load(
            mesh, checkpoint, numerics="reference", page_size=PAGE, max_running=28, max_model_len=64, hidden_window=5
        )
        assert group.workers[0].rank.pools.delta, "recurrent state is what this is about"
        return group

    def serve(mesh: Mesh = ONE_RANK, *, max_step_tokens: int = 48) -> ServedGroup:
        served = ServedGroup(load(mesh), max_step_tokens=max_step_tokens, last=lives.get(mesh))
        lives[mesh] = served.life
        return served

    yield serve
    for mesh in lives:
        load(mesh).close()


def family(length: int, kind: str, *, n: int = N, max_tokens: int = TOKENS) -> Request:
    rng = random.Random(length)
    return Request(
        uid=1000 * length,
        request_id=str(length),
        prompt=tuple(rng.randrange(1, 250) for _ in range(length)),
        sampling=KINDS[kind],
        stopping=StopParams(max_tokens=max_tokens),
        n=n,
    )


def submit_alone(served: ServedGroup, request: Request) -> list[int]:
    """Its sequences as requests of their own."""
    return [uid for each in sequences_of(request) for uid in served.submit(replace(each, n=1, index=0))]


def streams(
    served: ServedGroup, policy: Policy, kind: str, *, forked: bool, lengths: Sequence[int] = LENGTHS
) -> dict[int, Stream]:
    for length in lengths:
        wanted = family(length, kind)
        served.submit(wanted) if forked else submit_alone(served, wanted)
    served.drain(policy)
    return served.streams


_alone: dict[str, dict[int, Stream]] = {}


def alone(serve: Open, kind: str) -> dict[int, list[int]]:
    """Tokens without drafts and without forks, on one rank."""
    if kind not in _alone:
        _alone[kind] = streams(serve(), Fixed(0), kind, forked=False)
    return {uid: stream.tokens for uid, stream in _alone[kind].items()}


def tokens(found: dict[int, Stream]) -> dict[int, list[int]]:
    return {uid: stream.tokens for uid, stream in found.items()}


@pytest.mark.parametrize("case", by_day({f"{kind}-{gamma}": (kind, gamma) for gamma in (0, 1, 3) for kind in KINDS}))
def test_forked_sequences_say_what_they_would_alone(serve: Open, case: tuple[str, int]) -> None:
    kind, gamma = case
    found = streams(serve(), Fixed(gamma), kind, forked=True)
    assert tokens(found) == alone(serve, kind)
    if kind == "coupled":
        first, second, third = (found[1000 * 30 + i].tokens for i in range(N))
        assert first != second != third != first, "each has noise of its own"


def test_forked_sequences_draft_what_they_would_alone(serve: Open) -> None:
    """The drafter's entries of the prompt are shared and copied as the target's are: rounds are the same to a draft."""
    found = streams(serve(), Fixed(3), "coupled", forked=True, lengths=SOME)
    by_themselves = streams(serve(), Fixed(3), "coupled", forked=False, lengths=SOME)
    assert tokens(found) == tokens(by_themselves)
    for uid, stream in found.items():
        assert stream.rounds == by_themselves[uid].rounds, uid
    stood = [accepted for stream in found.values() for drafted, accepted in stream.rounds if len(drafted) == 3]
    assert {0, 3} <= set(stood), "inconclusive: all drafts stand, or none"


@pytest.mark.parametrize("max_step_tokens", by_day({"11": 11, "17": 17}))
def test_prompts_in_chunks_and_drafters_that_come_later(serve: Open, max_step_tokens: int) -> None:
    """Hidden states that wait for the drafter are taken over too, and may be fed in the step of the fork itself."""
    served = serve(max_step_tokens=max_step_tokens)
    for length in LENGTHS:
        served.submit(family(length, "coupled"))
    rng = random.Random(max_step_tokens)
    while served.scheduler.has_work:
        served.step(rng.choice((Off(), Off(), Fixed(0), Fixed(1), Fixed(3))))
        pools = served.group.workers[0].rank.pools
        drafted = [each.slot for each in served.scheduler.running if each.num_waiting_drafts]
        assert bool((pools.score[drafted, :1] > -SCORE_LIMIT).all()), "a drafter looked where nothing is"
    served.drain()
    assert tokens(served.streams) == alone(serve, "coupled")


@pytest.mark.parametrize("before", [Off(), Fixed(3)], ids=["paused", "fed"])
def test_a_greedy_family_is_one_mind(serve: Open, before: Policy) -> None:
    """Until they differ, which greedy ones never do, drafters of a family are equally sure of everything, whether they
    saw the prompt as it was read or see its end in the step of the fork, from the window of hidden states."""
    served = serve()
    uids = served.submit(family(6, "greedy")) + served.submit(family(30, "greedy"))
    served.step(before)
    pools = served.group.workers[0].rank.pools
    (scheduler,) = served.scheduler.schedulers
    while uids[0] in scheduler.ledger:
        plan = served.step(Fixed(3))
        assert plan.catches_up == (before == Off() and len(served.plans) == 2)
        for members in (uids[:N], uids[N:]):
            slots = [scheduler.ledger[uid].slot for uid in members if uid in scheduler.ledger]
            scores = pools.score[slots, :3]
            assert bool((scores > -SCORE_LIMIT).all()), "a drafter looked where nothing is"
            assert torch.equal(scores, scores[:1].expand_as(scores))
    served.drain()


@pytest.mark.parametrize("length", [2 * PAGE + 1, 30])
def test_pages_of_the_prompt_are_shared_and_nobody_writes_to_them(serve: Open, length: int) -> None:
    served = serve()
    uids = served.submit(family(length, "coupled", n=5))
    served.step(Fixed(3))
    (scheduler,) = served.scheduler.schedulers
    shared, copied = divmod(length - 1, PAGE)
    gamma_max = served.group.workers[0].description.gamma_max
    num_pages = -(-(length + TOKENS + gamma_max + 1) // PAGE)
    assert [pool.used for pool in scheduler.use().pages] == [num_pages + 4 * (num_pages - shared)] * 2
    tables = [scheduler.ledger[uid].tables for uid in uids]
    pools = served.group.workers[0].rank.pools

    def held() -> list[torch.Tensor]:
        """What the shared pages hold, by layer."""
        found = []
        for layer, specs in enumerate(pools.layout.layers):
            for spec in specs:
                if layer in pools.kv:
                    pages = torch.tensor(tables[0][0 if spec.group == TARGET_GROUP else 1][:shared])  # type: ignore[union-attr]
                    rows = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
                    found.append(pools.kv[layer][:, rows].clone())
        return found

    before = held()
    assert len(before) > 1
    assert all(bool(kv.isfinite().all()) for kv in before), "target and drafter have entries of all of it"
    plan = served.step(Fixed(3))
    assert [new.fork is not None for new in plan.batches[0].admitted] == [True] * 4
    assert all(
        (new.fork is not None and new.fork.pages[0] is not None) == bool(copied) for new in plan.batches[0].admitted
    )
    while len(list(served.scheduler.running)) == 5:
        for one, other in zip(before, held(), strict=True):
            assert torch.equal(one, other)
        served.step(Fixed(3))
    served.drain(Fixed(3))


@pytest.mark.parametrize(
    "case",
    by_day(
        {f"{1 + i % 5}-{ENDED[i % 6]}": (1 + i % 5, ENDED[i % 6]) for i in range(30)},
        count=4,
    ),
)
def test_whoever_ends_the_others_say_what_they_would_have_said(serve: Open, case: tuple[int, tuple[int, ...]]) -> None:
    """A prompt of 30 tokens in steps of 11 rows: read in three, forked in the fourth."""
    steps, ended = case
    served = serve(max_step_tokens=11)
    uids = served.submit(family(30, "coupled"))
    for _ in range(steps):
        served.step(Fixed(2))
    for index in ended:
        served.end(uids[index])
    served.drain(Fixed(2))
    expected = alone(serve, "coupled")
    for index, uid in enumerate(uids):
        assert served.streams[uid].tokens == (served.streams[uid].tokens if index in ended else expected[uid])
        assert index in ended or len(served.streams[uid].tokens) == TOKENS


@pytest.mark.parametrize("mesh", by_day({"tp2": Mesh(tp=2), "dp2": Mesh(dp=2), "dp2_ep2": Mesh(dp=2, ep=2)}))
def test_families_on_several_ranks(serve: Open, mesh: Mesh) -> None:
    """Each family is on one data-parallel rank; ranks that share it fork alike, which their digests show."""
    served = serve(mesh)
    found = streams(served, Fixed(3), "coupled", forked=True, lengths=SOME)
    expected = alone(serve, "coupled")
    assert tokens(found) == {uid: expected[uid] for uid in found}
    homes: dict[int, set[int]] = {}
    for plan in served.plans:
        for dp_rank, batch in enumerate(plan.batches):
            for new in batch.admitted:
                homes.setdefault(new.uid // 1000, set()).add(dp_rank)
    assert {len(ranks) for ranks in homes.values()} == {1}
    assert len(set.union(*homes.values())) == mesh.dp


def test_a_fork_from_another_tenant_is_refused(serve: Open) -> None:
    served = serve()
    served.submit(family(6, "greedy"))
    served.step(Fixed(0))
    plan = served.scheduler.plan(served._told.under(Fixed(0)))
    (batch,) = plan.batches
    first, *others = batch.admitted
    assert first.fork is not None
    wrong = replace(first.fork, epoch=first.fork.epoch + 1)
    with pytest.raises(StalePlan, match=rf"sequence {first.uid} forks from epoch {wrong.epoch}"):
        served.group.execute(replace(plan, batches=(replace(batch, admitted=(replace(first, fork=wrong), *others)),)))
