"""A small generation on loaded ranks before anybody is let in: what it takes is there, and was seen to work. Knows no
engine and no front.

It takes the way of every request: scheduler, plan, step on the ranks, settlement, books; prompt pass, drafting,
verification and plain decoding are in it. The books are its own, so that nothing of it counts as a client's.
"""

from __future__ import annotations

import math
import random
import time

from configs.schema import ServeSettings
from runtime.books import Books
from runtime.events import ErrorEvent, EventSink, TokenEvent, Verdict
from runtime.front.errors import InvalidRequest
from runtime.intake import check_servable
from runtime.life import Life, begin_life
from runtime.link import LoadedGroup, RankProgress
from runtime.profile.pinned import PinnedPlanner
from runtime.request import FinishReason, Origin, ReportParams, Request, SamplingParams, StopParams
from workers.plan import WorkerDescription, WorkerError, WorkerLost

STAGE = "warm-up"
"""What the progress of it is called."""

SIZES = ((32, 8), (8, 4), (1, 1))
"""Tokens of prompt and output, the first that the ranks can hold. A prompt past 16 tokens is committed otherwise than
what decodes, so the first has both."""

SEED = 0x3A4B
ORIGIN = Origin(identity="this server", face=STAGE)


class WarmUpFailed(WorkerError):
    """Ranks that were loaded do not generate as they should. The text says what went wrong."""


async def warm_up(group: LoadedGroup, settings: ServeSettings, last: Life | None, progress: RankProgress) -> Life:
    """Generates greedily on every data-parallel rank at once: a `runtime.life.Trial`. Nothing else may run there.

    Raises WarmUpFailed, WorkerLost where a rank was lost, ValueError when the step size does not suit the ranks.
    """
    attempt = _Attempt(group, settings, last)
    try:
        await attempt.run(progress)
        violations = [*attempt.violations(), *(line for lines in await group.link.check_integrity() for line in lines)]
    except WarmUpFailed:
        raise
    except WorkerError as error:
        raise WorkerLost(f"the ranks were loaded and failed in the {STAGE}: {error}") from error
    if violations:
        raise WarmUpFailed(f"the {STAGE} generated, and left the books violated: {'; '.join(violations)}")
    return attempt.life


class _Attempt(EventSink):
    """One request for each data-parallel rank, and what came of it."""

    def __init__(self, group: LoadedGroup, settings: ServeSettings, last: Life | None) -> None:
        self._group = group
        self._books = Books(self, max_waiting=lambda: group.mesh.dp, clock=time.monotonic)
        self.life = begin_life(group, self._books.queue, settings, last, now_s=0.0)
        self._books.adopt(self.life)
        self._tokens: dict[int, list[int]] = {}
        self._margins: dict[int, list[float]] = {}
        self._ends: dict[int, FinishReason] = {}

    async def run(self, progress: RankProgress) -> None:
        description = self._group.description
        num_prompt, num_output = size_for(description)
        noise = random.Random(SEED)
        for _ in range(self._group.mesh.dp):
            request = _request(self._books.intake.next_uid(), description, num_prompt, num_output, noise)
            self._books.accept(request)
            self._tokens[request.uid], self._margins[request.uid] = [], []
        # Each step reads a token of a prompt or brings one of an output, on every rank; one tells of the ends.
        most = self._group.mesh.dp * num_prompt + num_output + 1
        planner = PinnedPlanner(gamma=description.gamma_max, feeds_drafter=description.gamma_max > 0)
        num_steps = 0
        while self.life.scheduler.has_work:
            if num_steps == most:
                raise WarmUpFailed(f"the {STAGE} did not end within {most} steps: {self._so_far(num_output)}")
            progress(0, STAGE, num_steps, 0)
            await self._step(planner)
            num_steps += 1
        self._check(description, num_output)
        progress(0, STAGE, 1, 1)

    def violations(self) -> list[str]:
        """What the books find wrong with themselves."""
        return self._books.check_integrity()

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        for event in events:
            if isinstance(event, ErrorEvent):
                raise WarmUpFailed(f"the {STAGE} failed: {event.error}")
            self._tokens[event.uid] += event.tokens
            self._margins[event.uid] += [margin for one in event.rounds for margin in one.margins]
            if event.finish is not None:
                self._ends[event.uid] = event.finish.reason
        return []

    async def _step(self, planner: PinnedPlanner) -> None:
        books = self._books
        plan = self.life.scheduler.plan(planner)
        books.note_starts(plan)
        result = await self._group.link.execute(plan)
        for event in books.settle(plan.step_id, books.rounds(plan, result)):
            books.outbox.hold(event)
        # Not by the outbox, which would not let an error of the sink through.
        self.deliver(books.outbox.take())

    def _check(self, description: WorkerDescription, num_output: int) -> None:
        """Raises WarmUpFailed where the output is none that a model can have meant."""
        for uid, tokens in self._tokens.items():
            if len(tokens) != num_output or self._ends.get(uid) is not FinishReason.LENGTH:
                raise WarmUpFailed(f"the {STAGE} ended early: {self._so_far(num_output)}")
            strangers = [token for token in tokens if not 0 <= token < description.vocab_size]
            if strangers:
                raise WarmUpFailed(
                    f"the {STAGE} brought token {strangers[0]}, and the vocabulary has {description.vocab_size}: check "
                    "the checkpoint"
                )
            if len(self._margins[uid]) != num_output or not all(map(math.isfinite, self._margins[uid])):
                raise WarmUpFailed(
                    f"the {STAGE} found no finite logits: the checkpoint's weights, or the arithmetic on this device, "
                    "are broken; check the files, or try model.dtype=float32"
                )

    def _so_far(self, num_output: int) -> str:
        counts = ", ".join(str(len(tokens)) for tokens in self._tokens.values())
        return f"{counts} of {num_output} tokens came, by data-parallel rank"


def size_for(description: WorkerDescription) -> tuple[int, int]:
    """Tokens of prompt and output. Raises WarmUpFailed where the ranks hold nothing at all."""
    problem = ""
    for num_prompt, num_output in SIZES:
        try:
            check_servable(_request(0, description, num_prompt, num_output, random.Random(SEED)), description)
        except InvalidRequest as error:
            problem = error.problem
            continue
        return num_prompt, num_output
    raise WarmUpFailed(f"these ranks can serve nothing: {problem}; give cache.memory_mib more")


def _request(
    uid: int, description: WorkerDescription, num_prompt: int, num_output: int, noise: random.Random
) -> Request:
    """Greedy, of random tokens: prompts that share nothing go to the data-parallel ranks in turn."""
    return Request(
        uid=uid,
        request_id=f"{STAGE}-{uid}",
        prompt=tuple(noise.choices(range(description.vocab_size), k=num_prompt)),
        sampling=SamplingParams(temperature=0.0),
        stopping=StopParams(max_tokens=num_output),
        report=ReportParams(rounds=True),
        origin=ORIGIN,
    )
