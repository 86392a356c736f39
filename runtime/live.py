"""The requests that are live: their counts and times, from submit to the last event. Knows no queue, ledger or link.

added ── waits ──▶ started ── prefill ──▶ first round ── decode ──▶ last round, end

Each sequence of a request is one here, with counts, times and an end of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from runtime.front.errors import DuplicateRequest, InvalidRequest, Overloaded, Unavailable
from runtime.histogram import Histogram, HistogramView
from runtime.request import FinishReason, Request, Usage
from workers.demands import TokenLogprob

SHORT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
"""Buckets of what lasts a step or a few."""
LONG_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets of what lasts as long as a request."""
WAIT_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets of waits for a slot, for each urgency."""
COUNT_BOUNDS = (1, 2, 5, 10, 20)
"""Buckets of sequences of one request."""
LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
"""Buckets of tokens."""


REFUSALS = (InvalidRequest, DuplicateRequest, Overloaded, Unavailable)
"""Why the engine does not take in a request."""


class Urgency(Enum):
    """How a request's priority stands to the usual one, 0: any number may be asked for, and three can be told apart."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @classmethod
    def of(cls, priority: int) -> Urgency:
        """Lower numbers are served first."""
        if priority == 0:
            return cls.NORMAL
        return cls.HIGH if priority < 0 else cls.LOW


class RequestState(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """A live request. dp_rank: None while it waits. age_s: since it was taken in. waited_s: of that, for a slot."""

    request: Request
    usage: Usage
    state: RequestState
    dp_rank: int | None
    age_s: float
    waited_s: float


class EarlyEnd(Enum):
    """How a request ends that does not finish."""

    ABORTED = "aborted"
    FAILED = "failed"


End = FinishReason | EarlyEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """Requests since the engine started, each of their sequences as one.

    submitted: taken in. refused: not taken in, by the name of the error. ended: by how; what is missing of `submitted`
        is live.
    prompt_tokens: of requests whose prompt has been read; a shared one counts for each that shares it.
    waiting: in the queue, by urgency. longest_wait_s: of who has waited longest among them; 0 where none does.
    Histograms, in seconds or tokens. Those up to output_tokens are of requests that finished, so that those which
    clients left do not pass for fast ones; the others are of all that came so far. What finishes by its time limit may
    have had no slot, or no token, and is missing where that counts.
    latency_s: submit to end. queue_s: submit to slot. prefill_s: slot to first token. decode_s: first token to last.
    running_s: slot to last token. token_s: decode_s by token after the first, of those that have two.
    input_tokens, output_tokens: of each.
    first_token_s: submit to first token.
    round_gap_s: between passes that emitted for the same request; one observation each, however many tokens it brought.
    wait_s: submit to slot, by urgency.
    asked_sequences: sequences asked for, once a request. asked_tokens: max_tokens, once a request.
    """

    submitted: int
    refused: Mapping[str, int]
    ended: Mapping[End, int]
    prompt_tokens: int
    waiting: Mapping[Urgency, int]
    longest_wait_s: float
    latency_s: HistogramView
    queue_s: HistogramView
    prefill_s: HistogramView
    decode_s: HistogramView
    running_s: HistogramView
    token_s: HistogramView
    input_tokens: HistogramView
    output_tokens: HistogramView
    first_token_s: HistogramView
    round_gap_s: HistogramView
    wait_s: Mapping[Urgency, HistogramView]
    asked_sequences: HistogramView
    asked_tokens: HistogramView

    @property
    def finished(self) -> int:
        return sum(count for end, count in self.ended.items() if isinstance(end, FinishReason))


@dataclass(slots=True)
class LiveRequest:
    """A request between submit and its last event; `usage` is that of its newest event. Times are the engine's clock's,
    in seconds; None until the moment has come. prompt_logprobs: those that no event has told yet."""

    request: Request
    usage: Usage
    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def status(self, now_s: float, dp_rank: int | None) -> RequestStatus:
        """dp_rank: where it runs; None while it waits."""
        if self.started_s is None:
            state = RequestState.WAITING
        else:
            state = RequestState.PREFILLING if self.first_token_s is None else RequestState.DECODING
        return RequestStatus(
            request=self.request,
            usage=self.usage,
            state=state,
            dp_rank=dp_rank,
            age_s=now_s - self.submitted_s,
            waited_s=(now_s if self.started_s is None else self.started_s) - self.submitted_s,
        )


class LiveRequests:
    """Owns what is known of live requests, and sums over those that ended.

    clock: seconds; the same as the engine's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[int, LiveRequest] = {}
        # When the time of those is up that have a limit.
        self._deadlines_s: dict[int, float] = {}
        self._submitted = 0
        self._refused: Counter[str] = Counter({error.__name__: 0 for error in REFUSALS})
        self._ended: Counter[End] = Counter()
        self._prompt_tokens = 0
        self._waiting: Counter[Urgency] = Counter()
        self._latency_s, self._queue_s, self._prefill_s, self._decode_s, self._running_s = (
            Histogram(LONG_BOUNDS_S) for _ in range(5)
        )
        self._token_s, self._first_token_s, self._round_gap_s = (Histogram(SHORT_BOUNDS_S) for _ in range(3))
        self._wait_s = {urgency: Histogram(WAIT_BOUNDS_S) for urgency in Urgency}
        self._input_tokens, self._output_tokens, self._asked_tokens = (Histogram(LENGTH_BOUNDS) for _ in range(3))
        self._asked_sequences = Histogram(COUNT_BOUNDS)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, uid: int) -> bool:
        return uid in self._live

    def __iter__(self) -> Iterator[int]:
        """Uids, in order of arrival."""
        return iter(self._live)

    def __getitem__(self, uid: int) -> LiveRequest:
        return self._live[uid]

    def add(self, *sequences: Request) -> None:
        """Those of one request, whose time is up at one moment."""
        now_s = self._clock()
        for sequence in sequences:
            usage = Usage(prompt=len(sequence.prompt), seed=sequence.sampling.seed)
            self._live[sequence.uid] = LiveRequest(sequence, usage, now_s)
            if sequence.stopping.time_limit_s is not None:
                self._deadlines_s[sequence.uid] = now_s + sequence.stopping.time_limit_s
        self._submitted += len(sequences)
        self._waiting[Urgency.of(sequences[0].priority)] += len(sequences)
        self._asked_sequences.observe(len(sequences))
        self._asked_tokens.observe(sequences[0].stopping.max_tokens)

    def overdue(self) -> list[int]:
        """Those whose time is up, in order of arrival."""
        if not self._deadlines_s:
            return []
        now_s = self._clock()
        return [uid for uid, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]

    def next_deadline_in_s(self) -> float | None:
        """Seconds until the time of the next one is up, not above 0 where it is; None where nobody's is limited."""
        return min(self._deadlines_s.values()) - self._clock() if self._deadlines_s else None

    def note_refusal(self, error: Exception) -> None:
        self._refused[type(error).__name__] += 1

    def note_start(self, uid: int) -> None:
        """It has a slot. Does nothing where that is known."""
        live = self._live[uid]
        if live.started_s is None:
            live.started_s = self._clock()
            urgency = Urgency.of(live.request.priority)
            self._waiting[urgency] -= 1
            self._wait_s[urgency].observe(live.started_s - live.submitted_s)

    def note_fork(self, uid: int, num_cached: int) -> None:
        """It has taken over so many tokens of its prompt from the sequence that read them."""
        live = self._live[uid]
        live.usage = replace(live.usage, cached=num_cached)

    def note_prompt(self, uid: int, logprobs: Sequence[TokenLogprob]) -> None:
        """A pass told of its prompt's tokens; kept until its first round."""
        self._live[uid].prompt_logprobs += logprobs

    def note_round(self, uid: int, usage: Usage) -> None:
        """A pass emitted for it."""
        live, now_s = self._live[uid], self._clock()
        if live.last_token_s is None:
            live.first_token_s = now_s
            self._first_token_s.observe(now_s - live.submitted_s)
            self._prompt_tokens += usage.prompt
        else:
            self._round_gap_s.observe(now_s - live.last_token_s)
        live.usage, live.last_token_s = usage, now_s
        live.prompt_logprobs = []

    def trim(self, uid: int, num_cut: int) -> None:
        """Takes back tokens of its last round: a stop string had completed before them."""
        live = self._live[uid]
        usage = live.usage
        live.usage = replace(usage, completion=usage.completion - num_cut, trimmed=usage.trimmed + num_cut)

    def remove(self, uid: int, end: End) -> LiveRequest:
        """It has ended. Each request ends once. Returns what was known of it."""
        live = self._live.pop(uid)
        self._deadlines_s.pop(uid, None)
        self._ended[end] += 1
        if live.started_s is None:
            self._waiting[Urgency.of(live.request.priority)] -= 1
        if isinstance(end, FinishReason):
            self._observe(live)
        return live

    def _observe(self, live: LiveRequest) -> None:
        """Of one that has finished."""
        self._latency_s.observe(self._clock() - live.submitted_s)
        self._input_tokens.observe(live.usage.prompt)
        self._output_tokens.observe(live.usage.completion)
        if live.started_s is None:
            return
        self._queue_s.observe(live.started_s - live.submitted_s)
        if live.first_token_s is not None and live.last_token_s is not None:
            decode_s = live.last_token_s - live.first_token_s
            self._prefill_s.observe(live.first_token_s - live.started_s)
            self._decode_s.observe(decode_s)
            self._running_s.observe(live.last_token_s - live.started_s)
            if live.usage.completion > 1:
                self._token_s.observe(decode_s / (live.usage.completion - 1))

    def _longest_wait_s(self) -> float:
        first = next((live for live in self._live.values() if live.started_s is None), None)
        return 0.0 if first is None else self._clock() - first.submitted_s

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            submitted=self._submitted,
            refused=dict(self._refused),
            ended=dict(self._ended),
            prompt_tokens=self._prompt_tokens,
            waiting={urgency: self._waiting[urgency] for urgency in Urgency},
            longest_wait_s=self._longest_wait_s(),
            latency_s=self._latency_s.view(),
            queue_s=self._queue_s.view(),
            prefill_s=self._prefill_s.view(),
            decode_s=self._decode_s.view(),
            running_s=self._running_s.view(),
            token_s=self._token_s.view(),
            input_tokens=self._input_tokens.view(),
            output_tokens=self._output_tokens.view(),
            first_token_s=self._first_token_s.view(),
            round_gap_s=self._round_gap_s.view(),
            wait_s={urgency: waits.view() for urgency, waits in self._wait_s.items()},
            asked_sequences=self._asked_sequences.view(),
            asked_tokens=self._asked_tokens.view(),
        )
