"""A moment of a server in which no figure stands twice, so that one taken for another is seen."""

from __future__ import annotations

from fakes.advice import VIEW
from fakes.worker import describe

from parallel.mesh import Mesh
from runtime.histogram import HistogramView
from runtime.live import EarlyEnd, RequestStatistics, Urgency
from runtime.request import FinishReason
from runtime.statistics import EngineStatistics, PoolUse, RankUse
from runtime.status import EngineStatus, FilesStatus, FrontStatus, Losses, Moment, Reloads, ServerState
from runtime.verification.policy import Fixed, PolicyState
from workers.plan import StepTimings

_POOLS = [[("target", 201, 99), ("drafter", 100, 300)], [("target", 202, 98), ("drafter", 101, 299)]]


_HISTOGRAMS = (
    *("latency_s", "queue_s", "prefill_s", "decode_s", "output_tokens", "first_token_s", "round_gap_s"),
    *("running_s", "token_s", "input_tokens", "asked_sequences", "asked_tokens"),
)

FRONT = FrontStatus(
    errors={"Overloaded": 701, "InvalidRequest": 702, "Forbidden": 703},
    open_calls=704,
    open_streams=705,
    versions={"outrider": "7.0.6", "python": "7.0.7", "grpc": "7.0.8", "torch": "7.0.9"},
    reloads=Reloads(applied=710, refused=711, problem="a reason", held_back=712),
    files=(
        FilesStatus(what="identities", changes=713, refusals=714, is_refused=False),
        FilesStatus(what="certificates", changes=715, refusals=716, is_refused=True, expires_at=717.5),
    ),
)


def _view(seed: int) -> HistogramView:
    return HistogramView(bounds=(1.0, 2.0), counts=(seed, seed + 1, seed + 2), total=float(seed))


def a_moment() -> Moment:
    """Engine and front, with no figure twice."""
    return Moment(engine=an_engine(), front=FRONT)


def an_engine() -> EngineStatus:
    """Two data-parallel ranks and two cache groups, and no figure twice."""
    views = {name: _view(seed) for seed, name in enumerate(_HISTOGRAMS, 500)}
    ends = (*FinishReason, *EarlyEnd)
    requests = RequestStatistics(
        submitted=401,
        refused={"Overloaded": 402, "Unavailable": 403},
        ended={end: 410 + number for number, end in enumerate(ends)},
        prompt_tokens=404,
        waiting={urgency: 420 + number for number, urgency in enumerate(Urgency)},
        longest_wait_s=423.5,
        wait_s={urgency: _view(550 + number) for number, urgency in enumerate(Urgency)},
        **views,
    )
    pools = [[PoolUse(group=group, free=free, used=used) for group, free, used in rank] for rank in _POOLS]
    statistics = EngineStatistics(
        dp_ranks=tuple(
            RankUse(running=31 + rank, slots_free=41 + rank, slots_used=51 + rank, pages=tuple(pools[rank]))
            for rank in range(2)
        ),
        waiting=61,
        steps=71,
        rounds=72,
        emitted=73,
        trimmed=74,
        drafted_per_position=(99, 88),
        admitted_per_position=(87, 76),
        accepted_per_position=(75, 44),
        timings=StepTimings(
            total_s=101.0,
            target_s=102.0,
            verify_s=103.0,
            commit_s=104.0,
            draft_s=105.0,
            collective_s=106.0,
            dispatch_s=107.0,
            combine_s=108.0,
        ),
        expert_steps=109,
        expert_imbalance_sum=110.5,
        execute_s=111.0,
        host_s=112.0,
        step_s=_view(520),
        step_overhead_s=_view(521),
        restarts=113,
        requests=requests,
    )
    return EngineStatus(
        state=ServerState.DRAINING,
        outage="",
        losses=Losses(count=120, seconds=121.5),
        uptime_s=114.0,
        mesh=Mesh(dp=2, tp=1, ep=2),
        ranks=(describe(), describe()),
        places=(),
        max_waiting=115,
        policy=PolicyState(policy=Fixed(6), revision=117, effective_step=1, num_changes=116),
        step=118,
        epoch=119,
        statistics=statistics,
        speculation=VIEW,
    )
