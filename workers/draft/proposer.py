"""What a drafter is to a step: five verbs. Knows no model.

    begin, leave      sequences take their slots, and are gone from them
    observe(...)      the target committed rows; their hidden states are seen once, now
    propose(...)      draws gamma drafts per sequence into the token log, with their laws, scores and confidences
    accept(...)       verification's outcome, for the proposer's own counts

A proposer may own weights, a cache group (its layers appear in the state layout) and a vocabulary map. Nothing it does
can change the law of the output, only how many drafts stand. Which passes it makes follows from the plan alone, so that
all ranks make the same ones; what it keeps per sequence on the host, lookups, changes tokens and no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.batch import Batch, Layout
from workers.plan import Calibration, NewSequence, Origin
from workers.sampling.registers import Modes


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A committed pass. hidden_ND: the target's hidden states for drafting, flat rows of `batch`.
    committed_B: rows committed per sequence; rows beyond are void. slots: on the host. num_unfed: earlier committed
    rows that the drafter has not seen, a bound per sequence. catches_up: whether it sees them now, on every rank."""

    batch: Batch
    slots: Sequence[int]
    num_unfed: Sequence[int]
    catches_up: bool
    hidden_ND: Tensor
    committed_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Where to draft. columns_S: sequences of the observed batch that draft; slots: theirs, host values.
    longest: a bound of their lengths, on the host. chain: layout of one row for each of them, with its order and base
    on the device. step_id keys the noise of standard drafts. calibration: of the confidences of drawn drafts."""

    slots: Sequence[int]
    modes: Modes
    gamma: int
    longest: int
    step_id: int
    calibration: Calibration
    chain: Layout
    columns_S: Tensor
    chain_order_S: Tensor
    chain_base_S: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Per draft position since start: how many were verified and how many stood."""

    verified: tuple[int, ...]
    accepted: tuple[int, ...]


class Proposer(Protocol):
    gamma_max: int

    def begin(self, sequences: Sequence[NewSequence]) -> None:
        """Before the first observation of these sequences; whoever held their slots has left."""
        ...

    def leave(self, slots: Sequence[int]) -> None: ...

    def observe(self, observation: Observation, *, feed: bool) -> None:
        """feed: run the drafter over the rows. Otherwise their hidden states wait in the window."""
        ...

    def propose(self, proposal: Proposal) -> None:
        """Only after an observation that fed. Drafts lie in the token log behind the newest token. A proposal without
        sequences makes the passes of one that has some."""
        ...

    def looked_up(self, slots: Sequence[int]) -> tuple[tuple[Origin, int], ...]:
        """What made the first of the drafts that wait in each slot, and how many, on the rank that decides.

        (DRAFTER, 0) where the drafter made all; () where it did in every slot."""
        ...

    def accept(self, num_admitted: Sequence[int], num_accepted: Sequence[int]) -> None: ...

    def counts(self) -> DraftCounts: ...
