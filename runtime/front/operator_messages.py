"""Operators' messages to domain values and back; checks every field and applies every default. Knows no engine.

Fields that no message of an operator knows are refused by `convert.refuse_unknown_fields`, as those of requests are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.v1 import inference_pb2, operator_pb2
from runtime.front.convert import MAX_REQUEST_ID_CHARS
from runtime.front.errors import InvalidRequest
from runtime.front.policy_messages import policy_state_message, speculation_message
from runtime.front.replies import usage_message
from runtime.live import EarlyEnd, RequestState, RequestStatus
from runtime.statistics import EngineStatistics, RankUse
from runtime.status import EngineStatus, FrontStatus, Losses, ServerState
from workers.plan import WorkerDescription

DEFAULT_LISTED = 1000
MAX_LISTED = 1000
"""As many are listed in some 10 ms, for which the engine's loop stands still."""

MAX_ABORTED = 1000

_SERVER_STATES = {
    ServerState.SERVING: operator_pb2.SERVER_STATE_SERVING,
    ServerState.STALLED: operator_pb2.SERVER_STATE_STALLED,
    ServerState.WITHDRAWING: operator_pb2.SERVER_STATE_WITHDRAWING,
    ServerState.DRAINING: operator_pb2.SERVER_STATE_DRAINING,
    ServerState.RECOVERING: operator_pb2.SERVER_STATE_RECOVERING,
    ServerState.STOPPING: operator_pb2.SERVER_STATE_STOPPING,
}
_REQUEST_STATES = {
    RequestState.WAITING: operator_pb2.REQUEST_STATE_WAITING,
    RequestState.PREFILLING: operator_pb2.REQUEST_STATE_PREFILLING,
    RequestState.DECODING: operator_pb2.REQUEST_STATE_DECODING,
}


def limit_of(message: operator_pb2.ListRequestsRequest) -> int:
    """How many requests are listed at most. Raises InvalidRequest."""
    limit = message.limit if message.HasField("limit") else DEFAULT_LISTED
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest("limit", f"{limit} is not from 1 to {MAX_LISTED}; leave it out for {DEFAULT_LISTED}")
    return limit


def request_ids_of(message: operator_pb2.AbortRequest) -> tuple[str, ...]:
    """The ids to abort, as they were given. Raises InvalidRequest."""
    num_ids = len(message.request_ids)
    if not num_ids:
        raise InvalidRequest("request_ids", "is empty; name at least one request")
    if num_ids > MAX_ABORTED:
        raise InvalidRequest("request_ids", f"{num_ids} ids; at most {MAX_ABORTED} are taken, so send several calls")
    for index, request_id in enumerate(message.request_ids):
        field = f"request_ids[{index}]"
        if not request_id:
            raise InvalidRequest(field, "is empty, which no request's id is; leave it out")
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                field, f"{len(request_id)} characters long; no request's id has more than {MAX_REQUEST_ID_CHARS}"
            )
    return tuple(message.request_ids)


def state_message(state: ServerState) -> operator_pb2.ServerState:
    return _SERVER_STATES[state]


def status_message(
    status: EngineStatus, front: FrontStatus, *, model: inference_pb2.GetModelResponse
) -> operator_pb2.GetStatusResponse:
    """All of a status. model: what the engine does not know of itself."""
    tp = status.mesh.tp
    return operator_pb2.GetStatusResponse(
        state=state_message(status.state),
        outage=status.outage,
        uptime_s=status.uptime_s,
        model=model,
        versions=front.versions,
        ranks=_rank_messages(status),
        batches=[
            _batch_message(use, status.ranks[dp_rank * tp : (dp_rank + 1) * tp])
            for dp_rank, use in enumerate(status.statistics.dp_ranks)
        ],
        waiting=status.statistics.waiting,
        max_waiting=status.max_waiting,
        policy=policy_state_message(status.policy, fallback=status.speculation.fallback),
        step=status.step,
        epoch=status.epoch,
        counters=counters_message(status.statistics, status.losses, front),
        speculation=speculation_message(status.speculation, status.statistics),
        open_calls=front.open_calls,
    )


def _rank_messages(status: EngineStatus) -> Iterator[operator_pb2.RankStatus]:
    for rank, description in enumerate(status.ranks):
        place = status.places[rank] if status.places else None
        yield operator_pb2.RankStatus(
            rank=rank,
            name=place.name if place else "",
            address=place.address if place else "",
            device=description.device,
            parameter_bytes=description.parameter_bytes,
        )


def _batch_message(use: RankUse, ranks: Sequence[WorkerDescription]) -> operator_pb2.BatchStatus:
    """ranks: those that share the batch. Each holds a part of every slot and page, so bytes are summed over them."""
    page_bytes = {
        group: sum(rank.page_bytes[index] for rank in ranks) for index, group in enumerate(ranks[0].cache_groups)
    }
    return operator_pb2.BatchStatus(
        running=use.running,
        slots_used=use.slots_used,
        slots_total=use.slots_used + use.slots_free,
        slot_bytes=sum(rank.slot_bytes for rank in ranks),
        record_bytes=sum(rank.record_bytes for rank in ranks),
        pools=[
            operator_pb2.PoolStatus(
                group=pool.group,
                pages_used=pool.used,
                pages_total=pool.used + pool.free,
                page_bytes=page_bytes[pool.group],
            )
            for pool in use.pages
        ],
    )


def counters_message(statistics: EngineStatistics, losses: Losses, front: FrontStatus) -> operator_pb2.Counters:
    timings, requests = statistics.timings, statistics.requests
    return operator_pb2.Counters(
        steps=statistics.steps,
        rounds=statistics.rounds,
        emitted=statistics.emitted,
        trimmed=statistics.trimmed,
        drafted_by_position=statistics.drafted_per_position,
        admitted_by_position=statistics.admitted_per_position,
        accepted_by_position=statistics.accepted_per_position,
        rank_s=timings.total_s,
        target_s=timings.target_s,
        verify_s=timings.verify_s,
        commit_s=timings.commit_s,
        draft_s=timings.draft_s,
        collective_s=timings.collective_s,
        dispatch_s=timings.dispatch_s,
        combine_s=timings.combine_s,
        execute_s=statistics.execute_s,
        host_s=statistics.host_s,
        restarts=statistics.restarts,
        submitted=requests.submitted,
        finished=requests.finished,
        aborted=requests.ended.get(EarlyEnd.ABORTED, 0),
        failed=requests.ended.get(EarlyEnd.FAILED, 0),
        refused=sum(requests.refused.values()),
        prompt_tokens=requests.prompt_tokens,
        errors=front.errors,
        rank_losses=losses.count,
        outage_s=losses.seconds,
    )


def requests_message(listed: Sequence[RequestStatus], num_live: int) -> operator_pb2.ListRequestsResponse:
    return operator_pb2.ListRequestsResponse(requests=map(request_message, listed), total=num_live)


def request_message(status: RequestStatus) -> operator_pb2.RequestStatus:
    request = status.request
    return operator_pb2.RequestStatus(
        request_id=request.request_id,
        state=_REQUEST_STATES[status.state],
        dp_rank=status.dp_rank,
        priority=request.priority,
        max_tokens=request.stopping.max_tokens,
        usage=usage_message(status.usage),
        age_s=status.age_s,
        waited_s=status.waited_s,
    )
