"""Time that passes when it is told to. Knows no steps and no requests."""

from __future__ import annotations


class VirtualClock:
    """now_s: seconds since the simulation began."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """As `time.monotonic` is called."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Raises ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"time went back by {-seconds:g} s")
        self.now_s += seconds
