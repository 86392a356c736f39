"""Generate, GetModel and Tokenize as a gateway sees them, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from fakes.engine import DESCRIPTION, margin_of
from fakes.front import TOKENIZER, Front, in_loop, request_for, serving, status_of

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from parallel.mesh import Mesh
from runtime.front.errors import InternalError, OutriderError, Unavailable
from runtime.front.inference_service import TOKENS_SENT_KEY

Code = grpc.StatusCode
CODE_TEXT = "def f(x):\n    return x + 1\n"


async def collect(front: Front, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    """All frames, however the writer has merged them; checks what holds for every stream."""
    return checked([frame async for frame in front.client.generate(request)])


async def collect_by_steps(
    front: Front, request: inference_pb2.GenerateRequest
) -> list[inference_pb2.GenerateResponse]:
    """All frames, one per step: each is read before the next step, so that none are merged."""
    call = front.client.call(request)
    await front.engine.until(lambda: bool(front.engine.live))
    frames: list[inference_pb2.GenerateResponse] = []
    while not frames or not frames[-1].HasField("finish"):
        front.engine.step()
        frame = await call.read()
        assert isinstance(frame, inference_pb2.GenerateResponse)
        frames.append(frame)
    assert await call.read() is grpc.aio.EOF, "nothing follows the terminal frame"
    return checked(frames)


def checked(frames: list[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
    assert [frame.HasField("finish") for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert len({frame.request_id for frame in frames}) == 1
    num_ids = 0
    for frame in frames:
        usage = frame.usage
        num_ids += len(frame.token_ids)
        assert usage.completion_tokens == num_ids == usage.accepted + usage.rounds - usage.trimmed
    return frames


def text_of(frames: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(frame.text for frame in frames)


def token_ids_of(frames: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token_id for frame in frames for token_id in frame.token_ids]


@in_loop
async def test_deltas_add_up_and_exactly_one_frame_is_terminal() -> None:
    script = await TOKENIZER.encode(CODE_TEXT)
    async with serving(script, steps_by_itself=False) as front:
        frames = await collect_by_steps(front, request_for(text="# a", max_tokens=len(script), request_id="r-1"))
        assert len(frames) == -(-len(script) // 3)
        assert text_of(frames) == CODE_TEXT
        assert token_ids_of(frames) == script
        assert frames[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert frames[-1].usage.prompt_tokens == len(await TOKENIZER.encode("# a"))
        assert {frame.request_id for frame in frames} == {"r-1"}
        assert not front.engine.aborted


@in_loop
async def test_not_streaming_brings_the_same_in_one_frame() -> None:
    script = await TOKENIZER.encode(CODE_TEXT)
    # One unread token may be left: the limit is for streams, and a whole answer is not one.
    async with serving(script, settings={"server.max_frame_tokens_unread": 1}) as front:
        [frame] = await collect(front, request_for(max_tokens=len(script), stream=False, report_rounds=True))
        assert frame.text == CODE_TEXT
        assert list(frame.token_ids) == script
        assert len(frame.rounds) == frame.usage.rounds > 1


@in_loop
async def test_rounds_are_reported_on_request_only() -> None:
    script = await TOKENIZER.encode(CODE_TEXT)
    async with serving(script, run_length=4) as front:
        frames = await collect(front, request_for(max_tokens=6, report_rounds=True))
        rounds = [one for frame in frames for one in frame.rounds]
        assert [list(one.emitted_token_ids) for one in rounds] == [script[:4], script[4:6]]
        assert [list(one.drafted_token_ids) for one in rounds] == [script[:3], script[4:7]]
        assert [one.accepted for one in rounds] == [3, 3]
        assert [list(one.emitted_margins) for one in rounds] == [[0.5, 1.5, 2.5, 3.5], [4.5, 5.5]]
        assert frames[-1].usage.trimmed == 2, "two of the second run lie beyond max_tokens"
        for frame in frames:
            emitted = [i for one in frame.rounds for i in one.emitted_token_ids]
            assert emitted == list(frame.token_ids)
        assert not any(frame.rounds for frame in await collect(front, request_for(max_tokens=6)))


@in_loop
async def test_characters_never_break_across_frames() -> None:
    text = "한국어 👩‍👩‍👧‍👦 e\u0301 𝒜 汉字"
    script = await TOKENIZER.encode(text)
    assert len(script) > len(text), "the vocabulary spells these characters in several tokens"
    async with serving(script, run_length=1, steps_by_itself=False) as front:
        frames = await collect_by_steps(front, request_for(max_tokens=len(script)))
        assert len(frames) == len(script)
        assert text_of(frames) == text
        assert not any("\ufffd" in frame.text for frame in frames)


@in_loop
async def test_a_stop_string_inside_a_run_cuts_text_ids_and_usage_together() -> None:
    script = await TOKENIZER.encode(CODE_TEXT)
    async with serving(script, run_length=len(script)) as front:
        frames = await collect(front, request_for(stop=["return", "never"], report_rounds=True))
        last = frames[-1]
        assert text_of(frames) == "def f(x):\n    "
        assert last.finish.reason == types_pb2.FINISH_REASON_STOP_STRING
        assert last.finish.stop == "return"
        kept = token_ids_of(frames)
        assert kept == script[: len(kept)]
        assert 0 < len(kept) < len(script)
        assert TOKENIZER.decode(kept).endswith("return")
        assert last.usage.trimmed == len(script) - len(kept)
        assert list(last.rounds[-1].emitted_token_ids) == kept
        assert list(last.rounds[-1].emitted_margins) == [margin_of(position) for position in range(len(kept))]
        assert not front.engine.live, "the verdict let go of the sequence"
        assert not front.engine.aborted


@in_loop
async def test_a_stop_string_split_over_frames_is_never_shown() -> None:
    script = await TOKENIZER.encode("alpha beta gamma delta")
    async with serving(script, run_length=1, steps_by_itself=False) as front:
        frames = await collect_by_steps(front, request_for(stop=["ta gam"]))
        assert len(frames) > 3
        assert text_of(frames) == "alpha be"


@in_loop
async def test_end_of_sequence_and_stop_tokens_are_told_apart() -> None:
    word, stop_id = await TOKENIZER.encode("done"), (await TOKENIZER.encode("!"))[0]
    async with serving([*word, stop_id, 0]) as front:
        eos = await collect(front, request_for())
        assert eos[-1].finish == inference_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS)
        assert (text_of(eos), token_ids_of(eos)) == ("done!", [*word, stop_id, 0])
        stopped = await collect(front, request_for(stop_token_ids=[stop_id]))
        expected = inference_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=stop_id)
        assert stopped[-1].finish == expected
        assert (text_of(stopped), token_ids_of(stopped)) == ("done", [*word, stop_id])
        ignored = await collect(front, request_for(ignore_eos=True, max_tokens=2 * (len(word) + 2)))
        assert ignored[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert text_of(ignored) == "done!done!"


@in_loop
async def test_the_request_id_is_echoed_in_metadata_and_made_when_absent() -> None:
    async with serving() as front:
        call = front.client.call(request_for(max_tokens=5), metadata=(("x-request-id", "from-gateway"),))
        assert dict(await call.initial_metadata())["x-request-id"] == "from-gateway"
        frames = [frame async for frame in call]
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-request-id"] == frames[0].request_id == "from-gateway"
        assert trailing[TOKENS_SENT_KEY] == "5"
        made = {(await collect(front, request_for(max_tokens=1)))[0].request_id for _ in range(2)}
        assert len(made) == 2
        assert all(made)


@in_loop
async def test_seeds_are_echoed_and_drawn_when_absent() -> None:
    async with serving() as front:
        given = await collect(front, request_for(max_tokens=1, sampling=types_pb2.Sampling(seed=2**64 - 1)))
        assert given[-1].usage.seed == 2**64 - 1
        drawn = {(await collect(front, request_for(max_tokens=1)))[-1].usage.seed for _ in range(2)}
        assert len(drawn) == 2


@in_loop
async def test_refusals_have_their_codes() -> None:
    one_slot = replace(DESCRIPTION, num_slots=1)
    async with serving(steps_by_itself=False, max_waiting=0, description=one_slot) as front:
        refuse = front.client.call
        assert await status_of(refuse(request_for(model="gpt"))) == (
            Code.NOT_FOUND,
            "model: 'gpt' is not served here, 'demo' is",
        )
        code, text = await status_of(refuse(inference_pb2.GenerateRequest()))
        assert (code, text) == (Code.INVALID_ARGUMENT, "input: none is given; set text or token_ids or chat")
        first = front.client.call(request_for(request_id="twice"))
        await front.engine.until(lambda: len(front.engine.live) == 1)
        assert (await status_of(refuse(request_for(request_id="twice"))))[0] is Code.ALREADY_EXISTS
        assert (await status_of(refuse(request_for())))[0] is Code.RESOURCE_EXHAUSTED
        front.engine.set_serving(False)
        assert (await status_of(refuse(request_for())))[0] is Code.UNAVAILABLE
        first.cancel()
        await front.engine.until(lambda: not front.engine.live)
        assert len(front.engine.submitted) == 1
        assert len(front.engine.aborted) == 1, "what was refused is not aborted"


@in_loop
async def test_refusals_carry_the_request_id_and_say_that_nothing_went_out() -> None:
    async with serving() as front:
        call = front.client.call(request_for(model="gpt", request_id="r-9"))
        await status_of(call)
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-request-id"], trailing[TOKENS_SENT_KEY]) == ("r-9", "0")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("the worker was lost"), Code.UNAVAILABLE),
        (InternalError("a defect"), Code.INTERNAL),
        (RuntimeError("secret path"), Code.INTERNAL),
    ],
)
def test_an_error_in_mid_stream_ends_it_after_what_was_committed(error: OutriderError, code: grpc.StatusCode) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving(steps_by_itself=False) as front:
            call = front.client.call(request_for())
            await front.engine.until(lambda: bool(front.engine.live))
            front.engine.step()
            front.engine.fail(front.engine.submitted[0].uid, error)
            frame = await call.read()
            assert isinstance(frame, inference_pb2.GenerateResponse)
            assert len(frame.token_ids) == 3
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            got, text = caught.value.code(), caught.value.details() or ""
            assert got is code
            assert "secret" not in text
            assert dict(await call.trailing_metadata())[TOKENS_SENT_KEY] == "3"
            assert not front.engine.aborted

    scenario()


@in_loop
async def test_a_client_that_cancels_ends_the_work_at_once() -> None:
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for(request_id="name"))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        await call.read()
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.aborted == [front.engine.submitted[0].uid]
        # The name is free again, and the connection goes on.
        assert len(await collect_by_steps(front, request_for(request_id="name", max_tokens=1))) == 1


@in_loop
async def test_a_client_that_cancels_in_the_queue_leaves_it() -> None:
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for())
        await front.engine.until(lambda: bool(front.engine.live))
        call.cancel()
        await front.engine.until(lambda: not front.engine.live)
        assert front.engine.aborted == [front.engine.submitted[0].uid]


@in_loop
async def test_a_passed_deadline_ends_the_work() -> None:
    async with serving(steps_by_itself=False) as front:
        call = front.client.call(request_for(), timeout=0.2)
        await front.engine.until(lambda: bool(front.engine.live))
        assert (await status_of(call))[0] is Code.DEADLINE_EXCEEDED
        await front.engine.until(lambda: not front.engine.live)


@in_loop
async def test_a_slow_reader_is_cut_off_and_hurts_nobody() -> None:
    words = [i for i in range(1, 4096) if len(TOKENIZER.decode([i])) >= 8]
    roomy = replace(DESCRIPTION, max_model_len=10**6, num_pages=(10**6, 10**6))
    limit = {"server.max_frame_tokens_unread": 500}
    async with (
        serving(words, steps_by_itself=False, run_length=200, description=roomy, settings=limit) as front,
        # A connection whose flow-control window stays at 64 KiB: unread frames wait on the server.
        grpc.aio.insecure_channel(front.address, options=[("grpc.http2.bdp_probe", 0)]) as narrow,
    ):
        slow = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request_for(max_tokens=10**5))
        await front.engine.until(lambda: bool(front.engine.live))
        [slow_uid] = front.engine.live
        fast = front.client.call(request_for(max_tokens=10**5))
        await front.engine.until(lambda: len(front.engine.live) == 2)
        while slow_uid in front.engine.live:
            front.engine.step()
            frame = await fast.read()
            assert isinstance(frame, inference_pb2.GenerateResponse)
            assert len(frame.token_ids) == 200
            assert not frame.HasField("finish"), "the slow stream went on to its end"
        assert front.engine.aborted == [slow_uid]
        assert len(front.engine.live) == 1
        code, text = await status_of(slow)
        assert code is Code.RESOURCE_EXHAUSTED
        assert "tokens are unread and 500 may be" in text
        assert front.server.status().errors["SlowReader"] == 1


@in_loop
async def test_many_streams_at_once_keep_apart() -> None:
    async with serving(lambda request: request.prompt) as front:
        prompts = [await TOKENIZER.encode(f"stream {number} says {number * 7}") for number in range(24)]
        requests = [request_for(ids=prompt, max_tokens=len(prompt)) for prompt in prompts]
        answers = await asyncio.gather(*(collect(front, request) for request in requests))
        assert [token_ids_of(frames) for frames in answers] == prompts


@in_loop
async def test_cancelling_at_any_moment_leaves_nothing_behind() -> None:
    async with serving() as front:

        async def abandon(number_of_frames: int) -> None:
            call = front.client.call(request_for(max_tokens=100))
            for _ in range(number_of_frames):
                await call.read()
            call.cancel()

        await asyncio.gather(*(abandon(number % 5) for number in range(40)))
        await front.engine.until(lambda: not front.engine.live)
        assert len(token_ids_of(await collect(front, request_for(max_tokens=7)))) == 7


@in_loop
async def test_chat_goes_through_the_template() -> None:
    async with serving() as front:
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        await collect(front, inference_pb2.GenerateRequest(chat=chat, stopping=types_pb2.Stopping(max_tokens=1)))
        assert list(front.engine.submitted[0].prompt) == await TOKENIZER.encode("# user: hi\n")
        assert await front.client.tokenize_chat(chat) == await TOKENIZER.encode("# user: hi\n")


@in_loop
async def test_tokenize_agrees_with_the_library_for_short_and_long_texts() -> None:
    async with serving() as front:
        for text in ("", "x = 1\n", CODE_TEXT * 500):
            assert TOKENIZER.decode(await front.client.tokenize(text)) == text
        code, text = await status_of(front.client.tokenize_chat(inference_pb2.Chat()))
        assert (code, text) == (Code.INVALID_ARGUMENT, "chat.messages: is empty; give at least one message")


@in_loop
async def test_the_model_is_described() -> None:
    async with serving() as front:
        model = await front.client.get_model()
        assert (model.name, model.model_type, model.vocab_size) == ("demo", "qwen3_next", 4096)
        assert (model.context_length, list(model.eos_token_ids), model.gamma_max) == (512, [0], 8)
        assert model.version
        assert (model.dp, model.tp, model.ep) == (1, 1, 1)


@in_loop
async def test_the_layout_is_part_of_what_is_served() -> None:
    async with serving(mesh=Mesh(dp=2, tp=4, ep=8)) as front:
        model = await front.client.get_model()
        assert (model.dp, model.tp, model.ep) == (2, 4, 8)


@in_loop
async def test_held_out_prompts_come_through_as_they_are() -> None:
    lines = (demo_checkpoint() / "heldout.jsonl").read_text().splitlines()
    async with serving() as front:
        for line in itertools.islice(lines, 4):
            prompt = json.loads(line)["prompt"]
            await collect(front, request_for(text=prompt, max_tokens=1))
            assert TOKENIZER.decode(front.engine.submitted[-1].prompt) == prompt


@in_loop
async def test_lora_and_images_are_refused_by_name_before_anything_is_submitted() -> None:
    shown = inference_pb2.ChatMessage(role="user", content="?", images=[inference_pb2.Image(url="file:x")])
    chat = inference_pb2.Chat(messages=[shown])
    async with serving() as front:
        for call, field in (
            (front.client.call(request_for(lora_adapter="math")), "lora_adapter: "),
            (front.client.call(inference_pb2.GenerateRequest(chat=chat)), "chat.messages[0].images: "),
            (front.client.tokenize_chat(chat), "chat.messages[0].images: "),
        ):
            code, words = await status_of(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert words.startswith(field)
            assert " not served" in words
        assert not front.engine.submitted
