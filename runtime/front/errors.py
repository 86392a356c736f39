"""Every error a caller can see, and the one place where gRPC codes are chosen.

OutriderError
├── InvalidRequest      INVALID_ARGUMENT     a field is wrong; names it and the remedy
├── UnknownModel        NOT_FOUND            another model is served here
├── DuplicateRequest    ALREADY_EXISTS       the request id is live
├── Overloaded          RESOURCE_EXHAUSTED   the queue is full
├── SlowReader          RESOURCE_EXHAUSTED   the client left too much unread
├── Unavailable         UNAVAILABLE          not ready, draining, or the worker was lost
├── StaleRevision       ABORTED              the policy changed since the caller read it
├── AbortedByOperator   ABORTED              an operator ended the request
├── MissingFeature      FAILED_PRECONDITION  needs something that this server does not have; names it
└── InternalError       INTERNAL             our bug

gRPC itself answers a message past its limit (see bounds.py) with RESOURCE_EXHAUSTED, before any of this is asked.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors that a caller can see. The code is the name of a `grpc.StatusCode`."""

    code = "INTERNAL"


class InvalidRequest(OutriderError):
    """`field` is the path of the offending field in the request message."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownModel(OutriderError):
    code = "NOT_FOUND"


class DuplicateRequest(OutriderError):
    code = "ALREADY_EXISTS"


class Overloaded(OutriderError):
    code = "RESOURCE_EXHAUSTED"


class SlowReader(OutriderError):
    code = "RESOURCE_EXHAUSTED"


class Unavailable(OutriderError):
    code = "UNAVAILABLE"


class StaleRevision(OutriderError):
    code = "ABORTED"


class AbortedByOperator(OutriderError):
    code = "ABORTED"


class MissingFeature(OutriderError):
    code = "FAILED_PRECONDITION"


class InternalError(OutriderError):
    code = "INTERNAL"
