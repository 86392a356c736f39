"""Settings of a deployment: one frozen model per concern, each field with its meaning. Knows no files and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.access import AccessSettings, TlsSettings, WorkerTlsSettings
from configs.base import Port, Settings, as_port
from configs.observability import LogSettings, TracingSettings

GAMMA_LIMIT = 8
"""Longest draft any proposer may be asked for."""

Dtype = Literal["auto", "float32", "bfloat16"]
Numerics = Literal["default", "reference"]


class ModelSettings(Settings):
    """Which checkpoint is served, and how its arithmetic is done."""

    path: Path | None = Field(
        None, description="Checkpoint directory in Hugging Face format; unset serves the bundled demo model."
    )
    served_name: str | None = Field(None, description="Name that clients use; unset takes the directory's name.")
    dtype: Dtype = Field(
        "auto", description="Weights and activations. auto: float32 on CPUs, the checkpoint's dtype on GPUs."
    )
    numerics: Numerics = Field(
        "default",
        description="reference: float32 results that no batch or schedule changes, bit for bit; several times slower.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where torch finds one.")
    k_slices: int = Field(
        2,
        ge=1,
        le=64,
        description="Reference numerics sum every row-parallel product over this many slices; a multiple of tp.",
    )


class ParallelSettings(Settings):
    """How the model is split over ranks: dp × tp of them."""

    tp: int = Field(1, ge=1, le=1024, description="Tensor-parallel ranks: they cut every layer between them.")
    dp: int = Field(
        1, ge=1, le=1024, description="Data-parallel ranks, of tp each: they have sequences and pages of their own."
    )
    ep: int = Field(
        1,
        ge=1,
        le=1024,
        description="Expert-parallel ranks: 1 cuts every expert over tp; dp × tp gives each rank whole experts.",
    )
    pp: int = Field(1, description="Pipeline parallelism is not served; leave it at 1.")

    @model_validator(mode="after")
    def _is_a_layout(self) -> ParallelSettings:
        if self.pp != 1:
            raise ValueError(f"pp is {self.pp}: pipeline parallelism is not served; use tp, dp and ep, and set pp to 1")
        size = self.dp * self.tp
        if self.ep not in (1, size):
            raise ValueError(
                f"ep is {self.ep}; with dp {self.dp} and tp {self.tp} it is 1 (experts cut over tp) or {size} (whole "
                "experts over all ranks)"
            )
        return self


class CacheSettings(Settings):
    """How much memory sequences may take, and in what units."""

    memory_mib: int = Field(
        256, ge=1, description="Budget of one rank for paged KV, recurrent state, records and draft laws."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per KV page.")
    max_running: int = Field(
        64, ge=1, le=4096, description="Most sequences in one batch; fewer run where memory_mib does not hold them."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt + output; unset takes the checkpoint's context length."
    )


class SchedulerSettings(Settings):
    """How one step is filled."""

    max_step_tokens: int = Field(
        512, ge=1, description="Most token rows in one target pass; prefill chunks are cut to fit."
    )
    max_waiting: int = Field(1024, ge=0, description="Most requests in the queue; one more is refused.")
    default_max_tokens: int = Field(128, ge=1, description="max_tokens of a request that names none.")


class DynamicSettings(Settings):
    """Bounds and aim of the dynamic policy at start."""

    gamma_min: int = Field(
        0, ge=0, le=GAMMA_LIMIT, description="Drafts per round that are drawn and verified whatever they cost."
    )
    gamma_max: int | None = Field(
        None, ge=0, le=GAMMA_LIMIT, description="Drafts per round at most; unset takes speculation.gamma_max."
    )
    itl_limit_ms: float | None = Field(
        None,
        gt=0,
        description="Goodput: the longest time from one delivery of a stream to the next, which is that of a step; "
        "unset aims at throughput alone.",
    )
    min_gain: float = Field(
        0.01, ge=0, le=1, description="Speculation must promise this much more than ordinary decoding, as a share."
    )
    min_survival: float = Field(
        0.0, ge=0, le=1, description="Drafts whose survival is estimated below this are not verified."
    )


class SpeculationSettings(Settings):
    """How drafts are made, and the policy at start."""

    policy: Literal["off", "fixed", "dynamic"] = Field(
        "fixed",
        description="off: plain decoding. fixed: always gamma drafts. dynamic: as many as pay, by confidence, load and "
        "the hardware profile; without a profile of this machine it runs as fixed.",
    )
    revision: int = Field(
        1,
        ge=1,
        le=2**53,
        description="A policy that operators set is kept under state_dir and comes before this one, unless this number "
        "is higher than the kept one's: raise it to have the policy written here take over.",
    )
    gamma: int = Field(4, ge=0, le=GAMMA_LIMIT, description="Drafts per round under the fixed policy.")
    gamma_max: int = Field(
        GAMMA_LIMIT, ge=0, le=GAMMA_LIMIT, description="Longest draft the policy can be switched to; sizes buffers."
    )
    dynamic: DynamicSettings = DynamicSettings()
    drafter: Literal["mtp", "oracle"] = Field(
        "mtp",
        description="mtp: the checkpoint's multi-token-prediction head. oracle, for measurements alone: the head's "
        "passes are made, and requests may bring drafts that stand with a probability of their choice.",
    )
    confidence: Literal["auto", "margin", "max_probability", "entropy", "head"] = Field(
        "auto",
        description="What tells how sure the drafter is, before it draws: the lead of its first choice over its "
        "second, its first choice's probability, the entropy of its law, or the checkpoint's confidence head. auto "
        "takes the head where there is one, else the margin.",
    )
    explore_every: int = Field(
        64,
        ge=2,
        description="The dynamic policy drafts and verifies beyond what pays once in so many steps, to learn of it.",
    )
    profile: Path | None = Field(
        None,
        description="Hardware profile to use; unset takes the newest of this geometry under state_dir, else a shipped "
        "one.",
    )
    allow_typical: bool = Field(
        False,
        description="Take requests that ask for typical verification, which accepts drafts that are likely enough and "
        "so changes the law of their output.",
    )
    measure_profile: bool = Field(
        False, description="Measure a hardware profile at start where none fits; takes minutes."
    )
    profile_max_age_days: float = Field(30.0, gt=0, description="A profile older than this counts as stale.")
    hidden_window: int = Field(
        16, ge=1, le=256, description="Committed tokens whose hidden states wait for a drafter that is switched off."
    )

    @model_validator(mode="after")
    def _gamma_fits(self) -> SpeculationSettings:
        if self.gamma > self.gamma_max:
            raise ValueError(f"gamma is {self.gamma} but gamma_max is {self.gamma_max}; lower gamma or raise gamma_max")
        bounds = self.dynamic
        most = self.gamma_max if bounds.gamma_max is None else bounds.gamma_max
        if most > self.gamma_max:
            raise ValueError(
                f"dynamic.gamma_max is {most} but gamma_max is {self.gamma_max}; lower the one or raise the other"
            )
        if bounds.gamma_min > most:
            raise ValueError(f"dynamic.gamma_min is {bounds.gamma_min}, above the longest draft of {most}; lower it")
        return self


class ServerSettings(Settings):
    """Where clients reach us."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(50051, description="0 takes a free port.")
    max_frame_tokens_unread: int = Field(
        4096, ge=1, description="Tokens a slow reader may leave unread before its stream ends."
    )
    coalesce_ms: float = Field(
        2.0, ge=0, le=1000, description="Frames of one stream are at least this far apart under load."
    )
    withdraw_s: float = Field(
        0.0,
        ge=0,
        description="How long after a stop signal new requests are still taken, while health says NOT_SERVING: routers "
        "need this long to look elsewhere.",
    )
    drain_s: float = Field(10.0, ge=0, description="How long running streams may finish after that.")
    stall_s: float = Field(
        15.0,
        gt=0,
        description="Health says NOT_SERVING while a step has been running for longer than this.",
    )
    tls: TlsSettings = TlsSettings()
    health_port: Port | Literal["none"] = Field(
        "none",
        description="A port that answers health in plain text, and nothing else: for probes that do no TLS, as those "
        "of Kubernetes. 0 takes a free one.",
    )

    @field_validator("health_port", mode="before")
    @classmethod
    def _is_a_port(cls, given: object) -> object:
        return as_port(given, ("none",))


class OperatorSettings(Settings):
    """Where operators reach us."""

    port: Port | Literal["shared"] = Field(
        "shared",
        description="Port of the operator service. 0 takes a free one; shared serves it on server.port.",
    )
    host: str | None = Field(None, description="Address to listen on; unset takes server.host.")
    tls: TlsSettings = Field(TlsSettings(), description="Without a certificate of its own that port uses server.tls.")

    @field_validator("port", mode="before")
    @classmethod
    def _is_a_port(cls, given: object) -> object:
        return as_port(given, ("shared",))

    @model_validator(mode="after")
    def _shares_all(self) -> OperatorSettings:
        if self.port == "shared" and (self.host is not None or self.tls.is_on):
            raise ValueError("host and tls are of a port of its own, but port is shared; set port, or leave them out")
        return self


class MetricsSettings(Settings):
    """Where Prometheus finds the figures."""

    port: Port | Literal["auto", "none"] = Field(
        "auto",
        description="Port of the metrics, over HTTP at /metrics. 0 takes a free one, none serves none; auto takes the "
        "one after server.port, or a free one where that is 0.",
    )
    host: str | None = Field(None, description="Address to listen on; unset takes server.host.")

    @field_validator("port", mode="before")
    @classmethod
    def _is_a_port(cls, given: object) -> object:
        return as_port(given, ("auto", "none"))


class ClusterSettings(Settings):
    """How ranks are started and watched."""

    launcher: Literal["ray", "process"] = Field(
        "ray", description="ray: a Ray actor per rank. process: a child process per rank, without Ray."
    )
    ray_address: str | None = Field(None, description="Ray cluster to join; unset starts a local one.")
    worker_bind_host: str | None = Field(
        None,
        description="Address ranks listen on; unset: loopback on one machine, the Ray node's address in a cluster.",
    )
    worker_advertise_host: str | None = Field(None, description="Address the runtime dials; unset: the bind address.")
    worker_port_min: Port = Field(
        0,
        description="First port a rank may listen on, for steps and for the ranks' meeting; 0 takes a free one. "
        "Collectives choose ports of their own.",
    )
    worker_port_max: Port = Field(0, description="Last port a rank may listen on.")
    collectives: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="What carries collectives between ranks. auto: NCCL between GPUs, gloo between CPUs."
    )
    check_ranks: bool = Field(
        True, description="Compare, in every step, what ranks of a group committed and the collectives they joined."
    )
    start_timeout_s: float = Field(120.0, gt=0, description="Longest start of a rank, loading included.")
    step_timeout_s: float = Field(30.0, gt=0, description="A step past this is a lost rank.")
    worker_threads: int = Field(1, ge=1, description="Compute threads of a rank on CPUs.")
    tls: WorkerTlsSettings = WorkerTlsSettings()

    @model_validator(mode="after")
    def _ports_in_order(self) -> ClusterSettings:
        if self.worker_port_max < self.worker_port_min:
            raise ValueError(
                f"worker_port_max {self.worker_port_max} is below worker_port_min {self.worker_port_min}; swap them"
            )
        return self


class ServeSettings(Settings):
    """Everything `outrider serve` can be told; the shape of a YAML file in configs/serve."""

    model: ModelSettings = ModelSettings()
    parallel: ParallelSettings = ParallelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    server: ServerSettings = ServerSettings()
    operator: OperatorSettings = OperatorSettings()
    metrics: MetricsSettings = MetricsSettings()
    access: AccessSettings = AccessSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    cluster: ClusterSettings = ClusterSettings()
    state_dir: Path = Field(Path(".outrider"), description="Writable state: logs of ranks, profiles, policy.")

    @model_validator(mode="after")
    def _ports_differ(self) -> ServeSettings:
        host = self.server.host
        metrics_port = self.server.port + 1 if self.metrics.port == "auto" and self.server.port else self.metrics.port
        taken: dict[tuple[str, int], str] = {}
        for name, where, port in (
            ("server.port", host, self.server.port),
            ("metrics.port", self.metrics.host or host, metrics_port),
            ("operator.port", self.operator.host or host, self.operator.port),
            ("server.health_port", host, self.server.health_port),
        ):
            if isinstance(port, str) or port == 0:
                continue
            if other := taken.get((where, port)):
                given = " auto" if other == "metrics.port" and self.metrics.port == "auto" else ""
                raise ValueError(f"{name} is {port}, which {other}{given} is too; give another")
            taken[where, port] = name
        return self


class GroupSeat(Settings):
    """One rank's place among the ranks of a life, and where they meet.

    store_address: host:port of the store that rank 0 keeps; unset for a rank alone. store_fd: rank 0's own listening
    socket at it. bind_host: address of this rank's end of collectives.
    """

    rank: int = 0
    store_address: str | None = None
    store_fd: int | None = None
    bind_host: str = "127.0.0.1"


class WorkerSettings(Settings):
    """What one rank needs to load and run; travels to it as JSON."""

    model: ModelSettings
    cache: CacheSettings
    speculation: SpeculationSettings
    parallel: ParallelSettings = ParallelSettings()
    seat: GroupSeat = GroupSeat()
    max_step_tokens: int
    threads: int
    collectives: Literal["auto", "gloo", "nccl"] = "auto"
    collective_timeout_s: float = 30.0
    check_ranks: bool = True
