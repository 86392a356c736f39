"""Events on their way to the front: held until the ranks compute, handed over in batches, answered by verdicts.

A front that fails is no reason to stop: the requests it was told of end, and it is told so one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.events import ErrorEvent, EventSink, TokenEvent
from runtime.front.errors import InternalError, OutriderError

log = logging.getLogger(__name__)

Event = TokenEvent | ErrorEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What became of the requests of a batch of events, by uid.

    stopped: a stop string ended them; with the tokens behind the match. failed: the front has given them up, or failed
    itself; with the error where there is one. It knows of both. decided: they end or go on as they would have.
    undecided: they needed a verdict and got none.
    """

    stopped: tuple[tuple[int, int], ...] = ()
    failed: tuple[tuple[int, OutriderError | None], ...] = ()
    decided: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()


class Outbox:
    """Belongs to one engine and one front. Events leave in the order in which they were held."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._held: list[Event] = []

    def hold(self, event: Event) -> None:
        self._held.append(event)

    def forget(self, uid: int) -> None:
        """Nothing more of this request is told."""
        self._held = [event for event in self._held if event.uid != uid]

    def take(self) -> list[Event]:
        """What is held, to be handed over now."""
        held, self._held = self._held, []
        return held

    def hand_over(self, events: list[Event]) -> Handover:
        """Tells the front and takes its verdicts. A front that fails ends the requests of these events."""
        if not events:
            return Handover()
        waiting = {event.uid for event in events if isinstance(event, TokenEvent) and event.needs_verdict}
        try:
            verdicts = self._sink.deliver(events)
        except Exception as error:
            log.exception("the front failed on %d events", len(events))
            # Those that ended in this very batch are told too: their last event may not have got through.
            failure = InternalError(f"the front failed: {error!r}")
            self.report(ErrorEvent(uid=event.uid, error=failure) for event in events)
            return Handover(failed=tuple((event.uid, failure) for event in events))
        return Handover(
            stopped=tuple((verdict.uid, verdict.num_cut) for verdict in verdicts if verdict.stop),
            failed=tuple((verdict.uid, verdict.error) for verdict in verdicts if verdict.gone),
            decided=tuple(verdict.uid for verdict in verdicts if not verdict.stop and not verdict.gone),
            undecided=tuple(sorted(waiting - {verdict.uid for verdict in verdicts})),
        )

    def report(self, events: Iterable[Event]) -> None:
        """Tells a front that may be at fault itself, of one event at a time; what fails again is only logged."""
        for event in events:
            try:
                self._sink.deliver([event])
            except Exception:
                log.exception("the front failed on the end of request %d", event.uid)
