"""What a request may ask to be told, and what it may tell of its answer beforehand, over real gRPC."""

from __future__ import annotations

import random
from dataclasses import replace

import grpc
import pytest
from fakes.engine import DESCRIPTION, logprobs_of
from fakes.front import TOKENIZER, Front, in_loop, request_for, serving, status_of
from fakes.whole_calls import sequences_of

from outrider.v1 import inference_pb2, types_pb2
from outrider.v1.inference_pb2 import GenerateRequest, GenerateResponse, Prediction, TokenIds
from runtime.front.calls import LONG_ECHO_TOKENS
from runtime.front.replies import logprob_message
from workers.demands import Constraint

Code = grpc.StatusCode
SCRIPTS = ["한국어 글", "e\u0301\u0302a\u0308", "👩‍👩‍👧‍👦🏳️‍🌈", "🇰🇷🇫🇷 汉字", "plain"]
BYTES = {
    byte: i for i in reversed(range(4096)) if len(data := TOKENIZER._vocabulary.token_bytes(i)) == 1 for byte in data
}


async def collect(front: Front, request: GenerateRequest) -> list[GenerateResponse]:
    frames = [frame async for frame in front.client.generate(request)]
    sequences_of(request, frames)
    return frames


def text_of(frames: list[GenerateResponse]) -> str:
    return "".join(frame.text for frame in frames)


@in_loop
async def test_streamed_and_whole_text_are_byte_equal_in_every_script_and_for_invalid_tails() -> None:
    chance = random.Random(7)
    datas = [one.encode() for one in SCRIPTS]
    datas += [one.encode()[: -1 - chance.randrange(2)] for one in SCRIPTS]
    datas += [bytes(chance.choices([0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xC3, 0xFF, 0x41], k=20)) for _ in range(12)]
    scripts = {1 + number: [BYTES[byte] for byte in data] for number, data in enumerate(datas)}
    async with serving(lambda request: scripts[request.prompt[0]], run_length=2) as front:
        for number, ids in scripts.items():
            asked = request_for(ids=[number], max_tokens=len(ids), stop=["never said"], report_offsets=True)
            streamed = await collect(front, asked)
            asked.stream = False
            [whole] = await collect(front, asked)
            assert text_of(streamed).encode() == whole.text.encode() == TOKENIZER.decode(ids).encode()
            assert [offset for frame in streamed for offset in frame.offsets] == whole.offsets


@in_loop
async def test_log_probabilities_are_cut_where_a_stop_string_cuts_the_run() -> None:
    script = await TOKENIZER.encode("def f(x):\n    return x + 1\n")
    async with serving(script, run_length=len(script)) as front:
        frames = await collect(front, request_for(ids=[5, 6, 7], stop=["return"], logprobs=2, prompt_logprobs=1))
        ids = [token_id for frame in frames for token_id in frame.token_ids]
        assert 0 < len(ids) < len(script)
        told = [one for frame in frames for one in frame.logprobs]
        assert told == [logprob_message(one) for one in logprobs_of(ids, 2)]
        assert list(frames[0].prompt_logprobs) == [logprob_message(one) for one in logprobs_of([6, 7], 1)]
        plain = await collect(front, request_for(max_tokens=3))
        assert not any(frame.logprobs or frame.prompt_logprobs or frame.offsets for frame in plain)


@pytest.mark.parametrize("num_prompt", [3, LONG_ECHO_TOKENS + 1])
def test_an_echo_is_counted_where_ids_are_and_not_where_tokens_are(num_prompt: int) -> None:
    @in_loop
    async def scenario() -> None:
        async with serving([65, 66], description=replace(DESCRIPTION, max_model_len=4096)) as front:
            prompt = [BYTES[ord("a")]] * num_prompt
            call = front.client.call(request_for(ids=prompt, echo=True, max_tokens=4, report_offsets=True))
            frames = [frame async for frame in call]
            assert text_of(frames) == "a" * num_prompt + TOKENIZER.decode([65, 66, 65, 66])
            assert frames[0].token_ids[:num_prompt] == prompt
            assert frames[0].offsets[:num_prompt] == list(range(num_prompt))
            assert frames[-1].usage.completion_tokens == 4
            assert dict(await call.trailing_metadata())["x-tokens-sent"] == str(num_prompt + 4)

    scenario()


@in_loop
async def test_a_time_limit_returns_what_is_there() -> None:
    now_s = [100.0]
    async with serving(steps_by_itself=False, clock=lambda: now_s[0]) as front:
        stopping = types_pb2.Stopping(max_tokens=100, time_limit_ms=1500)
        call = front.client.call(GenerateRequest(text="x", stopping=stopping))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        assert not (await call.read()).HasField("finish")
        now_s[0] += 1.5
        front.engine.step()
        last = await call.read()
        assert last.finish.reason == types_pb2.FINISH_REASON_TIME_LIMIT
        assert last.usage.completion_tokens == 6
        assert await call.read() is grpc.aio.EOF
        assert not front.engine.live


@in_loop
async def test_a_prediction_is_encoded_as_what_follows_and_passed_on() -> None:
    async with serving() as front:
        text = "def f(x):\n    return x\n"
        for prediction, expected in (
            (Prediction(text=text), await TOKENIZER.encode(text)),
            (Prediction(text=""), []),
            (Prediction(token_ids=TokenIds(ids=[5, 4095])), [5, 4095]),
            (Prediction(token_ids=TokenIds()), []),
        ):
            await collect(front, request_for(max_tokens=2, prediction=prediction, ngram=True))
            assert list(front.engine.submitted[-1].prediction) == expected
            assert front.engine.submitted[-1].looks_back
        await collect(front, request_for(max_tokens=2))
        assert front.engine.submitted[-1].prediction == ()


@in_loop
async def test_predictions_that_cannot_be_are_refused_by_field() -> None:
    async with serving() as front:
        for prediction, words in (
            (Prediction(), "prediction: is empty; set text or token_ids"),
            (Prediction(text="a = 1\n" * 600), "prediction.text: "),
            (Prediction(text="x" * 10**6), "prediction.text: 1000000 bytes of text; at most "),
            (Prediction(token_ids=TokenIds(ids=[1] * 513)), "prediction.token_ids.ids: 513 ids, and the context holds"),
            (Prediction(token_ids=TokenIds(ids=[1, 4096])), "prediction.token_ids.ids[1]: 4096 is outside the vocab"),
        ):
            code, text = await status_of(front.client.call(request_for(prediction=prediction)))
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith(words)
        assert not front.engine.submitted


@in_loop
async def test_a_constraint_is_prepared_before_anything_is_submitted() -> None:
    wanted = Constraint(kind="choice", text='["yes", "no"]')
    message = types_pb2.Constraint(choice=types_pb2.Choices(texts=["yes", "no"]))
    async with serving() as front:
        front.engine.problems[wanted] = "no output meets it"
        code, text = await status_of(front.client.call(request_for(constraint=message)))
        assert (code, text) == (Code.INVALID_ARGUMENT, "constraint.choice: no output meets it")
        assert not front.engine.submitted
        del front.engine.problems[wanted]
        await collect(front, request_for(constraint=message, max_tokens=2))
        assert front.engine.prepared == [wanted, wanted]
        assert front.engine.submitted[0].sampling.constraint == wanted
        bad = inference_pb2.GenerateRequest(text="", constraint=message)
        await status_of(front.client.call(bad))
        assert len(front.engine.prepared) == 2, "what is refused for its prompt costs no compilation"


@in_loop
async def test_typical_verification_is_named_where_the_server_allows_it() -> None:
    typical = types_pb2.Sampling(verification=types_pb2.VERIFICATION_TYPICAL, temperature=1)
    async with serving(settings={"speculation.allow_typical": True}) as front:
        frames = await collect(front, request_for(max_tokens=7, sampling=typical))
        assert {frame.lossy_verification for frame in frames} == {types_pb2.VERIFICATION_TYPICAL}
    async with serving() as front:
        code, text = await status_of(front.client.call(request_for(sampling=typical)))
        assert code is Code.FAILED_PRECONDITION
        assert text.startswith(
            "sampling.verification: VERIFICATION_TYPICAL changes the law of the output, and this server"
        )


@in_loop
async def test_bad_words_are_banned_as_the_served_vocabulary_writes_them() -> None:
    async with serving() as front:
        await collect(front, request_for(max_tokens=1, sampling=types_pb2.Sampling(bad_words=["return"])))
        shaping = front.engine.submitted[0].sampling.shaping
        runs = {TOKENIZER.decode(word) for word in (*shaping.bad_words, *((one,) for one in shaping.banned))}
        assert runs == {"return", " return"}
