"""Domain values to the messages that clients read: frames, usage, the model. Knows no request, no engine, no files."""

from __future__ import annotations

from outrider.v1 import inference_pb2, types_pb2
from parallel.mesh import Mesh
from runtime.request import Finish, FinishReason, Request, Round, Usage
from runtime.stream.text_stream import Delta
from workers.demands import TokenLogprob
from workers.plan import WorkerDescription

_FINISH_REASONS = {
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONSTRAINT: types_pb2.FINISH_REASON_CONSTRAINT,
    FinishReason.TIME_LIMIT: types_pb2.FINISH_REASON_TIME_LIMIT,
}


def frame_of(
    delta: Delta, request: Request, index: int = 0, total: Usage | None = None
) -> inference_pb2.GenerateResponse:
    """One frame of the call. index: which sequence of the request. total: with the last frame of several sequences."""
    is_lossy = request.sampling.typical is not None
    return inference_pb2.GenerateResponse(
        request_id=request.request_id,
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        usage=usage_message(delta.usage),
        finish=None if delta.finish is None else finish_message(delta.finish),
        rounds=map(round_message, delta.rounds),
        logprobs=map(logprob_message, delta.logprobs),
        prompt_logprobs=map(logprob_message, delta.prompt_logprobs),
        offsets=delta.offsets,
        lossy_verification=types_pb2.VERIFICATION_TYPICAL if is_lossy else None,
        total=None if total is None else usage_message(total),
    )


def usage_message(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        rounds=usage.rounds,
        drafted=usage.drafted,
        admitted=usage.admitted,
        accepted=usage.accepted,
        trimmed=usage.trimmed,
        seed=usage.seed,
        cached_tokens=usage.cached,
        forbidden=usage.forbidden,
        predicted_drafted=usage.predicted_drafted,
        predicted_admitted=usage.predicted_admitted,
        predicted_accepted=usage.predicted_accepted,
        ngram_drafted=usage.ngram_drafted,
        ngram_admitted=usage.ngram_admitted,
        ngram_accepted=usage.ngram_accepted,
    )


def finish_message(finish: Finish) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason], stop_token_id=finish.stop_token_id, stop=finish.stop_string
    )


def round_message(one: Round) -> types_pb2.Round:
    return types_pb2.Round(
        drafted_token_ids=one.drafted,
        accepted=one.accepted,
        emitted_token_ids=one.emitted,
        emitted_margins=one.margins,
    )


def logprob_message(one: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(
        token_id=one.token,
        logprob=one.logprob,
        top=[types_pb2.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in one.top],
    )


def model_message(
    description: WorkerDescription, mesh: Mesh, name: str, version: str
) -> inference_pb2.GetModelResponse:
    """What is served. context_length is the longest sequence served, which may be below the checkpoint's own."""
    return inference_pb2.GetModelResponse(
        name=name,
        model_type=description.model_type,
        vocab_size=description.vocab_size,
        context_length=description.max_model_len,
        eos_token_ids=description.eos_token_ids,
        dtype=description.dtype,
        numerics=description.numerics,
        gamma_max=description.gamma_max,
        version=version,
        num_parameters=description.num_parameters,
        dp=mesh.dp,
        tp=mesh.tp,
        ep=mesh.ep,
        drafter=description.drafter,
    )
