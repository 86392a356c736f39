"""From the ends of a request's sequences to its record. Knows no queue and no front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.front.errors import OutriderError
from runtime.live import EarlyEnd, End, LiveRequest
from runtime.observe.records import OK, Observer, RequestRecord, code_of, code_of_leaving, field_of
from runtime.request import Usage, total_of


@dataclass(frozen=True, slots=True)
class _Part:
    """A sequence that has ended. output: its tokens, where these are kept."""

    live: LiveRequest
    end: End
    error: OutriderError | None
    output: tuple[int, ...]


class Gathering:
    """Holds the ends of those whose siblings still run. clock: the one that live requests are timed by."""

    def __init__(self, observer: Observer, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock
        # By the request's uid.
        self._parts: dict[int, list[_Part]] = {}

    def add(self, live: LiveRequest, end: End, error: OutriderError | None, emitted: Sequence[int]) -> None:
        """A sequence has ended, by `error` where that is known. emitted: its tokens, and perhaps some that were taken
        back since. Tells the observer of the request when this was the last one."""
        request = live.request
        output = tuple(emitted[: live.usage.completion]) if self._observer.keeps_tokens else ()
        part = _Part(live, end, error, output)
        if request.n == 1:
            self._observer.note_request(self._record((part,)))
            return
        uid = request.uid - request.index
        parts = self._parts.setdefault(uid, [])
        parts.append(part)
        if len(parts) == request.n:
            self._observer.note_request(self._record(self._parts.pop(uid)))

    def _record(self, parts: Sequence[_Part]) -> RequestRecord:
        """parts: of all sequences, in the order in which they ended."""
        error = next((part.error for part in parts if part.error is not None), None)
        if len(parts) > 1:
            parts = sorted(parts, key=lambda part: part.live.request.index)
        first = parts[0].live
        request, sampling = first.request, first.request.sampling
        has_left = any(isinstance(part.end, EarlyEnd) for part in parts)
        ended_s = self._clock()
        left = code_of_leaving(request.origin, first.submitted_s, ended_s) if has_left else OK
        usage, moments = _summed([part.live for part in parts]) if len(parts) > 1 else (first.usage, first)
        return RequestRecord(
            request_id=request.request_id,
            origin=request.origin,
            code=code_of(error) if error is not None else left,
            field=field_of(error),
            error="" if error is None else str(error),
            ends=tuple([part.end.value for part in parts]),
            n=request.n,
            priority=request.priority,
            max_tokens=request.stopping.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            usage=usage,
            submitted_s=first.submitted_s,
            started_s=moments.started_s,
            first_token_s=moments.first_token_s,
            last_token_s=moments.last_token_s,
            ended_s=ended_s,
            prompt=request.prompt if self._observer.keeps_tokens else (),
            outputs=tuple([part.output for part in parts]) if self._observer.keeps_tokens else (),
        )


def _summed(lives: Sequence[LiveRequest]) -> tuple[Usage, LiveRequest]:
    """Usage of all, and one that bears the first start, the first token and the last one of any."""
    moments = replace(
        lives[0],
        started_s=_extreme(min, (live.started_s for live in lives)),
        first_token_s=_extreme(min, (live.first_token_s for live in lives)),
        last_token_s=_extreme(max, (live.last_token_s for live in lives)),
    )
    return total_of([live.usage for live in lives]), moments


def _extreme(choose: Callable[[list[float]], float], moments: Iterable[float | None]) -> float | None:
    known = [moment for moment in moments if moment is not None]
    return choose(known) if known else None
