"""Generate and Abort of vllm.grpc.engine.VllmEngine over the fake engine: frames, counts, ends, errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from fakes.engine import DESCRIPTION, logprobs_of
from fakes.front import TOKENIZER, Front, in_loop, request_for, status_of
from gateway.vllm_face import Face, face_serving, message_for
from observe.test_records import Witness
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from parallel.mesh import Mesh
from runtime.front.errors import InternalError, InvalidRequest, Unavailable
from runtime.front.inference_service import Sent

Code = grpc.StatusCode
SCRIPT = (65, 66, 67)


def ids_of(frames: list[vllm.GenerateResponse], index: int = 0) -> list[int]:
    """As a client adds them up: from the chunks where there are chunks."""
    mine = [frame for frame in frames if (frame.chunk if frame.HasField("chunk") else frame.complete).index == index]
    chunks = [frame.chunk for frame in mine if frame.HasField("chunk")]
    if chunks:
        return [token_id for chunk in chunks for token_id in chunk.token_ids]
    return [token_id for frame in mine for token_id in frame.complete.output_ids]


def completes_of(frames: list[vllm.GenerateResponse]) -> list[vllm.GenerateComplete]:
    return [frame.complete for frame in frames if frame.HasField("complete")]


async def abort(face: Face, *request_ids: str) -> None:
    await face.stub.Abort(vllm.AbortRequest(request_ids=request_ids))


@in_loop
async def test_chunks_add_up_and_the_last_frame_says_how_it_ended() -> None:
    async with face_serving(SCRIPT) as face:
        frames = await face.generate(message_for(max_tokens=8))
        chunks = [frame.chunk for frame in frames[:-1]]
        assert ids_of(frames) == [65, 66, 67, 65, 66, 67, 65, 66]
        assert [chunk.completion_tokens for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
        assert {chunk.prompt_tokens for chunk in chunks} == {3}
        [complete] = completes_of(frames)
        assert (complete.finish_reason, complete.prompt_tokens) == ("length", 3)
        # vLLM's own way: the last frame repeats the last chunk, and who adds it up again counts it twice.
        assert list(complete.output_ids) == list(chunks[-1].token_ids)
        assert complete.completion_tokens == len(complete.output_ids)
        assert complete.WhichOneof("matched_stop") is None


@in_loop
async def test_what_is_not_streamed_comes_as_one_frame_with_everything() -> None:
    async with face_serving(SCRIPT) as face:
        [frame] = await face.generate(message_for(max_tokens=8, stream=False, logprobs=1, prompt_logprobs=1))
        assert ids_of([frame]) == [65, 66, 67, 65, 66, 67, 65, 66]
        assert frame.complete.completion_tokens == 8
        assert len(frame.complete.output_logprobs.token_ids) == 8
        assert len(frame.complete.input_logprobs.token_ids) == 3


@in_loop
async def test_text_is_encoded_here_and_ids_are_taken_as_they_are() -> None:
    async with face_serving() as face:
        await face.generate(message_for(text="def f(x):", max_tokens=1))
        tokenized = vllm.TokenizedInput(original_text="something else", input_ids=[9, 8, 7])
        await face.generate(vllm.GenerateRequest(tokenized=tokenized))
        assert [list(one.prompt) for one in face.engine.submitted] == [await TOKENIZER.encode("def f(x):"), [9, 8, 7]]
        # Without a limit, as much as the context leaves.
        assert face.engine.submitted[1].stopping.max_tokens == DESCRIPTION.max_model_len - 3


@pytest.mark.parametrize("stream", [True, False])
def test_several_sequences_have_an_index_and_an_end_each(stream: bool) -> None:
    @in_loop
    async def scenario() -> None:
        async with face_serving(lambda request: (10 + request.index,)) as face:
            frames = await face.generate(message_for(max_tokens=9, n=3, stream=stream))
            assert sorted(complete.index for complete in completes_of(frames)) == [0, 1, 2]
            assert [ids_of(frames, index) for index in range(3)] == [[10 + index] * 9 for index in range(3)]
            assert [complete.cached_tokens for complete in sorted(completes_of(frames), key=lambda one: one.index)] == [
                0,
                2,
                2,
            ]

    scenario()


@in_loop
async def test_ends_have_vllms_words_and_say_what_matched() -> None:
    script = [*(await TOKENIZER.encode("done")), (await TOKENIZER.encode("!"))[0], 0]
    async with face_serving(script) as face:

        async def end_of(**params: object) -> tuple[str, object]:
            [complete] = completes_of(await face.generate(message_for(**params)))  # type: ignore[arg-type]
            matched = complete.WhichOneof("matched_stop")
            return complete.finish_reason, None if matched is None else getattr(complete, matched)

        assert await end_of() == ("stop", None)
        assert await end_of(stop_token_ids=[script[-2]]) == ("stop", script[-2])
        assert await end_of(stop=["one", "never"]) == ("stop", "one")
        assert await end_of(max_tokens=2) == ("length", None)
        assert await end_of(ignore_eos=True, max_tokens=20) == ("length", None)


@in_loop
async def test_a_stop_string_cuts_ids_behind_the_token_that_completes_it() -> None:
    script = await TOKENIZER.encode("def f(x):\n    return x\n\n\ndef g(x):\n")
    for stream in (True, False):
        async with face_serving(script, run_length=len(script)) as face:
            frames = await face.generate(message_for(stop=["return"], stream=stream))
            kept = ids_of(frames)
            assert kept == script[: len(kept)]
            assert TOKENIZER.decode(kept).endswith("return")
            assert sum(frame.chunk.completion_tokens for frame in frames) == (len(kept) if stream else 0)


@in_loop
async def test_drafts_are_counted_and_those_in_the_output_are_part_of_it() -> None:
    async with face_serving(SCRIPT, run_length=5) as face:
        # Runs of four drafts and a token of the target's: 5 + 5, then 2 of a run, then 1.
        for max_tokens, accepted, drafted in ((10, 8, 8), (12, 10, 12), (11, 9, 12), (1, 1, 4)):
            [complete] = completes_of(await face.generate(message_for(max_tokens=max_tokens)))
            assert (complete.spec_accepted_tokens, complete.spec_draft_tokens) == (accepted, drafted)
            assert complete.spec_accepted_tokens <= max_tokens


@in_loop
async def test_log_probabilities_go_with_the_ids_of_their_frame() -> None:
    async with face_serving(SCRIPT) as face:
        frames = await face.generate(message_for(max_tokens=7, logprobs=2))
        for part in [frame.chunk for frame in frames if frame.HasField("chunk")]:
            told = logprobs_of(part.token_ids, 2)
            assert list(part.output_logprobs.token_ids) == list(part.token_ids)
            assert list(part.output_logprobs.token_logprobs) == [one.logprob for one in told]
            assert [list(top.token_ids) for top in part.output_logprobs.top_logprobs] == [[0, 1]] * len(part.token_ids)
            assert [list(top.values) for top in part.output_logprobs.top_logprobs] == [[0, -0.25]] * len(part.token_ids)
            assert not part.HasField("input_logprobs")
        plain = await face.generate(message_for(max_tokens=7))
        assert not any(frame.chunk.HasField("output_logprobs") for frame in plain)


@pytest.mark.parametrize("ids", [(5, 6, 7), (5,)], ids=["several", "one"])
def test_the_prompts_log_probabilities_come_once_with_an_empty_first_one(ids: tuple[int, ...]) -> None:
    @in_loop
    async def scenario() -> None:
        async with face_serving(SCRIPT) as face:
            frames = await face.generate(message_for(ids=ids, max_tokens=20, prompt_logprobs=1, n=2))
            parts = [frame.chunk if frame.HasField("chunk") else frame.complete for frame in frames]
            first = next(part for part in parts if part.index == 0)
            assert [part for part in parts if part.HasField("input_logprobs")] == [first]
            told = first.input_logprobs
            assert list(told.token_ids) == list(ids)
            assert [one.value if one.HasField("value") else None for one in told.token_logprobs] == [
                None,
                *(-token_id / 4 for token_id in ids[1:]),
            ]
            assert [len(top.token_ids) for top in told.top_logprobs] == [0, *[1] * (len(ids) - 1)]

    scenario()


@in_loop
async def test_ids_of_requests_are_echoed_taken_from_metadata_or_made() -> None:
    async with face_serving() as face:
        call = face.stub.Generate(message_for(max_tokens=5, request_id="mine"))
        frames = [frame async for frame in call]
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-request-id"], trailing["x-tokens-sent"]) == ("mine", str(len(ids_of(frames))))
        whole = face.stub.Generate(message_for(max_tokens=5, stream=False), metadata=(("x-request-id", "gateway"),))
        [_] = [frame async for frame in whole]
        assert dict(await whole.trailing_metadata())["x-tokens-sent"] == "5"
        await face.generate(message_for(max_tokens=1))
        names = [request.request_id for request in face.engine.submitted]
        assert names[:2] == ["mine", "gateway"]
        assert names[2]
        assert {request.origin.face for request in face.engine.submitted} == {"vllm.grpc.engine.VllmEngine"}


@in_loop
async def test_refusals_have_their_codes_and_this_faces_names() -> None:
    one_slot = replace(DESCRIPTION, num_slots=1)
    async with face_serving(steps_by_itself=False, max_waiting=0, description=one_slot) as face:
        generate = face.stub.Generate
        assert await status_of(generate(vllm.GenerateRequest())) == (
            Code.INVALID_ARGUMENT,
            "input: none is given; set tokenized or text",
        )
        code, text = await status_of(generate(message_for(ids=[5000])))
        assert (code, text.partition(":")[0]) == (Code.INVALID_ARGUMENT, "tokenized.input_ids[0]")
        code, text = await status_of(generate(message_for(ids=[])))
        assert code is Code.INVALID_ARGUMENT
        code, text = await status_of(generate(message_for(n=2)))
        assert (code, text.partition(":")[0]) == (Code.INVALID_ARGUMENT, "sampling_params.n")
        code, text = await status_of(generate(vllm.GenerateRequest(text="x", kv_transfer_params_json="{}")))
        assert (code, text.partition(":")[0]) == (Code.UNIMPLEMENTED, "kv_transfer_params_json")
        first = generate(message_for(request_id="twice"))
        await face.engine.until(lambda: len(face.engine.live) == 1)
        assert (await status_of(generate(message_for(request_id="twice"))))[0] is Code.ALREADY_EXISTS
        assert (await status_of(generate(message_for())))[0] is Code.RESOURCE_EXHAUSTED
        face.engine.set_serving(False)
        code, text = await status_of(generate(message_for()))
        assert code is Code.UNAVAILABLE
        first.cancel()
        await face.engine.until(lambda: not face.engine.live)


@in_loop
async def test_a_constraint_that_cannot_be_followed_is_named_as_it_was_given() -> None:
    async with face_serving() as face:

        async def refuse_all(constraint: object) -> None:
            raise InvalidRequest("constraint.lark", "line 1(7): unknown name")

        face.engine.prepare = refuse_all  # type: ignore[method-assign, assignment]
        code, text = await status_of(face.stub.Generate(message_for(grammar="start: nope")))
        assert (code, text) == (Code.INVALID_ARGUMENT, "sampling_params.grammar: line 1(7): unknown name")


@in_loop
async def test_nothing_goes_out_before_the_first_frame_so_that_a_gateway_may_ask_another_server() -> None:
    async with face_serving(steps_by_itself=False) as face:
        call = face.stub.Generate(message_for())
        await face.engine.until(lambda: bool(face.engine.live))
        headers = asyncio.ensure_future(call.initial_metadata())
        face.engine.step()
        await headers
        early = face.stub.Generate(message_for())
        await face.engine.until(lambda: len(face.engine.live) == 2)
        face.engine.fail(face.engine.submitted[1].uid, Unavailable("a worker was lost"))
        assert (await status_of(early))[0] is Code.UNAVAILABLE
        assert "x-request-id" not in dict(await early.initial_metadata())
        assert dict(await early.trailing_metadata())["x-tokens-sent"] == "0"
        call.cancel()
        await face.engine.until(lambda: not face.engine.live)


@in_loop
async def test_an_error_in_mid_stream_comes_behind_what_was_committed() -> None:
    async with face_serving(steps_by_itself=False) as face:
        for error, code in (
            (Unavailable("a worker was lost"), Code.UNAVAILABLE),
            (InternalError("a defect"), Code.INTERNAL),
        ):
            call = face.stub.Generate(message_for())
            await face.engine.until(lambda: bool(face.engine.live))
            face.engine.step()
            face.engine.fail(face.engine.submitted[-1].uid, error)
            frames = aiter(call)
            assert len((await anext(frames)).chunk.token_ids) == 3
            assert await status_of(frames) == (code, str(error))


@in_loop
async def test_an_abort_ends_every_sequence_with_that_word_and_frees_the_work() -> None:
    async with face_serving(steps_by_itself=False) as face:
        call = face.stub.Generate(message_for(request_id="gone", n=2))
        other = face.stub.Generate(message_for(request_id="gone-not", max_tokens=3))
        await face.engine.until(lambda: len(face.engine.live) == 3)
        face.engine.step()
        frames = aiter(call)
        first = [await anext(frames) for _ in range(2)]
        assert {frame.chunk.index for frame in first} == {0, 1}
        await abort(face, "gone")
        await abort(face, "gone", "gone")
        last = [frame async for frame in frames]
        assert [(one.index, one.finish_reason, one.prompt_tokens) for one in completes_of(last)] == [
            (0, "abort", 3),
            (1, "abort", 3),
        ]
        assert not face.engine.live
        assert len(ids_of([frame async for frame in other])) == 3
        assert len(face.engine.aborted) == 2
        # The name is free again, and its old abort does not meet the next request.
        await abort(face, "gone")
        again = face.stub.Generate(message_for(request_id="gone", max_tokens=1))
        await face.engine.until(lambda: len(face.engine.live) == 1)
        face.engine.step()
        assert completes_of([frame async for frame in again])[0].finish_reason == "length"


@in_loop
async def test_an_abort_ends_the_work_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written, may_go_on = asyncio.Event(), asyncio.Event()

    async def write(sent: Sent, *frame: object, **counts: object) -> None:
        written.set()
        await may_go_on.wait()

    monkeypatch.setattr(Sent, "write", write)
    async with face_serving(SCRIPT, steps_by_itself=False) as face:
        call = face.stub.Generate(message_for(request_id="held", max_tokens=50))
        await face.engine.until(lambda: bool(face.engine.live))
        face.engine.step()
        await written.wait()
        await abort(face, "held")
        assert (len(face.engine.live), len(face.engine.aborted)) == (0, 1)
        may_go_on.set()
        assert await call.code() is Code.OK


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_reaches_what_waits_and_what_is_not_streamed(stream: bool) -> None:
    @in_loop
    async def scenario() -> None:
        async with face_serving(steps_by_itself=False) as face:
            call = face.stub.Generate(message_for(request_id="gone", stream=stream))
            await face.engine.until(lambda: bool(face.engine.live))
            await abort(face, "gone")
            [complete] = completes_of([frame async for frame in call])
            assert (complete.finish_reason, complete.completion_tokens) == ("abort", 0)
            assert not face.engine.live

    scenario()


@in_loop
async def test_an_abort_may_come_before_its_request_or_while_it_is_read() -> None:
    witness = Witness()
    async with face_serving(steps_by_itself=False, observer=witness) as face:
        await abort(face, "early")
        assert await status_of(face.stub.Generate(message_for(request_id="early"))) == (
            Code.CANCELLED,
            "the caller has aborted the request",
        )
        reached, never = asyncio.Event(), asyncio.Event()

        async def compile_for_ever(constraint: object) -> None:
            reached.set()
            await never.wait()

        face.engine.prepare = compile_for_ever  # type: ignore[method-assign, assignment]
        call = face.stub.Generate(message_for(request_id="reading", regex="a"))
        await reached.wait()
        await abort(face, "reading")
        assert (await status_of(call))[0] is Code.CANCELLED
        assert not face.engine.submitted
    assert [(told.request_id, told.code) for told in witness.requests] == [
        ("early", "CANCELLED"),
        ("reading", "CANCELLED"),
    ]


@in_loop
async def test_aborts_that_mean_nothing_change_nothing() -> None:
    async with face_serving(steps_by_itself=False) as face:
        call = face.stub.Generate(message_for(request_id="gateway-12", max_tokens=3))
        await face.engine.until(lambda: bool(face.engine.live))
        await abort(face)
        await abort(face, "", "gateway-1", "gateway-123", "g" * 300)
        code, text = await status_of(face.stub.Abort(vllm.AbortRequest(request_ids=map(str, range(1025)))))
        assert (code, text.partition(":")[0]) == (Code.INVALID_ARGUMENT, "request_ids")
        face.engine.step()
        assert completes_of([frame async for frame in call])[0].finish_reason == "length"


@in_loop
async def test_a_cancelled_call_and_its_abort_in_either_order_end_the_work_once() -> None:
    async with face_serving(steps_by_itself=False) as face:
        for abort_first in (True, False):
            call = face.stub.Generate(message_for(request_id=f"race-{abort_first}"))
            await face.engine.until(lambda: bool(face.engine.live))
            aborting = asyncio.create_task(abort(face, f"race-{abort_first}")) if abort_first else None
            call.cancel()
            await (aborting or abort(face, f"race-{abort_first}"))
            await face.engine.until(lambda: not face.engine.live)
        assert sorted(set(face.engine.aborted)) == [request.uid for request in face.engine.submitted]


@in_loop
async def test_a_request_of_another_face_is_not_this_faces_to_abort() -> None:
    async with face_serving(steps_by_itself=False) as face:
        front: Front = face.front
        call = front.client.call(request_for(request_id="ours", max_tokens=3))
        await face.engine.until(lambda: bool(face.engine.live))
        await abort(face, "ours")
        face.engine.step()
        assert len([frame async for frame in call]) == 1


@in_loop
async def test_a_pinned_rank_is_refused_where_there_are_several() -> None:
    async with face_serving(mesh=Mesh(dp=2, tp=1, ep=1)) as face:
        pinned = vllm.GenerateRequest(text="x", data_parallel_rank=1)
        code, text = await status_of(face.stub.Generate(pinned))
        assert (code, text.partition(":")[0]) == (Code.UNIMPLEMENTED, "data_parallel_rank")
    async with face_serving() as face:
        pinned = vllm.GenerateRequest(text="x", data_parallel_rank=0, stream=True)
        assert completes_of(await face.generate(pinned))
