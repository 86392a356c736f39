"""Whether requests are taken, and if not, why; who is told when that changes. Knows no request and no rank."""

from __future__ import annotations

from collections.abc import Callable

from runtime.status import ServerState


class Readiness:
    """Four reasons against taking requests, each set and cleared by itself; requests are taken when none holds."""

    def __init__(self) -> None:
        self._is_started = False
        self._is_stopping = False
        self._is_draining = False
        self._outage = ""
        self._was_serving = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_serving(self) -> bool:
        return self._is_started and self.state is ServerState.SERVING

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def outage(self) -> str:
        """Why the ranks are not there; empty while they are."""
        return self._outage

    @property
    def state(self) -> ServerState:
        """Of several reasons, the one that lasts longest."""
        if self._is_stopping:
            return ServerState.STOPPING
        if self._is_draining:
            return ServerState.DRAINING
        return ServerState.RECOVERING if self._outage else ServerState.SERVING

    def explain(self) -> str:
        """What the server does instead of taking requests, by the same order as `state`."""
        if not self._is_started:
            return "starting"
        return f"recovering ({self._outage})" if self.state is ServerState.RECOVERING else self.state.value

    def add_listener(self, listener: Callable[[bool], None]) -> None:
        """`listener` hears every change of `is_serving`; it must not raise."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._is_started = True
        self._tell()

    def stop(self) -> None:
        """For good."""
        self._is_stopping = True
        self._tell()

    def drain(self, is_draining: bool) -> None:
        self._is_draining = is_draining
        self._tell()

    def lose(self, cause: str) -> None:
        """The ranks are not there, or not yet again; the newest cause counts."""
        self._outage = cause
        self._tell()

    def regain(self) -> None:
        """The ranks are there."""
        self._outage = ""
        self._tell()

    def _tell(self) -> None:
        if self.is_serving != self._was_serving:
            self._was_serving = self.is_serving
            for listener in self._listeners:
                listener(self._was_serving)
