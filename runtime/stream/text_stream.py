"""One sequence on its way out: engine events in, publishable deltas out. Knows nothing of gRPC, queues or batches.

A stop string inside an accepted run cuts text, ids, rounds and usage at one place: ids end with the token that
completes the match, text ends before the match, and the counts are those of the ids that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, Round, Usage
from runtime.stream.detokenizer import Detokenizer
from runtime.stream.stop_strings import StopMatcher

SILENT_LAST_TOKEN = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})
"""Endings whose last token is returned as an id and adds no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one event adds. `text` may lag behind `token_ids` (an unfinished character, a possible stop string).

    usage: cumulative. finish: set in the last delta of the sequence.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    rounds: tuple[Round, ...] = ()
    finish: Finish | None = None


class TextStream:
    """Turns the events of one sequence into deltas."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings)
        self._finished = False

    @property
    def is_finished(self) -> bool:
        """The last delta was returned; no event may follow."""
        return self._finished

    def take(self, event: TokenEvent) -> Delta:
        """The delta of the sequence's next event. It is the last one if the event is, or if a stop string completes."""
        assert not self._finished, f"event after the end of uid {event.uid}"
        num_spoken = len(event.tokens)
        if event.finish is not None and event.finish.reason in SILENT_LAST_TOKEN:
            num_spoken -= 1
        pieces: list[str] = []
        for position, token_id in enumerate(event.tokens[:num_spoken]):
            pieces.append(self._matcher.push(self._detokenizer.push(token_id)))
            if self._matcher.matched is not None:
                return self._stopped(event, kept=position + 1, text="".join(pieces))
        if event.finish is not None:
            # Bytes that become U+FFFD only here can complete a stop string too.
            pieces.append(self._matcher.push(self._detokenizer.finish()))
            if self._matcher.matched is not None:
                return self._stopped(event, kept=len(event.tokens), text="".join(pieces))
            pieces.append(self._matcher.finish())
            self._finished = True
        return Delta(
            text="".join(pieces),
            token_ids=event.tokens,
            usage=event.usage,
            rounds=event.rounds,
            finish=event.finish,
        )

    def _stopped(self, event: TokenEvent, *, kept: int, text: str) -> Delta:
        self._finished = True
        cut = len(event.tokens) - kept
        # Trimmed grows by what completion loses, so that completion = accepted + rounds - trimmed still holds.
        usage = replace(event.usage, completion=event.usage.completion - cut, trimmed=event.usage.trimmed + cut)
        return Delta(
            text=text,
            token_ids=event.tokens[:kept],
            usage=usage,
            rounds=_cut_rounds(event.rounds, kept),
            finish=Finish(reason=FinishReason.STOP_STRING, stop_string=self._matcher.matched),
        )


def _cut_rounds(rounds: tuple[Round, ...], kept: int) -> tuple[Round, ...]:
    """The rounds that emitted the first `kept` tokens of an event, the last of them shortened to fit."""
    left: list[Round] = []
    for one in rounds:
        if kept <= 0:
            break
        left.append(replace(one, emitted=one.emitted[:kept], margins=one.margins[:kept]))
        kept -= len(one.emitted)
    return tuple(left)
