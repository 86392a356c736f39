"""One sequence on its way out: engine events in, publishable deltas out. Knows nothing of gRPC, queues or batches.

A stop string inside an accepted run cuts text, ids, log-probabilities, rounds and usage at one place: ids end with the
token that completes the match, text ends before the match, and the counts are those of the ids that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from runtime.events import TokenEvent
from runtime.request import Finish, FinishReason, ReportParams, Round, StopParams, Usage
from runtime.stream.detokenizer import Detokenizer
from runtime.stream.stop_strings import StopMatcher
from workers.demands import TokenLogprob

SILENT_LAST_TOKEN = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN})
"""Endings whose last token is returned as an id and adds no text, unless it is asked for."""

NO_REPORT = ReportParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one event adds, behind the echoed prompt in the first one. `text` may lag behind `token_ids` (an unfinished
    character, a possible stop string).

    usage: cumulative. logprobs: one per id of the output. offsets: one per id, echoed ones among them. finish: set in
    the last delta of the sequence.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    rounds: tuple[Round, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    finish: Finish | None = None


class TextStream:
    """Turns the events of one sequence into deltas.

    Offsets count characters of the whole text, those held back and those that a stop string takes along among them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stopping: StopParams,
        report: ReportParams = NO_REPORT,
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        """prompt: its ids, which come first where the report is to echo them. A long one takes its time here."""
        self._detokenizer = detokenizer
        self._stopping, self._report = stopping, report
        self._matcher = StopMatcher(stopping.stop_strings)
        self._finished = False
        self._num_tokens = self._num_chars = 0
        self._echo = self._echoed(prompt) if report.echo else _Piece()

    @property
    def is_finished(self) -> bool:
        """The last delta was returned; no event may follow."""
        return self._finished

    def take(self, event: TokenEvent) -> Delta:
        """The delta of the sequence's next event. It is the last one if the event is, or if a stop string completes."""
        assert not self._finished, f"event after the end of uid {event.uid}"
        piece = _Piece()
        is_silent = event.finish is not None and event.finish.reason in SILENT_LAST_TOKEN
        # What such a token says is no part of a stop string: it ends the sequence before one could complete.
        num_searched = len(event.tokens) - is_silent
        num_spoken = len(event.tokens) if self._stopping.include_stop else num_searched
        for position, token_id in enumerate(event.tokens):
            self._num_tokens += 1
            piece.token_ids.append(token_id)
            self._note_offset(piece, token_id)
            if position < num_spoken:
                piece.texts.append(self._say(self._detokenizer.push(token_id), is_searched=position < num_searched))
            if self._matcher.matched is not None:
                return self._delta(event, piece)
        if event.finish is not None:
            # Bytes that become U+FFFD only here can complete a stop string too.
            piece.texts.append(self._say(self._detokenizer.finish(), is_searched=num_spoken == num_searched))
            if self._matcher.matched is None:
                piece.texts.append(self._matcher.finish())
            self._finished = True
        return self._delta(event, piece)

    def _echoed(self, prompt: Sequence[int]) -> _Piece:
        """Stop strings are looked for behind it. A character that the output completes is the output's."""
        piece = _Piece()
        for token_id in prompt:
            piece.token_ids.append(token_id)
            self._note_offset(piece, token_id)
            piece.texts.append(self._detokenizer.push(token_id))
            self._num_chars += len(piece.texts[-1])
        return piece

    def _note_offset(self, piece: _Piece, token_id: int) -> None:
        """Where the token begins that comes next: behind what was held back of those before it, unless it completes
        that character."""
        if self._report.offsets:
            piece.offsets.append(self._num_chars + self._detokenizer.num_revealed(token_id))

    def _say(self, text: str, *, is_searched: bool) -> str:
        """What of new text may be published."""
        self._num_chars += len(text)
        may_match = is_searched and self._num_tokens >= self._stopping.min_tokens
        said = self._matcher.push(text, may_match=may_match)
        if self._matcher.matched is not None and self._stopping.include_stop:
            said += self._matcher.matched
        return said

    def _delta(self, event: TokenEvent, piece: _Piece) -> Delta:
        kept = len(piece.token_ids)
        echo, self._echo = self._echo, _Piece()
        usage, finish = event.usage, event.finish
        if self._matcher.matched is not None:
            self._finished = True
            finish = Finish(reason=FinishReason.STOP_STRING, stop_string=self._matcher.matched)
            # Trimmed grows by what completion loses, so that completion = accepted + rounds - trimmed still holds.
            cut = len(event.tokens) - kept
            usage = replace(usage, completion=usage.completion - cut, trimmed=usage.trimmed + cut)
        return Delta(
            text="".join(echo.texts + piece.texts),
            token_ids=(*echo.token_ids, *piece.token_ids),
            usage=usage,
            rounds=_cut_rounds(event.rounds, kept),
            logprobs=event.logprobs[:kept],
            prompt_logprobs=event.prompt_logprobs,
            offsets=(*echo.offsets, *piece.offsets),
            finish=finish,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens in order, with what they let be published and where each begins."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def _cut_rounds(rounds: tuple[Round, ...], kept: int) -> tuple[Round, ...]:
    """The rounds that emitted the first `kept` tokens of an event, the last of them shortened to fit."""
    left: list[Round] = []
    for one in rounds:
        if kept <= 0:
            break
        left.append(replace(one, emitted=one.emitted[:kept], margins=one.margins[:kept]))
        kept -= len(one.emitted)
    return tuple(left)
