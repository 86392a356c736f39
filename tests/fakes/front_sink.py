"""The front's end of the queue, in memory: records events, answers verdicts by a rule. Knows no gRPC and no text."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from runtime.events import ErrorEvent, TokenEvent, Verdict
from runtime.request import Finish, Usage


class RecordingSink:
    """Keeps what each request got. `stop_after`: tokens after which a verdict stops a request, by
    uid; those of the same event beyond them are cut off.

    on_deliver: called with each batch first; may raise.
    violations: what no engine may do. Listed and not raised, for an engine outlives whatever its sink raises.
    """

    def __init__(self) -> None:
        self.batches: list[list[TokenEvent | ErrorEvent]] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.usage: dict[int, Usage] = {}
        self.ends: dict[int, list[Finish | Exception | str]] = defaultdict(list)
        self.stop_after: dict[int, int] = {}
        self.on_deliver: Callable[[list[TokenEvent | ErrorEvent]], None] = lambda events: None
        self.gives_verdicts = True
        self.violations: list[str] = []
        self._arrival = asyncio.Event()

    def deliver(self, events: list[TokenEvent | ErrorEvent]) -> list[Verdict]:
        self.on_deliver(events)
        if not events:
            self.violations.append("an empty batch")
        self.batches.append(list(events))
        verdicts = []
        for event in events:
            if self.ends[event.uid]:
                self.violations.append(f"request {event.uid} had ended, then came {event}")
            if isinstance(event, ErrorEvent):
                self.ends[event.uid].append(event.error)
                continue
            self.tokens[event.uid] += event.tokens
            self.usage[event.uid] = event.usage
            num_over = len(self.tokens[event.uid]) - self.stop_after.get(event.uid, 1 << 30)
            stop = event.needs_verdict and self.gives_verdicts and num_over >= 0
            if stop or event.finish is not None:
                self.ends[event.uid].append("stop string" if stop else event.finish)
            if event.needs_verdict and self.gives_verdicts:
                verdicts.append(Verdict(uid=event.uid, stop=stop, num_cut=max(0, num_over) if stop else 0))
        self._arrival.set()
        return verdicts

    @property
    def token_events(self) -> list[TokenEvent]:
        return [event for batch in self.batches for event in batch if isinstance(event, TokenEvent)]

    def end_of(self, uid: int) -> Finish | Exception | str:
        (end,) = self.ends[uid]
        return end

    async def wait_for_end(self, *uids: int) -> None:
        """Returns when all these requests have ended."""
        while not all(self.ends[uid] for uid in uids):
            self._arrival.clear()
            await self._arrival.wait()
