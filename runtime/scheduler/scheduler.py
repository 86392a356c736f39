"""Decides one step: who enters, who runs, on how many rows. Knows no clock, no link and no text.

A scheduler lives as long as one life of the worker; the queue outlives it.
"""

from __future__ import annotations

from runtime.request import Request
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.rows import share_rows
from runtime.verification.planner import Load, plan_speculation
from runtime.verification.policy import Policy
from state.ledger import Ledger, RunningSequence
from state.pages import num_reserved_tokens
from workers.plan import NewSequence, StepPlan


class Scheduler:
    """Continuous batching over one worker.

    queue: requests that wait; admission takes from its head.
    ledger: slots, pages and lengths of what runs; the scheduler opens and closes its sequences.
    worker_epoch: the life of the worker that the plans are for.
    max_step_tokens: most token rows of a step.
    gamma_max: longest draft the worker can hold.
    first_step_id: id of the first plan.

    Raises ValueError when a step cannot hold one verify pass of γ_max drafts and a prompt row beside it.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        ledger: Ledger,
        *,
        worker_epoch: int,
        max_step_tokens: int,
        gamma_max: int,
        first_step_id: int = 1,
    ) -> None:
        if max_step_tokens < gamma_max + 2:
            raise ValueError(
                f"scheduler.max_step_tokens is {max_step_tokens}, but a verify pass of {gamma_max} drafts and one "
                f"prompt row take {gamma_max + 2}; raise it or lower speculation.gamma_max"
            )
        self.queue = queue
        self.ledger = ledger
        self.worker_epoch = worker_epoch
        self.next_step_id = first_step_id
        self._max_step_tokens = max_step_tokens
        self._gamma_max = gamma_max
        # Insertion order is service order: a decode that ran goes to the back, prefills stay in order of admission.
        self._running: dict[int, RunningSequence] = {}
        # Those among them whose requests report their rounds.
        self._reporting: set[int] = set()
        self._released_slots: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would move anything, be it only to tell the worker of slots it can empty."""
        ready = any(not sequence.awaiting_verdict for sequence in self._running.values())
        return ready or bool(self.queue) or bool(self._released_slots)

    @property
    def num_openings(self) -> int:
        """Slots that the queue may fill in the next step; 0 while its head waits for pages."""
        head = self.queue.head
        return self.ledger.slots.num_free if head is None or self.ledger.can_open(self._reservation(head)) else 0

    def load(self) -> Load:
        prefilling = sum(sequence.is_prefilling for sequence in self._running.values())
        return Load(
            num_decoding=len(self._running) - prefilling, num_prefilling=prefilling, num_waiting=len(self.queue)
        )

    def plan(self, policy: Policy) -> StepPlan:
        """The next step. Admits what fits; its plan also carries the slots released since the last one, which the
        worker empties before it fills them anew."""
        admitted = self._admit()
        speculation = plan_speculation(policy, self.load())
        ready = [sequence for sequence in self._running.values() if not sequence.awaiting_verdict]
        decodes = [sequence for sequence in ready if not sequence.is_prefilling]
        prefills = [sequence for sequence in ready if sequence.is_prefilling]
        shares = share_rows(
            [1 + sequence.num_waiting_drafts for sequence in decodes],
            [sequence.num_prompt_left for sequence in prefills],
            self._max_step_tokens,
        )
        decodes = decodes[: shares.num_decodes]
        prefills = prefills[: len(shares.chunks)]
        for sequence in decodes:
            self._running[sequence.uid] = self._running.pop(sequence.uid)
        scheduled = decodes + prefills
        samples = (True,) * len(decodes) + tuple(
            chunk == sequence.num_prompt_left for sequence, chunk in zip(prefills, shares.chunks, strict=True)
        )
        plan = StepPlan(
            step_id=self.next_step_id,
            epoch=self.worker_epoch,
            admitted=tuple(admitted),
            released_slots=tuple(self._released_slots),
            slots=tuple(sequence.slot for sequence in scheduled),
            epochs=tuple(sequence.epoch for sequence in scheduled),
            num_known=(1,) * len(decodes) + shares.chunks,
            num_drafts=tuple(0 if sequence.is_prefilling else sequence.num_waiting_drafts for sequence in scheduled),
            samples=samples,
            max_committed=tuple(sequence.committed_len for sequence in scheduled),
            gamma=speculation.gamma,
            verify_budget=speculation.verify_budget,
            feed_drafter=speculation.feed_drafter,
            report_margins=any(
                sampling and sequence.uid in self._reporting
                for sequence, sampling in zip(scheduled, samples, strict=True)
            ),
        )
        self._released_slots.clear()
        self.next_step_id += 1
        return plan

    def release(self, uid: int) -> None:
        """Lets go of a running sequence. Its slot and pages are free at once: whoever gets them enters with a plan
        later than all that name this sequence."""
        del self._running[uid]
        self._reporting.discard(uid)
        self._released_slots.append(self.ledger.close(uid).slot)

    def _admit(self) -> list[NewSequence]:
        admitted = []
        while (head := self.queue.head) is not None and self.ledger.can_open(self._reservation(head)):
            request = self.queue.remove(head.uid)
            sequence = self.ledger.open(request.uid, request.prompt, self._reservation(request))
            self._running[request.uid] = sequence
            if request.report_rounds:
                self._reporting.add(request.uid)
            admitted.append(_new_sequence(request, sequence))
        return admitted

    def _reservation(self, request: Request) -> int:
        return num_reserved_tokens(len(request.prompt) + request.stopping.max_tokens, self._gamma_max)


def _new_sequence(request: Request, sequence: RunningSequence) -> NewSequence:
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
        seed=sampling.seed,
        coupled=sampling.coupled,
        stop_token_ids=tuple(dict.fromkeys((*stopping.eos_token_ids, *stopping.stop_token_ids))),
        max_tokens=stopping.max_tokens,
    )
