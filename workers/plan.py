"""StepPlan and StepResult: the whole contract between the runtime and a rank. No torch, no wire format.

A plan is complete without the result of the step before it. Sequences are named by (slot, epoch); their newest token,
waiting drafts, draft laws and committed length stay in the worker. The host sends upper bounds and reservations.

One step, for the sequence in row i of the columns:

    kind      num_known  num_drafts  samples   rows of the target pass          emits
    prefill   c          0           last?     c prompt tokens                  1 if samples else 0
    decode    1          d           True      newest token + admitted drafts   1 .. d + 1

Worker time line: gather → target pass → verify → clip (EOS, stop ids, limit) → commit(n) → draft gamma tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

VERIFY_EVERYTHING = 2**31 - 1
"""A verify budget that admits every waiting draft."""

MAX_STOP_IDS = 32
"""Stop and end-of-sequence ids of one sequence that a rank checks, in a table of this width."""

MAX_EOS_IDS = 16
"""Of these, the most that a checkpoint may name; the rest is left to the request."""

Progress = Callable[[str, int, int], None]
"""What is being loaded, how much of it is done, how much there is; each stage has its own unit."""


class WorkerError(Exception):
    """A rank cannot go on.

    WorkerError
    ├── WorkerLost      the link broke or the process is gone
    ├── StepTimeout     a step outlasted its deadline
    ├── StalePlan       a plan out of order or of another life of the worker
    └── LoadError       the checkpoint or the settings cannot be served; the text names the tensor or the field
    """


class WorkerLost(WorkerError):
    pass


class StepTimeout(WorkerError):
    pass


class StalePlan(WorkerError):
    pass


class LoadError(WorkerError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence enters a slot. `tables` holds its pages per cache group, reserved for prompt + max_tokens + γ_max + 1
    tokens; they do not change while it runs. `stop_token_ids` includes the end-of-sequence tokens it obeys."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of one rank. Columns have one entry per scheduled sequence, decodes and prefills in any order.

    slots, epochs: who; epochs guard against a slot's earlier tenant.
    num_known: known tokens fed (prefill chunk length, or 1 in decode).
    num_drafts: waiting drafts that admission may send to verification.
    samples: whether this pass draws a token (False for all but the last prefill chunk).
    max_committed: upper bound of the committed length before the step; exact for prefill.
    gamma: drafts to draw at the end of the step for every sequence that samples.
    verify_budget: K, the most draft rows of the whole step; from the past only.
    feed_drafter: run the drafter over this step's rows; False under `off`, where hidden states wait in their window.
    report_margins: tell how clear each emitted token was to the target; costs a search of the logits and their read.
    """

    step_id: int
    epoch: int
    admitted: tuple[NewSequence, ...] = ()
    released_slots: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    num_known: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    max_committed: tuple[int, ...] = ()
    gamma: int = 0
    verify_budget: int = VERIFY_EVERYTHING
    feed_drafter: bool = True
    report_margins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Seconds the rank spent."""

    total_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step committed, in the order of the plan's columns.

    emitted: new tokens per sequence, clipped at EOS, stop ids and max_tokens.
    drafted: the drafts that waited for each sequence at the start of the step.
    num_accepted: drafts that stood before clipping.
    margins: () unless the plan asks for them; then, per sequence and emitted token, by how much the largest logit of
        its target row led the second largest, before temperature. Exact in float32.
    """

    step_id: int
    epoch: int
    emitted: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[int, ...], ...]
    num_admitted: tuple[int, ...]
    num_accepted: tuple[int, ...]
    margins: tuple[tuple[float, ...], ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a loaded rank tells the runtime. Counts exclude the null page and the null slot."""

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
    num_slots: int
    accounting: tuple[tuple[str, str], ...]
    """Rows (what, figure) of the printed memory accounting."""
    load_s: float = 0.0
