"""What one data-parallel rank does in a step: who runs, on how many rows. Knows no queue, no other rank and no clock.

A scheduler lives as long as one life of the group.

A family, the sequences of one request, is admitted as a whole and never has to wait for room again:

    admit     slots and pages for all; the first enters, the others wait
    plan      the first reads the prompt up to its last token, in as many steps as that takes
    fork      the others enter, as copies of it
    plan      the last token of the prompt is each one's own row, and the first that draws

Where the first ends before the fork, one of those that wait goes on in its place. A prompt of one token leaves nothing
to share: all enter at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.request import Request
from runtime.scheduler.rows import share_rows
from runtime.statistics import PoolUse, RankUse
from runtime.verification.speculation import BatchSpeculation, Load, Traits
from state.ledger import Ledger, RunningSequence
from state.pages import num_reserved_tokens
from workers.demands import Fork
from workers.plan import BatchPlan, NewSequence, temperature_class


class Scheduler:
    """Continuous batching over one data-parallel rank.

    ledger: slots, pages and lengths of what runs; the scheduler opens and closes its sequences.
    max_step_tokens: most token rows of the rank in a step.
    gamma_max: longest draft the rank can hold.

    Raises ValueError when a step cannot hold one verify pass of γ_max drafts and a prompt row beside it.
    """

    def __init__(self, ledger: Ledger, *, max_step_tokens: int, gamma_max: int) -> None:
        if max_step_tokens < gamma_max + 2:
            raise ValueError(
                f"scheduler.max_step_tokens is {max_step_tokens}, but a verify pass of {gamma_max} drafts and one "
                f"prompt row take {gamma_max + 2}; raise it or lower speculation.gamma_max"
            )
        self.ledger = ledger
        self._max_step_tokens = max_step_tokens
        self._gamma_max = gamma_max
        # Insertion order is service order: a decode that ran goes to the back, prefills stay in order of admission.
        # Who waits to fork keeps the place that its family has.
        self._running: dict[int, RunningSequence] = {}
        # Requests of those that wait to fork, in order of admission; what took the place of one that had entered.
        self._followers: dict[int, Request] = {}
        self._heirs: dict[int, NewSequence] = {}
        # Those among them whose requests report their rounds; how each is drafted, and the longest it may get.
        self._reporting: set[int] = set()
        self._traits: dict[int, Traits] = {}
        self._max_tokens: dict[int, int] = {}
        self._released_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a batch planned now would move anything, be it only to tell the rank of slots it can empty."""
        return bool(self._released_slots) or any(sequence.is_ready for sequence in self._running.values())

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens that the running sequences may still commit, at most, prompts among them, a shared one once."""
        return sum(sequence.num_outstanding for sequence in self._running.values())

    def use(self) -> RankUse:
        """What the rank holds now. A page that several sequences share is one; those that wait to fork run."""
        slots, pages = self.ledger.slots, self.ledger.pages
        return RankUse(
            running=len(self._running),
            slots_free=slots.num_free,
            slots_used=slots.num_used,
            pages=tuple(PoolUse(group=group, free=pool.num_free, used=pool.num_used) for group, pool in pages.items()),
        )

    def load(self) -> Load:
        """What could run in the next step. Those that are to fork before it have forked."""
        ready = [sequence for sequence in self._running.values() if sequence.is_ready]
        decodes = [sequence for sequence in ready if not sequence.is_prefilling]
        prefills = [sequence for sequence in ready if sequence.is_prefilling]
        entering = tuple(
            sequence.uid
            for sequence in prefills
            if sequence.num_prompt_left <= self._max_step_tokens and not sequence.num_followers
        )
        return Load(
            uids=tuple(sequence.uid for sequence in decodes),
            traits=tuple(self._traits[sequence.uid] for sequence in decodes),
            waiting=tuple(sequence.num_waiting_drafts for sequence in decodes),
            committed=tuple(sequence.committed_len for sequence in decodes),
            left=tuple(self._max_tokens[sequence.uid] - len(sequence.log.emitted) for sequence in decodes),
            entering=entering,
            entering_traits=tuple(self._traits[uid] for uid in entering),
            num_prompt_rows=sum(sequence.num_prompt_left for sequence in prefills),
            max_rows=self._max_step_tokens,
        )

    def has_room(self, family: Sequence[Request]) -> bool:
        """Whether a slot and all pages that they can ever need are free for each sequence of a request."""
        request = family[0]
        return self.ledger.can_open(self._reservation(request), count=len(family), num_shared=len(request.prompt) - 1)

    def admit(self, family: Sequence[Request]) -> list[NewSequence]:
        """Gives the sequences of a request their slots and pages; the result goes into the next plan. Those that are
        not in it enter by `fork`. Ask `has_room` first."""
        entering: list[NewSequence] = []
        for request in family:
            if entering and len(request.prompt) > 1:
                self._begin(request, self.ledger.open_follower(request.uid, self._running[entering[0].uid]))
                self._followers[request.uid] = request
            else:
                sequence = self.ledger.open(request.uid, request.prompt, self._reservation(request))
                self._begin(request, sequence)
                entering.append(_new_sequence(request, sequence))
        return entering

    def fork(self) -> list[NewSequence]:
        """Lets those fork whose family has come to the last token of its prompt; the result goes into the next plan,
        and with it who has taken another's place."""
        entering, self._heirs = list(self._heirs.values()), {}
        for uid, request in list(self._followers.items()):
            sequence = self.ledger[uid]
            first = sequence.first
            assert first is not None
            if first.num_prompt_left == 0:
                fork = Fork(slot=first.slot, epoch=first.epoch, pages=self.ledger.fork(uid))
                entering.append(_new_sequence(request, sequence, fork))
                del self._followers[uid]
        return entering

    def followers(self, uid: int) -> list[int]:
        """Those that wait to fork from a running sequence, in order."""
        return [each for each in self._followers if self.ledger[each].first is self.ledger[uid]]

    def plan(
        self, admitted: Sequence[NewSequence], speculation: BatchSpeculation, *, gamma: int, feed_drafter: bool
    ) -> BatchPlan:
        """The next batch; empty where nothing can run. It also carries the slots released since the last one, which the
        rank empties before it fills them anew.

        admitted: what `fork` and `admit` gave since the last plan. speculation, gamma, feed_drafter: this rank's share
        of the decision on the step.
        """
        ready = [sequence for sequence in self._running.values() if sequence.is_ready]
        decodes = [sequence for sequence in ready if not sequence.is_prefilling]
        prefills = [sequence for sequence in ready if sequence.is_prefilling]
        shares = share_rows(
            [sequence.num_waiting_drafts for sequence in decodes],
            [sequence.num_prompt_left for sequence in prefills],
            self._max_step_tokens,
            verify_budget=speculation.verify_budget,
        )
        decodes = decodes[: shares.num_decodes]
        prefills = prefills[: len(shares.chunks)]
        for sequence in decodes:
            self._running[sequence.uid] = self._running.pop(sequence.uid)
        scheduled = decodes + prefills
        num_known = (1,) * len(decodes) + shares.chunks
        num_drafts = tuple(0 if sequence.is_prefilling else sequence.num_waiting_drafts for sequence in scheduled)
        for sequence in scheduled:
            sequence.draft_limit = min(gamma, speculation.limits.get(sequence.uid, gamma)) if feed_drafter else 0
        released, self._released_slots = tuple(self._released_slots), []
        return BatchPlan(
            admitted=tuple(admitted),
            released_slots=released,
            slots=tuple(sequence.slot for sequence in scheduled),
            epochs=tuple(sequence.epoch for sequence in scheduled),
            num_known=num_known,
            num_drafts=num_drafts,
            num_forced=tuple(
                min(drafts, speculation.forced.get(sequence.uid, 0))
                for sequence, drafts in zip(scheduled, num_drafts, strict=True)
            )
            if speculation.forced
            else (),
            samples=(True,) * len(decodes)
            + tuple(
                chunk == sequence.num_prompt_left and not sequence.num_followers
                for sequence, chunk in zip(prefills, shares.chunks, strict=True)
            ),
            max_committed=tuple(sequence.committed_len for sequence in scheduled),
            num_unfed=tuple(
                sequence.plan_pass(known + drafts, feed_drafter=feed_drafter)
                for sequence, known, drafts in zip(scheduled, num_known, num_drafts, strict=True)
            ),
            verify_budget=speculation.verify_budget,
        )

    def reports_margins(self, batch: BatchPlan) -> bool:
        """Whether a sequence draws in this batch, the newest, whose request reports its rounds."""
        drawing = (
            self.ledger.find(slot, epoch)
            for slot, epoch, samples in zip(batch.slots, batch.epochs, batch.samples, strict=True)
            if samples
        )
        return any(sequence is not None and sequence.uid in self._reporting for sequence in drawing)

    def release(self, uid: int) -> None:
        """Lets go of a running sequence. Its slot and pages are free at once: whoever gets them enters with a plan
        later than all that name this sequence. Where others wait to fork from it, the first of them takes its place,
        and the room that was that one's is free."""
        self._reporting.discard(uid)
        self._heirs.pop(uid, None)
        del self._traits[uid], self._max_tokens[uid]
        heirs = self.followers(uid)
        del self._running[uid]
        if heirs:
            self._hand_over(uid, heirs[0])
            return
        slot = self.ledger.close(uid).slot
        if self._followers.pop(uid, None) is None:  # the rank has heard of it
            self._released_slots.append(slot)

    def _begin(self, request: Request, sequence: RunningSequence) -> None:
        self._running[request.uid] = sequence
        if request.report.rounds:
            self._reporting.add(request.uid)
        self._traits[request.uid] = Traits(
            request.priority, temperature_class(request.sampling.temperature), request.max_drafts
        )
        self._max_tokens[request.uid] = request.stopping.max_tokens

    def _hand_over(self, uid: int, heir: int) -> None:
        """The rank goes on as it is, but by another request: it has emitted nothing yet."""
        sequence = self._running[heir] = self.ledger.hand_over(uid, heir)
        fork = Fork(slot=sequence.slot, epoch=sequence.epoch, pages=(None,) * len(sequence.tables))
        self._heirs[heir] = _new_sequence(self._followers.pop(heir), sequence, fork)

    def _reservation(self, request: Request) -> int:
        return num_reserved_tokens(len(request.prompt) + request.stopping.max_tokens, self._gamma_max)


def _new_sequence(request: Request, sequence: RunningSequence, fork: Fork | None = None) -> NewSequence:
    sampling, stopping = request.sampling, request.stopping
    return NewSequence(
        slot=sequence.slot,
        epoch=sequence.epoch,
        uid=request.uid,
        prompt=request.prompt,
        tables=sequence.tables,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
        coupled=sampling.coupled,
        stop_token_ids=tuple(dict.fromkeys((*stopping.eos_token_ids, *stopping.stop_token_ids))),
        max_tokens=stopping.max_tokens,
        shaping=sampling.shaping,
        constraint=sampling.constraint,
        typical=sampling.typical,
        num_logprobs=request.report.num_logprobs,
        num_prompt_logprobs=request.report.num_prompt_logprobs,
        prediction=request.prediction,
        looks_back=request.looks_back,
        fork=fork,
        oracle=request.oracle,
    )
