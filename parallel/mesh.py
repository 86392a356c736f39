"""How ranks are laid out: data × tensor parallel, and who owns whole experts. Pure integers; knows no network.

Rank r = dp_rank · tp + tp_rank. Ranks of one data-parallel rank are neighbours: they share sequences, pages and slots.

    tp2 ep1        r0 r1 cut every layer                               experts cut, one reduction
    tp2 ep2        r0 r1 cut attention; r0 owns e0.., r1 the rest      token rows split, dispatched, combined
    dp2 ep2        r0 | r1 each its own sequences                      token rows dispatched, combined
    tp2 dp2 ep4    r0 r1 | r2 r3                                       both
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import ParallelSettings
from parallel.slices import Shard


@dataclass(frozen=True, slots=True)
class Mesh:
    """dp data-parallel ranks of tp tensor-parallel ranks each. ep: ranks that own whole experts; 1 cuts experts as
    dense layers are cut.

    Raises ValueError, with the reason, for sizes that are no layout.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.ep) < 1:
            raise ValueError(f"parallel.dp {self.dp}, parallel.tp {self.tp}, parallel.ep {self.ep}: each is at least 1")
        if self.ep not in (1, self.size):
            raise ValueError(
                f"parallel.ep is {self.ep}; with dp {self.dp} and tp {self.tp} it is 1 (experts cut over tp) or "
                f"{self.size} (whole experts over all ranks)"
            )

    @classmethod
    def of(cls, settings: ParallelSettings) -> Mesh:
        """The layout that settings name."""
        return cls(dp=settings.dp, tp=settings.tp, ep=settings.ep)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks own whole experts, so that every rank takes part in every pass of any."""
        return self.ep > 1

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def leads(self, rank: int) -> bool:
        """Whether the rank samples for its data-parallel rank and answers with its tokens."""
        return self.tp_rank(rank) == 0

    def tp_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that share `rank`'s sequences, in order."""
        first = self.dp_rank(rank) * self.tp
        return tuple(range(first, first + self.tp))

    def leaders(self) -> tuple[int, ...]:
        """One rank per data-parallel rank, in order."""
        return tuple(range(0, self.size, self.tp))

    def tensor_shard(self, rank: int) -> Shard:
        """What `rank` keeps of attention, recurrence, dense layers and vocabulary."""
        return Shard(self.tp_rank(rank), self.tp)

    def expert_shard(self, rank: int) -> Shard | None:
        """What `rank` keeps of the experts; None where every expert is cut over the tensor-parallel ranks."""
        return Shard(rank, self.size) if self.spreads_experts else None

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp} ep{self.ep}"


ONE_RANK = Mesh()
