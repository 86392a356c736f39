from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadRequest(_message.Message):
    __slots__ = ("settings_json",)
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    settings_json: str
    def __init__(self, settings_json: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("stage", "done", "total", "description_json", "error")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done: int
    total: int
    description_json: str
    error: str
    def __init__(self, stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., description_json: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "epoch", "batches", "gamma", "feed_drafter", "report_margins", "calibration", "min_survival")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    FEED_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_MARGINS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    MIN_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    batches: _containers.RepeatedCompositeFieldContainer[BatchPlan]
    gamma: int
    feed_drafter: bool
    report_margins: bool
    calibration: Calibration
    min_survival: float
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[BatchPlan, _Mapping]]] = ..., gamma: _Optional[int] = ..., feed_drafter: _Optional[bool] = ..., report_margins: _Optional[bool] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ..., min_survival: _Optional[float] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("version", "slopes", "offsets")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOPES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    version: int
    slopes: _containers.RepeatedScalarFieldContainer[float]
    offsets: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, version: _Optional[int] = ..., slopes: _Optional[_Iterable[float]] = ..., offsets: _Optional[_Iterable[float]] = ...) -> None: ...

class BatchPlan(_message.Message):
    __slots__ = ("admitted", "released_slots", "slots", "sequence_epochs", "num_known", "num_drafts", "samples", "max_committed", "num_unfed", "verify_budget", "num_forced")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNFED_FIELD_NUMBER: _ClassVar[int]
    VERIFY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_FIELD_NUMBER: _ClassVar[int]
    admitted: _containers.RepeatedCompositeFieldContainer[NewSequence]
    released_slots: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    sequence_epochs: _containers.RepeatedScalarFieldContainer[int]
    num_known: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[bool]
    max_committed: _containers.RepeatedScalarFieldContainer[int]
    num_unfed: _containers.RepeatedScalarFieldContainer[int]
    verify_budget: int
    num_forced: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, admitted: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., released_slots: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., sequence_epochs: _Optional[_Iterable[int]] = ..., num_known: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[bool]] = ..., max_committed: _Optional[_Iterable[int]] = ..., num_unfed: _Optional[_Iterable[int]] = ..., verify_budget: _Optional[int] = ..., num_forced: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("slot", "sequence_epoch", "uid", "prompt", "tables", "temperature", "top_k", "top_p", "min_p", "seed", "coupled", "stop_token_ids", "max_tokens", "oracle", "shaping", "constraint", "typical", "num_logprobs", "num_prompt_logprobs", "prediction", "looks_back", "fork", "typical_p")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COUPLED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORACLE_FIELD_NUMBER: _ClassVar[int]
    SHAPING_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    LOOKS_BACK_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_epoch: int
    uid: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    coupled: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    oracle: OracleDrafts
    shaping: Shaping
    constraint: RankConstraint
    typical: RankTypical
    num_logprobs: int
    num_prompt_logprobs: int
    prediction: _containers.RepeatedScalarFieldContainer[int]
    looks_back: bool
    fork: Fork
    typical_p: float
    def __init__(self, slot: _Optional[int] = ..., sequence_epoch: _Optional[int] = ..., uid: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., coupled: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., oracle: _Optional[_Union[OracleDrafts, _Mapping]] = ..., shaping: _Optional[_Union[Shaping, _Mapping]] = ..., constraint: _Optional[_Union[RankConstraint, _Mapping]] = ..., typical: _Optional[_Union[RankTypical, _Mapping]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., prediction: _Optional[_Iterable[int]] = ..., looks_back: _Optional[bool] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., typical_p: _Optional[float] = ...) -> None: ...

class Shaping(_message.Message):
    __slots__ = ("repetition", "frequency", "presence", "bias_ids", "biases", "allowed", "banned", "bad_words", "min_tokens")
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    repetition: float
    frequency: float
    presence: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    allowed: _containers.RepeatedScalarFieldContainer[int]
    banned: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    min_tokens: int
    def __init__(self, repetition: _Optional[float] = ..., frequency: _Optional[float] = ..., presence: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., allowed: _Optional[_Iterable[int]] = ..., banned: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RankConstraint(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RankTypical(_message.Message):
    __slots__ = ("epsilon", "delta")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("slot", "sequence_epoch", "pages")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_epoch: int
    pages: _containers.RepeatedCompositeFieldContainer[PageCopy]
    def __init__(self, slot: _Optional[int] = ..., sequence_epoch: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[PageCopy, _Mapping]]] = ...) -> None: ...

class PageCopy(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("constraint",)
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    constraint: RankConstraint
    def __init__(self, constraint: _Optional[_Union[RankConstraint, _Mapping]] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: str
    def __init__(self, problem: _Optional[str] = ...) -> None: ...

class OracleDrafts(_message.Message):
    __slots__ = ("continuation", "acceptance")
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    continuation: _containers.RepeatedScalarFieldContainer[int]
    acceptance: float
    def __init__(self, continuation: _Optional[_Iterable[int]] = ..., acceptance: _Optional[float] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("step_id", "epoch", "batch", "digests", "collectives", "timings", "error")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    batch: BatchResult
    digests: _containers.RepeatedScalarFieldContainer[int]
    collectives: _containers.RepeatedCompositeFieldContainer[CollectiveCount]
    timings: Timings
    error: str
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., batch: _Optional[_Union[BatchResult, _Mapping]] = ..., digests: _Optional[_Iterable[int]] = ..., collectives: _Optional[_Iterable[_Union[CollectiveCount, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("num_emitted", "num_admitted", "num_accepted", "emitted", "drafted", "margins", "scores", "acceptance", "origins", "num_forbidden", "ends", "problems", "logprobs", "prompt_logprobs", "num_looked_up")
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORBIDDEN_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    num_emitted: _containers.RepeatedScalarFieldContainer[int]
    num_admitted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    emitted: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    margins: _containers.RepeatedScalarFieldContainer[float]
    scores: _containers.RepeatedScalarFieldContainer[float]
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    origins: _containers.RepeatedScalarFieldContainer[int]
    num_forbidden: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    problems: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[RankLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RankLogprobs]
    num_looked_up: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_emitted: _Optional[_Iterable[int]] = ..., num_admitted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ..., emitted: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[int]] = ..., margins: _Optional[_Iterable[float]] = ..., scores: _Optional[_Iterable[float]] = ..., acceptance: _Optional[_Iterable[float]] = ..., origins: _Optional[_Iterable[int]] = ..., num_forbidden: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ..., problems: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[RankLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RankLogprobs, _Mapping]]] = ..., num_looked_up: _Optional[_Iterable[int]] = ...) -> None: ...

class RankLogprobs(_message.Message):
    __slots__ = ("ids", "logprobs", "num_top", "top_ids", "top_logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_top: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., num_top: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class CollectiveCount(_message.Message):
    __slots__ = ("group", "count", "digest")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    group: str
    count: int
    digest: int
    def __init__(self, group: _Optional[str] = ..., count: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("total_s", "target_s", "verify_s", "commit_s", "draft_s", "collective_s", "dispatch_s", "combine_s", "expert_rows")
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_S_FIELD_NUMBER: _ClassVar[int]
    COMBINE_S_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    total_s: float
    target_s: float
    verify_s: float
    commit_s: float
    draft_s: float
    collective_s: float
    dispatch_s: float
    combine_s: float
    expert_rows: int
    def __init__(self, total_s: _Optional[float] = ..., target_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., collective_s: _Optional[float] = ..., dispatch_s: _Optional[float] = ..., combine_s: _Optional[float] = ..., expert_rows: _Optional[int] = ...) -> None: ...

class CheckRankRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckRankResponse(_message.Message):
    __slots__ = ("violations",)
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, violations: _Optional[_Iterable[str]] = ...) -> None: ...
