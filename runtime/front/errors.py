"""Every error a caller can see, and the one place where gRPC codes are chosen.

OutriderError
├── InvalidRequest      INVALID_ARGUMENT     a field is wrong; names it and the remedy
├── Unauthenticated     UNAUTHENTICATED      nobody that we know has called
├── Forbidden           PERMISSION_DENIED    the caller may not do that
├── UnknownModel        NOT_FOUND            another model is served here
├── DuplicateRequest    ALREADY_EXISTS       the request id is live
├── Overloaded          RESOURCE_EXHAUSTED   the queue is full
├── MessageTooLong      RESOURCE_EXHAUSTED   the message has more bytes than are read
├── OverQuota           RESOURCE_EXHAUSTED   the caller's own limit is reached
├── LateRequest         DEADLINE_EXCEEDED    the call began, and its message did not come
├── SlowReader          RESOURCE_EXHAUSTED   the client left too much unread
├── Unavailable         UNAVAILABLE          not ready, draining, or the worker was lost
├── StaleRevision       ABORTED              the policy changed since the caller read it
├── AbortedByOperator   ABORTED              an operator ended the request
├── AbortedByCaller     CANCELLED            the caller ended the request, before or after it came
├── MissingFeature      FAILED_PRECONDITION  needs something that this server does not have; names it
├── RefusedSettings     FAILED_PRECONDITION  a new configuration cannot be used; the one before stays
├── NotServed           UNIMPLEMENTED        no server of this version does that; names it
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


class Unauthenticated(OutriderError):
    code = "UNAUTHENTICATED"


class Forbidden(OutriderError):
    code = "PERMISSION_DENIED"


class UnknownModel(OutriderError):
    code = "NOT_FOUND"


class DuplicateRequest(OutriderError):
    code = "ALREADY_EXISTS"


class Overloaded(OutriderError):
    code = "RESOURCE_EXHAUSTED"


class MessageTooLong(OutriderError):
    code = "RESOURCE_EXHAUSTED"


class OverQuota(OutriderError):
    """retry_after_s: when another try may succeed; None where nobody can tell."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class LateRequest(OutriderError):
    code = "DEADLINE_EXCEEDED"


class SlowReader(OutriderError):
    code = "RESOURCE_EXHAUSTED"


class Unavailable(OutriderError):
    code = "UNAVAILABLE"


class StaleRevision(OutriderError):
    code = "ABORTED"


class AbortedByOperator(OutriderError):
    code = "ABORTED"


class AbortedByCaller(OutriderError):
    code = "CANCELLED"


class MissingFeature(OutriderError):
    code = "FAILED_PRECONDITION"


class RefusedSettings(OutriderError):
    code = "FAILED_PRECONDITION"


class NotServed(OutriderError):
    code = "UNIMPLEMENTED"


class InternalError(OutriderError):
    code = "INTERNAL"
