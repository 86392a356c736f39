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
EXTRAS = ("with_second", "with_rest", "with_entropy")
"""What may be asked for beside the best token."""


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


def check_best(ranks: Ranks, logits: Tensor, **wanted: bool) -> None:
    """wanted: with_second, with_rest, with_entropy; all of them by default."""
    wanted = wanted or dict.fromkeys(EXTRAS, True)
    count = logits.shape[1]

    def work(groups: RankGroups) -> Best | None:
        vocabulary = Vocabulary(count, groups.tp)
        held = vocabulary.without_padding(part(logits, groups.rank, ranks.mesh.size, 1, filler=INF))
        return vocabulary.best(held, **wanted)

    best, *others = ranks(work)
    assert others == [None] * (ranks.mesh.size - 1)
    assert best is not None
    # The lowest id of equals, said without argmax.
    ids = [row.index(max(row)) for row in logits.tolist()]
    assert best.id_R.dtype == torch.int64
    assert best.id_R.tolist() == ids
    values = logits.sort(-1, descending=True).values
    assert torch.equal(best.top_R, values[:, 0])
    assert [best.second_R is not None, best.rest_R is not None, best.entropy_R is not None] == [
        wanted[name] for name in EXTRAS
    ]
    assert {x.dtype for x in (best.top_R, best.second_R, best.rest_R, best.entropy_R) if x is not None} == {
        torch.float32
    }
    if best.second_R is not None:
        assert torch.equal(best.second_R, values[:, 1])
    below = (values - values[:, :1]).double()
    if best.rest_R is not None:
        check_close(best.rest_R, below[:, 1:].exp().sum(-1))
    if best.entropy_R is not None:
        mass = below.exp()
        mean = (mass * below.masked_fill(below == -INF, 0)).sum(-1) / mass.sum(-1)
        check_close(best.entropy_R, below[:, 1:].exp().sum(-1).log1p() - mean)


def check_close(found: Tensor, expected: Tensor) -> None:
    """Up to rounding of the logits' differences: a relative error, however small a number that float32 still has."""
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("wanted", [(), *[(name,) for name in EXTRAS], EXTRAS], ids="+".join)
@pytest.mark.parametrize("count", COUNTS)
def test_the_best_token_is_that_of_the_whole_row(ranks: Ranks, count: int, wanted: tuple[str, ...]) -> None:
    logits = torch.randn(9, count, generator=torch.Generator().manual_seed(count)) * 8
    for rows in (logits, logits[:0]):
        check_best(ranks, rows, **{name: name in wanted for name in EXTRAS})


@pytest.mark.parametrize("count", COUNTS)
def test_a_rest_of_hardly_any_mass_keeps_its_precision(ranks: Ranks, count: int) -> None:
    """Wherever the best token lies: log Σ exp − top would be 0 or noise."""
    logits = torch.randn(6, count, generator=torch.Generator().manual_seed(count))
    logits[torch.arange(6), torch.linspace(0, count - 1, 6).long()] = torch.tensor([18.0, 25.0, 30.0, 40.0, 60.0, 80.0])
    check_best(ranks, logits)


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
    check_best(ranks, torch.stack([torch.zeros(count), *rows]))


@pytest.mark.parametrize("count", COUNTS)
def test_masked_tokens_and_masked_rows(ranks: Ranks, count: int) -> None:
    logits = torch.full((4, count), -INF)
    logits[1, count - 1] = -2.5
    logits[2, [0, count // 2]] = 1.5
    logits[3, :64] = torch.arange(64) - 80.0
    check_best(ranks, logits)


@given(
    size=st.integers(1, 4),
    count=st.sampled_from([*COUNTS, 2, 65, 193]),
    levels=st.lists(st.sampled_from([-INF, -30.0, 0.0, 0.5, 1e4]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_any_row_of_few_levels(rings: dict[int, Ranks], size: int, count: int, levels: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, len(levels), (3, count), generator=generator)
    check_best(rings[size], torch.tensor(levels)[choice])
