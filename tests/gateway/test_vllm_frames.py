"""Frames of vllm.grpc.engine made of deltas, in whatever order sequences have theirs."""

from __future__ import annotations

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from runtime.front.vllm.frames import Frames
from runtime.request import Finish, FinishReason, ReportParams, Request, SamplingParams, StopParams, Usage
from runtime.stream.text_stream import Delta
from workers.demands import TokenLogprob

TOLD = (TokenLogprob(token=8, logprob=-0.5),)


def request_of(n: int = 1, num_prompt_logprobs: int | None = None) -> Request:
    return Request(
        uid=1,
        request_id="r",
        prompt=(7, 8),
        sampling=SamplingParams(),
        stopping=StopParams(max_tokens=9),
        report=ReportParams(num_prompt_logprobs=num_prompt_logprobs),
        n=n,
    )


def delta_of(*ids: int, reason: FinishReason | None = None, told: tuple[TokenLogprob, ...] = ()) -> Delta:
    finish = None if reason is None else Finish(reason=reason)
    return Delta(text="", token_ids=ids, usage=Usage(prompt=2), finish=finish, prompt_logprobs=told)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_end_has_one_of_vllms_words(reason: FinishReason) -> None:
    [frame] = Frames(request_of(), whole=True).of(0, delta_of(1, reason=reason))
    limits = {FinishReason.LENGTH, FinishReason.TIME_LIMIT}
    assert frame.complete.finish_reason == ("length" if reason in limits else "stop")


@pytest.mark.parametrize("whole", [False, True])
def test_the_prompts_log_probabilities_go_with_sequence_0_whoever_comes_first(whole: bool) -> None:
    frames = Frames(request_of(n=2, num_prompt_logprobs=0), whole=whole)
    made = [
        *frames.of(1, delta_of(5, reason=FinishReason.LENGTH)),
        *frames.of(0, delta_of(4, reason=FinishReason.LENGTH, told=TOLD)),
    ]
    parts = [frame.chunk if frame.HasField("chunk") else frame.complete for frame in made]
    assert [part.index for part in parts if part.HasField("input_logprobs")] == [0]
    told = next(part.input_logprobs for part in parts if part.HasField("input_logprobs"))
    assert told.token_logprobs[1] == vllm.InputTokenLogProb(value=-0.5)


def test_a_last_delta_without_ids_is_an_end_alone() -> None:
    [frame] = Frames(request_of(), whole=False).of(0, delta_of(reason=FinishReason.TIME_LIMIT))
    assert frame.WhichOneof("response") == "complete"


def test_an_abort_ends_those_that_have_not_ended_once() -> None:
    frames = Frames(request_of(n=3), whole=False)
    list(frames.of(1, delta_of(5, reason=FinishReason.EOS)))
    assert [frame.complete.index for frame in frames.of_abort()] == [0, 2]
    assert list(frames.of_abort()) == []
