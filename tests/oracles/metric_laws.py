"""Metrics as a scraper reads them, and the laws that hold in every scrape and between two."""

from __future__ import annotations

import math
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Scrape = dict[str, dict[tuple[str, ...], float]]
"""Sample name to label values, those that all have left out and that of a bucket last, to value."""

COMMON = ("model_name", "engine")


def parse(text: str) -> Scrape:
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name not in (*COMMON, "le"))
            if "le" in sample.labels:
                labels += (sample.labels["le"],)
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name}{labels} twice"
            found[sample.name][labels] = sample.value
    return found


def check_laws(found: Scrape) -> None:
    """What holds in every scrape, whatever happens. Those of the process itself are left out."""
    found = {name: samples for name, samples in found.items() if not name.startswith(("process_", "python_"))}
    assert all(value >= 0 for samples in found.values() for value in samples.values())
    assert not any(math.isnan(value) for samples in found.values() for value in samples.values())
    one = {name: sum(samples.values()) for name, samples in found.items()}
    columns = [
        [value for _, value in sorted(found.get(f"outrider_{kind}_tokens_total", {}).items())]
        for kind in ("drafted", "admitted", "accepted")
    ]
    for drafted, admitted, accepted in zip(*columns, strict=True):
        assert drafted >= admitted >= accepted
    assert all(earlier >= later for column in columns for earlier, later in pairwise(column))
    accepted = one["outrider_accepted_tokens_total"]
    assert one["outrider_emitted_tokens_total"] == (
        accepted + one["outrider_rounds_total"] - one["outrider_trimmed_tokens_total"]
    )
    assert one["vllm:generation_tokens_total"] == one["outrider_emitted_tokens_total"]
    assert one["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert one["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert one["vllm:spec_decode_num_draft_tokens_total"] == one["outrider_drafted_tokens_total"]
    prefixes = found["outrider_accepted_prefix_rounds_total"]
    assert sum(prefixes.values()) == one["vllm:spec_decode_num_drafts_total"] <= one["outrider_rounds_total"]
    assert sum(int(length) * count for (length,), count in prefixes.items()) == accepted
    live = one["vllm:num_requests_running"] + one["vllm:num_requests_waiting"]
    assert one["outrider_waiting_requests"] == one["vllm:num_requests_waiting"]
    assert bool(one["outrider_longest_wait_seconds"]) <= bool(one["outrider_waiting_requests"])
    assert one["outrider_step_duration_seconds_count"] == one["outrider_steps_total"]
    assert one["outrider_engine_overhead_seconds_count"] == one["outrider_steps_total"]
    assert one["outrider_engine_overhead_seconds_sum"] <= one["outrider_step_duration_seconds_sum"]
    assert one["outrider_restarts_total"] <= one["outrider_rank_losses_total"]
    assert one["outrider_requests_submitted_total"] == one["outrider_requests_ended_total"] + live
    assert one["vllm:request_success_total"] == one["outrider_requests_ended_total"]
    assert one["outrider_running_requests"] == one["vllm:num_requests_running"] == one["outrider_slots_used"]
    assert 0 <= one["vllm:kv_cache_usage_perc"] <= 1
    assert one["outrider_state"] == one["outrider_policy"] == 1
    for name in found:
        if name.endswith("_bucket"):
            groups: dict[tuple[str, ...], list[float]] = {}
            for (*labels, _), count in found[name].items():
                groups.setdefault(tuple(labels), []).append(count)
            for labels, counts in groups.items():
                assert counts == sorted(counts)
                assert counts[-1] == found[name.removesuffix("_bucket") + "_count"][labels]


def check_rise(before: Scrape, after: Scrape) -> None:
    """Counters never fall and no sample of them vanishes."""
    for name, samples in before.items():
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert all(after[name][labels] >= value for labels, value in samples.items()), name
