"""How much each identity does at a time and in a minute. Knows no gRPC and no engine.

A request sets aside the tokens that it may take at most, prompt and output. What is delivered of them counts for a
minute from then on, and at its end what was made for a caller who left; the rest is given back. So what is delivered in
any 60 s stays within tokens_per_minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.access.identity import Identity
from runtime.access.window import TokenWindow
from runtime.front.errors import InvalidRequest, OverQuota


@dataclass(slots=True)
class _Use:
    """Of one identity. num_set_aside: tokens that running calls may still take."""

    num_running: int = 0
    num_set_aside: int = 0
    window: TokenWindow = field(default_factory=TokenWindow)


class Allowance:
    """What one call may take. Without a limit nothing is counted."""

    def __init__(self, identity: Identity, use: _Use, clock: Callable[[], float]) -> None:
        self._identity, self._use, self._clock = identity, use, clock
        self._num_left = 0

    def set_aside(self, num_prompt: int, num_sequences: int, max_tokens: int) -> None:
        """Raises OverQuota, with the time after which another try may succeed where that is known; InvalidRequest where
        none ever could."""
        limit = self._identity.limits.tokens_per_minute
        if limit is None:
            return
        wanted = num_prompt + num_sequences * max_tokens
        what = (
            f"the request may take {wanted} tokens ({num_prompt} of prompt, {num_sequences} x {max_tokens} of output)"
        )
        if wanted > limit:
            raise InvalidRequest(
                "stopping.max_tokens", f"{what}, and {self._identity.name} has {limit} a minute; lower max_tokens or n"
            )
        now_s = self._clock()
        used = self._use.window.used(now_s)
        excess = used + self._use.num_set_aside + wanted - limit
        if excess > 0:
            wait_s = self._use.window.frees_in(now_s, excess)
            when = "when running ones have ended" if wait_s is None else f"in {math.ceil(wait_s)} s"
            raise OverQuota(
                f"{what}; of {self._identity.name}'s {limit} a minute {used} are used and {self._use.num_set_aside} "
                f"set aside for running requests; try again {when}, or lower max_tokens",
                retry_after_s=wait_s,
            )
        self._num_left = wanted
        self._use.num_set_aside += wanted

    def spend(self, num_tokens: int) -> None:
        """So many of them have been used: the prompt when the request is taken, output when it is delivered."""
        if not self._num_left:
            return
        num_tokens = min(num_tokens, self._num_left)
        self._num_left -= num_tokens
        self._use.num_set_aside -= num_tokens
        self._use.window.add(self._clock(), num_tokens)

    def give_back(self) -> None:
        """What is left of them. Idempotent."""
        self._use.num_set_aside -= self._num_left
        self._num_left = 0


class Quotas:
    """Of all identities. clock: seconds, never going back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def call(self, identity: Identity) -> Iterator[Allowance]:
        """Counts a call while the block runs. Raises OverQuota where the identity has as many as it may."""
        limits = identity.limits
        if limits.concurrency is None and limits.tokens_per_minute is None:
            # Not kept: what has no limit takes nothing from anything.
            yield Allowance(identity, _Use(), self._clock)
            return
        use = self._uses.setdefault(identity.name, _Use())
        if limits.concurrency is not None and use.num_running >= limits.concurrency:
            raise OverQuota(
                f"{identity.name} has {use.num_running} requests running and may have {limits.concurrency}; "
                "try again when one has ended"
            )
        use.num_running += 1
        allowance = Allowance(identity, use, self._clock)
        try:
            yield allowance
        finally:
            allowance.give_back()
            use.num_running -= 1

    def keep(self, names: Collection[str]) -> None:
        """Forgets all others, once they have nothing running."""
        self._uses = {name: use for name, use in self._uses.items() if name in names or use.num_running}
