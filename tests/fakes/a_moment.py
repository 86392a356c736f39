"""A moment of an engine in which no figure stands twice, so that one taken for another is seen."""

from __future__ import annotations

from fakes.advice import VIEW
from fakes.worker import describe

from parallel.mesh import Mesh
from runtime.histogram import HistogramView
from runtime.live import EarlyEnd, RequestStatistics
from runtime.request import FinishReason
from runtime.statistics import EngineStatistics, PoolUse, RankUse
from runtime.status import EngineStatus, ServerState
from runtime.verification.policy import Fixed, PolicyState
from workers.plan import StepTimings

_POOLS = [[("target", 201, 99), ("drafter", 100, 300)], [("target", 202, 98), ("drafter", 101, 299)]]


def a_moment() -> EngineStatus:
    """Two data-parallel ranks and two cache groups, and no figure twice."""
    views = {
        name: HistogramView(bounds=(1.0, 2.0), counts=(seed, seed + 1, seed + 2), total=float(seed))
        for seed, name in enumerate(
            ("latency_s", "queue_s", "prefill_s", "decode_s", "output_tokens", "first_token_s", "round_gap_s"), 500
        )
    }
    ends = (*FinishReason, *EarlyEnd)
    requests = RequestStatistics(
        submitted=401,
        refused={"Overloaded": 402, "Unavailable": 403},
        ended={end: 410 + number for number, end in enumerate(ends)},
        prompt_tokens=404,
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
        restarts=113,
        requests=requests,
    )
    return EngineStatus(
        state=ServerState.DRAINING,
        outage="",
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
