"""What the model answered before anything was measured, and how far later outputs follow it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """outputs: of each prompt, decoded plainly. requests_per_s: how fast they were."""

    outputs: tuple[tuple[int, ...], ...]
    requests_per_s: float

    def followed(self, prompt: int, tokens: Sequence[int]) -> int:
        """Tokens of an output of a prompt that are those recorded, up to the first that is not."""
        pairs = zip(tokens, self.outputs[prompt], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
