"""Every metric's name, kind and meaning in one table; each is read off one frozen moment of the server. Knows no HTTP.

Names that begin with `vllm:` are those that routers look for, with vLLM's meaning; ours begin with `outrider_`. All
carry the label `model_name`, and vLLM's its `engine` too. Since every figure of a scrape is of the same moment, sums
and differences between metrics hold in each scrape, not only on average.

Labels take few values, whatever clients send: names of errors, ends, states, parts and files, places in lists that
settings bound, and priorities of which operators name 16 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.live import EarlyEnd
from runtime.metric import (
    FrontRow,
    HistogramRow,
    Kind,
    Row,
    Samples,
    Views,
    counter,
    counters,
    front_gauge,
    gauge,
    gauges,
    histogram,
    status_counter,
)
from runtime.request import FinishReason
from runtime.router_metrics import ENGINE, ROUTER_METRICS
from runtime.speculation_metrics import DRAFT_METRICS, PLANNER_METRICS, POLICY_METRICS
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus, FrontStatus, Moment, ServerState

BUILT_OF = {"version": "outrider", "python": "python", "grpc": "grpc", "ray": "ray", "torch": "torch"}
"""Labels of the build, and what each is the version of."""

SETTINGS = "settings"
"""Stands for the configuration among files that are read again."""


def _build(front: FrontStatus) -> Samples:
    return [({label: front.versions.get(name, "") for label, name in BUILT_OF.items()}, 1)]


def _errors(front: FrontStatus) -> Samples:
    return [({"reason": reason}, count) for reason, count in sorted(front.errors.items())]


def _reloads(front: FrontStatus) -> Samples:
    settings = front.reloads
    counts = [(SETTINGS, settings.applied, settings.refused)]
    counts += [(one.what, one.changes, one.refusals) for one in front.files]
    for what, taken, refused in counts:
        yield {"files": what, "result": "taken"}, taken
        yield {"files": what, "result": "refused"}, refused


def _refused_now(front: FrontStatus) -> Samples:
    settings = [({"files": SETTINGS}, float(bool(front.reloads.problem)))]
    return settings + [({"files": one.what}, float(one.is_refused)) for one in front.files]


def _expiries(front: FrontStatus) -> Samples:
    return [({"files": one.what}, one.expires_at) for one in front.files if one.expires_at is not None]


def _ends(statistics: EngineStatistics) -> Samples:
    return [({"end": end.value}, statistics.requests.ended.get(end, 0)) for end in (*FinishReason, *EarlyEnd)]


def _refusals(statistics: EngineStatistics) -> Samples:
    return [({"reason": reason}, count) for reason, count in sorted(statistics.requests.refused.items())]


def _waiting(status: EngineStatus) -> Samples:
    return [({"priority": urgency.value}, count) for urgency, count in status.statistics.requests.waiting.items()]


def _waits(statistics: EngineStatistics) -> Views:
    return [({"priority": urgency.value}, view) for urgency, view in statistics.requests.wait_s.items()]


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


SERVER_METRICS: tuple[Row | FrontRow | HistogramRow, ...] = (
    FrontRow(
        name="outrider_build_info",
        kind=Kind.GAUGE,
        meaning="Versions of the server and of what it stands on; empty where it is not installed.",
        labels=tuple(BUILT_OF),
        read=_build,
    ),
    gauges(
        "outrider_model_info",
        "What is served, and the layout of its ranks.",
        ("model_type", "dtype", "numerics", "dp", "tp", "ep"),
        _layout,
    ),
    gauges(
        "outrider_state",
        "1 for the state that the server is in.",
        ("state",),
        lambda s: [({"state": state.value}, s.state is state) for state in ServerState],
    ),
    gauge("outrider_uptime_seconds", "Since the engine started.", lambda s: s.uptime_s),
    counter("outrider_restarts_total", "Lives of the group of ranks after the first.", lambda s: s.restarts),
    status_counter(
        "outrider_rank_losses_total", "Times that the ranks were lost, or given up.", lambda s: s.losses.count
    ),
    status_counter(
        "outrider_outage_seconds_total",
        "Time without ranks, from losses to recoveries, that of the present one included.",
        lambda s: s.losses.seconds,
    ),
    FrontRow(
        name="outrider_rpc_errors_total",
        kind=Kind.COUNTER,
        meaning="Calls of any service that were answered with an error, by its name: what the front refuses, what the "
        "engine does not take in, and streams that end with one.",
        labels=("reason",),
        read=_errors,
    ),
    FrontRow(
        name="outrider_reloads_total",
        kind=Kind.COUNTER,
        meaning="Times that settings, certificates or identities changed, by whether what they brought could be used.",
        labels=("files", "result"),
        read=_reloads,
    ),
    FrontRow(
        name="outrider_reload_refused",
        kind=Kind.GAUGE,
        meaning="1 while files are not in use as they are now, since they cannot be; what was read before stays.",
        labels=("files",),
        read=_refused_now,
    ),
    front_gauge(
        "outrider_settings_held_back",
        "Settings that have changed and wait for a restart, or for a higher revision.",
        lambda s: s.reloads.held_back,
    ),
    FrontRow(
        name="outrider_certificate_expiry_timestamp_seconds",
        kind=Kind.GAUGE,
        meaning="When the certificate that a port shows expires, in Unix time.",
        labels=("files",),
        read=_expiries,
    ),
    front_gauge("outrider_open_calls", "Calls that generate and are open.", lambda s: s.open_calls),
    front_gauge("outrider_open_streams", "Sequences of those calls.", lambda s: s.open_streams),
    counter("outrider_requests_submitted_total", "Requests taken in.", lambda s: s.requests.submitted),
    counters(
        "outrider_requests_ended_total",
        "Requests that ended, by how; the rest of those taken in is live.",
        ("end",),
        _ends,
    ),
    counters(
        "outrider_requests_refused_total", "Requests that the engine did not take in, by error.", ("reason",), _refusals
    ),
    gauges(
        "outrider_waiting_requests",
        "Requests in the queue, by priority: high is below 0, normal 0, low above.",
        ("priority",),
        _waiting,
    ),
    gauge(
        "outrider_longest_wait_seconds",
        "How long the request has waited that has been in the queue for longest.",
        lambda s: s.statistics.requests.longest_wait_s,
    ),
    HistogramRow(
        name="outrider_queue_wait_seconds",
        meaning="From taking in a request to its slot, of all that got one, by priority as in waiting_requests.",
        labels=("priority",),
        read=_waits,
    ),
    gauges("outrider_running_requests", "Requests that hold a slot.", ("dp_rank",), lambda s: _slots(s, "running")),
    gauges("outrider_slots_used", "Slots in use.", ("dp_rank",), lambda s: _slots(s, "slots_used")),
    gauges("outrider_slots_free", "Slots that are free.", ("dp_rank",), lambda s: _slots(s, "slots_free")),
    gauges("outrider_pages_used", "KV pages in use.", ("dp_rank", "group"), lambda s: _pages(s, "used")),
    gauges("outrider_pages_free", "KV pages that are free.", ("dp_rank", "group"), lambda s: _pages(s, "free")),
)

STEP_METRICS: tuple[Row | HistogramRow, ...] = (
    histogram("outrider_step_duration_seconds", "Whole steps, from one plan to the next.", lambda s: s.step_s),
    histogram(
        "outrider_engine_overhead_seconds",
        "What each step took beyond its slowest rank: planning, links, booking.",
        lambda s: s.step_overhead_s,
    ),
    counter("outrider_rank_seconds_total", "Time of the slowest rank of each step.", lambda s: s.timings.total_s),
    counters("outrider_step_seconds_total", "That time, by part of the step.", ("part",), _step_parts),
    counters(
        "outrider_exchange_seconds_total",
        "Of that time, what went into moving data between ranks; dispatch and combine are parts of all.",
        ("part",),
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

METRICS: tuple[Row | FrontRow | HistogramRow, ...] = (
    *ROUTER_METRICS,
    *SERVER_METRICS,
    *POLICY_METRICS,
    *DRAFT_METRICS,
    *PLANNER_METRICS,
    *STEP_METRICS,
)


class EngineCollector(Collector):
    """A Prometheus collector over the table. look: a moment of the server; called once a scrape. While there is no
    engine yet, the rows of the front are told alone."""

    def __init__(self, model_name: str, look: Callable[[], Moment]) -> None:
        self._model_name = model_name
        self._look = look

    def collect(self) -> Iterator[Metric]:
        moment = self._look()
        for row in METRICS:
            common = {"model_name": self._model_name}
            if row.name.startswith("vllm:"):
                common["engine"] = ENGINE
            if isinstance(row, FrontRow):
                yield _family(row, row.read(moment.front), common)
            elif moment.engine is not None:
                if isinstance(row, HistogramRow):
                    yield _histogram(row, row.read(moment.engine.statistics), common)
                else:
                    yield _family(row, row.read(moment.engine), common)

    def describe(self) -> Iterator[Metric]:
        """The names, for scrapes that ask for some: no look at the engine."""
        for row in METRICS:
            kind = HistogramMetricFamily if isinstance(row, HistogramRow) else row.kind.value
            yield kind(row.name, row.meaning)


def _family(row: Row | FrontRow, samples: Samples, common: dict[str, str]) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily = row.kind.value(
        row.name, row.meaning, labels=[*common, *row.labels]
    )
    for labels, value in samples:
        assert tuple(labels) == row.labels, row.name
        family.add_metric([*common.values(), *map(str, labels.values())], float(value))
    return family


def _histogram(row: HistogramRow, views: Views, common: dict[str, str]) -> Metric:
    family = HistogramMetricFamily(row.name, row.meaning, labels=[*common, *row.labels])
    for labels, view in views:
        assert tuple(labels) == row.labels, row.name
        buckets, cumulative = [], 0
        for bound, count in zip((*map(float, view.bounds), float("inf")), view.counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), cumulative))
        family.add_metric([*common.values(), *map(str, labels.values())], buckets, view.total)
    return family
