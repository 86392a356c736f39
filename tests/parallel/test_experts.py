"""Token rows reach exactly the ranks that own their experts, once each, and what the owners make of them comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.threads import Ranks
from torch import Tensor

from parallel.collectives import Tally, solo
from parallel.experts import ABSENT, ExpertOwners, Received, Sent
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups

WIDTH = 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(Mesh(tp=size, ep=size)) for size in (1, 2, 3, 4)}
    yield made
    for ranks in made.values():
        ranks.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What every rank holds: rows [N, D] that say whose they are, experts [N, K] of each and weights [N, K].
    owner: rank of each expert; local: its number there."""

    rows: list[Tensor]
    experts: list[Tensor]
    weights: list[Tensor]
    owner: list[int]
    local: list[int]

    @property
    def size(self) -> int:
        return len(self.rows)

    def arrives_at(self, rank: int) -> list[tuple[int, int]]:
        """(sender, row) of what `rank` is to receive, in order."""
        return [
            (sender, row)
            for sender, experts in enumerate(self.experts)
            for row, chosen in enumerate(experts.tolist())
            if any(self.owner[expert] == rank for expert in chosen)
        ]


def contiguous(num_experts: int, size: int) -> tuple[list[int], list[int]]:
    """Owner and local number of each expert: equal shares, one more for each of the first ranks."""
    owner = [rank for rank in range(size) for _ in range(num_experts // size + (rank < num_experts % size))]
    return owner, [owner[:expert].count(rank) for expert, rank in enumerate(owner)]


def make_case(
    size: int, num_experts: int, top_k: int, counts: list[int], dtype: torch.dtype, seed: int, *, shuffled: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rows, experts, weights = [], [], []
    for rank, count in enumerate(counts):
        x = torch.randn(count, WIDTH, generator=generator)
        x[:, 0], x[:, 1] = rank, torch.arange(count)
        rows.append(x.to(dtype))
        order = torch.rand(count, num_experts, generator=generator).argsort(-1)
        experts.append(order[:, :top_k])
        weights.append(torch.rand(count, top_k, generator=generator).to(dtype))
    owner, local = contiguous(num_experts, size)
    if shuffled:
        places = torch.randperm(num_experts, generator=generator).tolist()
        owner, local = [owner[place] for place in places], [local[place] for place in places]
    return Case(rows=rows, experts=experts, weights=weights, owner=owner, local=local)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 4))
    num_experts = draw(st.integers(size, 12))
    count = st.one_of(st.just(0), st.integers(0, 9))
    return make_case(
        size,
        num_experts,
        draw(st.integers(1, num_experts)),
        draw(st.lists(count, min_size=size, max_size=size)),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.integers(0, 1 << 30)),
        shuffled=draw(st.booleans()),
    )


def owners_of(case: Case, groups: RankGroups) -> ExpertOwners:
    owners = ExpertOwners(len(case.owner), groups.world, CPU)
    owners.owner_E, owners.local_E = torch.tensor(case.owner), torch.tensor(case.local)
    return owners


def expert(number: int, x_ND: Tensor) -> Tensor:
    """An expert of our own making: the same bits for a row wherever it is computed."""
    return x_ND * (number + 1) - number


def outputs(case: Case, rank: int) -> Tensor:
    """[N, K, D]: what the experts make of the rows of `rank`, without any exchange."""
    x, chosen = case.rows[rank], case.experts[rank].tolist()
    pairs = [torch.stack([expert(number, x[row]) for number in numbers]) for row, numbers in enumerate(chosen)]
    return torch.stack(pairs) if pairs else x.new_zeros(0, case.experts[rank].shape[1], WIDTH)


def sums(case: Case, rank: int) -> Tensor:
    """[N, D]: weighted, added in order of K on each owner, the owners' parts in order of their ranks."""
    pairs, weights = outputs(case, rank), case.weights[rank]
    out = []
    for row, numbers in enumerate(case.experts[rank].tolist()):
        parts = []
        for owner in range(case.size):
            mine = [k for k, number in enumerate(numbers) if case.owner[number] == owner]
            if mine:
                part = pairs[row, mine[0]] * weights[row, mine[0]]
                for k in mine[1:]:
                    part = part + pairs[row, k] * weights[row, k]
                parts.append(part)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out.append(total)
    return torch.stack(out) if out else case.rows[rank]


def own_pairs(case: Case, rank: int, received: Received) -> Tensor:
    """[P, D]: every pair of the rows received whose expert is here, row by row, in order of K."""
    numbers = {local: number for number, local in enumerate(case.local) if case.owner[number] == rank}
    pairs = [
        expert(numbers[local], received.x_MD[row])
        for row, chosen in enumerate(received.expert_MK.tolist())
        for local in chosen
        if local != ABSENT
    ]
    return torch.stack(pairs) if pairs else received.x_MD.new_zeros(0, WIDTH)


def own_sums(case: Case, rank: int, received: Received) -> Tensor:
    """[M, D]: per row received, its pairs weighted and added in order of K."""
    pairs = iter(own_pairs(case, rank, received))
    out = torch.zeros_like(received.x_MD)
    for row, chosen in enumerate(received.expert_MK.tolist()):
        parts = [next(pairs) * received.weight_MK[row, k] for k, local in enumerate(chosen) if local != ABSENT]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out[row] = total
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one rank saw of one way out and back. num_pairs: after the way out."""

    sent: Sent
    received: Received
    num_pairs: int
    by_sums: Tensor
    by_pairs: Tensor
    tally: tuple[int, int]


def go_round(case: Case, groups: RankGroups, owners: ExpertOwners) -> Round:
    rank = groups.rank
    groups.log.clear()
    sent, received = owners.exchange(case.rows[rank], case.experts[rank], case.weights[rank])
    num_pairs = int(owners.num_pairs)
    by_sums = owners.return_sums(own_sums(case, rank, received), sent, received)
    by_pairs = owners.return_pairs(own_pairs(case, rank, received), sent, received)
    tally = groups.log.tallies.get("world", Tally())
    return Round(
        sent=sent,
        received=received,
        num_pairs=num_pairs,
        by_sums=by_sums,
        by_pairs=by_pairs,
        tally=(tally.count, tally.digest),
    )


def check_rounds(case: Case, rounds: list[Round]) -> None:
    for rank, seen in enumerate(rounds):
        check_received(case, rank, seen.sent, seen.received)
        assert seen.num_pairs == int((seen.received.expert_MK != ABSENT).sum())
        assert torch.equal(seen.by_sums, sums(case, rank))
        assert torch.equal(seen.by_pairs, outputs(case, rank))
    # What the load of ranks is measured by: no pair is lost or counted twice.
    assert sum(seen.num_pairs for seen in rounds) == sum(experts.numel() for experts in case.experts)
    # The same collectives on all ranks, whatever rows they have: counts and rows out, sums back, pairs back.
    assert {seen.tally for seen in rounds} == {rounds[0].tally}
    assert rounds[0].tally[0] == (4 if case.size > 1 else 0)


def check_received(case: Case, rank: int, sent: Sent, received: Received) -> None:
    arrived = case.arrives_at(rank)
    senders = [sender for sender, _ in arrived]
    assert received.counts == [senders.count(sender) for sender in range(case.size)]
    assert received.x_MD.shape == (len(arrived), WIDTH)
    assert received.x_MD.dtype == received.weight_MK.dtype == case.rows[0].dtype
    for i, (sender, row) in enumerate(arrived):
        assert torch.equal(received.x_MD[i], case.rows[sender][row])
        assert torch.equal(received.weight_MK[i], case.weights[sender][row])
        assert received.expert_MK[i].tolist() == [
            case.local[number] if case.owner[number] == rank else ABSENT
            for number in case.experts[sender][row].tolist()
        ]
    destinations = [{case.owner[number] for number in numbers} for numbers in case.experts[rank].tolist()]
    assert sent.counts == [sum(at in some for some in destinations) for at in range(case.size)]
    assert [set(row.nonzero().flatten().tolist()) for row in sent.to_RN.t()] == destinations


@given(case=cases())
def test_every_row_visits_each_owner_of_its_experts_once_and_comes_back(rings: dict[int, Ranks], case: Case) -> None:
    check_rounds(case, rings[case.size](lambda groups: go_round(case, groups, owners_of(case, groups))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 0, 0, 0), (0, 0, 3, 1), (4, 4, 4, 4), (1, 9, 2, 0)], ids=str)
@pytest.mark.parametrize(("num_experts", "size"), [(5, 2), (12, 4), (7, 3), (4, 4), (3, 1)])
def test_uneven_experts_and_idle_ranks(
    rings: dict[int, Ranks], num_experts: int, size: int, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    for top_k in {1, 2, num_experts}:
        case = make_case(size, num_experts, top_k, list(counts[:size]), dtype, seed=top_k)

        def work(groups: RankGroups, case: Case = case) -> tuple[list[int], list[int], Round]:
            owners = ExpertOwners(len(case.owner), groups.world, CPU)
            return owners.owner_E.tolist(), owners.local_E.tolist(), go_round(case, groups, owners)

        results = rings[size](work)
        assert [(owner, local) for owner, local, _ in results] == [(case.owner, case.local)] * size
        check_rounds(case, [seen for *_, seen in results])


@given(case=cases())
@settings(max_examples=10)
def test_figures_add_up_until_they_are_cleared(rings: dict[int, Ranks], case: Case) -> None:
    def work(groups: RankGroups) -> list[tuple[int, float, float]]:
        owners = owners_of(case, groups)
        figures = []
        for _ in range(2):
            go_round(case, groups, owners)
            figures.append((int(owners.num_pairs), owners.dispatch_s, owners.combine_s))
        owners.clear()
        return [*figures, (int(owners.num_pairs), owners.dispatch_s, owners.combine_s)]

    for rank, (once, twice, cleared) in enumerate(rings[case.size](work)):
        pairs = sum(case.owner[number] == rank for experts in case.experts for number in experts.flatten().tolist())
        assert (once[0], twice[0]) == (pairs, 2 * pairs)
        assert 0 < once[1] < twice[1]
        assert 0 < once[2] < twice[2]
        assert cleared == (0, 0.0, 0.0)


@pytest.mark.parametrize("on_rank", [0, 1])
def test_all_rows_may_choose_the_experts_of_one_rank(rings: dict[int, Ranks], on_rank: int) -> None:
    case = make_case(2, 4, 2, [3, 4], torch.float32, seed=1)
    mine = torch.tensor([expert for expert, owner in enumerate(case.owner) if owner == on_rank])
    case = Case(
        rows=case.rows,
        experts=[mine.expand(len(rows), 2) for rows in case.rows],
        weights=case.weights,
        owner=case.owner,
        local=case.local,
    )

    rounds = rings[2](lambda groups: go_round(case, groups, owners_of(case, groups)))
    check_rounds(case, rounds)
    assert [seen.num_pairs for seen in rounds] == [14 * (rank == on_rank) for rank in range(2)]


def test_a_rank_without_experts_is_refused() -> None:
    ranks = Ranks(Mesh(tp=3, ep=3))
    with pytest.raises(ValueError, match="2 experts are too few for 3 ranks"):
        ranks(lambda groups: ExpertOwners(2, groups.world, CPU))
    ranks.close()


def test_one_rank_owns_all() -> None:
    owners = ExpertOwners(3, solo(), CPU)
    assert (owners.owner_E.tolist(), owners.local_E.tolist()) == ([0, 0, 0], [0, 1, 2])
