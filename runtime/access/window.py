"""Tokens of the last minute, by the second. Knows no clock and no callers."""

from __future__ import annotations

from collections import deque

MINUTE_S = 60


class TokenWindow:
    """What was added in the last 60 s, and up to one second longer: whole seconds leave it when they are all past it.

    Times are seconds of one clock that never goes back.
    """

    def __init__(self) -> None:
        # (second, tokens), oldest first; at most 62 of them.
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, now_s: float, num_tokens: int) -> None:
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            second, before = self._seconds.pop()
            self._seconds.append((second, before + num_tokens))
        else:
            self._seconds.append((second, num_tokens))
        self._sum += num_tokens
        self._forget(now_s)

    def used(self, now_s: float) -> int:
        self._forget(now_s)
        return self._sum

    def frees_in(self, now_s: float, num_tokens: int) -> float | None:
        """Seconds until at least so many of the tokens have left it; None where it does not hold as many."""
        self._forget(now_s)
        if num_tokens <= 0:
            return 0.0
        for second, count in self._seconds:
            num_tokens -= count
            if num_tokens <= 0:
                return second + 1 + MINUTE_S - now_s
        return None

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] + 1 + MINUTE_S <= now_s:
            self._sum -= self._seconds.popleft()[1]
