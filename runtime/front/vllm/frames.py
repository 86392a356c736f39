"""Deltas as frames of vllm.grpc.engine. Knows no gRPC and no engine.

    streaming    chunk ... chunk complete    a chunk per delta; `complete` repeats the last one and says how it ended
    whole        complete                    everything

Of each sequence, in any order between them. Counts in frames are those of the frame and not of the sequence so far, as
vLLM's are: readers add up the chunks and take from `complete` no more than the end. With speculation a chunk holds any
number of ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from runtime.request import FinishReason, Request, Usage
from runtime.stream.text_stream import Delta
from workers.demands import TokenLogprob

ABORTED = "abort"

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.CONSTRAINT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}


class Frames:
    """Makes the frames of one call, and knows which of its sequences have had their last.

    whole: nothing is streamed.
    """

    def __init__(self, request: Request, *, whole: bool) -> None:
        self._request = request
        self._whole = whole
        self._open = set(range(request.n))
        # The prompt's log-probabilities come once, with what is told first of sequence 0.
        self._owes_prompt = request.report.num_prompt_logprobs is not None

    def of(self, index: int, delta: Delta) -> Iterator[vllm.GenerateResponse]:
        """Those of what is new of a sequence."""
        if not self._whole and delta.token_ids:
            yield vllm.GenerateResponse(chunk=self._chunk(index, delta))
        if delta.finish is not None:
            self._open.discard(index)
            yield vllm.GenerateResponse(complete=self._complete(index, delta))

    def of_abort(self) -> Iterator[vllm.GenerateResponse]:
        """The last ones of all that have had none."""
        for index in sorted(self._open):
            end = vllm.GenerateComplete(
                index=index, finish_reason=ABORTED, prompt_tokens=len(self._request.prompt), output_ids=()
            )
            yield vllm.GenerateResponse(complete=end)
        self._open.clear()

    def _chunk(self, index: int, delta: Delta) -> vllm.GenerateStreamChunk:
        return vllm.GenerateStreamChunk(
            index=index,
            token_ids=delta.token_ids,
            prompt_tokens=delta.usage.prompt,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.usage.cached,
            output_logprobs=_output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs(index, delta),
        )

    def _complete(self, index: int, delta: Delta) -> vllm.GenerateComplete:
        finish, usage = delta.finish, delta.usage
        assert finish is not None
        return vllm.GenerateComplete(
            index=index,
            output_ids=delta.token_ids,
            finish_reason=_REASONS[finish.reason],
            matched_token_id=finish.stop_token_id,
            matched_stop_str=finish.stop_string,
            prompt_tokens=usage.prompt,
            completion_tokens=len(delta.token_ids),
            cached_tokens=usage.cached,
            output_logprobs=_output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs(index, delta),
            spec_accepted_tokens=_drafts_in(usage),
            spec_draft_tokens=usage.drafted,
        )

    def _input_logprobs(self, index: int, delta: Delta) -> vllm.InputLogProbs | None:
        """One entry per token of the prompt; the first token, which follows nothing, has an empty one."""
        if index or not self._owes_prompt:
            return None
        self._owes_prompt = False
        told = delta.prompt_logprobs
        return vllm.InputLogProbs(
            token_ids=self._request.prompt,
            token_logprobs=[vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=one.logprob) for one in told)],
            top_logprobs=[vllm.TopLogProbs(), *map(_alternatives, told)],
        )


def _drafts_in(usage: Usage) -> int:
    """Drafts that are tokens of the output. Gateways report them as a part of its tokens, so what was accepted and then
    cut is none: of the last round, the only one that is ever cut, the target's own token goes first."""
    return usage.accepted - max(0, usage.trimmed - 1)


def _output_logprobs(logprobs: Sequence[TokenLogprob]) -> vllm.OutputLogProbs | None:
    if not logprobs:
        return None
    return vllm.OutputLogProbs(
        token_ids=[one.token for one in logprobs],
        token_logprobs=[one.logprob for one in logprobs],
        top_logprobs=map(_alternatives, logprobs),
    )


def _alternatives(one: TokenLogprob) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(token_ids=[token_id for token_id, _ in one.top], values=[logprob for _, logprob in one.top])
