"""Which data-parallel rank a request goes to, by load and by the prompts that went there before. Knows no pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class PrefixRouter:
    """Remembers, per rank, the blocks of prompts it was given, and weighs a known prefix against load.

    A block is named by a hash of its tokens and of the name of the block before it, so that equal names mean equal
    prefixes. Two blocks that share a name by chance cost a poorer choice and nothing else.

    block_size: tokens of a block; shorter ends of prompts are not remembered.
    capacity: blocks remembered per rank; those not seen for longest go first.
    """

    def __init__(self, num_ranks: int, *, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._known: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(num_ranks))

    def route(self, prompt: tuple[int, ...], outstanding: Mapping[int, int]) -> int:
        """Chooses a rank and remembers the prompt there. The same calls in the same order bring the same choices.

        outstanding: tokens that each rank with room has before it; at least one rank.

        The best rank has the most tokens of known prefix beyond its outstanding ones: a token that need not be computed
        again weighs as much as one that waits for its turn. Of equals the one with less before it is taken, then the
        lowest.
        """
        if len(self._known) == 1:
            return 0
        blocks = self._blocks(prompt)
        chosen = max(
            outstanding,
            key=lambda rank: (
                self._num_known(rank, blocks) * self._block_size - outstanding[rank],
                -outstanding[rank],
                -rank,
            ),
        )
        self._remember(chosen, blocks)
        return chosen

    def _blocks(self, prompt: tuple[int, ...]) -> list[int]:
        names: list[int] = []
        name = 0
        for start in range(0, len(prompt) - self._block_size + 1, self._block_size):
            name = hash((name, prompt[start : start + self._block_size]))
            names.append(name)
        return names

    def _num_known(self, rank: int, blocks: list[int]) -> int:
        known = self._known[rank]
        return next((number for number, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, rank: int, blocks: list[int]) -> None:
        """Later blocks count as older: one without those before it is worth nothing."""
        known = self._known[rank]
        for block in reversed(blocks[: self._capacity]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)
