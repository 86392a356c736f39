"""n > 1 as a gateway sees it: frames with their index, each sequence's own end, one total, and errors that end all."""

from __future__ import annotations

from dataclasses import replace

import grpc
import grpc.aio
import pytest
from fakes.engine import DESCRIPTION
from fakes.front import TOKENIZER, Front, in_loop, request_for, serving, status_of

from outrider.v1 import inference_pb2, types_pb2
from runtime.front.errors import Unavailable
from runtime.front.inference_service import TOKENS_SENT_KEY
from runtime.request import Request, seed_of_sequence

Code = grpc.StatusCode


def own_script(request: Request) -> list[int]:
    """Another text for each sequence."""
    return [100 + request.index]


async def collect(front: Front, request: inference_pb2.GenerateRequest) -> list[list[inference_pb2.GenerateResponse]]:
    """Frames by sequence; checks what holds of every call."""
    frames = [frame async for frame in front.client.generate(request)]
    n = request.n or 1
    sequences = [[frame for frame in frames if frame.index == index] for index in range(n)]
    assert sum(map(len, sequences)) == len(frames)
    for index, of_one in enumerate(sequences):
        assert [frame.HasField("finish") for frame in of_one] == [False] * (len(of_one) - 1) + [True]
        usage = of_one[-1].usage
        assert usage.completion_tokens == sum(len(frame.token_ids) for frame in of_one)
        assert usage.completion_tokens == usage.accepted + usage.rounds - usage.trimmed
        assert usage.cached_tokens == (usage.prompt_tokens - 1 if index else 0)
    assert [frame.HasField("total") for frame in frames] == [False] * (len(frames) - 1) + [n > 1]
    if n > 1:
        total, last = frames[-1].total, [of_one[-1].usage for of_one in sequences]
        assert total.prompt_tokens == last[0].prompt_tokens >= total.cached_tokens == 0
        for name in ("completion_tokens", "rounds", "drafted", "admitted", "accepted", "trimmed"):
            assert getattr(total, name) == sum(getattr(usage, name) for usage in last), name
        assert total.completion_tokens == total.accepted + total.rounds - total.trimmed
    return sequences


@in_loop
async def test_each_sequence_has_its_index_its_seed_and_its_end() -> None:
    async with serving(own_script) as front:
        sampling = types_pb2.Sampling(seed=11)
        sequences = await collect(front, request_for(ids=[5, 6, 7], n=3, max_tokens=8, sampling=sampling))
        for index, frames in enumerate(sequences):
            assert [token for frame in frames for token in frame.token_ids] == [100 + index] * 8
            assert frames[-1].usage.seed == seed_of_sequence(11, index)
            assert "".join(frame.text for frame in frames) == TOKENIZER.decode([100 + index] * 8)
        assert len({frames[-1].usage.seed for frames in sequences}) == 3
        [submitted] = front.engine.submitted
        assert (submitted.n, submitted.index) == (3, 0)
        again = await collect(front, request_for(max_tokens=1))
        assert front.engine.submitted[-1].uid == submitted.uid + 3, "the uids of the others are theirs alone"
        assert len(again) == 1


@in_loop
async def test_sequences_end_where_their_own_text_does() -> None:
    words = [await TOKENIZER.encode("a b c END d"), await TOKENIZER.encode("no such thing here")]
    async with serving(lambda request: words[request.index], run_length=2) as front:
        first, second = await collect(front, request_for(n=2, stop=["END"], max_tokens=6))
        assert first[-1].finish == inference_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP_STRING, stop="END")
        assert second[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert not front.engine.live


@in_loop
async def test_frames_of_all_come_as_they_are_made() -> None:
    async with serving(own_script, steps_by_itself=False) as front:
        call = front.client.call(request_for(n=4, max_tokens=9))
        await front.engine.until(lambda: len(front.engine.live) == 4)
        for _ in range(3):
            front.engine.step()
            seen = {(await call.read()).index for _ in range(4)}
            assert seen == {0, 1, 2, 3}
        assert await call.read() is grpc.aio.EOF, "nothing follows the last frame"
        assert dict(await call.trailing_metadata())[TOKENS_SENT_KEY] == "36"


@in_loop
async def test_without_streaming_there_is_one_frame_per_sequence_in_order() -> None:
    async with serving(own_script) as front:
        frames = [frame async for frame in front.client.generate(request_for(n=5, max_tokens=7, stream=False))]
        assert [frame.index for frame in frames] == [0, 1, 2, 3, 4]
        assert [list(frame.token_ids) for frame in frames] == [[100 + index] * 7 for index in range(5)]
        assert [frame.HasField("total") for frame in frames] == [False] * 4 + [True]


@in_loop
async def test_leaving_early_aborts_every_sequence_that_is_not_over() -> None:
    async with serving([*[65] * 3, 0], steps_by_itself=False) as front:
        call = front.client.call(request_for(n=3, max_tokens=50, ignore_eos=True))
        await front.engine.until(lambda: len(front.engine.live) == 3)
        uids = set(front.engine.live)
        front.engine.step()
        await call.read()
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        assert set(front.engine.aborted) == uids


@in_loop
async def test_an_error_of_one_sequence_ends_the_call_and_the_others() -> None:
    async with serving(own_script, steps_by_itself=False) as front:
        call = front.client.call(request_for(n=3, max_tokens=50))
        await front.engine.until(lambda: len(front.engine.live) == 3)
        first, second, third = front.engine.live
        front.engine.step()
        for _ in range(3):
            await call.read()
        front.engine.fail(second, Unavailable("a worker was lost; try again"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (Code.UNAVAILABLE, "a worker was lost; try again")
        assert dict(await call.trailing_metadata())[TOKENS_SENT_KEY] == "9"
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.aborted == [first, third]


@in_loop
async def test_more_sequences_than_can_run_are_refused_by_name() -> None:
    async with serving(description=replace(DESCRIPTION, num_slots=4)) as front:
        for n in (0, 65, 2**32 - 1):
            code, text = await status_of(front.client.call(request_for(n=n)))
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith(f"n: {n} is not from 1 to 64; ")
        code, text = await status_of(front.client.call(request_for(n=5)))
        assert code is Code.INVALID_ARGUMENT
        assert text.startswith("n: 5 sequences run at the same time, and there are slots for 4")
        assert not front.engine.aborted
        await collect(front, request_for(n=4, max_tokens=2))


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_told_of_the_prompt_comes_in_the_first_frame_of_the_first_sequence(stream: bool) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(own_script, run_length=2) as front:
            asked = request_for(ids=[5, 6, 7], n=2, max_tokens=6, prompt_logprobs=1, logprobs=2, echo=True)
            asked.stream = stream
            for index, frames in enumerate(await collect_echoed(front, asked)):
                told = [list(frame.prompt_logprobs) for frame in frames]
                assert [one.token_id for one in told[0]] == ([] if index else [6, 7])
                assert not any(told[1:])
                assert list(frames[0].token_ids[:3]) == [5, 6, 7]

    scenario()


async def collect_echoed(
    front: Front, request: inference_pb2.GenerateRequest
) -> list[list[inference_pb2.GenerateResponse]]:
    frames = [frame async for frame in front.client.generate(request)]
    return [[frame for frame in frames if frame.index == index] for index in range(request.n)]
