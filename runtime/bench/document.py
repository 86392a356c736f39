"""The report as data: what `--json` writes, and what table and page are made of. Fields say their units and meanings.

`docs/benchmarks/bench.schema.json` is this tree as JSON Schema. SCHEMA_VERSION rises when a reader of an older one
would misread a newer report.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from runtime.bench.drafting import Drafts, Lengths, Origins, Work
from runtime.bench.part import Part

SCHEMA_VERSION = 3


class Spread(Part):
    """Mean and percentiles of observations; null where there are none. Percentiles lie between the two nearest
    observations in proportion."""

    count: int = Field(description="Observations.")
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Latencies(Part):
    """Milliseconds, as the client sees them, of requests that finished. Requests of an open loop count from the moment
    they were due, so that a load generator that falls behind hides nothing."""

    first_token_ms: Spread = Field(description="From the request to its first frame with tokens.")
    token_gap_ms: Spread = Field(
        description="Between committed tokens: each gap between two frames of a request is divided over the tokens of "
        "the later frame, one observation per token. Tokens of a first frame have no gap before them."
    )
    frame_gap_ms: Spread = Field(
        description="Between frames with tokens of the same request, as they came; a frame holds one token or several."
    )
    request_ms: Spread = Field(description="From the request to its last frame.")
    schedule_lag_ms: Spread = Field(
        description="How late the load generator itself sent requests. In a closed loop a request is due when its "
        "client is free, and what making it costs is left."
    )


class Limits(Part):
    """Latencies a request must keep to count as within limits; null asks for nothing."""

    first_token_ms: float | None = Field(description="Longest time to the first token.")
    token_gap_ms: float | None = Field(description="Largest mean gap between the tokens of a request.")
    request_ms: float | None = Field(description="Longest time from the request to its last frame.")


class Rates(Part):
    """Per second of the cell, from the start of its load to the end of its last request: the last moments, when fewer
    requests are under way than before, are in it."""

    tokens_per_s: float = Field(description="Tokens of requests that finished.")
    requests_per_s: float = Field(description="Requests that finished.")
    requests_within_limits_per_s: float = Field(description="Of those, requests that kept all limits.")


class Series(Part):
    """Plans over time, sampled with the memory: one entry per sample in every list."""

    at_s: list[float] = Field(description="Seconds since the start of the load.")
    gamma: list[int] = Field(description="Drafts drawn for each sequence in the newest step.")
    budget: list[int] = Field(description="Draft rows that it might verify.")
    predicted_ms: list[float] = Field(description="Its time as predicted; 0 without a profile.")
    measured_ms: list[float] = Field(description="Its time as it was.")


class TimeSplit(Part):
    """Milliseconds of steps per committed token: sums over steps of the slowest rank's time, divided by the tokens that
    the server emitted. Prefill is in every part. Where ranks are not on CPUs the first three are times of launching
    work, and only their sum is the time it took."""

    draft_ms: float = Field(description="From the end of committing to the end of the step: drafting and reporting.")
    verify_ms: float = Field(
        description="From the plan's arrival at the rank to the end of verification: gathering inputs, the target's "
        "pass, and deciding what stands."
    )
    state_ms: float = Field(description="Committing: lengths, recurrent state, convolution windows.")
    host_and_link_ms: float = Field(description="Planning, booking, and the way to the rank and back.")
    total_ms: float


class Memory(Part):
    """Peak bytes in use by the allocator's accounts, over all ranks. Sampled while the cell runs: a shorter peak than
    the time between samples can be missed."""

    parameter_bytes: int
    record_bytes: int = Field(description="Of the records of one step, allocated once.")
    slot_bytes: int = Field(description="Slots in use x bytes of a slot, in the sample of the largest total.")
    page_bytes: int = Field(description="Pages in use x bytes of a page, in that sample.")
    total_bytes: int
    samples: int


class Figures(Part):
    """What was measured of one policy under one load."""

    elapsed_s: float = Field(description="Sum over the repeats that are in it.")
    requests: int = Field(description="Sent, warm-up excluded.")
    finished: int
    failures: dict[str, int] = Field(description="Requests that failed, by gRPC code. Latencies and rates lack them.")
    failures_before: dict[str, int] = Field(
        description="Requests that failed before the cell, by gRPC code: those that report their rounds, and warm-up."
    )
    failure_texts: dict[str, str] = Field(description="By gRPC code, what the server said of the first of all these.")
    finishes: dict[str, int] = Field(
        description="Requests that finished, by the reason: LENGTH, CONSTRAINT and others."
    )
    rates: Rates
    latencies: Latencies
    decode_passes: int = Field(description="Passes of the target after the prompt's last chunk, over all requests.")
    tokens_per_pass: float | None = Field(description="Tokens they committed / decode passes; null without any.")
    drafts: Drafts
    origins: Origins
    work: Work
    time_per_token: TimeSplit | None = Field(description="null where the server emitted nothing.")
    steps: int
    overhead_per_step_ms: float | None = Field(
        description="A step's time beyond its slowest rank: host and link. null without steps."
    )
    memory: Memory
    recording: Agreement | None = Field(description="null where nothing was recorded.")
    measured_anew: int = Field(description="Times that ranks were lost in a cell, which was discarded and began again.")
    tokens_of_others: int = Field(
        description="Tokens that the server emitted and no request of this cell received: others' traffic, or failures."
    )


class Agreement(Part):
    """Outputs beside what was recorded before anything was measured: decoded plainly, with the seeds of a cell's first
    requests. Default numerics round differently in another batch, and a request that has left its recording has no
    oracle drafts any more."""

    compared: int = Field(description="Requests that finished.")
    identical: int = Field(description="Of those, requests whose output is the recorded one.")
    followed_share: float | None = Field(
        description="Share of their tokens that came before the first one that differs; null without tokens."
    )


class LoadName(Part):
    """One of the first two is given."""

    concurrency: int | None = Field(description="Closed loop: clients, each with one request at a time.")
    rate: float | None = Field(description="Open loop: Poisson arrivals per second.")
    acceptance: float | None = Field(
        description="Oracle drafts: with which probability they stand, on average; null where the checkpoint's own "
        "drafter drafts."
    )
    variant: str | None = Field(
        description="What requests bring beside their prompts, where that is measured: with (prediction and "
        "constraint, where prompts have any) or without, and +ngram where drafts are looked up in prompt and output "
        "too. null: with, and nothing else was measured."
    )


class Cell(Part):
    """One repeat of one policy under one load, in the order in which they were measured."""

    repeat: int = Field(description="From 0.")
    load: LoadName
    policy: str
    figures: Figures
    series: Series


class Group(Part):
    """All repeats of one policy under one load: latencies are of all requests together, rates of all time together."""

    load: LoadName
    policy: str
    repeats: int = Field(description="Those that were measured.")
    tokens_per_s_by_repeat: list[float]
    figures: Figures
    lengths: Lengths | None = Field(
        description="null where all requests that reported their rounds failed, and under dynamic, whose rounds differ."
    )


class TokenDifference(Part):
    """Where two greedy outputs of a prompt part first."""

    prompt: int = Field(description="Number in the workload, from 0.")
    position: int = Field(description="Output position, from 0.")
    expected: int | None = Field(description="Token of the baseline; null where it had ended.")
    found: int | None = Field(description="Token of the other; null where it had ended.")
    logit_gap: float | None = Field(
        description="Lead of the baseline's token over the next best, in logits; null where it had ended."
    )
    looks_like_a_tie: bool = Field(description="Whether rounding explains it: both chose, and the gap is tiny.")


class Comparison(Part):
    """Greedy outputs of a policy beside those of the first policy under the same load: of the requests that report
    their rounds, before the first repeat."""

    load: LoadName
    baseline: str
    policy: str
    compared: int = Field(description="Prompts that failed under neither.")
    failed: int = Field(description="Prompts that failed under either, and are not compared.")
    identical: int
    ties: int = Field(description="Differences that look like ties.")
    differences: list[TokenDifference]


class Trial(Part):
    """A dynamic policy beside the best of the others under one load, repeat by repeat."""

    load: LoadName
    policy: str
    best: str = Field(description="The other policy of the largest median of tokens per second.")
    ratios: list[float] = Field(description="By repeat: tokens per second over those of the best.")
    ratio: float = Field(description="Their median.")
    bound: float = Field(description="Lower 95 % bound of that median, by bootstrap over repeats.")
    longest_loses: bool = Field(description="Whether the longest fixed drafts are slower than off.")
    ahead_of_longest: bool = Field(description="Whether the dynamic policy is faster than those drafts.")
    gamma_mean: float | None = Field(description="Mean drafts of a step; what follows tells why a trial was lost.")
    tokens_per_pass: float | None
    best_tokens_per_pass: float | None
    predicted_ms: float | None = Field(description="Predicted time of a step, mean.")
    measured_ms: float | None
    explored_share: float | None = Field(description="Share of steps that were planned to learn.")
    fallback: str = Field(description="As in Work.")


class Verdict(Part):
    """Whether dynamic keeps up with the best of the others; of closed loops alone, as open ones emit what arrives."""

    trials: list[Trial]
    least_bound: float
    share_near: float = Field(description="Share of trials whose bound is 0.98 or more.")
    floor_is_kept: bool = Field(description="Whether all bounds are 0.95 or more.")
    most_are_near: bool = Field(description="Whether nine of ten are 0.98 or more.")
    longest_lost: int = Field(description="Trials in which the longest fixed drafts are slower than off.")
    ahead_where_longest_lost: int = Field(description="Of those, trials in which dynamic is faster than they are.")


class Model(Part):
    """What the server says it serves."""

    name: str
    model_type: str
    num_parameters: int
    dtype: str
    numerics: str
    vocab_size: int
    context_length: int
    gamma_max: int
    dp: int
    tp: int
    ep: int
    drafter: str = Field(description="mtp, or oracle, which is for measurements alone; empty where nothing drafts.")


class Machine(Part):
    """Where the load generator ran; a server of its own ran there too."""

    cpu: str
    cores: int = Field(description="That this process may use.")
    memory_bytes: int
    system: str


class Identity(Part):
    """What was measured, and where."""

    model: Model
    devices: list[str] = Field(description="One per rank, in order.")
    versions: dict[str, str] = Field(description="Of the server.")
    machine: Machine
    own_server: bool = Field(description="Started for the benchmark, rather than running already.")
    settings: dict[str, Any] | None = Field(description="Of a server of its own; null of a running one.")
    profile: str = Field(description="The hardware profile that dynamic policies plan with, or why there is none.")


class Plan(Part):
    """What was asked for."""

    workload: str = Field(description="code, random, code-edit, json-schema, chat, or the name of a file.")
    prompts: int
    predictions: int = Field(description="Prompts that bring a prediction.")
    edit_every: int | None = Field(
        description="Predictions are what was recorded with an edit behind every so many tokens on average, 0 for "
        "none; null where they are not made of that."
    )
    constraints: int = Field(description="Prompts that bring a JSON Schema for their output.")
    prompt_tokens: Spread = Field(description="Tokens per prompt, of all prompts of the workload.")
    prompt_tokens_cut: int | None = Field(description="Longest prompt kept; longer ones were cut.")
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int = Field(description="Of arrivals, random prompts, edits and sampling; request i samples with seed + i.")
    policies: list[str]
    loads: list[LoadName]
    requests: int = Field(description="Per cell at most; the same prompts in all of them, from the first on.")
    warmup: int = Field(description="Requests before each cell that count nowhere; a whole load before the first.")
    repeats: int
    limits: Limits
    records: bool = Field(description="Whether outputs were recorded first, and those of all cells compared with them.")


class Report(Part):
    """A whole benchmark."""

    schema_version: int
    started_at: str = Field(description="UTC, ISO 8601.")
    duration_s: float
    complete: bool = Field(description="Whether all cells that were planned were measured.")
    cells_planned: int
    identity: Identity
    plan: Plan
    groups: list[Group]
    comparisons: list[Comparison]
    verdict: Verdict | None = Field(
        description="null where nothing was recorded, no policy is dynamic, or no loop closed."
    )
    cells: list[Cell]
