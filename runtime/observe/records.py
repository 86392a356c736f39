"""What came of a request and of a step, as frozen values, and who is told. Knows no logger and no exporter.

Of a call there is one record. The engine makes it of what it took in, when the last sequence has ended; the front makes
it of a call that was refused or left before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.front.errors import InternalError, InvalidRequest, OutriderError
from runtime.request import UNKNOWN_ORIGIN, Origin, Usage
from workers.plan import StepPlan, StepResult

OK = "OK"
CANCELLED = "CANCELLED"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
"""Names of gRPC codes that calls end with by themselves."""

DEADLINE_SLACK_S, DEADLINE_SLACK_SHARE = 0.05, 0.01
"""A caller's own timer began before the call came here, and its length is rounded up in the call's headers, by a
hundredth at most: what ends so shortly before a deadline has ended by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A call that asked for tokens, at its end.

    request_id: empty where it was refused before it had one.
    code: name of the gRPC status. OK where every sequence finished, DEADLINE_EXCEEDED where the client's deadline
        passed, CANCELLED where it left before; else that of the first error.
    field, error: what the error says; field of a wrong request. They may quote what the client sent.
    ends: how each sequence ended, in order: a FinishReason, aborted or failed; () where none was begun.
    n, priority, max_tokens, temperature, top_p, top_k: as asked for; n 0 and the rest unset where that is not known.
    usage: sums over the sequences, but for what they share (see `runtime.request.total_of`).
    submitted_s, started_s, first_token_s, last_token_s, ended_s: seconds on the clock of whoever made the record: taken
        in, the first sequence has a slot, first and last token of any, end of the last. None until it came to that.
    prompt, outputs: token ids, for observers that keep tokens; else ().
    """

    request_id: str = ""
    origin: Origin = UNKNOWN_ORIGIN
    code: str = OK
    field: str = ""
    error: str = ""
    ends: tuple[str, ...] = ()
    n: int = 0
    priority: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    usage: Usage | None = None
    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float
    prompt: tuple[int, ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()


def code_of(error: BaseException, left: str = CANCELLED) -> str:
    """The gRPC code that a call ends with by this error; `left` for what is no error of a call."""
    if isinstance(error, OutriderError):
        return error.code
    return InternalError.code if isinstance(error, Exception) else left


def code_of_leaving(origin: Origin, began_s: float, now_s: float) -> str:
    """The gRPC code that the client of a call sees which ends under us. gRPC does not tell a deadline that passed from
    a client that went away; the time does. began_s: of the call."""
    if origin.deadline_s is None:
        return CANCELLED
    slack_s = DEADLINE_SLACK_S + DEADLINE_SLACK_SHARE * (origin.deadline_s - began_s)
    return DEADLINE_EXCEEDED if now_s >= origin.deadline_s - slack_s else CANCELLED


def field_of(error: BaseException | None) -> str:
    """The field that is wrong, where it is one."""
    return error.field if isinstance(error, InvalidRequest) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step in which any sequence ran. Figures are reckoned when they are asked for: few steps are looked at.

    plan_s: making the plan. execute_s: from handing it over to its result. book_s: booking that, and verdicts.
    is_first: of this life of the ranks.
    """

    plan: StepPlan
    result: StepResult
    plan_s: float
    execute_s: float
    book_s: float
    is_first: bool = False

    @property
    def took_s(self) -> float:
        return self.plan_s + self.execute_s + self.book_s

    @property
    def link_s(self) -> float:
        """Of execute_s, what the slowest rank does not account for: encoding, links, this process's event loop."""
        return max(0.0, self.execute_s - self.result.slowest.total_s)

    @property
    def num_rows(self) -> int:
        """Token rows of the target pass: known tokens and admitted drafts."""
        known = sum(sum(batch.num_known) for batch in self.plan.batches)
        return known + sum(sum(batch.num_admitted) for batch in self.result.batches)

    @property
    def num_prompt_rows(self) -> int:
        """Of those, rows of prompts, but for prompts of one token."""
        chunks = (
            known
            for batch in self.plan.batches
            for known, samples in zip(batch.num_known, batch.samples, strict=True)
            if known > 1 or not samples
        )
        return sum(chunks)

    @property
    def num_drafted(self) -> int:
        return sum(sum(map(len, batch.drafted)) for batch in self.result.batches)

    @property
    def num_admitted(self) -> int:
        return sum(sum(batch.num_admitted) for batch in self.result.batches)

    @property
    def num_accepted(self) -> int:
        return sum(sum(batch.num_accepted) for batch in self.result.batches)

    @property
    def num_emitted(self) -> int:
        return sum(sum(map(len, batch.emitted)) for batch in self.result.batches)


class Observer(Protocol):
    """Hears of every request and step, on the event loop that serves: it takes microseconds, and never raises."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether records of requests are to hold token ids."""
        ...

    def note_request(self, record: RequestRecord) -> None: ...

    def note_step(self, record: StepRecord) -> None: ...


class _Nobody:
    keeps_tokens = False

    def note_request(self, record: RequestRecord) -> None:
        pass

    def note_step(self, record: StepRecord) -> None:
        pass


UNOBSERVED: Observer = _Nobody()
"""Where nobody wants to know."""
