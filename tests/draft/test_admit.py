"""admit: its order and edges, its torch twin, and the exact joint output law under it; leaky rules are rejected."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from draft.admission_laws import (
    Lengths,
    RequestModel,
    Rule,
    Tokens,
    bias,
    coin,
    first_token,
    joint_law,
    random_request,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from workers.draft.admit import admit
from workers.draft.admit_on_device import admit_on_device
from workers.plan import VERIFY_EVERYTHING

NAN = float("nan")
COARSE = [0.0, -0.0, 0.25, 0.5, 0.75, 1.0, 1.5, -1.0, NAN, float("inf")]
"""Confidences with many ties and every oddity; products of the ordinary ones are exact in float32."""


def lengths(
    confidences: list[list[float]],
    num_drafts: list[int],
    uid: list[int],
    budget: int,
    forced: list[int] | None = None,
    floor: float = 0.0,
) -> list[int]:
    forced_B = None if forced is None else np.array(forced)
    c = np.array(confidences, dtype=np.float32)
    return admit(c, np.array(num_drafts), np.array(uid), budget, forced_B, floor).tolist()


def test_the_largest_survivals_are_admitted_as_prefixes() -> None:
    confidences = [[0.5, 1.0, 0.5], [0.75, 0.5, 1.0]]  # survivals .5 .5 .25 and .75 .375 .375
    by_budget = [lengths(confidences, [3, 3], [1, 2], budget) for budget in range(7)]
    assert by_budget == [[0, 0], [0, 1], [1, 1], [2, 1], [2, 2], [2, 3], [3, 3]]


def test_ties_go_to_the_earlier_position_and_then_to_the_older_request() -> None:
    confidences = [[1.0, 1.0], [1.0, 1.0]]
    assert [lengths(confidences, [2, 2], [9, 4], budget) for budget in (1, 2, 3)] == [[0, 1], [1, 1], [1, 2]]


def test_survival_0_is_admitted_only_by_a_budget_that_covers_everything() -> None:
    confidences = [[0.5, 0.0, 1.0], [NAN, 1.0, 1.0]]
    assert lengths(confidences, [3, 3], [1, 2], 5) == [1, 0]
    assert lengths(confidences, [3, 3], [1, 2], 6) == [3, 3]
    assert lengths(confidences, [3, 2], [1, 2], 5) == [3, 2]
    assert lengths(confidences, [3, 3], [1, 2], VERIFY_EVERYTHING) == [3, 3]


def test_confidences_outside_0_to_1_are_clipped() -> None:
    # Unclipped, 0.25 · 4 would outrank 0.5 and admit a second draft without the first one's standing.
    assert lengths([[0.25, 4.0], [0.5, -1.0]], [2, 2], [1, 2], 1) == [0, 1]


def test_no_positions_and_no_sequences_are_fine() -> None:
    none = np.zeros((2, 0), dtype=np.float32)
    zero = np.zeros(2, dtype=np.int64)
    assert admit(none, zero, np.array([1, 2]), 4).tolist() == [0, 0]
    assert admit_on_device(torch.from_numpy(none), torch.from_numpy(zero), torch.tensor([1, 2]), 4).tolist() == [0, 0]
    assert admit(none.T, zero[:0], zero[:0], 4).tolist() == []
    empty = torch.zeros(0, dtype=torch.int64)
    assert admit_on_device(torch.from_numpy(none.T), empty, empty, 4).tolist() == []


def test_forced_drafts_come_first_whatever_their_confidence_and_count_against_the_budget() -> None:
    confidences = [[0.0, 1.0], [1.0, 1.0], [NAN, 0.5]]
    by_budget = [lengths(confidences, [2, 2, 2], [3, 1, 2], budget, [1, 0, 2]) for budget in range(7)]
    # Positions 0 of requests 2 and 3 in order of their uids, position 1 of request 2; then by survival, of which the
    # second draft of request 3 has none.
    assert by_budget == [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 0, 2], [1, 1, 2], [1, 2, 2], [2, 2, 2]]


def test_what_is_forced_weighs_on_what_comes_after_it() -> None:
    assert lengths([[0.25, 1.0], [0.5, 0.5]], [2, 2], [1, 2], 2, [1, 0]) == [1, 1]
    assert lengths([[0.75, 1.0], [0.5, 0.5]], [2, 2], [1, 2], 2, [1, 0]) == [2, 0]


def test_drafts_below_the_floor_are_not_admitted_though_the_budget_covers_all() -> None:
    confidences = [[0.5, 0.5, 1.0], [0.75, 0.0, 1.0]]
    assert lengths(confidences, [3, 3], [1, 2], VERIFY_EVERYTHING, floor=0.25) == [3, 1]
    assert lengths(confidences, [3, 3], [1, 2], VERIFY_EVERYTHING, floor=0.26) == [1, 1]
    assert lengths(confidences, [3, 3], [1, 2], 1, floor=0.26) == [0, 1]
    assert lengths(confidences, [3, 3], [1, 2], VERIFY_EVERYTHING, [0, 2], 0.26) == [1, 2]
    assert lengths(confidences, [3, 3], [1, 2], VERIFY_EVERYTHING, floor=0.0) == [3, 3]


def test_the_floor_is_compared_in_float32() -> None:
    """0.1 rounds up: a survival of float32 0.1 reaches it, and neither twin holds it against the float64 one."""
    c, one = np.array([[0.1]], dtype=np.float32), np.array([1])
    below = np.nextafter(c, np.float32(0))
    for confidence, expected in ((c, [1]), (below, [0])):
        tensors = (torch.from_numpy(confidence), torch.from_numpy(one), torch.from_numpy(one))
        assert admit(confidence, one, one, 1, None, 0.1).tolist() == expected
        assert admit_on_device(*tensors, 1, None, 0.1).tolist() == expected


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What `admit` is told."""

    confidence: NDArray[np.float32]
    num_drafts: NDArray[np.int64]
    uid: NDArray[np.int64]
    budget: int
    num_forced: NDArray[np.int64] | None
    floor: float

    def admit(self) -> list[int]:
        return admit(self.confidence, self.num_drafts, self.uid, self.budget, self.num_forced, self.floor).tolist()

    def admit_on_device(self) -> list[int]:
        arrays = (self.confidence, self.num_drafts, self.uid)
        forced = None if self.num_forced is None else torch.from_numpy(self.num_forced)
        admitted = admit_on_device(*map(torch.from_numpy, arrays), self.budget, forced, self.floor)
        assert admitted.dtype == torch.int64
        return admitted.tolist()

    def plainly(self) -> list[int]:
        """One entry at a time, by counting those that beat it."""
        entries = {}
        for b, row in enumerate(self.confidence):
            survival = np.float32(1)
            for j in range(self.num_drafts[b]):
                survival *= min(max(row[j], np.float32(0)), np.float32(1)) if row[j] == row[j] else np.float32(0)
                forced = self.num_forced is not None and j < self.num_forced[b]
                entries[b, j] = (forced, np.float32(0) if forced else survival, -j, -self.uid[b], survival)
        admitted = [0] * len(self.confidence)
        for (b, _), key in entries.items():
            rank = sum(other[:4] > key[:4] for other in entries.values())
            good = (key[4] > 0 or self.budget >= len(entries)) and key[4] >= np.float32(self.floor)
            admitted[b] += bool(rank < self.budget and (key[0] or good))
        return admitted


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_sequences, num_positions = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    one = st.one_of(st.sampled_from(COARSE), st.floats(0, 1, width=32))
    row = st.lists(one, min_size=num_positions, max_size=num_positions)
    confidences = draw(st.lists(row, min_size=num_sequences, max_size=num_sequences))
    num_drafts = draw(st.lists(st.integers(0, num_positions), min_size=num_sequences, max_size=num_sequences))
    uid = draw(st.lists(st.integers(0, 50), min_size=num_sequences, max_size=num_sequences, unique=True))
    return Batch(
        confidence=np.array(confidences, dtype=np.float32),
        num_drafts=np.array(num_drafts),
        uid=np.array(uid),
        budget=draw(st.integers(0, num_sequences * num_positions + 1)),
        num_forced=draw(st.none() | st.tuples(*[st.integers(0, n) for n in num_drafts]).map(np.array)),
        floor=draw(st.sampled_from([0.0, 0.125, 0.25, 0.1, 0.5, 1.0]) | st.floats(0, 1)),
    )


@given(batches())
def test_both_twins_equal_the_plain_computation(batch: Batch) -> None:
    expected = batch.plainly()
    assert batch.admit() == expected
    assert batch.admit_on_device() == expected


def test_the_twins_agree_on_large_batches_of_close_survivals() -> None:
    rng = np.random.default_rng(0)
    c = rng.uniform(0.98, 1.0, size=(256, 8)).astype(np.float32)
    num_drafts, uid = rng.integers(0, 9, size=256), rng.permutation(256)
    forced = np.minimum(num_drafts, rng.integers(-6, 3, size=256).clip(0))
    for budget in range(0, 1100, 100):
        for num_forced, floor in ((None, 0.0), (forced, 0.95)):
            batch = Batch(
                confidence=c, num_drafts=num_drafts, uid=uid, budget=budget, num_forced=num_forced, floor=floor
            )
            assert batch.admit() == batch.admit_on_device()


@given(batches(), st.data())
def test_what_comes_after_a_draft_does_not_change_its_admission(batch: Batch, data: st.DataObject) -> None:
    num_sequences, num_positions = batch.confidence.shape
    row, k = data.draw(st.integers(0, num_sequences - 1)), data.draw(st.integers(0, num_positions - 1))
    later = st.lists(st.sampled_from(COARSE), min_size=num_positions - k - 1, max_size=num_positions - k - 1)
    changed = batch.confidence.copy()
    changed[row, k + 1 :] = data.draw(later)
    before, after = batch.admit(), replace(batch, confidence=changed).admit()
    assert (before[row] > k) == (after[row] > k)


@given(batches(), st.randoms(use_true_random=False))
def test_lengths_follow_their_requests_when_rows_move(batch: Batch, rng: random.Random) -> None:
    order = list(range(len(batch.uid)))
    rng.shuffle(order)
    moved = replace(
        batch,
        confidence=batch.confidence[order],
        num_drafts=batch.num_drafts[order],
        uid=batch.uid[order],
        num_forced=None if batch.num_forced is None else batch.num_forced[order],
    )
    assert moved.admit() == [batch.admit()[i] for i in order]


def top_k(budget: int, forced: int = 0, floor: float = 0.0) -> Rule:
    """The rule under test, with a budget fixed beforehand."""

    def rule(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
        uid, num_drafts = list(range(len(drafts))), [len(x) for x in drafts]
        return [(Fraction(1), tuple(lengths(confidences, num_drafts, uid, budget, [forced] * len(uid), floor)))]

    return rule


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("num_requests", "gamma"), [(1, 2), (2, 1), (2, 2)])
def test_the_joint_law_is_exact_for_every_budget(num_requests: int, gamma: int, seed: int) -> None:
    rng = random.Random(seed)
    models = [random_request(rng, gamma, COARSE) for _ in range(num_requests)]
    for budget in range(num_requests * gamma + 1):
        assert bias(top_k(budget), models, gamma) == 0


@pytest.mark.parametrize(("forced", "floor"), [(1, 0.0), (0, 0.5), (1, 0.5)])
def test_the_joint_law_is_exact_with_forced_drafts_and_a_floor(forced: int, floor: float) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        models = [random_request(rng, 2, COARSE) for _ in range(2)]
        for budget in (1, 2, 3, VERIFY_EVERYTHING):
            assert bias(top_k(budget, forced, floor), models, 2) == 0


def test_the_joint_law_is_exact_for_three_drafts() -> None:
    model = random_request(random.Random(5), 3, COARSE)
    for budget in range(4):
        assert bias(top_k(budget), [model], 3) == 0


def overlap(p: Callable[[Tokens], tuple[Fraction, ...]], q: Callable[[Tokens], tuple[Fraction, ...]]) -> RequestModel:
    """A request whose confidence is the very probability that the next draft stands."""
    return RequestModel(p=p, q=q, confidence=lambda x: float(sum(map(min, p(x), q(x)))))


def cliff_request(p: str, q: str, next_p: tuple[str, str], next_q: tuple[str, str]) -> RequestModel:
    """First laws p and q; after draft x the laws next_p[x] and next_q[x]. Shares of token 0."""
    return overlap(
        lambda x: coin(next_p[x[0]]) if x else coin(p),
        lambda x: coin(next_q[x[0]]) if x else coin(q),
    )


A = cliff_request("2/3", "1/3", ("1/2", "0"), ("1/2", "1"))
"""After draft 0 the next one is sure to stand, after draft 1 sure to fall."""
B = cliff_request("3/5", "2/5", ("1/2", "0"), ("1/2", "1"))


def survivals(confidences: list[list[float]]) -> dict[tuple[int, int], float]:
    return {(r, j): float(np.prod(row[: j + 1])) for r, row in enumerate(confidences) for j in range(len(row))}


def global_argmax(step_cost: dict[int, float]) -> Rule:
    """Budget of the best ratio of expected tokens to cost under the *current* confidences."""

    def rule(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
        descending = sorted(survivals(confidences).values(), reverse=True)
        num_requests = len(drafts)
        rates = [
            (num_requests + sum(descending[:budget])) / step_cost[num_requests + budget]
            for budget in range(len(descending) + 1)
        ]
        return top_k(rates.index(max(rates)))(drafts, confidences)

    return rule


ONE_REQUEST_COST = {1: 1.0, 2: 2.0, 3: 2.0}
TWO_REQUEST_COST = {2: 2.0, 3: 2.5, 4: 3.2, 5: 3.3, 6: 3.4}


def test_a_budget_from_the_current_confidences_is_rejected() -> None:
    rule = global_argmax(ONE_REQUEST_COST)
    assert bias(rule, [A], 2) == Fraction(1, 9)
    assert first_token(joint_law(rule, [A], 2), 0, 0) == Fraction(7, 9)
    for budget in range(3):
        assert bias(top_k(budget), [A], 2) == 0


def test_a_budget_from_the_current_confidences_of_the_batch_is_rejected() -> None:
    rule = global_argmax(TWO_REQUEST_COST)
    assert first_token(joint_law(rule, [A, B], 2), 0, 0) == Fraction(11, 15)
    for budget in range(5):
        assert bias(top_k(budget), [A, B], 2) == 0


def rounded_to_graph(round_up: bool) -> Rule:
    """Verify while survival is at least 1/2, then fit 1 + length to captured sizes 1 and 3."""

    def rule(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
        wanted = sum(survival >= 0.5 for survival in survivals(confidences).values())
        return [(Fraction(1), ({0: 0, 1: 2 if round_up else 0, 2: 2}[wanted],))]

    return rule


def test_rounding_down_after_looking_is_rejected_and_filling_up_is_not() -> None:
    assert bias(rounded_to_graph(round_up=False), [A], 2) == Fraction(1, 9)
    assert bias(rounded_to_graph(round_up=True), [A], 2) == 0


def random_ties(budget: int) -> Rule:
    """The largest survivals, those of one value in an order by lot."""

    def rule(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
        survival = survivals(confidences)
        orders = list(permutations(survival))
        sorted_orders = [sorted(order, key=lambda entry: -survival[entry])[:budget] for order in orders]
        return [
            (Fraction(1, len(orders)), tuple(sum(entry[0] == r for entry in chosen) for r in range(len(drafts))))
            for chosen in sorted_orders
        ]

    return rule


def test_ties_by_lot_are_rejected() -> None:
    # A's first draft ties with B's, and with A's own second one if the first is token 0.
    rival = RequestModel(p=A.p, q=A.q, confidence=lambda x: 0.0 if x else A.confidence(()))
    assert bias(random_ties(1), [A, rival], 2) > 0
    assert bias(top_k(1), [A, rival], 2) == 0


def unclipped(budget: int) -> Rule:
    """Top survivals without the clip: a factor above 1 lets a later entry outrank the earlier one."""

    def rule(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
        survival = survivals(confidences)
        chosen = sorted(survival, key=lambda entry: (-survival[entry], entry[1], entry[0]))[:budget]
        return [(Fraction(1), tuple(sum(entry[0] == r for entry in chosen) for r in range(len(drafts))))]

    return rule


def test_survival_that_may_grow_along_a_request_is_rejected() -> None:
    models = [
        RequestModel(p=A.p, q=A.q, confidence=lambda x: {(): 0.5, (0,): 4.0, (1,): 0.0}[x]),
        RequestModel(p=B.p, q=B.q, confidence=lambda x: 0.0 if x else 0.75),
    ]
    assert bias(unclipped(1), models, 2) > 0
    assert bias(top_k(1), models, 2) == 0


def drawn_token_gate(drafts: tuple[Tokens, ...], confidences: list[list[float]]) -> list[tuple[Fraction, Lengths]]:
    """Verify a draft only if the drafter gave that very token at least half of its law."""
    (draft,) = drafts
    return [(Fraction(1), (int(A.q(())[draft[0]] >= Fraction(1, 2)),))]


def test_a_gate_on_the_drawn_token_s_probability_is_rejected() -> None:
    assert bias(drawn_token_gate, [A], 2) > 0
