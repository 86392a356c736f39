"""A vocabulary cut over ranks gives what the whole one gives: the same rows, the same best token, the same law."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.threads import Ranks
from torch import Tensor

from parallel import slices
from parallel.mesh import Mesh
from parallel.rendezvous import RankGroups
from parallel.slices import Shard
from parallel.vocabulary import Best, Vocabulary

COUNTS = [509, 512, 130, 64]
WIDTH = 5
INF = float("inf")


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(Mesh(tp=size)) for size in (1, 2, 3, 4)}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest, rings: dict[int, Ranks]) -> Ranks:
    return rings[request.param]


def part(whole: Tensor, rank: int, size: int, dim: int, filler: float) -> Tensor:
    """What `rank` holds of rows or columns, padding included: equal parts, each a multiple of 64."""
    count = whole.shape[dim]
    width = count if size == 1 else -(-count // (64 * size)) * 64
    columns = [0] * (2 * (whole.dim() - dim) - 1) + [max(0, width * size - count)]
    return F.pad(whole, columns, value=filler).narrow(dim, rank * width, width).contiguous()


def test_some_ranks_of_the_sizes_tested_hold_padding_only() -> None:
    held = {
        (count, size): [slices.vocabulary(count, Shard(rank, size)).rows.length for rank in range(size)]
        for count in COUNTS
        for size in (2, 3, 4)
    }
    assert held[130, 4] == [64, 64, 2, 0]
    assert held[64, 4] == [64, 0, 0, 0]
    assert held[509, 2] == [256, 253]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_rows_of_the_table_are_those_of_the_whole_one(ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    size = ranks.mesh.size
    table = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to(dtype)
    # Every token, the edges of parts among them; and no token at all.
    for ids in (torch.randperm(count), torch.zeros(0, dtype=torch.int64), torch.tensor([count - 1] * 3)):

        def work(groups: RankGroups, ids: Tensor = ids) -> Tensor:
            held = part(table, groups.rank, size, 0, filler=float("nan"))
            return Vocabulary(count, groups.tp).embed(ids, held)

        for rows in ranks(work):
            assert torch.equal(rows, F.embedding(ids, table))


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("count", COUNTS)
def test_gathered_columns_are_those_of_the_whole_head(ranks: Ranks, count: int, num_rows: int) -> None:
    logits = torch.randn(num_rows, count, generator=torch.Generator().manual_seed(count))

    def work(groups: RankGroups) -> Tensor | None:
        vocabulary = Vocabulary(count, groups.tp)
        held = vocabulary.without_padding(part(logits, groups.rank, ranks.mesh.size, 1, filler=7.0))
        assert held[:, : max(0, count - groups.rank * held.shape[1])].isfinite().all()
        return vocabulary.gather(held)

    first, *others = ranks(work)
    assert first is not None
    assert torch.equal(first, logits)
    assert first.is_contiguous()
    assert others == [None] * (ranks.mesh.size - 1)


def test_padding_is_no_token(ranks: Ranks) -> None:
    def work(groups: RankGroups) -> Tensor:
        held = part(torch.zeros(2, 130), groups.rank, ranks.mesh.size, 1, filler=0.0)
        return Vocabulary(130, groups.tp).without_padding(held)

    joined = torch.cat(ranks(work), 1)
    assert (joined[:, :130] == 0).all()
    assert (joined[:, 130:] == -INF).all()


def check_best(ranks: Ranks, logits: Tensor, *, with_second: bool, with_mass: bool) -> None:
    count = logits.shape[1]

    def work(groups: RankGroups) -> Best | None:
        vocabulary = Vocabulary(count, groups.tp)
        held = vocabulary.without_padding(part(logits, groups.rank, ranks.mesh.size, 1, filler=INF))
        return vocabulary.best(held, with_second=with_second, with_mass=with_mass)

    best, *others = ranks(work)
    assert others == [None] * (ranks.mesh.size - 1)
    assert best is not None
    # The lowest id of equals, said without argmax.
    ids = [row.index(max(row)) for row in logits.tolist()]
    assert best.id_R.dtype == torch.int64
    assert best.id_R.tolist() == ids
    values = logits.sort(-1, descending=True).values
    assert best.top_R.dtype == torch.float32
    assert torch.equal(best.top_R, values[:, 0])
    assert (best.second_R is not None, best.log_mass_R is not None) == (with_second, with_mass)
    if best.second_R is not None:
        assert best.second_R.dtype == torch.float32
        assert torch.equal(best.second_R, values[:, 1])
    if best.log_mass_R is not None:
        assert best.log_mass_R.dtype == torch.float32
        torch.testing.assert_close(best.log_mass_R, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("with_second", "with_mass"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("count", COUNTS)
def test_the_best_token_is_that_of_the_whole_row(ranks: Ranks, count: int, with_second: bool, with_mass: bool) -> None:
    logits = torch.randn(9, count, generator=torch.Generator().manual_seed(count)) * 8
    check_best(ranks, logits, with_second=with_second, with_mass=with_mass)
    check_best(ranks, logits[:0], with_second=with_second, with_mass=with_mass)


@pytest.mark.parametrize("count", COUNTS)
def test_of_equals_the_lowest_id_is_best_wherever_they_lie(ranks: Ranks, count: int) -> None:
    size = ranks.mesh.size
    width = part(torch.zeros(1, count), 0, size, 1, 0.0).shape[1]
    edges = sorted({0, 1, count - 1, *(id for id in range(0, count, width)), *range(width - 1, count, width)})
    rows = []
    for first in edges:
        for second in edges:
            row = torch.zeros(count)
            row[[first, second]] = 3.0
            rows.append(row)
    check_best(ranks, torch.stack([torch.zeros(count), *rows]), with_second=True, with_mass=True)


@pytest.mark.parametrize("count", COUNTS)
def test_masked_tokens_and_masked_rows(ranks: Ranks, count: int) -> None:
    logits = torch.full((4, count), -INF)
    logits[1, count - 1] = -2.5
    logits[2, [0, count // 2]] = 1.5
    logits[3, :64] = torch.arange(64) - 80.0
    check_best(ranks, logits, with_second=True, with_mass=True)


@given(
    size=st.integers(1, 4),
    count=st.sampled_from([*COUNTS, 2, 65, 193]),
    levels=st.lists(st.sampled_from([-INF, -30.0, 0.0, 0.5, 1e4]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 30),
    with_second=st.booleans(),
    with_mass=st.booleans(),
)
@settings(max_examples=60)
def test_any_row_of_few_levels(
    rings: dict[int, Ranks],
    size: int,
    count: int,
    levels: list[float],
    seed: int,
    with_second: bool,
    with_mass: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, len(levels), (3, count), generator=generator)
    check_best(rings[size], torch.tensor(levels)[choice], with_second=with_second, with_mass=with_mass)
