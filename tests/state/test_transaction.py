"""commit(n) leaves exactly what a sequence that never speculated would have: KV, recurrent, convolution, drafter KV.

Reference numerics, bitwise. A hypothesis machine interleaves sequences, draft lengths (0 among them), chunks, budgets,
acceptances of every length, slot reuse and idle sequences; after every step each live sequence is compared with a fresh
replay of its token log in one plain pass, and the drafter's coverage with what the steps so far imply. Unowned pages
and slots are NaN throughout.
"""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import tiny
from oracles.driver import Driver, Live
from oracles.ranks import load_worker
from torch import Tensor

import workers.step as step_module
from state.layout import DRAFTER_GROUP, TARGET_GROUP
from state.pools import DevicePools
from state.txn import StepTransaction
from workers.probe import Probe
from workers.step import Worker

MAX_LENGTH, MAX_TOKENS, HIDDEN_WINDOW = 80, 30, 8
PROMPTS = ([7], [3, 1, 4], list(range(20, 35)), list(range(5, 37)))  # one token; short; a page less one; two pages


def committed_bytes(pools: DevicePools, slots: list[int]) -> list[Tensor]:
    """Copies of all that is committed: recurrent and convolution state of all slots, KV below the committed lengths."""
    found = [pool.committed.clone() for pool in (*pools.conv, *pools.delta)]
    for slot in slots:
        found += sequence_kv(pools, slot, int(pools.committed_len[slot]))
    return [*found, pools.committed_len.clone()]


def sequence_kv(pools: DevicePools, slot: int, length: int) -> list[Tensor]:
    """Target KV of the first `length` positions, layer by layer, then the drafter's as far as it reaches."""
    position = torch.arange(length)
    found = []
    for layer, specs in enumerate(pools.layout.layers):
        if layer in pools.kv:
            group = specs[0].group  # type: ignore[union-attr]
            reach = position if group == TARGET_GROUP else position[: int(pools.draft_len[slot])]
            rows = pools.kv_rows(group, torch.full_like(reach, slot), reach)
            found.append(pools.kv[layer].index_select(1, rows))
    return found


def sequence_state(pools: DevicePools, slot: int) -> list[Tensor]:
    return [pool.committed[:, slot] for pool in (*pools.conv, *pools.delta)]


class GuardedTransaction(StepTransaction):
    """Fails when a committed byte changes between begin and commit."""

    def __init__(self, pools: DevicePools, slots_B: Tensor, *rest: object) -> None:
        super().__init__(pools, slots_B, *rest)  # type: ignore[arg-type]
        self._guarded = (pools, slots_B.tolist())
        self._before = committed_bytes(*self._guarded)

    def commit(self, counts_B: Tensor) -> None:
        for before, now in zip(self._before, committed_bytes(*self._guarded), strict=True):
            torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)
        super().commit(counts_B)


@dataclass(slots=True)
class Coverage:
    """Positions below `length` have drafter KV, but for the gap [start, end); those at `length` and above wait."""

    length: int = 0
    start: int = 0
    end: int = 0

    def feed(self, before: int, committed: int) -> None:
        """A step that ran the drafter, from `before` tokens to `committed`: what no longer waits joins the gap."""
        oldest = max(self.length, before - HIDDEN_WINDOW)
        if oldest > self.length:
            self.start = self.start if self.end else self.length
            self.end = oldest
        self.length = committed


@functools.cache
def rank() -> Worker:
    """A random hybrid model whose drafts are often accepted, with pages of 16 tokens."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        tiny.write(path, "base", seed=5, agree=0.15)
        return load_worker(
            path, numerics="reference", max_running=4, max_model_len=MAX_LENGTH, hidden_window=HIDDEN_WINDOW
        )


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(step_module, "StepTransaction", GuardedTransaction)
    return None


class Speculation(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        step_module.StepTransaction = GuardedTransaction  # type: ignore[misc]
        self.driver = Driver(rank(), seed=seed)
        self.worker = rank()
        self.coverage: defaultdict[int, Coverage] = defaultdict(Coverage)  # by epoch

    @precondition(lambda self: len(self.driver.live) < 3)
    @rule(prompt=st.sampled_from(PROMPTS), temperature=st.sampled_from((0.0, 1.0)), seed=st.integers(0, 3))
    def admit(self, prompt: list[int], temperature: float, seed: int) -> None:
        self.driver.add(prompt, MAX_TOKENS, temperature=temperature, seed=seed, coupled=bool(seed % 2))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        gamma=st.sampled_from((0, 1, 2, 4, 8)),
        chunk=st.integers(1, 33),
        budget=st.sampled_from((0, 1, 2, 5, 10**6)),
        plant=st.none() | st.integers(0, 8),
    )
    def step(self, data: st.DataObject, gamma: int, chunk: int, budget: int, plant: int | None) -> None:
        members = data.draw(st.lists(st.sampled_from(self.running), min_size=1, unique_by=id))
        if plant is not None:
            for live in members:
                self.plant_drafts(live, plant)
        self.advance(members, gamma, chunk=chunk, budget=budget)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Cancelled at any moment, drafts waiting or not; its pages and slot become NaN and are dealt out again."""
        self.driver.remove(data.draw(st.sampled_from(self.driver.live)))

    def advance(self, members: Sequence[Live], gamma: int, *, chunk: int = 99, budget: int = 99) -> None:
        before = [live.committed for live in members]
        self.driver.step(members, gamma=gamma, chunks={live.slot: chunk for live in members}, budget=budget)
        for live, committed in zip(members, before, strict=True):
            if gamma:
                self.coverage[live.epoch].feed(committed, live.committed)

    @property
    def running(self) -> list[Live]:
        return [live for live in self.driver.live if not live.finished]

    def plant_drafts(self, live: Live, right: int) -> None:
        """Overwrites waiting drafts of a greedy sequence so that exactly `right` of them (if that many wait) stand."""
        registers = self.worker.rank.registers
        if not live.waiting or float(registers.temperature[live.slot]) != 0:
            return
        log = self.worker.rank.pools.token_log
        known = live.prompt + live.out
        truth = greedy(tuple(known), live.waiting)
        drafts = [t if i < right else (t + 1) % 512 for i, t in enumerate(truth)]
        log[live.slot, len(known) : len(known) + live.waiting] = torch.tensor(drafts, dtype=log.dtype)

    @invariant()
    def state_is_that_of_a_sequence_that_never_speculated(self) -> None:
        pools = self.worker.rank.pools
        entered = {new.slot for new in self.driver.new}
        for live in self.driver.live:
            length = live.committed
            if live.slot in entered or length == 0:
                continue
            assert int(pools.committed_len[live.slot]) == length
            known = (live.prompt + live.out)[: length + 1]
            fresh = replay(tuple(known), length)
            for ours, theirs in zip(sequence_state(pools, live.slot), sequence_state(fresh, 1), strict=True):
                assert torch.equal(ours, theirs)
            for ours, theirs in comparable(pools, live, fresh):
                assert torch.equal(ours, theirs)
        assert pools.check_integrity() == []

    @invariant()
    def the_drafter_lacks_only_what_left_its_window(self) -> None:
        pools = self.worker.rank.pools
        entering = {new.slot for new in self.driver.new}
        for live in self.driver.live:
            if live.slot not in entering:
                registers = (pools.draft_len, pools.gap_start, pools.gap_end)
                assert Coverage(*(int(register[live.slot]) for register in registers)) == self.coverage[live.epoch]

    @invariant()
    def a_slot_that_was_left_has_no_pages(self) -> None:
        held = {live.slot for live in self.driver.live} | set(self.driver.left)
        for table in self.worker.rank.pools.tables.values():
            assert not any(bool(table[slot].any()) for slot in self.driver.free_slots if slot not in held)

    def teardown(self) -> None:
        step_module.StepTransaction = StepTransaction  # type: ignore[misc]


def comparable(pools: DevicePools, live: Live, fresh: DevicePools) -> Iterator[tuple[Tensor, Tensor]]:
    """KV of the live sequence beside the replay's: the target's whole, the drafter's within its reach but for its gap.

    A module of one layer computes K and V before it attends, so entries after a gap are the replay's too.
    """
    slot = live.slot
    fresh.draft_len[1] = pools.draft_len[slot]
    start, end = int(pools.gap_start[slot]), int(pools.gap_end[slot])
    ours, theirs = sequence_kv(pools, slot, live.committed), sequence_kv(fresh, 1, live.committed)
    for layer, a, b in zip(pools.kv, ours, theirs, strict=True):
        drafter = pools.layout.layers[layer][0].group == DRAFTER_GROUP  # type: ignore[union-attr]
        if drafter:
            yield a[:, :start], b[:, :start]
            yield a[:, end:], b[:, end:]
        else:
            yield a, b


@functools.lru_cache(maxsize=4096)
def greedy(known: tuple[int, ...], count: int) -> list[int]:
    """The target's own next tokens, one at a time, without speculation."""
    rank_ = rank().rank
    probe = Probe(rank_.model, rank_.ops, [[*known, *[0] * count]])
    trace = probe.feed({0: len(known)})[0]
    out = [int(trace.logits[-1].argmax())]
    for i in range(1, count):
        probe.pools.token_log[1, len(known) + i - 1] = out[-1]
        out.append(int(probe.feed({0: 1})[0].logits[-1].argmax()))
    return out


@functools.lru_cache(maxsize=512)
def replay(known: tuple[int, ...], length: int) -> DevicePools:
    """Pools after feeding the first `length` tokens in one plain pass."""
    rank_ = rank().rank
    probe = Probe(rank_.model, rank_.ops, [known])
    probe.feed({0: length})
    return probe.pools


TestSpeculation = Speculation.TestCase
TestSpeculation.settings = settings(
    max_examples=settings.default.max_examples // 6,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_every_number_of_accepted_drafts(gamma: int) -> None:
    """commit(n) for every n of a window, from a fresh driver each time: none, some and all drafts stand."""
    for right in range(gamma + 1):
        machine = Speculation()
        machine.begin(seed=right)
        live = machine.driver.add(PROMPTS[2], MAX_TOKENS)
        machine.driver.step(gamma=gamma)
        machine.plant_drafts(live, right)
        machine.driver.step(gamma=gamma)
        assert live.results == [(gamma, right)]
        machine.state_is_that_of_a_sequence_that_never_speculated()
        machine.teardown()


@pytest.mark.parametrize("pause", [1, HIDDEN_WINDOW - 1, HIDDEN_WINDOW, HIDDEN_WINDOW + 1, HIDDEN_WINDOW + 3])
@pytest.mark.parametrize("gammas", ["1010101", "10_10_1"])
def test_the_drafter_resumes_after_pauses_around_its_window(pause: int, gammas: str) -> None:
    """Pauses of one prompt chunk each, and pauses of as many tokens in decode: "_" stands for pause − 1 more steps."""
    machine = Speculation()
    machine.begin(seed=pause)
    short, long = machine.driver.add(PROMPTS[1], MAX_TOKENS), machine.driver.add(PROMPTS[3], MAX_TOKENS)
    for gamma in gammas.replace("_", "0" * (pause - 1)):
        machine.advance([live for live in (short, long) if not live.finished], int(gamma), chunk=pause)
        machine.state_is_that_of_a_sequence_that_never_speculated()
        machine.the_drafter_lacks_only_what_left_its_window()
    assert machine.coverage[short.epoch].length == short.committed
    machine.teardown()


def test_a_slot_keeps_nothing_of_who_left_it() -> None:
    machine = Speculation()
    machine.begin(seed=0)
    former = machine.driver.add(PROMPTS[1], MAX_TOKENS)
    for gamma in (1, *[0] * (HIDDEN_WINDOW + 1), 1):
        machine.advance([former], gamma)
    assert machine.coverage[former.epoch].end > 0, "inconclusive: no gap"
    machine.driver.remove(former)
    machine.driver.step([])
    machine.a_slot_that_was_left_has_no_pages()
    machine.advance([machine.driver.add(PROMPTS[1], MAX_TOKENS) for _ in range(len(machine.driver.free_slots))], 1)
    machine.state_is_that_of_a_sequence_that_never_speculated()
    machine.the_drafter_lacks_only_what_left_its_window()
    machine.teardown()


def test_abort_changes_no_committed_byte() -> None:
    machine = Speculation()
    machine.begin(seed=1)
    live = machine.driver.add(PROMPTS[3], MAX_TOKENS)
    machine.driver.step(gamma=4)
    pools = machine.worker.rank.pools
    before = committed_bytes(pools, [live.slot])

    class Aborted(Exception):
        pass

    class AbortingTransaction(StepTransaction):
        def commit(self, counts_B: Tensor) -> None:
            self.abort()
            with pytest.raises(RuntimeError, match="once"):
                super().commit(counts_B)
            raise Aborted

    step_module.StepTransaction = AbortingTransaction  # type: ignore[misc]
    try:
        with pytest.raises(Aborted):
            machine.worker.execute(machine.driver.plan([live], gamma=4))
    finally:
        machine.teardown()
    for old, new in zip(before, committed_bytes(pools, [live.slot]), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
