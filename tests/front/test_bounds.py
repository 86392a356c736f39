"""What a client can ask for at most, and that nobody else waits while it is refused or worked on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest
from fakes.engine import DESCRIPTION
from fakes.front import TOKENIZER, Front, in_loop, request_for, serving, status_of

from configs.load import demo_checkpoint
from outrider.v1 import inference_pb2, inference_pb2_grpc
from runtime.front.bounds import STOCK_LIMIT_BYTES, TextBound, prompt_bound, reply_bound, request_limit_bytes
from runtime.front.errors import InvalidRequest
from runtime.front.tokenizer import GIANT_TEXT_CHARS, LONG_TEXT_CHARS, NUM_ENCODERS, Tokenizer

Code = grpc.StatusCode
ROOMY = replace(DESCRIPTION, max_model_len=10**6, num_pages=(10**6, 10**6))
GIANT = "def f(x): return x + 1\n" * (2 * GIANT_TEXT_CHARS // 23)


class Gated:
    """The library's tokenizer, except that giants wait at a gate; tells what it was asked to encode."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inner = tokenizer._tokenizer
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.encoded: list[str] = []
        monkeypatch.setattr(tokenizer, "_tokenizer", self)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
        self.encoded += texts
        if len(texts[0]) > GIANT_TEXT_CHARS:
            self.waiting.set()
            self.gate.wait()
            texts = ["x"]
        return self._inner.encode_batch_fast(texts, **options)


def text_call(front: Front, text: str) -> grpc.aio.UnaryStreamCall:
    return front.client.call(request_for(text=text, max_tokens=1))


async def serve(front: Front, request: inference_pb2.GenerateRequest) -> None:
    async for _ in front.client.generate(request):
        pass


@in_loop
async def test_streams_go_on_while_a_giant_is_encoded() -> None:
    async with serving(description=ROOMY) as front:
        giant = asyncio.create_task(serve(front, request_for(text=GIANT, max_tokens=1)))
        num_served = 0
        while not giant.done():
            await serve(front, request_for(max_tokens=3))
            num_served += 1
        await giant
        assert num_served >= 12


@in_loop
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated(TOKENIZER, monkeypatch)
    longest = TOKENIZER.longest_token_bytes
    limit = DESCRIPTION.max_model_len * longest
    async with serving() as front:
        because = f"since the context holds {DESCRIPTION.max_model_len} tokens of at most {longest} bytes each"
        for text in ("한" * (limit // 3 + 1), "x" * (3 << 20)):
            code, words = await status_of(text_call(front, text))
            assert code is Code.INVALID_ARGUMENT
            assert words == f"text: {len(text.encode())} bytes of text; at most {limit} are taken, {because}"
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x" * limit)])
        code, words = await status_of(front.client.call(inference_pb2.GenerateRequest(chat=chat)))
        assert code is Code.INVALID_ARGUMENT
        assert words.startswith(f"chat: {limit + 4} bytes of text; at most {limit} are taken, ")
    assert not gated.encoded


@in_loop
async def test_tokenize_takes_no_text_whose_ids_a_stock_client_could_not_read() -> None:
    bound = reply_bound(DESCRIPTION.vocab_size)
    assert bound.max_bytes > 2 * 10**6, "two bytes per id of this vocabulary"
    async with serving() as front, grpc.aio.insecure_channel(front.address) as stock:
        tokenize = inference_pb2_grpc.InferenceServiceStub(stock).Tokenize
        code, words = await status_of(tokenize(inference_pb2.TokenizeRequest(text="x" * (bound.max_bytes + 1))))
        assert code is Code.INVALID_ARGUMENT
        assert words.startswith(f"text: {bound.max_bytes + 1} bytes of text; at most {bound.max_bytes} are taken")


@pytest.mark.parametrize("vocab_size", [2, 128, 129, 4096, 151_936])
def test_as_many_ids_as_bytes_fit_a_reply(vocab_size: int) -> None:
    num_ids = reply_bound(vocab_size).max_bytes
    # The largest ids, counted on a part: packed ids add up.
    size = inference_pb2.TokenizeResponse(token_ids=[vocab_size - 1] * 1000).ByteSize() - 3
    assert num_ids * size / 1000 <= STOCK_LIMIT_BYTES - 1000
    assert (num_ids + 1000) * size / 1000 > STOCK_LIMIT_BYTES - 4000


@in_loop
async def test_a_message_past_the_limit_is_not_read() -> None:
    async with serving() as front:
        code, words = await status_of(text_call(front, "x" * STOCK_LIMIT_BYTES))
        assert code is Code.RESOURCE_EXHAUSTED
        assert f"at most {STOCK_LIMIT_BYTES} are taken" in words


def test_the_request_limit_follows_the_context() -> None:
    assert request_limit_bytes(512) == request_limit_bytes(1 << 18) == 4 << 20
    assert request_limit_bytes(1 << 19) == 8 << 20
    assert request_limit_bytes(10**9) == 16 << 20


def test_the_longest_token_of_the_demo_is_known() -> None:
    longest = max(range(4096), key=lambda token_id: len(TOKENIZER.decode([token_id])))
    assert TOKENIZER.longest_token_bytes == len(TOKENIZER.decode([longest]).encode()) > len("<|endoftext|>")
    assert prompt_bound(10, 7).max_bytes == 70


@in_loop
async def test_giants_that_are_cancelled_in_the_queue_are_never_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(demo_checkpoint())
    gated = Gated(tokenizer, monkeypatch)
    running = asyncio.create_task(tokenizer.encode(GIANT))
    await asyncio.to_thread(gated.waiting.wait)
    queued = [asyncio.create_task(tokenizer.encode(f"{number}{GIANT}")) for number in range(4)]
    # Others do not queue up behind a giant, however many there are.
    long_text = "x = 1\n" * LONG_TEXT_CHARS
    for ids in await asyncio.gather(*(tokenizer.encode(long_text) for _ in range(2 * NUM_ENCODERS))):
        assert tokenizer.decode(ids) == long_text
    for task in queued[:3]:
        task.cancel()
    await asyncio.wait(queued[:3])
    gated.gate.set()
    await asyncio.gather(running, queued[3])
    assert [text[:1] for text in gated.encoded if len(text) > GIANT_TEXT_CHARS] == [GIANT[0], "3"]


@in_loop
async def test_a_chat_that_grows_while_it_is_rendered_is_bounded_too() -> None:
    bound = TextBound(max_bytes=20, because="so it is")
    messages = [{"role": "user", "content": "0123456789"}]
    with pytest.raises(InvalidRequest, match="chat: 14 bytes of text; at most 13 are taken, since so it is"):
        await TOKENIZER.encode_chat(messages, add_generation_prompt=True, bound=replace(bound, max_bytes=13))
    rendered = TOKENIZER.render_chat(messages, add_generation_prompt=True)
    assert len(rendered) > 14
    with pytest.raises(InvalidRequest, match=f"chat: {len(rendered)} bytes of text; at most 14 are taken"):
        await TOKENIZER.encode_chat(messages, add_generation_prompt=True, bound=replace(bound, max_bytes=14))
    assert await TOKENIZER.encode_chat(messages, add_generation_prompt=True, bound=bound)


@in_loop
async def test_long_chats_are_rendered_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def render(messages: object, add_generation_prompt: bool) -> str:
        threads.append(threading.current_thread())
        return "rendered"

    monkeypatch.setattr(TOKENIZER, "render_chat", render)
    for num_messages in (1, 1000):
        await TOKENIZER.encode_chat([{"role": "user", "content": ""}] * num_messages, add_generation_prompt=True)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threads[0]
