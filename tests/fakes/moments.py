"""Records of requests and steps that tests make up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.observe.records import RequestRecord, StepRecord
from runtime.request import Origin, Usage
from workers.plan import BatchPlan, BatchResult, StepPlan, StepResult, StepTimings

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

FINISHED = RequestRecord(
    request_id="one",
    origin=Origin(identity="gateway", face="outrider.v1.InferenceService", traceparent=TRACEPARENT),
    ends=("length",),
    n=1,
    max_tokens=20,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    usage=Usage(prompt=7, completion=20, rounds=8, drafted=24, admitted=20, accepted=12, seed=2**64 - 1),
    submitted_s=10.0,
    started_s=10.25,
    first_token_s=10.75,
    last_token_s=12.75,
    ended_s=13.0,
    prompt=(1, 2, 3),
    outputs=((4, 5),),
)
"""Three seconds: a quarter in the queue, half a second to the first token, two to the last."""

REFUSED = RequestRecord(
    request_id="bad",
    code="INVALID_ARGUMENT",
    field="stopping.stop",
    error="stopping.stop: 'my secret words' is too long",
    submitted_s=1.0,
    ended_s=1.001,
)


def step_record(
    *ranks: StepTimings, step_id: int = 1, known: tuple[int, ...] = (1, 1), is_first: bool = False, **times: Any
) -> StepRecord:
    """A step of sequences that all sample. ranks: their timings; execute_s is that of the slowest unless given."""
    plan = StepPlan(
        step_id=step_id,
        epoch=1,
        batches=(
            BatchPlan(
                slots=tuple(range(len(known))),
                epochs=(1,) * len(known),
                num_known=known,
                num_drafts=(2,) * len(known),
                samples=(True,) * len(known),
            ),
        ),
        gamma=2,
    )
    batch = BatchResult(
        emitted=((7,),) * len(known),
        drafted=((8, 9),) * len(known),
        num_admitted=(1,) * len(known),
        num_accepted=(0,) * len(known),
    )
    result = StepResult(step_id=step_id, epoch=1, batches=(batch,), timings=ranks)
    times = {"plan_s": 0.001, "execute_s": result.slowest.total_s + 0.001, "book_s": 0.001} | times
    return StepRecord(plan=plan, result=result, is_first=is_first, **times)


def timings(**parts: float) -> StepTimings:
    """Parts in seconds; the whole is their sum, of which collectives are a part."""
    total_s = sum(value for name, value in parts.items() if name != "collective_s")
    return replace(StepTimings(**parts), total_s=total_s)
