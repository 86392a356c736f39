"""What ends a benchmark before its end."""

from __future__ import annotations


class BenchError(RuntimeError):
    """The server cannot be measured, or was changed meanwhile. The text says what, and the remedy."""


class PolicyRefused(BenchError):
    """The server cannot serve a policy at the moment, such as a dynamic one whose profile does not come true."""
