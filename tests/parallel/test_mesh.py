"""Every layout that is one puts each rank in its place; what is no layout is refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.schema import ParallelSettings
from parallel.mesh import Mesh
from parallel.slices import WHOLE, Shard

SIZES = st.integers(1, 8)


@pytest.mark.parametrize(
    ("mesh", "tp_ranks", "tensor_shards", "expert_shards"),
    [
        (Mesh(), [(0,)], [(0, 1)], [None]),
        (Mesh(tp=2), [(0, 1)] * 2, [(0, 2), (1, 2)], [None] * 2),
        (Mesh(tp=2, ep=2), [(0, 1)] * 2, [(0, 2), (1, 2)], [(0, 2), (1, 2)]),
        (Mesh(dp=2), [(0,), (1,)], [(0, 1)] * 2, [None] * 2),
        (Mesh(dp=2, ep=2), [(0,), (1,)], [(0, 1)] * 2, [(0, 2), (1, 2)]),
        (Mesh(dp=2, tp=2), [(0, 1)] * 2 + [(2, 3)] * 2, [(0, 2), (1, 2)] * 2, [None] * 4),
        (
            Mesh(dp=2, tp=2, ep=4),
            [(0, 1)] * 2 + [(2, 3)] * 2,
            [(0, 2), (1, 2)] * 2,
            [(0, 4), (1, 4), (2, 4), (3, 4)],
        ),
    ],
    ids=str,
)
def test_what_each_rank_of_a_layout_is(
    mesh: Mesh,
    tp_ranks: list[tuple[int, ...]],
    tensor_shards: list[tuple[int, int]],
    expert_shards: list[tuple[int, int] | None],
) -> None:
    ranks = range(mesh.size)
    assert len(ranks) == len(tp_ranks)
    assert [mesh.tp_ranks(rank) for rank in ranks] == tp_ranks
    assert [mesh.tensor_shard(rank) for rank in ranks] == [Shard(*shard) for shard in tensor_shards]
    assert [mesh.expert_shard(rank) for rank in ranks] == [shard and Shard(*shard) for shard in expert_shards]


@given(SIZES, SIZES, st.booleans())
def test_ranks_that_share_sequences_are_neighbours_with_one_leader(dp: int, tp: int, spread: bool) -> None:
    mesh = Mesh(dp=dp, tp=tp, ep=dp * tp if spread else 1)
    ranks = range(mesh.size)
    assert [mesh.dp_rank(rank) * tp + mesh.tp_rank(rank) for rank in ranks] == list(ranks)
    assert [rank for rank in ranks if mesh.leads(rank)] == list(mesh.leaders())
    assert len(mesh.leaders()) == dp
    for rank in ranks:
        assert mesh.tp_ranks(rank)[mesh.tp_rank(rank)] == rank
        assert {mesh.dp_rank(peer) for peer in mesh.tp_ranks(rank)} == {mesh.dp_rank(rank)}
        assert mesh.tp_ranks(rank)[0] in mesh.leaders()
        assert mesh.tensor_shard(rank) == Shard(mesh.tp_rank(rank), tp)
        assert mesh.expert_shard(rank) == (Shard(rank, dp * tp) if mesh.spreads_experts else None)
    assert mesh.spreads_experts is (spread and mesh.size > 1)


def test_one_rank_keeps_everything() -> None:
    mesh = Mesh()
    assert (mesh.size, mesh.leads(0), mesh.tensor_shard(0), mesh.expert_shard(0)) == (1, True, WHOLE, None)
    assert str(Mesh(dp=2, tp=4, ep=8)) == "dp2 tp4 ep8"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp": 0}, r"parallel\.dp 1, parallel\.tp 0, parallel\.ep 1: each is at least 1"),
        ({"dp": -1}, r"parallel\.dp -1, .*each is at least 1"),
        ({"ep": 0}, r"parallel\.ep 0: each is at least 1"),
        ({"ep": 2}, r"parallel\.ep is 2; with dp 1 and tp 1 it is 1 \(experts cut over tp\) or 1"),
        (
            {"tp": 2, "dp": 2, "ep": 2},
            r"parallel\.ep is 2; with dp 2 and tp 2 it is 1 \(experts cut over tp\) or 4 \(whole experts over",
        ),
        ({"tp": 4, "ep": 3}, r"parallel\.ep is 3; with dp 1 and tp 4 it is 1 .* or 4 "),
    ],
)
def test_what_is_no_layout_is_refused_with_the_sizes_that_are(sizes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Mesh(**sizes)


@given(SIZES, SIZES, st.integers(0, 64))
def test_settings_take_the_layouts_that_a_mesh_takes(dp: int, tp: int, ep: int) -> None:
    def is_refused(make: type[Mesh] | type[ParallelSettings]) -> bool:
        try:
            make(dp=dp, tp=tp, ep=ep)
        except (ValueError, ValidationError):
            return True
        return False

    assert is_refused(Mesh) == is_refused(ParallelSettings) == (ep not in (1, dp * tp))
