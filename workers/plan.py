"""StepPlan and StepResult: the whole contract between the runtime and its ranks. No torch, no wire format.

A plan goes to every rank of the group and carries one batch per data-parallel rank, so that all ranks know which passes
the step consists of and join the collectives of those that are not theirs. It is complete without the result of the
step before it. Sequences are named by (slot, epoch); their newest token, waiting drafts, draft laws and committed
length stay in the worker. The host sends upper bounds and reservations.

One step, for the sequence in row i of a batch's columns:

    kind      num_known  num_drafts  samples   rows of the target pass          emits
    prefill   c          0           last?     c prompt tokens                  1 if samples else 0
    decode    1          d           True      newest token + admitted drafts   1 .. d + 1

Worker time line: gather → target pass → verify → clip (EOS, stop ids, limit) → commit(n) → draft gamma tokens.

What may be decided by what, so that admission leaves the law of the output alone (docs/admission.md):

    gamma, calibration     fixed by the plan, before the drafts of its step are drawn
    verify_budget          fixed by a plan made before the drafts it is about were looked at by anyone
    which drafts stand     the rank's, from the scores of the waiting drafts: each was taken before its draft was drawn

Passes of a step, the same for all ranks of an expert-parallel group, whatever their own batches hold:

    target                        any sequence is scheduled anywhere
    drafter, over waiting rows    feed_drafter, and num_unfed > 0 somewhere
    drafter, over this step's     feed_drafter
    drafter, gamma − 1 times      feed_drafter, and a sequence samples somewhere
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from workers.demands import NO_SHAPING, Constraint, Fork, Shaping, TokenLogprob, Typical

VERIFY_EVERYTHING = 2**31 - 1
"""A verify budget that admits every waiting draft."""

MAX_STOP_IDS = 32
"""Stop and end-of-sequence ids of one sequence that a rank checks, in a table of this width."""

MAX_EOS_IDS = 16
"""Of these, the most that a checkpoint may name; the rest is left to the request."""

TEMPERATURE_BOUNDS = (0.0, 0.3, 0.8, 1.1)
"""Classes of requests whose drafts are calibrated apart: greedy, then up to each of the other bounds, then beyond."""

NUM_TEMPERATURE_CLASSES = len(TEMPERATURE_BOUNDS) + 1


def temperature_class(temperature: float) -> int:
    """Which class a request's drafts are calibrated in, from 0."""
    return bisect_left(TEMPERATURE_BOUNDS, temperature)


Progress = Callable[[str, int, int], None]
"""What is being loaded, how much of it is done, how much there is; each stage has its own unit."""


class WorkerError(Exception):
    """A rank cannot go on.

    WorkerError
    ├── WorkerLost      the link broke or the process is gone
    ├── StepTimeout     a step outlasted its deadline
    ├── StalePlan       a plan out of order or of another life of the worker
    ├── CollectiveFailed a collective broke or timed out: mostly the echo of another rank's end
    ├── RanksDisagree   ranks of a group committed different tokens or joined different collectives
    └── LoadError       the checkpoint or the settings cannot be served; the text names the tensor or the field
    """


class WorkerLost(WorkerError):
    pass


class StepTimeout(WorkerError):
    pass


class StalePlan(WorkerError):
    pass


class CollectiveFailed(WorkerError):
    pass


class RanksDisagree(WorkerError):
    pass


class LoadError(WorkerError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleDrafts:
    """For measurements, what a request's drafts are made of where the rank's drafter is the oracle.

    continuation: tokens that the target is known to emit. acceptance: share of drafts that stand, on average, 0 to 1.
    """

    continuation: tuple[int, ...]
    acceptance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence enters a slot.

    tables: its pages per cache group, reserved for prompt + max_tokens + γ_max + 1 tokens; they do not change while it
        runs.
    stop_token_ids: the end-of-sequence tokens it obeys among them.
    typical: makes the verification of its drafts lossy; None is exact.
    num_logprobs, num_prompt_logprobs: likeliest tokens reported beside each one's log-probability; None reports none.
    prediction: tokens that its output may have in common with. looks_back: whether drafts are looked up in what it has.
    fork: whose state it takes over; None where it begins with nothing committed.
    """

    slot: int
    epoch: int
    uid: int
    prompt: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    coupled: bool
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    typical_p: float = 1.0
    shaping: Shaping = NO_SHAPING
    constraint: Constraint | None = None
    typical: Typical | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    looks_back: bool = False
    fork: Fork | None = None
    oracle: OracleDrafts | None = None


class Origin(IntEnum):
    """What made a round's drafts."""

    DRAFTER = 0
    PREDICTION = 1
    NGRAM = 2


class RankEnd(IntEnum):
    """Why a rank ends a sequence of itself, beside stop ids and the limit.

    CONSTRAINT: it is met and nothing more may follow. BROKEN: it cannot be followed any further; the rank's log says
    why, and `BatchResult.problems`.
    """

    NONE = 0
    CONSTRAINT = 1
    BROKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one data-parallel rank does in a step. Columns have one entry per scheduled sequence, decodes and prefills
    in any order.

    slots, epochs: who; epochs guard against a slot's earlier tenant.
    num_known: known tokens fed (prefill chunk length, or 1 in decode).
    num_drafts: waiting drafts that admission may send to verification; a rank may hold more, which count for nothing.
    num_forced: of these, how many from the front are verified whatever their confidence; () where none is.
    samples: whether this pass draws a token (False for all but the last prefill chunk).
    max_committed: upper bound of the committed length before the step; exact for prefill.
    num_unfed: committed rows that the drafter has not seen, an upper bound; 0 while it is fed in every step.
    verify_budget: K, the most draft rows of the batch, the forced ones among them; from the past only.
    """

    admitted: tuple[NewSequence, ...] = ()
    released_slots: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    num_known: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()
    num_forced: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    max_committed: tuple[int, ...] = ()
    num_unfed: tuple[int, ...] = ()
    verify_budget: int = VERIFY_EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """From the score of a draft to the probability that it stands: σ(slope · score + offset).

    version: the step after which this was fitted; 0 for the identity, slope 1 and offset 0.
    slopes, offsets: float32 values, one row of γ_max per temperature class, flattened; () for the identity.
    """

    version: int = 0
    slopes: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()


IDENTITY = Calibration()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of all ranks.

    batches: one per data-parallel rank, in order; empty ones for those that idle.
    gamma: drafts to draw at the end of the step for every sequence that samples.
    feed_drafter: run the drafter over this step's rows; False under `off`, where hidden states wait in their window.
    report_margins: tell how clear each emitted token was to the target; costs a search of the logits and their read.
    calibration: makes confidences of the scores of the drafts drawn in this step; the same on all ranks.
    min_survival: waiting drafts whose confidences multiply to less are not verified, whatever the budget, but for the
        forced ones; a float32 value, 0 is off.
    """

    step_id: int
    epoch: int
    batches: tuple[BatchPlan, ...] = (BatchPlan(),)
    gamma: int = 0
    feed_drafter: bool = True
    report_margins: bool = False
    calibration: Calibration = IDENTITY
    min_survival: float = 0.0

    @property
    def num_sequences(self) -> int:
        return sum(len(batch.slots) for batch in self.batches)

    @property
    def samples(self) -> bool:
        """Whether any sequence of any batch draws a token."""
        return any(any(batch.samples) for batch in self.batches)

    @property
    def catches_up(self) -> bool:
        """Whether the drafter runs over rows of earlier steps."""
        return self.feed_drafter and any(any(batch.num_unfed) for batch in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Seconds a rank spent.

    collective_s: waiting for and moving data between ranks, dispatch and combine among it; part of the others.
    dispatch_s, combine_s: token rows to the owners of their experts and back.
    expert_rows: (row, expert) pairs that this rank computed, all layers and passes of the step.
    """

    total_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    draft_s: float = 0.0
    collective_s: float = 0.0
    dispatch_s: float = 0.0
    combine_s: float = 0.0
    expert_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What one batch committed, in the order of its plan's columns.

    emitted: new tokens per sequence, clipped at EOS, stop ids and max_tokens.
    drafted: the drafts that waited for each sequence at the start of the step.
    num_accepted: drafts that stood before clipping.
    margins: () unless the plan asks for them; then, per sequence and emitted token, by how much the largest logit of
        its target row led the second largest, before temperature. Exact in float32.
    scores: float32, per sequence and waiting draft, how sure the drafter was before it drew it: a log-odds.
    acceptance: float32, per sequence and position that verification reached (min(num_accepted + 1, num_admitted) of
        them), the probability with which a draft stands there, given those before it: Σ min(p, q) where drafts are
        drawn, p of the draft where they are point masses, and 1 or 0 where the noise is shared.
    origins, num_looked_up: per sequence, what made the first of the drafts that waited, and how many of them where it
        was not the drafter, which made those behind; () where the drafter made all.
    num_forbidden: per sequence, admitted drafts at and behind the first that its constraint forbids; () where none.
    ends: per sequence, why the rank ends it with the last emitted token; () where it ends none.
    problems: per BROKEN sequence, in order, what is wrong.
    logprobs: per sequence and emitted token; () where no sequence of the batch wants any, and for those that do not.
    prompt_logprobs: per sequence, of the prompt tokens behind the rows of this chunk; as above.
    """

    emitted: tuple[tuple[int, ...], ...] = ()
    drafted: tuple[tuple[int, ...], ...] = ()
    num_admitted: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    margins: tuple[tuple[float, ...], ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    acceptance: tuple[tuple[float, ...], ...] = ()
    origins: tuple[Origin, ...] = ()
    num_looked_up: tuple[int, ...] = ()
    num_forbidden: tuple[int, ...] = ()
    ends: tuple[RankEnd, ...] = ()
    problems: tuple[str, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """How many collectives of one group a rank joined in a step, and a digest of their kinds in order."""

    group: str
    count: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's answer to a plan.

    batch: what its data-parallel rank committed; None from ranks that do not lead.
    digests: per scheduled sequence, of (slot, epoch, drafts admitted, tokens committed, tokens emitted); () where ranks
        are not checked.
    collectives: per group of ranks it belongs to, by name; () where ranks are not checked.
    """

    step_id: int
    epoch: int
    batch: BatchResult | None
    digests: tuple[int, ...] = ()
    collectives: tuple[CollectiveCount, ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step committed: one result per batch of the plan. timings: one per rank, in order."""

    step_id: int
    epoch: int
    batches: tuple[BatchResult, ...]
    timings: tuple[StepTimings, ...] = (StepTimings(),)

    @property
    def slowest(self) -> StepTimings:
        return max(self.timings, key=lambda timings: timings.total_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a loaded rank tells the runtime. Counts exclude the null page and the null slot, and are those of one
    data-parallel rank. num_parameters: of the whole model; parameter_bytes: those that this rank holds.

    page_bytes: of one page of each cache group, all its layers together. slot_bytes: of one slot, recurrent state and
        what lies beside it. record_bytes: of the records of one step, allocated once.
    drafter: what makes drafts: mtp, oracle, or "" where nothing does.
    """

    model_type: str
    vocab_size: int
    context_length: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    numerics: str
    device: str
    num_parameters: int
    parameter_bytes: int
    gamma_max: int
    page_size: int
    cache_groups: tuple[str, ...]
    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    num_slots: int
    slot_bytes: int
    record_bytes: int
    accounting: tuple[tuple[str, str], ...]
    """Rows (what, figure) of the printed memory accounting."""
    load_s: float = 0.0
    rank: int = 0
    num_ranks: int = 1
    machine: str = ""
    checkpoint: str = ""
    torch_version: str = ""
    row_multiple: int = 1
    drafter: str = ""
