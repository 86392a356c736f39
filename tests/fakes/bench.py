"""Requests and cells of a benchmark made by hand, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fakes.front import Front

from runtime.bench import document
from runtime.bench.asked import Asked
from runtime.bench.completion import AT_LENGTH, Completion, Frame
from runtime.bench.counters import DraftCounts, MemoryUse, ServerCounts
from runtime.bench.figures import CellRun, Record
from runtime.bench.load import Closed, Load, Policy, Slot
from runtime.bench.prompts import Prompts
from runtime.bench.session import Session
from runtime.request import Round

TWO = Policy(2)
AT_A_TIME = Closed(2)
NO_LIMITS = document.Limits(first_token_ms=None, token_gap_ms=None, request_ms=None)


def asked_of(**changes: object) -> Asked:
    """A small benchmark of a running server."""
    values: dict[str, object] = {
        "settings": None,
        "workload": "code",
        "prompts": None,
        "tokenizer": None,
        "prompt_tokens": None,
        "max_tokens": 6,
        "ignore_eos": True,
        "requests": 4,
        "loads": (Closed(2),),
        "policies": (Policy(None), Policy(2)),
        "warmup": 1,
        "repeats": 1,
        "seed": 0,
        "temperature": 0.0,
        "limits": NO_LIMITS,
    }
    return Asked(**{**values, **changes})  # type: ignore[arg-type]


PROMPTS = Prompts(ids=((5, 6), (7, 8, 9)), max_tokens=(6, 4))


def session_of(
    front: Front,
    *,
    note_cell: Callable[[Slot], None] = lambda slot: None,
    note_request: Callable[[], None] = lambda: None,
    **changes: object,
) -> Session:
    """Of a small benchmark of a front, and two prompts of six and four tokens."""
    return Session(front.client, asked_of(**changes), PROMPTS, note_cell=note_cell, note_request=note_request)


def round_of(accepted: int, gamma: int, *, emitted: int | None = None, margin: float = 1.0) -> Round:
    """A pass that verified γ drafts of which the first `accepted` stood; it emitted all that follows, or was cut."""
    tokens = tuple(range(accepted + 1 if emitted is None else emitted))
    return Round(drafted=(7,) * gamma, accepted=accepted, emitted=tokens, margins=(margin,) * len(tokens))


def completion_of(
    rounds: Sequence[Round],
    *,
    sent_s: float = 0.0,
    times_s: Sequence[float] = (),
    at_length: bool = True,
    failure: str = "",
    tokens: Sequence[int] | None = None,
    finish: str = "",
    drafts: DraftCounts | None = None,
) -> Completion:
    """A frame per round, at `times_s`, or a second apart. finish: in place of what at_length says."""
    times_s = times_s or [sent_s + i + 1 for i in range(len(rounds))]
    emitted = [token for one in rounds for token in one.emitted]
    return Completion(
        tokens=tuple(emitted if tokens is None else tokens),
        rounds=tuple(rounds),
        num_passes=len(rounds),
        sent_s=sent_s,
        frames=tuple(Frame(at_s=at_s, num_tokens=len(one.emitted)) for at_s, one in zip(times_s, rounds, strict=True)),
        drafts=drafts or DraftCounts(),
        finish=finish or (AT_LENGTH if at_length else "EOS"),
        failure=failure,
    )


def record_of(completion: Completion, *, due_s: float = 0.0, max_tokens: int = 1000) -> Record:
    return Record(due_s=due_s, max_tokens=max_tokens, completion=completion)


def run_of(
    *completions: Completion,
    policy: Policy = TWO,
    load: Load = AT_A_TIME,
    repeat: int = 0,
    elapsed_s: float = 10.0,
    counts: ServerCounts | None = None,
    reads: bool = True,
) -> CellRun:
    """A cell whose requests are at once its readings."""
    records = tuple(map(record_of, completions))
    return CellRun(
        slot=Slot(repeat=repeat, load=load, policy=policy),
        elapsed_s=elapsed_s,
        records=records,
        counts=counts or ServerCounts(),
        memory=(MemoryUse(parameters=8, records=4, slots=2, pages=1),),
        readings=records if reads else (),
    )
