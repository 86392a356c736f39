"""Requests that bring their own drafts: checked field by field, refused where nothing takes them, passed on whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fakes.engine import DESCRIPTION
from fakes.front import in_loop, request_for, serving, status_of
from grpc import StatusCode

from outrider.v1.inference_pb2 import GenerateRequest, Oracle, Prediction
from outrider.v1.types_pb2 import Sampling
from runtime.front import convert
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, MissingFeature
from workers import wire
from workers.plan import BatchPlan, NewSequence, OracleDrafts, StepPlan

MODEL = ServedModel(
    name="demo",
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=(0,),
    default_max_tokens=lambda: 16,
    defaults=SamplingDefaults(),
    takes_oracle=True,
)
GREEDY = Sampling(temperature=0.0)


def asking(oracle: Oracle, sampling: Sampling = GREEDY) -> GenerateRequest:
    return GenerateRequest(oracle=oracle, sampling=sampling)


def test_a_recording_is_passed_on_and_a_request_has_none_by_default() -> None:
    def converted(message: GenerateRequest) -> OracleDrafts | None:
        options = convert.options_of(message, "r", MODEL)
        return convert.request_of(options, (1, 2), field="text", uid=7, model=MODEL).oracle

    for acceptance in (0.0, 0.3, 1.0):
        found = converted(asking(Oracle(continuation=[1, 99], acceptance=acceptance)))
        assert found == OracleDrafts(continuation=(1, 99), acceptance=acceptance)
    assert converted(asking(Oracle(continuation=[5] * 32, acceptance=1.0))) is not None
    assert converted(GenerateRequest()) is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (asking(Oracle(acceptance=0.5)), "oracle.continuation: is empty; give the ids"),
        (asking(Oracle(continuation=[1, 100])), r"oracle.continuation\[1\]: 100 is outside the vocabulary"),
        (asking(Oracle(continuation=[1] * 33)), "oracle.continuation: 33 ids, and the context holds 32"),
        (asking(Oracle(continuation=[1], acceptance=-0.1)), "oracle.acceptance: -0.1 is not from 0 to 1"),
        (asking(Oracle(continuation=[1], acceptance=1.5)), "oracle.acceptance: 1.5 is not from 0 to 1"),
        (asking(Oracle(continuation=[1], acceptance=math.nan)), "oracle.acceptance: nan is not from 0 to 1"),
        (asking(Oracle(continuation=[1]), Sampling(temperature=0.5)), "oracle: goes with greedy requests only"),
        (
            GenerateRequest(oracle=Oracle(continuation=[1]), sampling=GREEDY, prediction=Prediction(text="x")),
            "prediction: goes without oracle",
        ),
        (GenerateRequest(oracle=Oracle(continuation=[1]), sampling=GREEDY, ngram=True), "ngram: goes without oracle"),
        (asking(Oracle(continuation=[1]), Sampling()), "oracle: goes with greedy requests only; set sampling.temp"),
    ],
)
def test_what_is_no_recording_is_refused_by_field_with_the_remedy(message: GenerateRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        convert.options_of(message, "r", MODEL)


def test_a_server_with_another_drafter_names_the_setting() -> None:
    with pytest.raises(MissingFeature, match=r"speculation\.drafter=oracle"):
        convert.options_of(asking(Oracle(continuation=[1])), "r", replace(MODEL, takes_oracle=False))


@in_loop
async def test_only_a_server_that_drafts_so_takes_recordings_and_it_says_that_it_does() -> None:
    fields = {"oracle": Oracle(continuation=[4, 5], acceptance=0.5), "sampling": GREEDY, "max_tokens": 3}
    async with serving() as front:
        code, text = await status_of(front.client.generate(request_for(**fields)))
        assert code is StatusCode.FAILED_PRECONDITION
        assert "speculation.drafter=oracle" in text
        assert front.engine.submitted == []
        assert (await front.client.get_model()).drafter == ""
    async with serving(description=replace(DESCRIPTION, drafter="oracle")) as front:
        frames = [frame async for frame in front.client.generate(request_for(**fields))]
        assert frames[-1].HasField("finish")
        [request] = front.engine.submitted
        assert request.oracle == OracleDrafts(continuation=(4, 5), acceptance=0.5)
        status = await front.client.get_status()
        assert status.model.drafter == (await front.client.get_model()).drafter == "oracle"


@pytest.mark.parametrize("oracle", [None, OracleDrafts(continuation=(3, 1, 4), acceptance=0.1)])
def test_a_plan_takes_recordings_to_the_ranks_exactly(oracle: OracleDrafts | None) -> None:
    sequence = NewSequence(
        slot=1, epoch=1, uid=1, prompt=(1,), tables=((1,),), temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
        coupled=False, stop_token_ids=(), max_tokens=4, oracle=oracle,
    )  # fmt: skip
    plan = StepPlan(step_id=1, epoch=1, batches=(BatchPlan(admitted=(sequence,)),))
    assert wire.plan_from_wire(wire.plan_to_wire(plan)) == plan
