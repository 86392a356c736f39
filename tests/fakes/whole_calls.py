"""What holds of the frames of every Generate call that ends well, whatever was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outrider.v1.inference_pb2 import GenerateRequest, GenerateResponse
from outrider.v1.types_pb2 import FINISH_REASON_STOP_STRING, VERIFICATION_TYPICAL, TokenLogprob, Usage

SUMS = (
    *("completion_tokens", "rounds", "drafted", "admitted", "accepted", "trimmed", "forbidden"),
    *("predicted_drafted", "predicted_admitted", "predicted_accepted"),
    *("ngram_drafted", "ngram_admitted", "ngram_accepted"),
)
PARTS = (
    *(("cached_tokens", "prompt_tokens"), ("accepted", "admitted"), ("admitted", "drafted"), ("forbidden", "admitted")),
    *((f"{kind}_{what}", what) for kind in ("predicted", "ngram") for what in ("drafted", "admitted", "accepted")),
)
"""A count, and the one that it is part of."""


def sequences_of(request: GenerateRequest, frames: Sequence[GenerateResponse]) -> list[list[GenerateResponse]]:
    """Frames by sequence. Raises AssertionError where they do not fit the request or each other."""
    n = request.n if request.HasField("n") else 1
    sequences = [[frame for frame in frames if frame.index == index] for index in range(n)]
    assert sum(map(len, sequences)) == len(frames)
    assert len({frame.request_id for frame in frames}) == 1
    if request.HasField("stream") and not request.stream:
        assert [frame.index for frame in frames] == list(range(n))
    for index, of_one in enumerate(sequences):
        _check_sequence(request, index, of_one)
    assert [frame.HasField("total") for frame in frames] == [False] * (len(frames) - 1) + [n > 1]
    if n > 1:
        _check_total(frames[-1].total, [of_one[-1].usage for of_one in sequences])
    return sequences


def check_usage(usage: Usage) -> None:
    assert usage.completion_tokens == usage.accepted + usage.rounds - usage.trimmed, usage
    for part, whole in PARTS:
        assert getattr(usage, part) <= getattr(usage, whole), (part, whole, usage)
    for what in ("drafted", "admitted", "accepted"):
        assert getattr(usage, f"predicted_{what}") + getattr(usage, f"ngram_{what}") <= getattr(usage, what), usage


def _check_sequence(request: GenerateRequest, index: int, frames: Sequence[GenerateResponse]) -> None:
    assert [frame.HasField("finish") for frame in frames] == [False] * (len(frames) - 1) + [True]
    ids = [token_id for frame in frames for token_id in frame.token_ids]
    usage = frames[-1].usage
    output = ids[usage.prompt_tokens :] if request.echo else ids
    assert len(output) == usage.completion_tokens
    if request.token_ids.ids and request.echo:
        assert ids[: usage.prompt_tokens] == request.token_ids.ids
    for frame in frames:
        check_usage(frame.usage)
        assert frame.usage.seed == usage.seed
        is_lossy = request.sampling.verification == VERIFICATION_TYPICAL and frame.HasField("lossy_verification")
        assert frame.lossy_verification == (VERIFICATION_TYPICAL if is_lossy else 0)
    counts = [frame.usage.completion_tokens for frame in frames]
    assert counts == sorted(counts)
    logprobs = [one for frame in frames for one in frame.logprobs]
    assert [one.token_id for one in logprobs] == (output if request.HasField("logprobs") else [])
    _check_logprobs(logprobs, request.logprobs)
    told = [list(frame.prompt_logprobs) for frame in frames]
    num_told = usage.prompt_tokens - 1 if request.HasField("prompt_logprobs") and index == 0 else 0
    # A time limit may come before the whole prompt was read.
    assert len(told[0]) == num_told or (not output and len(told[0]) < num_told)
    assert not any(told[1:])
    _check_logprobs(told[0], request.prompt_logprobs)
    offsets = [offset for frame in frames for offset in frame.offsets]
    assert len(offsets) == (len(ids) if request.report_offsets else 0)
    assert offsets == sorted(offsets)
    rounds = [one for frame in frames for one in frame.rounds]
    emitted = [token_id for one in rounds for token_id in one.emitted_token_ids]
    assert emitted == (output if request.report_rounds else [])
    _check_text(request, "".join(frame.text for frame in frames), frames[-1])


def _check_text(request: GenerateRequest, text: str, last: GenerateResponse) -> None:
    """Where a stop string ended it."""
    if last.finish.reason != FINISH_REASON_STOP_STRING:
        assert not last.finish.stop
        return
    assert last.finish.stop in request.stopping.stop
    if request.stopping.include_stop:
        assert text.endswith(last.finish.stop)
    elif not request.stopping.min_tokens and not request.echo:
        assert not any(stop in text for stop in request.stopping.stop)


def _check_logprobs(told: Sequence[TokenLogprob], num_top: int) -> None:
    for one in told:
        assert one.logprob <= 0
        assert len(one.top) == num_top
        assert all(first.logprob >= second.logprob for first, second in itertools.pairwise(one.top))
        for other in one.top:
            assert other.token_id != one.token_id or other.logprob == one.logprob


def _check_total(total: Usage, usages: Sequence[Usage]) -> None:
    check_usage(total)
    for name in ("prompt_tokens", "cached_tokens", "seed"):
        assert getattr(total, name) == getattr(usages[0], name), name
    for name in SUMS:
        assert getattr(total, name) == sum(getattr(usage, name) for usage in usages), name
