"""What the front needs of the engine, and nothing more: the seam behind which it could live in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from parallel.mesh import Mesh
from runtime.front.errors import OutriderError
from runtime.live import RequestStatus
from runtime.request import Request
from runtime.status import Aborted, EngineStatus, IntegrityReport
from runtime.verification.policy import Policy, PolicyState
from runtime.verification.view import AdviceReport, ShadowView
from workers.demands import Constraint
from workers.plan import WorkerDescription


class PolicyLink(Protocol):
    """The policies in force, as an operator sees and changes them."""

    @property
    def state(self) -> PolicyState: ...

    async def set(
        self,
        policy: Policy | None,
        expected_revision: int | None = None,
        *,
        priority: int | None = None,
        set_by: str = "",
    ) -> PolicyState:
        """Puts a policy in force from the next planned step on.

        priority: only for requests of this priority; policy None lets them follow the others again.
        set_by: whom the state names.

        Raises StaleRevision, InvalidRequest or MissingFeature.
        """
        ...

    def add_listener(self, listener: Callable[[PolicyState], None]) -> Callable[[], None]:
        """Calls `listener` after each change of the policy; it must not raise. Returns what ends that."""
        ...

    def set_shadow(self, policy: Policy | None) -> ShadowView | None:
        """Plans a second policy beside the one in force, from now on; None ends it. Raises InvalidRequest or
        MissingFeature."""
        ...

    def advise(self, *, num_sequences: int | None = None, context: int | None = None) -> AdviceReport:
        """What each draft length would bring now, or for another load. Raises MissingFeature without a profile or
        anything drafted."""
        ...


class EngineLink(Protocol):
    """The engine as the front sees it. All calls are made on one event loop; tokens come back through an EventSink."""

    @property
    def description(self) -> WorkerDescription:
        """Rank 0's."""
        ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def is_serving(self) -> bool:
        """This is a good place to send requests to. In some other states `submit` takes them too: see
        `runtime.readiness`."""
        ...

    @property
    def has_ended(self) -> bool:
        """Nothing will be served again, and nobody has asked for that."""
        ...

    @property
    def policies(self) -> PolicyLink: ...

    def next_uid(self, count: int = 1) -> int:
        """The first of `count` uids in a row that no sequence had before."""
        ...

    async def prepare(self, constraint: Constraint) -> None:
        """Makes a constraint ready on the ranks, so that what has it enters at once. Raises InvalidRequest that says
        why it cannot be followed, on the field `constraint.` and its kind, or Unavailable."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request; the events of each of its sequences (`runtime.request.sequences_of`) follow under its uid.
        Raises an OutriderError when it is refused, and no event comes then."""
        ...

    def abort(self, uid: int) -> None:
        """Ends a request that its client has left, without further events. Does nothing for a uid that is not live."""
        ...

    def abandon(self, uid: int, error: OutriderError) -> None:
        """Like `abort`, for a request whose stream the front has failed: it counts as failed. error: what its client is
        told."""
        ...

    def add_state_listener(self, listener: Callable[[bool], None]) -> None:
        """Calls `listener` with `is_serving` after each change of it or of `has_ended`."""
        ...

    def status(self) -> EngineStatus: ...

    def live_requests(self, limit: int) -> tuple[list[RequestStatus], int]:
        """At most `limit` of them, running ones in order of arrival before waiting ones in order of service; and how
        many are live."""
        ...

    def drain(self) -> None:
        """Refuses new requests until `resume`; live ones go on. Idempotent."""
        ...

    def resume(self) -> None:
        """Takes requests again. Idempotent. Raises Unavailable when the engine is stopping."""
        ...

    def abort_by_id(self, request_ids: Sequence[str]) -> Aborted:
        """Ends requests by their callers' names for them; their last event is an AbortedByOperator."""
        ...

    async def check_integrity(self) -> IntegrityReport:
        """Checks the books and has every rank check itself. Raises Unavailable when the ranks are not there."""
        ...
