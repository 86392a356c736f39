"""Where a stream ends, and what is left of it: stops inside accepted runs, limits, cancellation, deadlines."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from flow.house import House, Reply, heldout, request

from outrider.v1 import types_pb2
from runtime.front.client import OutriderClient

GAMMAS = (None, 1, 4, 8)


def across_policies(house: House, prompt: str, tokens: int, **stopping: object) -> list[Reply]:
    replies = []
    for gamma in GAMMAS:
        house.set_policy(gamma)
        replies.append(house.run(house.generate(request(prompt, tokens, **stopping))))
        usage = replies[-1].usage
        assert usage.completion_tokens == len(replies[-1].ids) == usage.accepted + usage.rounds - usage.trimmed
    return replies


def plain_ids(house: House, prompt: str, tokens: int) -> Reply:
    house.set_policy(None)
    return house.run(house.generate(request(prompt, tokens, ignore_eos=True)))


@pytest.mark.parametrize("position", [1, 2, 3, 5, 8])
def test_a_stop_token_cuts_ids_text_and_usage_alike(reference_house: House, position: int) -> None:
    prompt = heldout(1, 3)[0]
    plain = plain_ids(reference_house, prompt, 24)
    stop = plain.ids[position]
    expected = plain.ids[: plain.ids.index(stop) + 1]
    replies = across_policies(reference_house, prompt, 24, stop_token_ids=[stop], ignore_eos=True)
    assert [r.ids for r in replies] == [expected] * len(GAMMAS)
    assert len({r.text for r in replies}) == 1
    assert all(r.reason == types_pb2.FINISH_REASON_STOP_TOKEN for r in replies)
    assert all(r.frames[-1].finish.stop_token_id == stop for r in replies)


@pytest.mark.parametrize("start", range(2, 30, 9))
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_stop_string_cuts_ids_text_and_usage_alike(reference_house: House, start: int, length: int) -> None:
    prompt = heldout(1, 7)[0]
    plain = plain_ids(reference_house, prompt, 24)
    stop = plain.text[start : start + length]
    replies = across_policies(reference_house, prompt, 24, stop=[stop], ignore_eos=True)
    assert [r.text for r in replies] == [plain.text[: plain.text.index(stop)]] * len(GAMMAS)
    assert len({tuple(r.ids) for r in replies}) == 1
    ids = replies[0].ids
    assert ids == plain.ids[: len(ids)]
    assert all(r.reason == types_pb2.FINISH_REASON_STOP_STRING for r in replies)
    assert all(r.frames[-1].finish.stop == stop for r in replies)


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
def test_max_tokens_cuts_an_accepted_run(reference_house: House, limit: int) -> None:
    prompt = heldout(1, 3)[0]
    plain = plain_ids(reference_house, prompt, 24)
    replies = across_policies(reference_house, prompt, limit, ignore_eos=True)
    assert [r.ids for r in replies] == [plain.ids[:limit]] * len(GAMMAS)
    assert all(r.reason == types_pb2.FINISH_REASON_LENGTH for r in replies)


def test_the_end_of_the_context_is_a_length(reference_house: House) -> None:
    prompt = "x = 1\n" * 115
    for gamma in (None, 8):
        reference_house.set_policy(gamma)
        reply = reference_house.run(reference_house.generate(request(prompt, 10_000, ignore_eos=True)))
        assert reply.usage.prompt_tokens + len(reply.ids) == 512
        assert reply.reason == types_pb2.FINISH_REASON_LENGTH
    reference_house.check_baseline()


def test_one_frame_without_streaming(house: House) -> None:
    house.set_policy(4)
    streamed = house.run(house.generate(request("def main(", 40)))
    whole = request("def main(", 40)
    whole.stream = False
    (frame,) = house.run(house.generate(whole)).frames
    assert (frame.text, list(frame.token_ids)) == (streamed.text, streamed.ids)
    assert frame.HasField("finish")


def test_a_cancelled_stream_gives_everything_back(house: House) -> None:
    house.set_policy(4)

    async def cancelled(after: int) -> int:
        assert house.client is not None
        call = house.client.call(request("import os\n", 400, ignore_eos=True))
        frames = 0
        async for _ in call:
            frames += 1
            if frames == after:
                break
        call.cancel()
        return frames

    async def all_cancelled() -> list[int]:
        return list(await asyncio.gather(*(cancelled(1 + i % 3) for i in range(12))))

    before = house.deployment.statistics().rounds
    assert house.run(all_cancelled()) == [1 + i % 3 for i in range(12)]
    house.check_baseline()
    rounds = house.deployment.statistics().rounds - before
    assert rounds < 12 * 40, "cancelled streams went on"
    assert house.run(house.generate(request("import os\n", 5, ignore_eos=True))).usage.completion_tokens == 5


def test_a_deadline_ends_the_work(house: House) -> None:
    async def late() -> grpc.StatusCode:
        assert house.client is not None
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in house.client.generate(request("import os\n", 450, ignore_eos=True), timeout=0.3):
                pass
        return error.value.code()

    assert house.run(late()) is grpc.StatusCode.DEADLINE_EXCEEDED
    house.check_baseline()


def test_waiting_requests_are_served_when_room_returns(house: House) -> None:
    """More requests than slots, and one that wants nearly all the context: all end, none starves."""
    house.set_policy(2)
    many = [request(prompt, 20, ignore_eos=True) for prompt in heldout(40)]
    many.insert(5, request("a", 450, ignore_eos=True))
    replies = house.run(house.generate_all(many, len(many)))
    assert [len(r.ids) for r in replies] == [450 if i == 5 else 20 for i in range(len(many))]
    house.check_baseline()


def test_characters_of_several_bytes_never_break(house: House) -> None:
    """Sampling hot over a byte-level vocabulary brings broken and whole multi-byte characters alike."""
    prompts = ["# 한국어 주석\n", "s = '👩‍👩‍👧‍👦'\n", "é = 'e\u0301'\n"]

    async def run() -> list[Reply]:
        assert house.client is not None
        return await house.generate_all(
            [request(p, 60, temperature=3.0, seed=i, ignore_eos=True) for i, p in enumerate(prompts * 4)], 12
        )

    house.set_policy(4)
    tokenizer = house.deployment.tokenizer
    for reply in house.run(run()):
        assert reply.text == tokenizer.decode(reply.ids)
        assert "".join(f.text for f in reply.frames).encode("utf-8")


def test_seeds_are_echoed_and_differ(house: House) -> None:
    replies = house.run(house.generate_all([request("a = ", 8, temperature=1.0) for _ in range(4)], 4))
    assert len({r.usage.seed for r in replies}) == 4
    seeded = house.run(house.generate(request("a = ", 8, temperature=1.0, seed=2**64 - 1)))
    assert seeded.usage.seed == 2**64 - 1


def test_other_clients_are_served_while_one_sends_nonsense(house: House) -> None:
    async def run() -> tuple[Reply, grpc.StatusCode]:
        good = asyncio.create_task(house.generate(request("def f(x):\n", 60, ignore_eos=True)))
        async with OutriderClient(house.deployment.address) as other:
            bad = request("x", 5)
            bad.sampling.top_p = 7
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in other.generate(bad):
                    pass
        return await good, error.value.code()

    reply, code = house.run(run())
    assert len(reply.ids) == 60
    assert code is grpc.StatusCode.INVALID_ARGUMENT
