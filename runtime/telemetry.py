"""Every metric's name, kind and meaning in one table; each is read off one frozen moment of the engine. Knows no HTTP.

Names that begin with `vllm:` are those that routers look for, with vLLM's meaning; ours begin with `outrider_`. All
carry the label `model_name`. Since every figure of a scrape is of the same moment, sums and differences between metrics
hold in each scrape, not only on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.histogram import HistogramView
from runtime.live import EarlyEnd, End
from runtime.request import FinishReason
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus, ServerState
from runtime.verification.policy import Fixed, Off

Samples = Iterable[tuple[Mapping[str, object], float]]
"""Values with the labels that tell them apart, the common ones left out."""


class Kind(Enum):
    """COUNTER values only rise from start to stop; their names end in _total. GAUGE values go either way."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of plain values. read: its samples; labels of the first are the labels of all."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[EngineStatus], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramRow:
    """One metric in buckets."""

    name: str
    meaning: str
    read: Callable[[EngineStatistics], HistogramView]


def _counter(name: str, meaning: str, read: Callable[[EngineStatistics], float]) -> Row:
    return Row(name=name, kind=Kind.COUNTER, meaning=meaning, read=lambda status: [({}, read(status.statistics))])


def _counters(name: str, meaning: str, read: Callable[[EngineStatistics], Samples]) -> Row:
    return Row(name=name, kind=Kind.COUNTER, meaning=meaning, read=lambda status: read(status.statistics))


def _gauge(name: str, meaning: str, read: Callable[[EngineStatus], float]) -> Row:
    return Row(name=name, kind=Kind.GAUGE, meaning=meaning, read=lambda status: [({}, read(status))])


def _gauges(name: str, meaning: str, read: Callable[[EngineStatus], Samples]) -> Row:
    return Row(name=name, kind=Kind.GAUGE, meaning=meaning, read=read)


def _positions(counts: Iterable[int]) -> Samples:
    return [({"position": position}, count) for position, count in enumerate(counts)]


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
        "stop": (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING),
        "length": (FinishReason.LENGTH,),
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


def _gamma(status: EngineStatus) -> int:
    policy = status.policy.policy
    return policy.gamma if isinstance(policy, Fixed) else 0


def _policy(status: EngineStatus) -> Samples:
    policy = status.policy.policy
    return [({"policy": "off"}, isinstance(policy, Off)), ({"policy": "fixed"}, isinstance(policy, Fixed))]


def _layout(status: EngineStatus) -> Samples:
    first = status.ranks[0]
    identity = {"model_type": first.model_type, "dtype": first.dtype, "numerics": first.numerics}
    return [({**identity, "dp": status.mesh.dp, "tp": status.mesh.tp, "ep": status.mesh.ep}, 1)]


METRICS: tuple[Row | HistogramRow, ...] = (
    # What routers scrape.
    _gauge("vllm:num_requests_running", "Requests that hold a slot.", lambda s: s.statistics.running),
    _gauge("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.statistics.waiting),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, of the fullest cache group; 1 is all.", _cache_usage),
    _gauges("vllm:cache_config_info", "Tokens per KV page, and pages of the first cache group.", _cache_config),
    _counter(
        "vllm:prompt_tokens_total",
        "Prompt tokens of requests whose prompt has been read.",
        lambda s: s.requests.prompt_tokens,
    ),
    _counter("vllm:generation_tokens_total", "Tokens committed for requests.", lambda s: s.emitted),
    _counters("vllm:request_success_total", "Requests that ended, by reason.", _vllm_ends),
    _counter(
        "vllm:spec_decode_num_drafts_total",
        "Rounds that drafted; mean accepted length is 1 + accepted tokens / drafts.",
        lambda s: sum(s.drafted_per_position[:1]),
    ),
    _counter("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted.", lambda s: s.drafted),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "Drafted tokens that verification let stand; the target's own token of a round is not among them.",
        lambda s: s.accepted,
    ),
    _counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Accepted tokens by draft position, from 0.",
        lambda s: _positions(s.accepted_per_position),
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
    _gauges("outrider_model_info", "What is served, and the layout of its ranks.", _layout),
    _gauges(
        "outrider_state",
        "1 for the state that the server is in.",
        lambda s: [({"state": state.value}, s.state is state) for state in ServerState],
    ),
    _gauge("outrider_uptime_seconds", "Since the engine started.", lambda s: s.uptime_s),
    _counter("outrider_restarts_total", "Lives of the group of ranks after the first.", lambda s: s.restarts),
    _counter("outrider_requests_submitted_total", "Requests taken in.", lambda s: s.requests.submitted),
    _counters(
        "outrider_requests_ended_total", "Requests that ended, by how; the rest of those taken in is live.", _ends
    ),
    _counters("outrider_requests_refused_total", "Requests that the engine did not take in, by error.", _refusals),
    _gauges("outrider_running_requests", "Requests that hold a slot.", lambda s: _slots(s, "running")),
    _gauges("outrider_slots_used", "Slots in use.", lambda s: _slots(s, "slots_used")),
    _gauges("outrider_slots_free", "Slots that are free.", lambda s: _slots(s, "slots_free")),
    _gauges("outrider_pages_used", "KV pages in use.", lambda s: _pages(s, "used")),
    _gauges("outrider_pages_free", "KV pages that are free.", lambda s: _pages(s, "free")),
    # Speculation.
    _gauges("outrider_policy", "1 for the verification policy in force.", _policy),
    _gauge("outrider_gamma_current", "Drafts per round under the policy in force.", _gamma),
    Row(
        name="outrider_gamma_changes_total",
        kind=Kind.COUNTER,
        meaning="Times that the verification policy was set, the same one again included.",
        read=lambda s: [({}, s.policy.revision - 1)],
    ),
    _counter("outrider_steps_total", "Steps in which a sequence ran.", lambda s: s.steps),
    _counter("outrider_rounds_total", "Target passes that emitted, counted per sequence.", lambda s: s.rounds),
    _counter("outrider_emitted_tokens_total", "Tokens committed: accepted + rounds - trimmed.", lambda s: s.emitted),
    _counter(
        "outrider_trimmed_tokens_total",
        "Tokens verified but cut off by a stop or a limit inside an accepted run.",
        lambda s: s.trimmed,
    ),
    _counters(
        "outrider_drafted_tokens_total",
        "Tokens drafted, by draft position, from 0.",
        lambda s: _positions(s.drafted_per_position),
    ),
    _counters(
        "outrider_admitted_tokens_total",
        "Drafted tokens sent to verification, by draft position.",
        lambda s: _positions(s.admitted_per_position),
    ),
    _counters(
        "outrider_accepted_tokens_total",
        "Admitted tokens that verification let stand, by draft position.",
        lambda s: _positions(s.accepted_per_position),
    ),
    _counters(
        "outrider_accepted_prefix_rounds_total",
        "Rounds that drafted, by how many of their drafts stood.",
        lambda s: [({"length": length}, count) for length, count in enumerate(s.accepted_prefixes)],
    ),
    # Where a step's time goes.
    _counter("outrider_rank_seconds_total", "Time of the slowest rank of each step.", lambda s: s.timings.total_s),
    _counters("outrider_step_seconds_total", "That time, by part of the step.", _step_parts),
    _counters(
        "outrider_exchange_seconds_total",
        "Of that time, what went into moving data between ranks; dispatch and combine are parts of all.",
        _exchange_parts,
    ),
    _counter("outrider_execute_seconds_total", "From handing over a plan to its result.", lambda s: s.execute_s),
    _counter("outrider_host_seconds_total", "From a result to the next plan.", lambda s: s.host_s),
    _counter("outrider_expert_steps_total", "Steps in which ranks computed expert rows.", lambda s: s.expert_steps),
    _counter(
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
