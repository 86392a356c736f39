from google.api import annotations_pb2 as _annotations_pb2
from outrider.v1 import inference_pb2 as _inference_pb2
from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Objective(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBJECTIVE_UNSPECIFIED: _ClassVar[Objective]
    OBJECTIVE_THROUGHPUT: _ClassVar[Objective]
    OBJECTIVE_GOODPUT: _ClassVar[Objective]

class ProfileState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_STATE_UNSPECIFIED: _ClassVar[ProfileState]
    PROFILE_STATE_OK: _ClassVar[ProfileState]
    PROFILE_STATE_MISSING: _ClassVar[ProfileState]
    PROFILE_STATE_STALE: _ClassVar[ProfileState]
    PROFILE_STATE_FOREIGN: _ClassVar[ProfileState]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_RECOVERING: _ClassVar[ServerState]
    SERVER_STATE_STOPPING: _ClassVar[ServerState]
    SERVER_STATE_STALLED: _ClassVar[ServerState]
    SERVER_STATE_WITHDRAWING: _ClassVar[ServerState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]
OBJECTIVE_UNSPECIFIED: Objective
OBJECTIVE_THROUGHPUT: Objective
OBJECTIVE_GOODPUT: Objective
PROFILE_STATE_UNSPECIFIED: ProfileState
PROFILE_STATE_OK: ProfileState
PROFILE_STATE_MISSING: ProfileState
PROFILE_STATE_STALE: ProfileState
PROFILE_STATE_FOREIGN: ProfileState
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_RECOVERING: ServerState
SERVER_STATE_STOPPING: ServerState
SERVER_STATE_STALLED: ServerState
SERVER_STATE_WITHDRAWING: ServerState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_DECODING: RequestState

class VerificationPolicy(_message.Message):
    __slots__ = ("off", "fixed", "dynamic")
    class Off(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Fixed(_message.Message):
        __slots__ = ("gamma",)
        GAMMA_FIELD_NUMBER: _ClassVar[int]
        gamma: int
        def __init__(self, gamma: _Optional[int] = ...) -> None: ...
    class Dynamic(_message.Message):
        __slots__ = ("gamma_min", "gamma_max", "objective", "itl_limit_ms", "min_gain", "min_survival")
        GAMMA_MIN_FIELD_NUMBER: _ClassVar[int]
        GAMMA_MAX_FIELD_NUMBER: _ClassVar[int]
        OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
        ITL_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
        MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
        MIN_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
        gamma_min: int
        gamma_max: int
        objective: Objective
        itl_limit_ms: float
        min_gain: float
        min_survival: float
        def __init__(self, gamma_min: _Optional[int] = ..., gamma_max: _Optional[int] = ..., objective: _Optional[_Union[Objective, str]] = ..., itl_limit_ms: _Optional[float] = ..., min_gain: _Optional[float] = ..., min_survival: _Optional[float] = ...) -> None: ...
    OFF_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    off: VerificationPolicy.Off
    fixed: VerificationPolicy.Fixed
    dynamic: VerificationPolicy.Dynamic
    def __init__(self, off: _Optional[_Union[VerificationPolicy.Off, _Mapping]] = ..., fixed: _Optional[_Union[VerificationPolicy.Fixed, _Mapping]] = ..., dynamic: _Optional[_Union[VerificationPolicy.Dynamic, _Mapping]] = ...) -> None: ...

class ClassPolicy(_message.Message):
    __slots__ = ("priority", "policy")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    priority: int
    policy: VerificationPolicy
    def __init__(self, priority: _Optional[int] = ..., policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ...) -> None: ...

class GetVerificationPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetVerificationPolicyRequest(_message.Message):
    __slots__ = ("policy", "expected_revision", "priority")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    expected_revision: int
    priority: int
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ..., expected_revision: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class VerificationPolicyState(_message.Message):
    __slots__ = ("policy", "revision", "effective_step", "classes", "set_by", "set_at", "fallback")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    SET_AT_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    revision: int
    effective_step: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassPolicy]
    set_by: str
    set_at: float
    fallback: str
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ..., revision: _Optional[int] = ..., effective_step: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassPolicy, _Mapping]]] = ..., set_by: _Optional[str] = ..., set_at: _Optional[float] = ..., fallback: _Optional[str] = ...) -> None: ...

class WatchVerificationPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetShadowPolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ...) -> None: ...

class ShadowStatus(_message.Message):
    __slots__ = ("policy", "steps", "agreed", "tokens", "step_s", "shadow_tokens", "shadow_step_s", "steps_by_gamma")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SHADOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_GAMMA_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    steps: int
    agreed: int
    tokens: float
    step_s: float
    shadow_tokens: float
    shadow_step_s: float
    steps_by_gamma: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ..., steps: _Optional[int] = ..., agreed: _Optional[int] = ..., tokens: _Optional[float] = ..., step_s: _Optional[float] = ..., shadow_tokens: _Optional[float] = ..., shadow_step_s: _Optional[float] = ..., steps_by_gamma: _Optional[_Iterable[int]] = ...) -> None: ...

class AdvisePolicyRequest(_message.Message):
    __slots__ = ("num_sequences", "context")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    context: int
    def __init__(self, num_sequences: _Optional[int] = ..., context: _Optional[int] = ...) -> None: ...

class AdvisePolicyResponse(_message.Message):
    __slots__ = ("num_sequences", "context", "advice", "acceptance", "survival_by_position", "best_gamma", "sentence", "reliability", "calibration_error_by_position")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    BEST_GAMMA_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    RELIABILITY_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERROR_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    context: int
    advice: _containers.RepeatedCompositeFieldContainer[Advice]
    acceptance: float
    survival_by_position: _containers.RepeatedScalarFieldContainer[float]
    best_gamma: int
    sentence: str
    reliability: _containers.RepeatedCompositeFieldContainer[Reliability]
    calibration_error_by_position: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_sequences: _Optional[int] = ..., context: _Optional[int] = ..., advice: _Optional[_Iterable[_Union[Advice, _Mapping]]] = ..., acceptance: _Optional[float] = ..., survival_by_position: _Optional[_Iterable[float]] = ..., best_gamma: _Optional[int] = ..., sentence: _Optional[str] = ..., reliability: _Optional[_Iterable[_Union[Reliability, _Mapping]]] = ..., calibration_error_by_position: _Optional[_Iterable[float]] = ...) -> None: ...

class Reliability(_message.Message):
    __slots__ = ("bins",)
    BINS_FIELD_NUMBER: _ClassVar[int]
    bins: _containers.RepeatedCompositeFieldContainer[ReliabilityBin]
    def __init__(self, bins: _Optional[_Iterable[_Union[ReliabilityBin, _Mapping]]] = ...) -> None: ...

class ReliabilityBin(_message.Message):
    __slots__ = ("confidence", "acceptance", "weight")
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    acceptance: float
    weight: float
    def __init__(self, confidence: _Optional[float] = ..., acceptance: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("gamma", "budget", "tokens", "geometric_tokens", "step_s", "tokens_per_s")
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    gamma: int
    budget: int
    tokens: float
    geometric_tokens: float
    step_s: float
    tokens_per_s: float
    def __init__(self, gamma: _Optional[int] = ..., budget: _Optional[int] = ..., tokens: _Optional[float] = ..., geometric_tokens: _Optional[float] = ..., step_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class SpeculationStatus(_message.Message):
    __slots__ = ("profile", "profile_detail", "gamma", "budget", "rows", "predicted_s", "measured_s", "predicted_steps", "predicted_sum_s", "measured_sum_s", "error_sum_s", "zero_budget_steps", "explored_steps", "steps_by_gamma", "budget_sum", "survival_by_position", "calibration_error_by_position", "calibration_version", "rollback_tokens", "shadow")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_DETAIL_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SUM_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SUM_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_SUM_S_FIELD_NUMBER: _ClassVar[int]
    ZERO_BUDGET_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPLORED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_GAMMA_FIELD_NUMBER: _ClassVar[int]
    BUDGET_SUM_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERROR_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    profile: ProfileState
    profile_detail: str
    gamma: int
    budget: int
    rows: int
    predicted_s: float
    measured_s: float
    predicted_steps: int
    predicted_sum_s: float
    measured_sum_s: float
    error_sum_s: float
    zero_budget_steps: int
    explored_steps: int
    steps_by_gamma: _containers.RepeatedScalarFieldContainer[int]
    budget_sum: int
    survival_by_position: _containers.RepeatedScalarFieldContainer[float]
    calibration_error_by_position: _containers.RepeatedScalarFieldContainer[float]
    calibration_version: int
    rollback_tokens: int
    shadow: ShadowStatus
    def __init__(self, profile: _Optional[_Union[ProfileState, str]] = ..., profile_detail: _Optional[str] = ..., gamma: _Optional[int] = ..., budget: _Optional[int] = ..., rows: _Optional[int] = ..., predicted_s: _Optional[float] = ..., measured_s: _Optional[float] = ..., predicted_steps: _Optional[int] = ..., predicted_sum_s: _Optional[float] = ..., measured_sum_s: _Optional[float] = ..., error_sum_s: _Optional[float] = ..., zero_budget_steps: _Optional[int] = ..., explored_steps: _Optional[int] = ..., steps_by_gamma: _Optional[_Iterable[int]] = ..., budget_sum: _Optional[int] = ..., survival_by_position: _Optional[_Iterable[float]] = ..., calibration_error_by_position: _Optional[_Iterable[float]] = ..., calibration_version: _Optional[int] = ..., rollback_tokens: _Optional[int] = ..., shadow: _Optional[_Union[ShadowStatus, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "outage", "uptime_s", "model", "versions", "ranks", "batches", "waiting", "max_waiting", "policy", "step", "epoch", "counters", "speculation", "open_calls")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTAGE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    outage: str
    uptime_s: float
    model: _inference_pb2.GetModelResponse
    versions: _containers.ScalarMap[str, str]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    batches: _containers.RepeatedCompositeFieldContainer[BatchStatus]
    waiting: int
    max_waiting: int
    policy: VerificationPolicyState
    step: int
    epoch: int
    counters: Counters
    speculation: SpeculationStatus
    open_calls: int
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., outage: _Optional[str] = ..., uptime_s: _Optional[float] = ..., model: _Optional[_Union[_inference_pb2.GetModelResponse, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., batches: _Optional[_Iterable[_Union[BatchStatus, _Mapping]]] = ..., waiting: _Optional[int] = ..., max_waiting: _Optional[int] = ..., policy: _Optional[_Union[VerificationPolicyState, _Mapping]] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStatus, _Mapping]] = ..., open_calls: _Optional[int] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "name", "address", "device", "parameter_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    name: str
    address: str
    device: str
    parameter_bytes: int
    def __init__(self, rank: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., parameter_bytes: _Optional[int] = ...) -> None: ...

class BatchStatus(_message.Message):
    __slots__ = ("running", "slots_used", "slots_total", "slot_bytes", "record_bytes", "pools")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    running: int
    slots_used: int
    slots_total: int
    slot_bytes: int
    record_bytes: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, running: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., record_bytes: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("group", "pages_used", "pages_total", "page_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: str
    pages_used: int
    pages_total: int
    page_bytes: int
    def __init__(self, group: _Optional[str] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("steps", "rounds", "emitted", "trimmed", "drafted_by_position", "admitted_by_position", "accepted_by_position", "rank_s", "target_s", "verify_s", "commit_s", "draft_s", "collective_s", "dispatch_s", "combine_s", "execute_s", "host_s", "restarts", "submitted", "finished", "aborted", "failed", "refused", "prompt_tokens", "errors", "rank_losses", "outage_s")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    RANK_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_S_FIELD_NUMBER: _ClassVar[int]
    COMBINE_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_S_FIELD_NUMBER: _ClassVar[int]
    HOST_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    RANK_LOSSES_FIELD_NUMBER: _ClassVar[int]
    OUTAGE_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rounds: int
    emitted: int
    trimmed: int
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    admitted_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    rank_s: float
    target_s: float
    verify_s: float
    commit_s: float
    draft_s: float
    collective_s: float
    dispatch_s: float
    combine_s: float
    execute_s: float
    host_s: float
    restarts: int
    submitted: int
    finished: int
    aborted: int
    failed: int
    refused: int
    prompt_tokens: int
    errors: _containers.ScalarMap[str, int]
    rank_losses: int
    outage_s: float
    def __init__(self, steps: _Optional[int] = ..., rounds: _Optional[int] = ..., emitted: _Optional[int] = ..., trimmed: _Optional[int] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., admitted_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., rank_s: _Optional[float] = ..., target_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., collective_s: _Optional[float] = ..., dispatch_s: _Optional[float] = ..., combine_s: _Optional[float] = ..., execute_s: _Optional[float] = ..., host_s: _Optional[float] = ..., restarts: _Optional[int] = ..., submitted: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., failed: _Optional[int] = ..., refused: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., errors: _Optional[_Mapping[str, int]] = ..., rank_losses: _Optional[int] = ..., outage_s: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("request_id", "state", "dp_rank", "priority", "max_tokens", "usage", "age_s", "waited_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    dp_rank: int
    priority: int
    max_tokens: int
    usage: _types_pb2.Usage
    age_s: float
    waited_s: float
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., dp_rank: _Optional[int] = ..., priority: _Optional[int] = ..., max_tokens: _Optional[int] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., age_s: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("state", "running", "waiting")
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    running: int
    waiting: int
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("violations", "ranks_checked")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    RANKS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    ranks_checked: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., ranks_checked: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("applied", "held_back")
    class HeldBack(_message.Message):
        __slots__ = ("key", "reason")
        KEY_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        key: str
        reason: str
        def __init__(self, key: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_FIELD_NUMBER: _ClassVar[int]
    applied: _containers.RepeatedScalarFieldContainer[str]
    held_back: _containers.RepeatedCompositeFieldContainer[ReloadResponse.HeldBack]
    def __init__(self, applied: _Optional[_Iterable[str]] = ..., held_back: _Optional[_Iterable[_Union[ReloadResponse.HeldBack, _Mapping]]] = ...) -> None: ...
