"""A rank of arithmetic: tokens follow from prompt and position, drafts are right by chance, every plan is checked.

It keeps the contract of BatchPlan as real ones do, scores, calibration and admission among it, and refuses what those
would silently compute wrongly.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, field

import numpy as np

from workers.demands import TokenLogprob
from workers.draft.admit import admit
from workers.plan import (
    BatchPlan,
    BatchResult,
    Calibration,
    NewSequence,
    StepPlan,
    WorkerDescription,
    temperature_class,
)

VOCAB_SIZE = 61
EOS = 0


def true_token(prompt: tuple[int, ...], position: int) -> int:
    """The token at output position `position`, whatever the schedule."""
    return zlib.crc32(repr((prompt, position)).encode()) % VOCAB_SIZE


def score_of(prompt: tuple[int, ...], position: int) -> float:
    """How sure the drafter is of the token at output position `position`, whatever it drafts there: −2 to 5.75."""
    return (zlib.crc32(repr((position, prompt)).encode()) % 32) / 4 - 2


def logprob_of(token: int, num_top: int) -> TokenLogprob:
    """The log-probability of a token, and those of the others that stand beside it."""
    return TokenLogprob(token=token, logprob=-token / 8, top=tuple((other, -other / 8) for other in range(num_top)))


def margin_of(token: int) -> float:
    """The logit gap of a token, told to plans that ask for it."""
    return token / 8


@dataclass
class Tenant:
    """What a rank knows of a sequence. num_unfed: committed rows that its drafter has not seen.
    drafts, scores, confidences: of those that wait."""

    new: NewSequence
    num_fed: int = 0
    emitted: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()
    num_unfed: int = 0

    @property
    def committed_len(self) -> int:
        return len(self.new.prompt) + len(self.emitted) - 1 if self.emitted else self.num_fed


class FakeRank:
    """One data-parallel rank: tenants of its own. `corrupt_uids`: sequences whose counts come back wrong.
    silent_uids: those whose log-probabilities do not come."""

    def __init__(
        self,
        description: WorkerDescription,
        *,
        max_step_tokens: int,
        accept: float,
        seed: int,
        corrupt_uids: set[int],
    ) -> None:
        self.description = description
        self.tenants: dict[int, Tenant] = {}
        self.corrupt_uids = corrupt_uids
        self.silent_uids: set[int] = set()
        self._max_step_tokens = max_step_tokens
        self._accept = accept
        self._chance = random.Random(seed)
        # Of each slot.
        self._last_epochs = [0] * (description.num_slots + 1)

    def run(self, plan: StepPlan, batch: BatchPlan) -> BatchResult:
        self._check_and_enter(batch)
        tenants = [self.tenants[slot] for slot in batch.slots]
        for tenant, count in zip(tenants, batch.num_drafts, strict=True):
            assert count <= len(tenant.drafts), f"{len(tenant.drafts)} drafts wait, the plan says {count}"
        drafted = tuple(tenant.drafts[:n] for tenant, n in zip(tenants, batch.num_drafts, strict=True))
        scores = tuple(tenant.scores[:n] for tenant, n in zip(tenants, batch.num_drafts, strict=True))
        admitted = self._admit(plan, batch, tenants)
        fed = [tenant.num_fed for tenant in tenants]
        outcomes = [self._advance(plan, batch, column, admitted[column]) for column in range(len(tenants))]
        return BatchResult(
            emitted=tuple(emitted for emitted, _ in outcomes),
            drafted=drafted,
            num_admitted=admitted,
            num_accepted=tuple(accepted for _, accepted in outcomes),
            margins=tuple(tuple(map(margin_of, tokens)) for tokens, _ in outcomes) if plan.report_margins else (),
            scores=scores,
            acceptance=tuple(
                ((1.0,) * accepted + (0.0,))[:count] for (_, accepted), count in zip(outcomes, admitted, strict=True)
            ),
            logprobs=tuple(
                self._tell(tenant, emitted, tenant.new.num_logprobs)
                for tenant, (emitted, _) in zip(tenants, outcomes, strict=True)
            ),
            prompt_logprobs=tuple(
                self._tell(tenant, tenant.new.prompt[1 + before : 1 + tenant.num_fed], tenant.new.num_prompt_logprobs)
                for tenant, before in zip(tenants, fed, strict=True)
            ),
        )

    def _tell(self, tenant: Tenant, tokens: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprob, ...]:
        if num_top is None or tenant.new.uid in self.silent_uids:
            return ()
        return tuple(logprob_of(token, num_top) for token in tokens)

    def _admit(self, plan: StepPlan, batch: BatchPlan, tenants: list[Tenant]) -> tuple[int, ...]:
        confidence_BG = np.zeros((len(tenants), self.description.gamma_max), np.float32)
        for row, tenant in zip(confidence_BG, tenants, strict=True):
            row[: len(tenant.confidences)] = tenant.confidences
        num_admitted_B = admit(
            confidence_BG,
            np.array(batch.num_drafts, np.int64),
            np.array([tenant.new.uid for tenant in tenants], np.int64),
            batch.verify_budget,
            np.array(batch.num_forced, np.int64) if batch.num_forced else None,
            plan.min_survival,
        )
        return tuple(num_admitted_B.tolist())

    def _check_and_enter(self, batch: BatchPlan) -> None:
        for slot in batch.released_slots:
            assert slot in self.tenants, f"released slot {slot} has no tenant"
            del self.tenants[slot]
        for new in batch.admitted:
            self._enter(new)
        columns = (
            batch.epochs,
            batch.num_known,
            batch.num_drafts,
            batch.samples,
            batch.max_committed,
            batch.num_unfed,
        )
        assert all(len(column) == len(batch.slots) for column in columns), "columns of unequal length"
        assert len(set(batch.slots)) == len(batch.slots), "a slot is scheduled twice"
        assert 0 <= batch.verify_budget < 2**32
        num_rows = sum(batch.num_known) + min(sum(batch.num_drafts), batch.verify_budget)
        assert num_rows <= self._max_step_tokens, f"{num_rows} rows"
        forced = zip(batch.num_forced or (0,) * len(batch.slots), batch.num_drafts, strict=True)
        assert all(0 <= count <= most for count, most in forced), "more forced than drafted"

    def _enter(self, new: NewSequence) -> None:
        assert 1 <= new.slot <= self.description.num_slots
        if new.fork is not None and new.fork.slot == new.slot:
            self._take_place(new)
            return
        assert new.slot not in self.tenants, f"slot {new.slot} is taken"
        assert new.epoch > self._last_epochs[new.slot], f"epoch {new.epoch} is not fresh"
        self._last_epochs[new.slot] = new.epoch
        need = len(new.prompt) + new.max_tokens + self.description.gamma_max + 1
        assert len(new.tables) == len(self.description.cache_groups)
        for group, (table, num_pages) in enumerate(zip(new.tables, self.description.num_pages, strict=True)):
            assert all(1 <= page <= num_pages for page in table)
            assert len(table) * self.description.page_size >= need, f"{len(table)} pages for {need} tokens"
            own = table if new.fork is None else table[self._num_shared(new, group) :]
            held = {page for tenant in self.tenants.values() for page in tenant.new.tables[group]}
            assert len(held.union(own)) == len(held) + len(own), "a page that is written to has two tenants"
        self.tenants[new.slot] = Tenant(new)
        if new.fork is not None:
            source = self.tenants[new.fork.slot]
            self.tenants[new.slot].num_fed, self.tenants[new.slot].num_unfed = source.num_fed, source.num_unfed

    def _num_shared(self, new: NewSequence, group: int) -> int:
        """Pages that a sequence which forks has in common with the other one, as it should."""
        assert new.fork is not None
        source, num_read = self.tenants[new.fork.slot], len(new.prompt) - 1
        assert source.new.epoch == new.fork.epoch, f"slot {new.fork.slot} is in epoch {source.new.epoch}"
        assert source.new.prompt == new.prompt
        assert source.num_fed == num_read > 0, f"{source.num_fed} of {num_read} tokens are there to fork from"
        page, num_entries = divmod(num_read, self.description.page_size)
        theirs, table = source.new.tables[group], new.tables[group]
        assert table[:page] == theirs[:page], "pages of the prompt are not shared"
        pair = (theirs[page], table[page]) if num_entries else None
        assert new.fork.pages[group] == pair, f"{new.fork.pages[group]} is copied, not {pair}"
        return page

    def _take_place(self, new: NewSequence) -> None:
        """A sequence goes on where another one of its prompt has ended before it drew a token."""
        tenant = self.tenants[new.slot]
        assert new.fork is not None
        assert (new.epoch, new.fork.epoch) == (tenant.new.epoch,) * 2, f"slot {new.slot} is in epoch {tenant.new.epoch}"
        assert (new.prompt, new.tables) == (tenant.new.prompt, tenant.new.tables)
        assert new.fork.pages == (None,) * len(new.tables)
        assert not tenant.emitted, "it has drawn a token"
        tenant.new = new

    def _advance(self, plan: StepPlan, batch: BatchPlan, column: int, num_admitted: int) -> tuple[tuple[int, ...], int]:
        """What the sequence emits, and how many of its drafts stood."""
        tenant = self.tenants[batch.slots[column]]
        before, num_unfed = tenant.committed_len, batch.num_unfed[column]
        assert num_unfed >= tenant.num_unfed, f"the drafter lacks {tenant.num_unfed} rows, the plan says {num_unfed}"
        assert bool(num_unfed) == bool(tenant.num_unfed), "a catch-up pass over nothing"
        outcome = self._commit(plan, batch, column, tenant, num_admitted)
        tenant.num_unfed = 0 if plan.feed_drafter else tenant.num_unfed + tenant.committed_len - before
        return outcome

    def _commit(
        self, plan: StepPlan, batch: BatchPlan, column: int, tenant: Tenant, num_admitted: int
    ) -> tuple[tuple[int, ...], int]:
        new, known = tenant.new, batch.num_known[column]
        assert batch.epochs[column] == new.epoch, f"slot {new.slot} is in epoch {new.epoch}"
        assert batch.max_committed[column] == tenant.committed_len, f"{tenant.committed_len} tokens are committed"
        if tenant.emitted:
            assert known == 1
            assert batch.samples[column]
        else:
            tenant.num_fed += known
            assert known >= 1
            assert tenant.num_fed <= len(new.prompt)
            assert batch.samples[column] == (tenant.num_fed == len(new.prompt))
            if not batch.samples[column]:
                return (), 0
        admitted, position = tenant.drafts[:num_admitted], len(tenant.emitted)
        num_accepted = 0
        while num_accepted < num_admitted and admitted[num_accepted] == true_token(new.prompt, position + num_accepted):
            num_accepted += 1
        emitted = self._clip(new, position, [true_token(new.prompt, position + i) for i in range(num_accepted + 1)])
        tenant.emitted += emitted
        self._draft(tenant, plan)
        if new.uid in self.corrupt_uids:
            num_accepted += 1
        return tuple(emitted), num_accepted

    def _clip(self, new: NewSequence, position: int, tokens: list[int]) -> list[int]:
        clipped = tokens[: new.max_tokens - position]
        stop = next((i for i, token in enumerate(clipped) if token in new.stop_token_ids), len(clipped))
        return clipped[: stop + 1]

    def _draft(self, tenant: Tenant, plan: StepPlan) -> None:
        prompt, position = tenant.new.prompt, len(tenant.emitted)
        right = [true_token(prompt, position + i) for i in range(plan.gamma)]
        tenant.drafts = tuple(t if self._chance.random() < self._accept else (t + 1) % VOCAB_SIZE for t in right)
        tenant.scores = tuple(score_of(prompt, position + i) for i in range(plan.gamma))
        tenant.confidences = tuple(
            self._confidence(score, tenant.new.temperature, i, plan.calibration)
            for i, score in enumerate(tenant.scores)
        )

    def _confidence(self, score: float, temperature: float, draft: int, calibration: Calibration) -> float:
        if calibration.slopes:
            cell = temperature_class(temperature) * self.description.gamma_max + draft
            score = calibration.slopes[cell] * score + calibration.offsets[cell]
        return 1 / (1 + math.exp(-score))
