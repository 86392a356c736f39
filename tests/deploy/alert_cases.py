"""For every alert, figures under which it must fire, and such as are near and under which it must not. Knows no rules.

A sample a minute, from minute 0 to `MINUTES`; the last minute is when the alert is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MINUTES = 120
TARGET = {"job": "outrider", "instance": "a:50052"}
SERVER = {**TARGET, "model_name": "m"}

Values = Callable[[int], float | None]
"""By minute; None where the scrape failed."""


@dataclass(frozen=True)
class Series:
    name: str
    labels: Mapping[str, str]
    values: Values


Case = tuple[Series, ...]


def flat(name: str, value: float, **labels: str) -> Series:
    return series(name, lambda minute: value, **labels)


def rising(name: str, per_minute: float, **labels: str) -> Series:
    return series(name, lambda minute: per_minute * minute, **labels)


def series(name: str, values: Values, **labels: str) -> Series:
    common = TARGET if name.startswith(("up", "process_")) else SERVER
    engine = {"engine": "0"} if name.startswith("vllm:") else {}
    return Series(name, {**common, **engine, **labels}, values)


def built(is_up: Callable[[int], bool] = lambda minute: True) -> Series:
    """A server that listens at some minutes."""
    return series("outrider_build_info", lambda minute: 1 if is_up(minute) else None, version="1")


def jumps(name: str, *at: int, **labels: str) -> Series:
    """A counter that goes up by one at some minutes."""
    return series(name, lambda minute: sum(moment <= minute for moment in at), **labels)


def states(state: str, since: int = 0) -> Case:
    """Serving up to a minute, and then something else."""
    return tuple(
        series("outrider_state", lambda minute, one=one: (minute >= since) == (one == state), state=one)
        for one in ("serving", state)
    )


def buckets(name: str, per_minute: Mapping[str, float], **labels: str) -> Case:
    """A histogram that grows evenly. per_minute: cumulative, by bound."""
    return tuple(rising(f"{name}_bucket", rate, le=bound, **labels) for bound, rate in per_minute.items())


CASES: dict[str, tuple[tuple[Case, ...], tuple[Case, ...]]] = {
    "OutriderDown": (
        ((series("up", lambda minute: minute < MINUTES - 3),),),
        ((flat("up", 1),), (series("up", lambda minute: minute < MINUTES),), (flat("up", 0, job="another"),)),
    ),
    "OutriderAbsent": ((((flat("up", 1)),),), ((flat("outrider_build_info", 1, version="1"),),)),
    "OutriderNotStarted": (
        (
            (built(),),
            # One that gives up after a while and is started again.
            (built(lambda minute: minute % 25 > 4),),
        ),
        (
            (built(), flat("outrider_uptime_seconds", 7)),
            (built(lambda minute: minute > MINUTES - 25),),
            (built(), series("outrider_uptime_seconds", lambda minute: 7 if minute > MINUTES - 2 else None)),
        ),
    ),
    "OutriderNotServing": (
        tuple(states(state, MINUTES - 4) for state in ("recovering", "stalled", "stopping")),
        (states("recovering", MINUTES - 2), states("draining"), states("withdrawing")),
    ),
    "OutriderDrained": ((states("draining", MINUTES - 31),), (states("draining", MINUTES - 29), states("recovering"))),
    "OutriderRanksLost": (
        ((jumps("outrider_rank_losses_total", MINUTES - 5),),),
        ((jumps("outrider_rank_losses_total", MINUTES - 20),), (flat("outrider_rank_losses_total", 4),)),
    ),
    "OutriderRanksKeepDying": (
        ((jumps("outrider_rank_losses_total", 70, 80, 90, 100),),),
        ((jumps("outrider_rank_losses_total", 10, 80, 100),),),
    ),
    "OutriderReloadRefused": (
        ((flat("outrider_reload_refused", 1, files="settings"),),),
        ((flat("outrider_reload_refused", 0, files="settings"),),),
    ),
    "OutriderCertificateExpires": (
        ((flat("outrider_certificate_expiry_timestamp_seconds", 600_000, files="certificates of server.tls"),),),
        ((flat("outrider_certificate_expiry_timestamp_seconds", 700_000, files="certificates of server.tls"),),),
    ),
    "OutriderFileDescriptorsShort": (
        ((flat("process_open_fds", 900), flat("process_max_fds", 1024)),),
        ((flat("process_open_fds", 700), flat("process_max_fds", 1024)),),
    ),
    "OutriderQueueGrowing": (
        ((rising("vllm:num_requests_waiting", 2),),),
        (
            (flat("vllm:num_requests_waiting", 50),),
            (series("vllm:num_requests_waiting", lambda minute: 200 - minute),),
            (series("vllm:num_requests_waiting", lambda minute: minute % 5),),
        ),
    ),
    "OutriderQueueWaitLong": (
        (buckets("outrider_queue_wait_seconds", {"10.0": 1, "30.0": 60, "+Inf": 60}, priority="normal"),),
        (
            buckets("outrider_queue_wait_seconds", {"10.0": 59, "30.0": 60, "+Inf": 60}, priority="normal"),
            buckets("outrider_queue_wait_seconds", {"10.0": 1, "30.0": 60, "+Inf": 60}, priority="low"),
            buckets("outrider_queue_wait_seconds", {"10.0": 0, "30.0": 0, "+Inf": 0}, priority="normal"),
        ),
    ),
    "OutriderKvFull": (
        ((flat("vllm:kv_cache_usage_perc", 0.97), flat("vllm:num_requests_waiting", 3)),),
        (
            (flat("vllm:kv_cache_usage_perc", 0.97), flat("vllm:num_requests_waiting", 0)),
            (flat("vllm:kv_cache_usage_perc", 0.9), flat("vllm:num_requests_waiting", 3)),
        ),
    ),
    "OutriderOverloaded": (
        ((rising("outrider_rpc_errors_total", 3, reason="Overloaded"),),),
        (
            (rising("outrider_rpc_errors_total", 3, reason="InvalidRequest"),),
            (flat("outrider_rpc_errors_total", 3, reason="Overloaded"),),
        ),
    ),
    "OutriderInternalErrors": (
        ((rising("outrider_rpc_errors_total", 1, reason="InternalError"),),),
        (
            (rising("outrider_rpc_errors_total", 9, reason="Unavailable"),),
            (jumps("outrider_rpc_errors_total", MINUTES - 20, reason="InternalError"),),
        ),
    ),
    "OutriderFailuresHigh": (
        (
            (
                rising("outrider_requests_ended_total", 10, end="failed"),
                rising("outrider_requests_ended_total", 90, end="eos"),
            ),
        ),
        (
            (
                rising("outrider_requests_ended_total", 1, end="failed"),
                rising("outrider_requests_ended_total", 90, end="eos"),
            ),
            (
                flat("outrider_requests_ended_total", 0, end="failed"),
                flat("outrider_requests_ended_total", 9, end="eos"),
            ),
        ),
    ),
    "OutriderAccessRefused": (
        (
            (
                rising("outrider_rpc_errors_total", 40, reason="Unauthenticated"),
                rising("outrider_rpc_errors_total", 40, reason="Forbidden"),
            ),
        ),
        ((rising("outrider_rpc_errors_total", 40, reason="Unauthenticated"),),),
    ),
    "OutriderEngineOverheadHigh": (
        (buckets("outrider_engine_overhead_seconds", {"0.05": 90, "0.1": 100, "+Inf": 100}),),
        (buckets("outrider_engine_overhead_seconds", {"0.03": 100, "0.05": 100, "+Inf": 100}),),
    ),
    "OutriderStepsSlow": (
        (buckets("outrider_step_duration_seconds", {"1.0": 90, "2.5": 100, "+Inf": 100}),),
        (buckets("outrider_step_duration_seconds", {"0.5": 50, "1.0": 100, "+Inf": 100}),),
    ),
    "OutriderStepsSlowerThanPredicted": (
        (
            (
                rising("outrider_measured_step_seconds_total", 32),
                rising("outrider_predicted_step_seconds_total", 20),
            ),
        ),
        (
            (
                rising("outrider_measured_step_seconds_total", 28),
                rising("outrider_predicted_step_seconds_total", 20),
            ),
            (flat("outrider_measured_step_seconds_total", 0), flat("outrider_predicted_step_seconds_total", 0)),
        ),
    ),
    "OutriderAcceptanceCollapsed": (
        (
            (
                rising("vllm:spec_decode_num_accepted_tokens_total", 10),
                rising("vllm:spec_decode_num_draft_tokens_total", 100),
            ),
        ),
        (
            (
                rising("vllm:spec_decode_num_accepted_tokens_total", 50),
                rising("vllm:spec_decode_num_draft_tokens_total", 100),
            ),
            (
                rising("vllm:spec_decode_num_accepted_tokens_total", 1),
                rising("vllm:spec_decode_num_draft_tokens_total", 30),
            ),
            (
                flat("vllm:spec_decode_num_accepted_tokens_total", 1),
                flat("vllm:spec_decode_num_draft_tokens_total", 30),
            ),
        ),
    ),
    "OutriderProfileStale": (
        ((flat("outrider_profile_state", 1, state="stale"),),),
        (
            (flat("outrider_profile_state", 0, state="stale"), flat("outrider_profile_state", 1, state="missing")),
            (series("outrider_profile_state", lambda minute: minute > MINUTES - 10, state="stale"),),
        ),
    ),
    "OutriderDynamicFallenBack": (
        ((flat("outrider_policy_fallback", 1),),),
        (
            (flat("outrider_policy_fallback", 0),),
            (series("outrider_policy_fallback", lambda minute: minute % 10 != 0),),
        ),
    ),
}
