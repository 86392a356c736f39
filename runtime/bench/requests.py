"""From a prompt of the workload to the request that is sent for it, before all cells and in them. Pure; knows no client
and no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.bench.asked import Asked
from runtime.bench.completion import generate_request
from runtime.bench.edits import predictions_of
from runtime.bench.extras import Extras, Variant
from runtime.bench.load import Load
from runtime.bench.prompts import Prompts
from runtime.bench.recording import Recording
from workers.plan import OracleDrafts

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2

WHOLE = Variant(brings=True)
"""Of loads whose variants are not told apart."""


def recorded_request(asked: Asked, prompts: Prompts, number: int) -> inference_pb2.GenerateRequest:
    """What is recorded of a prompt: what it says under its constraint, by no drafts."""
    extras = replace(prompts.extras(number, WHOLE), prediction=())
    return _request(asked, prompts, number, extras, report_rounds=False)


def cell_request(
    asked: Asked, prompts: Prompts, number: int, load: Load, recording: Recording | None, *, report_rounds: bool
) -> inference_pb2.GenerateRequest:
    """Request `number` of a load; prompts come again and again. recording: where outputs were recorded."""
    prompt, oracle = number % len(prompts.ids), None
    if load.acceptance is not None:
        assert recording is not None, "nothing was recorded"
        oracle = OracleDrafts(continuation=recording.outputs[prompt], acceptance=load.acceptance)
    extras = prompts.extras(prompt, load.variant or WHOLE)
    return _request(asked, prompts, number, extras, report_rounds=report_rounds, oracle=oracle)


def with_edits(asked: Asked, prompts: Prompts, recording: Recording) -> Prompts:
    """The prompts with predictions made of what was recorded, where that is asked for."""
    if asked.edit_every is None:
        return prompts
    predictions = predictions_of(recording.outputs, asked.edit_every, asked.seed)
    # What was inserted may make one longer than the context, which prompt and output fit into.
    rooms = [len(ids) + limit for ids, limit in zip(prompts.ids, prompts.max_tokens, strict=True)]
    cut = {i: one[:room] for i, (one, room) in enumerate(zip(predictions, rooms, strict=True))}
    return replace(prompts, predictions=cut)


def _request(
    asked: Asked,
    prompts: Prompts,
    number: int,
    extras: Extras,
    *,
    report_rounds: bool,
    oracle: OracleDrafts | None = None,
) -> inference_pb2.GenerateRequest:
    prompt = number % len(prompts.ids)
    return generate_request(
        prompts.content(prompt),
        prompts.max_tokens[prompt],
        temperature=asked.temperature,
        seed=asked.seed + number,
        ignore_eos=asked.ignore_eos,
        report_rounds=report_rounds,
        extras=extras,
        oracle=oracle,
    )
