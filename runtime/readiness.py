"""Whether requests are taken and whether to send any, and if not, why; who is told when that changes. Knows no request
and no rank.

               requests taken   health
starting       no               NOT_SERVING
serving        yes              SERVING
stalled        yes              NOT_SERVING   a step has been running for long; others would answer sooner
withdrawing    yes              NOT_SERVING   told to stop, and routers are still to hear of it
recovering     no               NOT_SERVING
draining       no               NOT_SERVING
stopping       on their way     NOT_SERVING   whoever was let in before may still submit, until the intake is closed
"""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.status import Losses, ServerState


class Readiness:
    """Reasons against taking requests or against sending any, each set and cleared by itself.

    clock: seconds, by which the time without ranks is told.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_started = False
        self._is_withdrawing = False
        self._is_stopping = False
        self._is_closed = False
        self._has_ended = False
        self._is_draining = False
        self._is_stalled = False
        self._outage = ""
        self._lost_s = 0.0
        self._num_losses = 0
        self._outage_s = 0.0
        self._told = (False, False)
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_serving(self) -> bool:
        """What health says: requests are taken, and this is a good place to send them to."""
        return self._is_started and self.state is ServerState.SERVING

    @property
    def takes_requests(self) -> bool:
        return self._is_started and not (self._is_closed or self._is_draining or self._outage)

    @property
    def is_stopping(self) -> bool:
        """The server was told to stop, whatever it still takes."""
        return self._is_withdrawing or self._is_stopping

    @property
    def has_ended(self) -> bool:
        """Nothing will be served again, and nobody has asked for that."""
        return self._has_ended

    @property
    def outage(self) -> str:
        """Why the ranks are not there; empty while they are."""
        return self._outage

    @property
    def present_outage_s(self) -> float:
        """For how long the ranks have not been there; 0 while they are."""
        return self._clock() - self._lost_s if self._outage else 0.0

    @property
    def losses(self) -> Losses:
        """How often and how long the ranks were not there."""
        return Losses(count=self._num_losses, seconds=self._outage_s + self.present_outage_s)

    @property
    def state(self) -> ServerState:
        """Of several reasons, the one that lasts longest; those against taking requests before the others."""
        reasons = (
            (self._is_stopping, ServerState.STOPPING),
            (self._is_draining, ServerState.DRAINING),
            (self._outage, ServerState.RECOVERING),
            (self._is_withdrawing, ServerState.WITHDRAWING),
            (self._is_stalled, ServerState.STALLED),
        )
        return next((state for holds, state in reasons if holds), ServerState.SERVING)

    def explain(self) -> str:
        """What the server does instead of taking requests, by the same order as `state`."""
        if not self._is_started:
            return "starting"
        return f"recovering ({self._outage})" if self.state is ServerState.RECOVERING else self.state.value

    def add_listener(self, listener: Callable[[bool], None]) -> None:
        """`listener` hears `is_serving` after every change of it or of `has_ended`; it must not raise."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._is_started = True
        self._tell()

    def withdraw(self) -> None:
        """For good: routers are to look elsewhere. Requests are still taken."""
        self._is_withdrawing = True
        self._tell()

    def wind_down(self) -> None:
        """For good: nobody else is let in. Who was may still submit."""
        self._is_stopping = True
        self._tell()

    def stop(self) -> None:
        """For good: nothing is taken any more."""
        self._is_stopping = self._is_closed = True
        self._tell()

    def end(self) -> None:
        """For good, and by no wish of anybody's."""
        self._has_ended = True
        self.stop()

    def stall(self, is_stalled: bool) -> None:
        self._is_stalled = is_stalled
        self._tell()

    def drain(self, is_draining: bool) -> None:
        self._is_draining = is_draining
        self._tell()

    def lose(self, cause: str) -> None:
        """The ranks are not there, or not yet again; the newest cause counts."""
        if not self._outage:
            self._num_losses += 1
            self._lost_s = self._clock()
        self._outage = cause
        self._tell()

    def regain(self) -> None:
        """The ranks are there."""
        if self._outage:
            self._outage_s += self._clock() - self._lost_s
        self._outage = ""
        self._tell()

    def _tell(self) -> None:
        present = (self.is_serving, self._has_ended)
        if present != self._told:
            self._told = present
            for listener in self._listeners:
                listener(self.is_serving)
