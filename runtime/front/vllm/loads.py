"""The engine's load as gateways poll it, per data-parallel rank. Knows no requests beyond their prompts' lengths.

What the engine has once for all ranks is spread over them: the queue evenly, since its head goes to any rank with room,
and output per second by the sequences that run on each. Sums over ranks are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from runtime.front.engine_link import EngineLink
from runtime.live import RequestState
from runtime.statistics import PoolUse, RankUse

SHORTEST_S = 0.5
"""Between two readings that a rate is taken of; what comes sooner is told the last rate."""


class OutputRate:
    """Tokens per second of a counter that is read now and then: between the last two readings that lay apart.

    clock: seconds; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._count = 0
        self._rate = 0.0

    def read(self, count: int) -> float:
        now_s = self._clock()
        passed_s = now_s - self._read_s
        if passed_s >= SHORTEST_S:
            self._rate = (count - self._count) / passed_s
            self._read_s, self._count = now_s, count
        return self._rate


def loads_of(engine: EngineLink, rate: OutputRate) -> list[vllm.SchedulerLoad]:
    """One per data-parallel rank, in order."""
    statistics = engine.status().statistics
    ranks = statistics.dp_ranks
    per_second = rate.read(statistics.emitted)
    running = [use.running for use in ranks]
    generated = [per_second * (one / sum(running)) if any(running) else per_second / len(ranks) for one in running]
    waiting = _spread(statistics.waiting, len(ranks))
    prompts = _spread(_waiting_tokens(engine) if statistics.waiting else 0, len(ranks))
    return [
        _load(dp_rank, use, waiting[dp_rank], prompts[dp_rank], generated[dp_rank], engine.description.page_size)
        for dp_rank, use in enumerate(ranks)
    ]


def _load(
    dp_rank: int, use: RankUse, waiting: int, waiting_tokens: int, per_second: float, page_size: int
) -> vllm.SchedulerLoad:
    """Tokens are counted in whole pages of the cache group that is fullest, as a request would find them."""
    fullest = max(use.pages, key=_share)
    return vllm.SchedulerLoad(
        dp_rank=dp_rank,
        num_running_reqs=use.running,
        num_waiting_reqs=waiting,
        num_total_reqs=use.running + waiting,
        num_used_tokens=fullest.used * page_size,
        max_total_num_tokens=(fullest.used + fullest.free) * page_size,
        token_usage=_share(fullest),
        gen_throughput=per_second,
        # No prompt is found in a cache but that of a sequence's siblings.
        cache_hit_rate=0.0,
        utilization=max(_share(fullest), use.slots_used / max(1, use.slots_used + use.slots_free)),
        max_running_requests=use.slots_used + use.slots_free,
        num_waiting_uncached_tokens=waiting_tokens,
    )


def _share(pool: PoolUse) -> float:
    return pool.used / max(1, pool.used + pool.free)


def _spread(total: int, num_ranks: int) -> Sequence[int]:
    each, more = divmod(total, num_ranks)
    return [each + (rank < more) for rank in range(num_ranks)]


def _waiting_tokens(engine: EngineLink) -> int:
    """Of prompts that have yet to be read; one that several sequences share counts once."""
    _, num_live = engine.live_requests(0)
    live, _ = engine.live_requests(num_live)
    return sum(len(one.request.prompt) for one in live if one.state is RequestState.WAITING and not one.request.index)
