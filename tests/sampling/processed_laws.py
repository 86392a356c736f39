"""Exact laws of what processed requests output, round by round or token by token, by the functions that serve.

Laws come out of processing as float32, are taken as fractions and normalised; drafts and verdicts are branches with
their exact weights. `verify_standard` is asked at the middle of each cell between the boundaries that these fractions
put on its uniforms, `clip_emitted` and the constraint cut the run, and rounds go on until every output has ended.
Shared noise is a table per sequence, and then outputs themselves are compared. Test material only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, product
from unittest.mock import patch

import torch
from sampling.tiny_rank import TinyRank, Tokens
from torch import Tensor

from workers.sampling.verify import DrawParams, clip_emitted, draw_draft, verify, verify_standard

Masses = tuple[Fraction, ...]
Outcome = tuple[Tokens, str]
"""An output and what ended it: "" at the limit."""
OutputLaw = dict[Outcome, Fraction]

NARROWEST = Fraction(1, 10**12)
"""Rounding in the core moves a boundary by less than a thousandth of this; cells are as wide at least."""


def lifted(law_V: Tensor) -> Masses:
    masses = [Fraction(value) for value in law_V.tolist()]
    return tuple(mass / sum(masses) for mass in masses)


@dataclass(slots=True)
class Laws:
    """Of outputs of up to `length` tokens, with γ drafts a round. One sequence, in whichever slots are needed."""

    rank: TinyRank
    length: int
    num_verdicts: int = 0
    num_accepted: int = 0
    _entered: set[int] = field(default_factory=set)

    def output(self, gamma: int) -> OutputLaw:
        law: dict[Outcome, Fraction] = defaultdict(Fraction)
        open_runs: dict[Tokens, Fraction] = {(): Fraction(1)}
        while open_runs:
            longer: dict[Tokens, Fraction] = defaultdict(Fraction)
            for prefix, weight in open_runs.items():
                runs = self.round(prefix, gamma)
                for share, (tokens, end) in zip(runs.values(), self.clipped(prefix, list(runs)), strict=True):
                    if end or len(tokens) == self.length:
                        law[tokens, end] += weight * share
                    else:
                        longer[tokens] += weight * share
            open_runs = longer
        assert sum(law.values()) == 1
        return dict(law)

    def round(self, prefix: Tokens, gamma: int) -> dict[Tokens, Fraction]:
        """The law of the run that a round emits, before it is clipped."""
        chains = self._chains(prefix, gamma)
        slots = self._placed(prefix, len(chains))
        p_SWV = self.rank.window_laws(slots, [chain.drafts for chain in chains])
        p = [[lifted(law_V) for law_V in p_WV] for p_WV in p_SWV]
        return self._judged(chains, p)

    def clipped(self, prefix: Tokens, runs: Sequence[Tokens]) -> list[Outcome]:
        """The output with each run, as far as it is kept."""
        world, width = self.rank.world, max(map(len, runs))
        kept = clip_emitted(
            torch.tensor([[*run, *[-1] * (width - len(run))] for run in runs]),
            torch.tensor([len(run) for run in runs]),
            torch.tensor([[*world.stops, -1]] * len(runs)),
            torch.full((len(runs),), self.length - len(prefix)),
        )
        outcomes = []
        for run, most in zip(runs, kept.tolist(), strict=True):
            (slot,) = self._placed(prefix, 1)
            count, is_met = self.rank.commit(slot, run[:most])
            end = "stop" if run[count - 1] in world.stops else "constraint" if is_met else ""
            outcomes.append(((*prefix, *run[:count]), end))
        return outcomes

    def _placed(self, prefix: Tokens, count: int) -> list[int]:
        slots = list(range(1, 1 + count))
        new = [slot for slot in slots if slot not in self._entered]
        if new:
            self.rank.enter(new)
            self._entered.update(new)
        self.rank.rewind(slots, prefix)
        return slots

    def _chains(self, prefix: Tokens, gamma: int) -> list[_Chain]:
        """Every run of γ drafts that can be drawn, with its probability and what is told of the laws it is of."""
        chains = [_Chain()]
        for _ in range(gamma):
            slots = self._placed(prefix, len(chains))
            laws_SV = self.rank.draft_laws(slots, [chain.drafts for chain in chains])
            told = [lifted(law_V) for law_V in self.rank.claim(laws_SV)]
            chains = [
                _Chain((*chain.drafts, token), chain.weight * mass, (*chain.laws, q))
                for chain, law_V, q in zip(chains, laws_SV, told, strict=True)
                for token, mass in enumerate(lifted(law_V))
                if mass
            ]
        return chains

    def _judged(self, chains: Sequence[_Chain], p: Sequence[Sequence[Masses]]) -> dict[Tokens, Fraction]:
        rows: list[tuple[int, tuple[Fraction, ...], Fraction]] = []
        for index, (chain, laws) in enumerate(zip(chains, p, strict=True)):
            for uniforms, share in _cells(chain, laws):
                rows.append((index, uniforms, chain.weight * share))
        gamma = len(chains[0].drafts)
        index_N = torch.tensor([index for index, _, _ in rows])
        u_NX = torch.tensor([[float(u) for u in uniforms] for _, uniforms, _ in rows], dtype=torch.float64)
        p_NWV = torch.tensor([[[float(x) for x in law] for law in laws] for laws in p], dtype=torch.float64)[index_N]
        q_SGV = torch.tensor([[[float(x) for x in law] for law in c.laws] for c in chains], dtype=torch.float64)
        verdict = verify_standard(
            p_NWV,
            q_SGV.view(len(chains), gamma, -1)[index_N] if gamma else p_NWV[:, :0],
            torch.tensor([c.drafts for c in chains], dtype=torch.int64).view(len(chains), gamma)[index_N],
            torch.full((len(rows),), gamma),
            u_NX[:, :gamma],
            u_NX[:, gamma],
            scale=1.0,
        )
        law: dict[Tokens, Fraction] = defaultdict(Fraction)
        counts = verdict.num_accepted_B.tolist()
        for (_, _, share), count, tokens in zip(rows, counts, verdict.tokens_BW.tolist(), strict=True):
            law[tuple(tokens[: count + 1])] += share
        self.num_verdicts += len(rows) * (gamma > 0)
        self.num_accepted += sum(count > 0 for count in counts)
        return dict(law)


@dataclass(frozen=True, slots=True)
class _Chain:
    """laws: told of each draft."""

    drafts: Tokens = ()
    weight: Fraction = Fraction(1)
    laws: tuple[Masses, ...] = ()


def _cells(chain: _Chain, p: Sequence[Masses]) -> Iterator[tuple[tuple[Fraction, ...], Fraction]]:
    """The uniforms of a round, one for each draft and one for the draw: the middles of all cells that decisions are
    constant in, and their shares."""
    axes: list[list[tuple[Fraction, Fraction]]] = []
    drawn_from = [p[-1]]
    for token, own, law in zip(chain.drafts, chain.laws, p, strict=False):
        axes.append(_middles([law[token] / own[token]] if own[token] else []))
        residual = [max(a - b, Fraction(0)) for a, b in zip(law, own, strict=True)]
        drawn_from.append(tuple(mass / sum(residual) for mass in residual) if any(residual) else law)
    boundaries = {sum(law[: k + 1], Fraction(0)) for law in drawn_from for k in range(len(law))}
    axes.append(_middles(sorted(boundaries)))
    for cells in product(*axes):
        share = Fraction(1)
        for _, width in cells:
            share *= width
        yield tuple(middle for middle, _ in cells), share


def _middles(boundaries: Sequence[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Middle and width of each cell of [0, 1)."""
    edges = [Fraction(0), *sorted({b for b in boundaries if 0 < b < 1}), Fraction(1)]
    cells = [((low + high) / 2, high - low) for low, high in pairwise(edges)]
    assert all(width > NARROWEST for _, width in cells), "a cell is too narrow to tell rounding from a boundary"
    return cells


class SharedNoise:
    """Outputs of sequences that verify coupled: seed s draws with row s of a table, [seeds, positions, V]."""

    def __init__(self, rank: TinyRank, length: int, num_seeds: int, vocab_size: int) -> None:
        rng = random.Random(num_seeds)
        # Far enough apart for noise to overrule some laws, near enough for other laws to overrule noise.
        orders = [[4.0**k for k in rng.sample(range(vocab_size), vocab_size)] for _ in range(num_seeds * 2 * length)]
        self._noise_TNV = torch.tensor(orders).view(num_seeds, 2 * length, vocab_size)
        self._rank, self._length, self._count = rank, length, num_seeds
        self.num_accepted = 0

    def outputs(self, gamma_of_round: Callable[[int], int]) -> list[Outcome]:
        ended: dict[int, str] = {}
        slots = list(range(1, 1 + self._count))
        self._rank.enter(slots, coupled=True)
        self.num_accepted = index = 0
        with patch("workers.sampling.verify.exponential_noise", self._noise):
            while going := [slot for slot in slots if slot not in ended]:
                self._round(going, gamma_of_round(index), ended)
                index += 1
        return [(tuple(self._rank.outputs[slot]), ended[slot]) for slot in slots]

    def _noise(self, seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        return self._noise_TNV[seed - 1, position]

    def _round(self, slots: list[int], gamma: int, ended: dict[int, str]) -> None:
        rank = self._rank
        position_S = torch.tensor([len(rank.outputs[slot]) for slot in slots])
        drafts: list[Tokens] = [()] * len(slots)
        for step in range(gamma):
            law_SV = rank.draft_laws(slots, drafts)
            drawn = draw_draft(law_SV, self._params(slots, position_S + step), 0, any_standard=False, any_coupled=True)
            drafts = [(*own, token) for own, token in zip(drafts, drawn.tolist(), strict=True)]
        counts = [(slot + gamma) % (gamma + 1) if slot % 3 == 0 else gamma for slot in slots]  # some admit fewer
        admitted = [own[:count] for own, count in zip(drafts, counts, strict=True)]
        p_SWV = rank.window_laws(slots, admitted, num_pad=3)
        width = p_SWV.shape[1]
        verdict = verify(
            p_SWV,
            None,
            torch.tensor([[*own, *[0] * (width - 1 - len(own))] for own in admitted], dtype=torch.int64).view(
                len(slots), width - 1
            ),
            torch.tensor(counts),
            self._params(slots, position_S),
            0,
            any_standard=False,
            any_coupled=True,
        )
        stops = rank.world.stops
        kept_S = clip_emitted(
            verdict.tokens_BW,
            verdict.num_emitted_B,
            torch.tensor([[*stops, -1]] * len(slots)),
            self._length - position_S,
        )
        self.num_accepted += int(verdict.num_accepted_B.sum())
        for slot, tokens, kept in zip(slots, verdict.tokens_BW.tolist(), kept_S.tolist(), strict=True):
            count, is_met = rank.commit(slot, tokens[:kept])
            if tokens[count - 1] in stops:
                ended[slot] = "stop"
            elif is_met:
                ended[slot] = "constraint"
            elif len(rank.outputs[slot]) == self._length:
                ended[slot] = ""

    def _params(self, slots: Sequence[int], position_S: Tensor) -> DrawParams:
        coupled_S = torch.ones(len(slots), dtype=torch.bool)
        return DrawParams(greedy_N=~coupled_S, coupled_N=coupled_S, seed_N=torch.tensor(slots), position_N=position_S)
