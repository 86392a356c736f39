"""Every metric's name, kind and meaning in one table; each is read off one frozen moment of the engine. Knows no HTTP.

Names that begin with `vllm:` are those that routers look for, with vLLM's meaning; ours begin with `outrider_`. All
carry the label `model_name`. Since every figure of a scrape is of the same moment, sums and differences between metrics
hold in each scrape, not only on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.histogram import HistogramView
from runtime.live import EarlyEnd, End
from runtime.metric import HistogramRow, Row, Samples, counter, counters, gauge, gauges, positions
from runtime.request import FinishReason
from runtime.speculation_metrics import PLANNER_METRICS, POLICY_METRICS
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus, ServerState


def _cache_usage(status: EngineStatus) -> float:
    """Of the cache group that is fullest: it is the one that keeps requests waiting."""
    pools = status.statistics.pages
    return max((pool.used / (pool.used + pool.free) for pool in pools if pool.used + pool.free), default=0.0)


def _cache_config(status: EngineStatus) -> Samples:
    first = status.ranks[0]
    blocks = sum(first.num_pages[:1]) * status.mesh.dp
    return [({"block_size": first.page_size, "num_gpu_blocks": blocks}, 1)]


def _vllm_ends(statistics: EngineStatistics) -> Samples:
    reasons: dict[str, tuple[End, ...]] = {
        "stop": (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING, FinishReason.CONSTRAINT),
        "length": (FinishReason.LENGTH, FinishReason.TIME_LIMIT),
        "abort": (EarlyEnd.ABORTED,),
        "error": (EarlyEnd.FAILED,),
    }
    ended = statistics.requests.ended
    return [({"finished_reason": name}, sum(ended.get(end, 0) for end in ends)) for name, ends in reasons.items()]


def _ends(statistics: EngineStatistics) -> Samples:
    return [({"end": end.value}, statistics.requests.ended.get(end, 0)) for end in (*FinishReason, *EarlyEnd)]


def _refusals(statistics: EngineStatistics) -> Samples:
    return [({"reason": reason}, count) for reason, count in sorted(statistics.requests.refused.items())]


def _step_parts(statistics: EngineStatistics) -> Samples:
    timings = statistics.timings
    parts = {
        "target": timings.target_s,
        "verify": timings.verify_s,
        "commit": timings.commit_s,
        "draft": timings.draft_s,
    }
    return [({"part": part}, seconds) for part, seconds in parts.items()]


def _exchange_parts(statistics: EngineStatistics) -> Samples:
    timings = statistics.timings
    parts = {"all": timings.collective_s, "dispatch": timings.dispatch_s, "combine": timings.combine_s}
    return [({"part": part}, seconds) for part, seconds in parts.items()]


def _slots(status: EngineStatus, name: str) -> Samples:
    return [({"dp_rank": rank}, getattr(use, name)) for rank, use in enumerate(status.statistics.dp_ranks)]


def _pages(status: EngineStatus, name: str) -> Samples:
    return [
        ({"dp_rank": rank, "group": pool.group}, getattr(pool, name))
        for rank, use in enumerate(status.statistics.dp_ranks)
        for pool in use.pages
    ]


def _layout(status: EngineStatus) -> Samples:
    first = status.ranks[0]
    identity = {"model_type": first.model_type, "dtype": first.dtype, "numerics": first.numerics}
    return [({**identity, "dp": status.mesh.dp, "tp": status.mesh.tp, "ep": status.mesh.ep}, 1)]


METRICS: tuple[Row | HistogramRow, ...] = (
    # What routers scrape.
    gauge("vllm:num_requests_running", "Requests that hold a slot.", lambda s: s.statistics.running),
    gauge("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.statistics.waiting),
    gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, of the fullest cache group; 1 is all.", _cache_usage),
    gauges("vllm:cache_config_info", "Tokens per KV page, and pages of the first cache group.", _cache_config),
    counter(
        "vllm:prompt_tokens_total",
        "Prompt tokens of requests whose prompt has been read.",
        lambda s: s.requests.prompt_tokens,
    ),
    counter("vllm:generation_tokens_total", "Tokens committed for requests.", lambda s: s.emitted),
    counters("vllm:request_success_total", "Requests that ended, by reason.", _vllm_ends),
    counter(
        "vllm:spec_decode_num_drafts_total",
        "Rounds that drafted; mean accepted length is 1 + accepted tokens / drafts.",
        lambda s: sum(s.drafted_per_position[:1]),
    ),
    counter("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted.", lambda s: s.drafted),
    counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Drafted tokens that verification let stand; the target's own token of a round is not among them.",
        lambda s: s.accepted,
    ),
    counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Accepted tokens by draft position, from 0.",
        lambda s: positions(s.accepted_per_position),
    ),
    HistogramRow(
        name="vllm:time_to_first_token_seconds",
        meaning="From taking in a request to its first token.",
        read=lambda s: s.requests.first_token_s,
    ),
    HistogramRow(
        name="vllm:inter_token_latency_seconds",
        meaning="Between passes that emitted for the same request; one observation each, of one token or several.",
        read=lambda s: s.requests.round_gap_s,
    ),
    HistogramRow(
        name="vllm:e2e_request_latency_seconds",
        meaning="From taking in a request to its end, of those that finished.",
        read=lambda s: s.requests.latency_s,
    ),
    HistogramRow(
        name="vllm:request_queue_time_seconds",
        meaning="From taking in a request to its slot, of those that finished.",
        read=lambda s: s.requests.queue_s,
    ),
    HistogramRow(
        name="vllm:request_prefill_time_seconds",
        meaning="From slot to first token, of those that finished.",
        read=lambda s: s.requests.prefill_s,
    ),
    HistogramRow(
        name="vllm:request_decode_time_seconds",
        meaning="From first token to last, of those that finished.",
        read=lambda s: s.requests.decode_s,
    ),
    HistogramRow(
        name="vllm:request_generation_tokens",
        meaning="Tokens of requests that finished.",
        read=lambda s: s.requests.output_tokens,
    ),
    # The server.
    gauges("outrider_model_info", "What is served, and the layout of its ranks.", _layout),
    gauges(
        "outrider_state",
        "1 for the state that the server is in.",
        lambda s: [({"state": state.value}, s.state is state) for state in ServerState],
    ),
    gauge("outrider_uptime_seconds", "Since the engine started.", lambda s: s.uptime_s),
    counter("outrider_restarts_total", "Lives of the group of ranks after the first.", lambda s: s.restarts),
    counter("outrider_requests_submitted_total", "Requests taken in.", lambda s: s.requests.submitted),
    counters(
        "outrider_requests_ended_total", "Requests that ended, by how; the rest of those taken in is live.", _ends
    ),
    counters("outrider_requests_refused_total", "Requests that the engine did not take in, by error.", _refusals),
    gauges("outrider_running_requests", "Requests that hold a slot.", lambda s: _slots(s, "running")),
    gauges("outrider_slots_used", "Slots in use.", lambda s: _slots(s, "slots_used")),
    gauges("outrider_slots_free", "Slots that are free.", lambda s: _slots(s, "slots_free")),
    gauges("outrider_pages_used", "KV pages in use.", lambda s: _pages(s, "used")),
    gauges("outrider_pages_free", "KV pages that are free.", lambda s: _pages(s, "free")),
    # Speculation.
    *POLICY_METRICS,
    counter("outrider_steps_total", "Steps in which a sequence ran.", lambda s: s.steps),
    counter("outrider_rounds_total", "Target passes that emitted, counted per sequence.", lambda s: s.rounds),
    counter("outrider_emitted_tokens_total", "Tokens committed: accepted + rounds - trimmed.", lambda s: s.emitted),
    counter(
        "outrider_trimmed_tokens_total",
        "Tokens verified but cut off by a stop or a limit inside an accepted run.",
        lambda s: s.trimmed,
    ),
    counters(
        "outrider_drafted_tokens_total",
        "Tokens drafted, by draft position, from 0.",
        lambda s: positions(s.drafted_per_position),
    ),
    counters(
        "outrider_admitted_tokens_total",
        "Drafted tokens sent to verification, by draft position.",
        lambda s: positions(s.admitted_per_position),
    ),
    counters(
        "outrider_accepted_tokens_total",
        "Admitted tokens that verification let stand, by draft position.",
        lambda s: positions(s.accepted_per_position),
    ),
    counters(
        "outrider_accepted_prefix_rounds_total",
        "Rounds that drafted, by how many of their drafts stood.",
        lambda s: [({"length": length}, count) for length, count in enumerate(s.accepted_prefixes)],
    ),
    *PLANNER_METRICS,
    # Where a step's time goes.
    counter("outrider_rank_seconds_total", "Time of the slowest rank of each step.", lambda s: s.timings.total_s),
    counters("outrider_step_seconds_total", "That time, by part of the step.", _step_parts),
    counters(
        "outrider_exchange_seconds_total",
        "Of that time, what went into moving data between ranks; dispatch and combine are parts of all.",
        _exchange_parts,
    ),
    counter("outrider_execute_seconds_total", "From handing over a plan to its result.", lambda s: s.execute_s),
    counter("outrider_host_seconds_total", "From a result to the next plan.", lambda s: s.host_s),
    counter("outrider_expert_steps_total", "Steps in which ranks computed expert rows.", lambda s: s.expert_steps),
    counter(
        "outrider_expert_imbalance_total",
        "Over those steps, the sum of the busiest rank's expert rows over the ranks' mean.",
        lambda s: s.expert_imbalance_sum,
    ),
)


class EngineCollector(Collector):
    """A Prometheus collector over the table. look: a moment of the engine; called once a scrape."""

    def __init__(self, model_name: str, look: Callable[[], EngineStatus]) -> None:
        self._model_name = model_name
        self._look = look

    def collect(self) -> Iterator[Metric]:
        status = self._look()
        for row in METRICS:
            if isinstance(row, HistogramRow):
                yield _histogram(row, row.read(status.statistics), self._model_name)
            else:
                yield _family(row, list(row.read(status)), self._model_name)

    def describe(self) -> Iterator[Metric]:
        """The names, for scrapes that ask for some: no look at the engine."""
        for row in METRICS:
            kind = HistogramMetricFamily if isinstance(row, HistogramRow) else row.kind.value
            yield kind(row.name, row.meaning)


def _family(row: Row, samples: list[tuple[Mapping[str, object], float]], model_name: str) -> Metric:
    names = list(samples[0][0]) if samples else []
    family: CounterMetricFamily | GaugeMetricFamily = row.kind.value(
        row.name, row.meaning, labels=["model_name", *names]
    )
    for labels, value in samples:
        family.add_metric([model_name, *map(str, labels.values())], float(value))
    return family


def _histogram(row: HistogramRow, view: HistogramView, model_name: str) -> Metric:
    family = HistogramMetricFamily(row.name, row.meaning, labels=["model_name"])
    buckets, cumulative = [], 0
    for bound, count in zip((*map(float, view.bounds), float("inf")), view.counts, strict=True):
        cumulative += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), cumulative))
    family.add_metric([model_name], buckets, view.total)
    return family
