"""The metrics that routers and dashboards made for vLLM look for, under its names and with its meanings, as rows of the
table in `telemetry.py`.

What vLLM has and this server has not, a prefix cache and preemption, is told by its counters, which stay at 0: queries
per second and hits per second then are what they are. Its histograms of such things are left out.
"""

from __future__ import annotations

from runtime.live import EarlyEnd, End
from runtime.metric import HistogramRow, Row, Samples, counter, counters, gauge, gauges, histogram, positions
from runtime.request import FinishReason
from runtime.statistics import EngineStatistics
from runtime.status import EngineStatus

ENGINE = "0"
"""vLLM numbers its engines, of which each has a queue. Here one queue serves all ranks."""


def _cache_usage(status: EngineStatus) -> float:
    """Of the cache group that is fullest: it is the one that keeps requests waiting."""
    pools = status.statistics.pages
    return max((pool.used / (pool.used + pool.free) for pool in pools if pool.used + pool.free), default=0.0)


def _cache_config(status: EngineStatus) -> Samples:
    first = status.ranks[0]
    blocks = sum(first.num_pages[:1]) * status.mesh.dp
    return [({"block_size": first.page_size, "num_gpu_blocks": blocks}, 1)]


def _ends(statistics: EngineStatistics) -> Samples:
    reasons: dict[str, tuple[End, ...]] = {
        "stop": (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING, FinishReason.CONSTRAINT),
        "length": (FinishReason.LENGTH, FinishReason.TIME_LIMIT),
        "abort": (EarlyEnd.ABORTED,),
        "error": (EarlyEnd.FAILED,),
    }
    ended = statistics.requests.ended
    return [({"finished_reason": name}, sum(ended.get(end, 0) for end in ends)) for name, ends in reasons.items()]


ROUTER_METRICS: tuple[Row | HistogramRow, ...] = (
    gauge("vllm:num_requests_running", "Requests that hold a slot.", lambda s: s.statistics.running),
    gauge("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.statistics.waiting),
    gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, of the fullest cache group; 1 is all.", _cache_usage),
    gauges(
        "vllm:cache_config_info",
        "Tokens per KV page, and pages of the first cache group.",
        ("block_size", "num_gpu_blocks"),
        _cache_config,
    ),
    counter("vllm:prefix_cache_queries_total", "Tokens looked up in a prefix cache: there is none.", lambda s: 0),
    counter("vllm:prefix_cache_hits_total", "Tokens found in a prefix cache: there is none.", lambda s: 0),
    counter("vllm:num_preemptions_total", "Requests that lost their slot to others: none does.", lambda s: 0),
    counter(
        "vllm:prompt_tokens_total",
        "Prompt tokens of requests whose prompt has been read.",
        lambda s: s.requests.prompt_tokens,
    ),
    counter("vllm:generation_tokens_total", "Tokens committed for requests.", lambda s: s.emitted),
    counters("vllm:request_success_total", "Requests that ended, by reason.", ("finished_reason",), _ends),
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
        ("position",),
        lambda s: positions(s.accepted_per_position),
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        "From taking in a request to its first token.",
        lambda s: s.requests.first_token_s,
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Between passes that emitted for the same request; one observation each, of one token or several.",
        lambda s: s.requests.round_gap_s,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "From first token to last by token after the first, of requests that finished.",
        lambda s: s.requests.token_s,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "From taking in a request to its end, of those that finished.",
        lambda s: s.requests.latency_s,
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "From taking in a request to its slot, of those that finished.",
        lambda s: s.requests.queue_s,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "From slot to last token, of those that finished.",
        lambda s: s.requests.running_s,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "From slot to first token, of those that finished.",
        lambda s: s.requests.prefill_s,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "From first token to last, of those that finished.",
        lambda s: s.requests.decode_s,
    ),
    histogram(
        "vllm:request_prompt_tokens", "Prompt tokens of requests that finished.", lambda s: s.requests.input_tokens
    ),
    histogram(
        "vllm:request_generation_tokens", "Tokens of requests that finished.", lambda s: s.requests.output_tokens
    ),
    histogram("vllm:request_params_n", "Sequences that requests asked for.", lambda s: s.requests.asked_sequences),
    histogram(
        "vllm:request_params_max_tokens", "The max_tokens of requests taken in.", lambda s: s.requests.asked_tokens
    ),
)
