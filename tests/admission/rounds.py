"""Exact laws of one request's round, by the functions that serve: `draw_draft` and `verify` under enumerated noise.

A variate takes `size` values, the midpoints of as many equal cells of [0, 1). With a size that every boundary of a
decision divides, counting cells is exact, and rounding cannot move a midpoint across a boundary. Noise is a function of
the key that the code itself asks for; an `identity` says which keys are one. Knows no schedule and no admission.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from draft.admission_laws import ONE, RequestModel, Tokens
from torch import Tensor

from workers.sampling.randomness import KeyUse, Purpose, audit_keys
from workers.sampling.verify import DrawParams, Verdict, draw_draft, verify

Identity = Callable[[KeyUse], Hashable]
Known = tuple[tuple[Hashable, int], ...]
"""Noise that is kept in mind, in the order of its use: which, and the cell of its value."""

OFF = torch.zeros(1, dtype=torch.bool)


class KeyReused(AssertionError):
    """One noise has two uses, and was not kept in mind for the second."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a round brings: tokens, how many drafts stood, the acceptance of the positions reached."""

    emitted: Tokens
    num_accepted: int
    acceptance: tuple[float, ...]


@dataclass(slots=True)
class Rounds:
    """The rounds of one request.

    keeps: whether values of noise are kept in mind for a later use of their key. Where they are not, each is integrated
    out at once, and a second use is an error.
    depth: output positions whose laws the rounds may ask for.
    """

    model: RequestModel
    seed: int
    vocab_size: int
    depth: int
    identity: Identity = lambda key: key
    keeps: Callable[[KeyUse], bool] = lambda key: False
    size: int = field(init=False)
    _laws: dict[tuple[object, ...], object] = field(init=False, default_factory=dict)
    _used: dict[Hashable, tuple[KeyUse, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.size = _exact_size(self.model, self.vocab_size, self.depth)

    def draw(self, prefix: Tokens, gamma: int, step: int, known: Known) -> Mapping[tuple[Tokens, Known], Fraction]:
        """The law of γ drafts after `prefix`, drawn in `step`, and of the noise in mind after it."""
        law: dict[tuple[Tokens, Known], Fraction] = {((), known): ONE}
        for position in range(len(prefix), len(prefix) + gamma):
            longer: dict[tuple[Tokens, Known], Fraction] = defaultdict(Fraction)
            for (drafts, noise), mass in law.items():
                for (token, after), share in self._draft((*prefix, *drafts), position, step, noise).items():
                    longer[(*drafts, token), after] += mass * share
            law = longer
        return law

    def judge(
        self, prefix: Tokens, drafts: Tokens, num_admitted: int, step: int, known: Known
    ) -> Mapping[tuple[Judged, Known], Fraction]:
        """The law of the verdict on the first `num_admitted` of the drafts."""
        law = self._laws.get((prefix, drafts, num_admitted, step, known))
        if law is None:
            law = self._judge(prefix, drafts, num_admitted, step, known)
            self._laws[prefix, drafts, num_admitted, step, known] = law
        return law  # type: ignore[return-value]

    def _draft(self, prefix: Tokens, position: int, step: int, known: Known) -> Mapping[tuple[int, Known], Fraction]:
        case = ("draft", prefix, position, step, known)
        if case in self._laws:
            return self._laws[case]  # type: ignore[return-value]
        law_V = torch.tensor([float(mass) for mass in self.model.q(prefix)])

        def draw(count: int) -> Tensor:
            params = self._params(position, count)
            return draw_draft(law_V.expand(count, -1), params, step, any_standard=True, any_coupled=False)

        with audit_keys() as audit:
            draw(1)
        grid, kept = self._grid(audit.uses, known, f"drafts of step {step}")
        with answering(audit.uses, grid, self.size):
            tokens_N = draw(len(grid))
        law = {
            (token, (*known, *noise)): share for (token,), noise, _, share in _counted(tokens_N[:, None], grid, kept)
        }
        self._laws[case] = law
        return law

    def _judge(
        self, prefix: Tokens, drafts: Tokens, num_admitted: int, step: int, known: Known
    ) -> Mapping[tuple[Judged, Known], Fraction]:
        window = 1 + len(drafts)
        p_WV = torch.tensor([[float(x) for x in self.model.p((*prefix, *drafts[:j]))] for j in range(window)])
        q_GV = torch.tensor([[float(x) for x in self.model.q((*prefix, *drafts[:j]))] for j in range(len(drafts))])
        q_GV = q_GV.view(len(drafts), self.vocab_size)

        def run(count: int) -> Verdict:
            return verify(
                p_WV.expand(count, -1, -1),
                q_GV.expand(count, -1, -1),
                torch.tensor(drafts, dtype=torch.int64).expand(count, -1),
                torch.full((count,), num_admitted),
                self._params(len(prefix), count),
                step,
                any_standard=True,
                any_coupled=False,
            )

        with audit_keys() as audit:
            run(1)
        # The noise of drafts that are not admitted is asked for and ignored.
        end = len(prefix) + num_admitted
        uses = [key for key in audit.uses if key.purpose is not Purpose.ACCEPT or key.position < end]
        grid, kept = self._grid(uses, known, f"verdicts of step {step}")
        with answering(uses, grid, self.size):
            verdict = run(len(grid))
        outcome_NX = torch.cat([verdict.num_accepted_B[:, None], verdict.tokens_BW], dim=1)
        law: dict[tuple[Judged, Known], Fraction] = {}
        for (num_accepted, *tokens), noise, row, share in _counted(outcome_NX, grid, kept):
            reached = verdict.acceptance_BG[row, : min(num_accepted + 1, num_admitted)]
            judged = Judged(tuple(tokens[: num_accepted + 1]), num_accepted, tuple(reached.float().tolist()))
            law[judged, (*known, *noise)] = share
        return law

    def _params(self, position: int, count: int) -> DrawParams:
        off = OFF.expand(count)
        return DrawParams(
            greedy_N=off,
            coupled_N=off,
            seed_N=torch.full((count,), self.seed),
            position_N=torch.full((count,), position),
        )

    def _grid(self, uses: Sequence[KeyUse], known: Known, use: str) -> tuple[Tensor, list[tuple[Hashable, int]]]:
        """Cells of all noise that the keys in `uses` stand for, [combinations, keys], and which columns to keep in
        mind: identity and column. use: what the noise is for, once on any path."""
        in_mind = dict(known)
        names = [self.identity(key) for key in uses]
        cells = {name: torch.tensor([in_mind[name]]) if name in in_mind else torch.arange(self.size) for name in names}
        for key, name in zip(uses, names, strict=True):
            if self._used.setdefault(name, (key, use)) != (key, use) and name not in in_mind:
                raise KeyReused(f"{key} of {use} is the noise of {self._used[name]}")
        places = {name: i for i, name in enumerate(cells)}
        combinations = torch.cartesian_prod(*cells.values()).view(-1, len(cells))
        kept = [
            (name, names.index(name))
            for name in cells
            if name not in in_mind and any(self.keeps(key) for key, own in zip(uses, names, strict=True) if own == name)
        ]
        return combinations[:, [places[name] for name in names]], kept


def _counted(
    outcome_NX: Tensor, grid: Tensor, kept: Sequence[tuple[Hashable, int]]
) -> Iterator[tuple[list[int], Known, int, Fraction]]:
    """Each outcome with the noise to keep in mind of it: its columns, that noise, a row that has it, and its share of
    all rows."""
    columns = torch.cat([outcome_NX, grid[:, [column for _, column in kept]]], dim=1).numpy()
    # One number per row of columns, none of which is below −1, is found again much faster than the row is.
    base_X = np.cumprod([1, *(columns.max(0) + 2)])[:-1]
    _, rows, counts = np.unique((columns + 1) @ base_X, return_index=True, return_counts=True)
    width = outcome_NX.shape[1]
    for row_X, row, count in zip(columns[rows].tolist(), rows.tolist(), counts.tolist(), strict=True):
        noise = tuple((name, cell) for (name, _), cell in zip(kept, row_X[width:], strict=True))
        yield row_X[:width], noise, row, Fraction(count, len(grid))


@contextmanager
def answering(uses: Sequence[KeyUse], grid: Tensor, size: int) -> Iterator[None]:
    """Has variates of verification take the midpoints of the cells in the columns of `grid`, by key; those of other
    keys are 0."""
    columns = {key: (grid[:, i].to(torch.float64) + 0.5) / size for i, key in enumerate(uses)}
    nothing = torch.zeros(len(grid), dtype=torch.float64)

    def uniforms(seed: Tensor, purpose: Purpose, position: Tensor, step: int | Tensor) -> Tensor:
        step_N = step if isinstance(step, Tensor) else torch.tensor(step)
        shape = (seed + position + step_N).shape
        rows = [column.expand(shape)[0].reshape(-1).tolist() for column in (seed, position, step_N)]
        values = [columns.get(KeyUse(s, purpose, x, t), nothing) for s, x, t in zip(*rows, strict=True)]
        return torch.stack(values, dim=1).view(shape) if values else torch.zeros(shape, dtype=torch.float64)

    with patch("workers.sampling.verify.uniforms", uniforms):
        yield


def _exact_size(model: RequestModel, vocab_size: int, depth: int) -> int:
    """The least number of cells at which every boundary of a decision lies between two of them."""
    size = 1
    for length in range(depth):
        for prefix in product(range(vocab_size), repeat=length):
            p, q = model.p(prefix), model.q(prefix)
            residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
            shares = [a / b for a, b in zip(p, q, strict=True) if a < b] + [*p, *q]
            shares += [mass / sum(residual) for mass in residual if mass]
            size = math.lcm(size, *(share.denominator for share in shares))
    return size
