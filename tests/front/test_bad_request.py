"""A wrong field is told to people and to programs: in the status's text, and as a google.rpc.BadRequest beside it."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from fakes.front import in_loop, request_for, serving
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.v1 import inference_pb2, operator_pb2, operator_pb2_grpc, types_pb2
from runtime.front.errors import InvalidRequest
from runtime.front.inference_service import TOKENS_SENT_KEY
from runtime.front.status import MAX_DETAILS_BYTES, MAX_DETAILS_CHARS
from workers.demands import Constraint

MAX_HEADERS_BYTES = 8 * 1024
"""What peers take of headers in all, with 32 bytes for each."""


async def error_of(call: grpc.aio.UnaryStreamCall | grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:
    """Of a call that must fail."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def violation_of(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest.FieldViolation:
    """The one field that is named; checks that text and details agree, as clients of grpcio-status do."""
    status = rpc_status.from_call(error)
    assert status is not None
    [detail] = status.details
    bad_request = error_details_pb2.BadRequest()
    assert detail.Unpack(bad_request)
    [violation] = bad_request.field_violations
    assert error.details() == f"{violation.field}: {violation.description}" or error.details().endswith(" ...")
    return violation


@in_loop
async def test_a_wrong_field_is_named_by_its_path() -> None:
    sampling = types_pb2.Sampling
    async with serving() as front:
        for request, field in (
            (request_for(sampling=sampling(top_p=1.5)), "sampling.top_p"),
            (request_for(sampling=sampling(logit_bias={4096: 1.0})), "sampling.logit_bias[4096]"),
            (request_for(stop=["a", ""]), "stopping.stop[1]"),
            (request_for(ids=[1, 5000]), "token_ids.ids[1]"),
            (request_for(text=""), "text"),
            (inference_pb2.GenerateRequest(), "input"),
            (request_for(n=0), "n"),
        ):
            error = await error_of(front.client.call(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            violation = violation_of(error)
            assert violation.field == field
            assert violation.description
            trailers = dict(error.trailing_metadata())
            assert trailers[TOKENS_SENT_KEY] == "0"
            assert trailers["x-request-id"]
        assert not front.engine.submitted


@in_loop
async def test_what_the_engine_refuses_is_named_too() -> None:
    schema = '{"type": "object", "required": "x"}'
    async with serving() as front:
        constraint = types_pb2.Constraint(json_schema=schema)
        problem = "/required: 'x' is not an array"
        front.engine.problems[Constraint(kind="json_schema", text=schema)] = problem
        violation = violation_of(await error_of(front.client.call(request_for(constraint=constraint))))
        assert (violation.field, violation.description) == ("constraint.json_schema", problem)
        violation = violation_of(await error_of(front.client.call(request_for(n=64, max_tokens=500))))
        assert violation.field == "n"
        assert not front.engine.submitted


@in_loop
async def test_every_service_tells_it_so() -> None:
    async with serving() as front, grpc.aio.insecure_channel(front.address) as channel:
        operator = operator_pb2_grpc.OperatorServiceStub(front.client.channel)
        for call, field in (
            (operator.ListRequests(operator_pb2.ListRequestsRequest(limit=0)), "limit"),
            (operator.Abort(operator_pb2.AbortRequest()), "request_ids"),
            (channel.unary_unary("/outrider.v1.InferenceService/Tokenize")(b"\xff\xff"), "request"),
            (channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff"), "request"),
        ):
            assert violation_of(await error_of(call)).field == field


@in_loop
async def test_other_errors_have_a_plain_text() -> None:
    typical = types_pb2.Sampling(verification=types_pb2.VERIFICATION_TYPICAL)
    async with serving() as front:
        for request, code in (
            (request_for(model="gpt"), grpc.StatusCode.NOT_FOUND),
            (request_for(sampling=typical), grpc.StatusCode.FAILED_PRECONDITION),
        ):
            error = await error_of(front.client.call(request))
            assert error.code() is code
            assert rpc_status.from_call(error) is None


@pytest.mark.parametrize("filler", ["x", "é", "한", "😀", "\x01"])
@pytest.mark.parametrize("length", [500, 9000])
def test_a_long_text_of_any_script_fits_the_headers(filler: str, length: int) -> None:
    @in_loop
    async def scenario() -> None:
        text = filler * length
        async with serving() as front:
            front.engine.problems[Constraint(kind="regex", text=text)] = text
            request = request_for(constraint=types_pb2.Constraint(regex=text), request_id="r" * 256)
            error = await error_of(front.client.call(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            violation = violation_of(error)
            assert len(error.details()) <= MAX_DETAILS_CHARS
            assert len(error.details().encode()) <= MAX_DETAILS_BYTES
            assert violation.field == "constraint.regex"
            assert violation.description.startswith(filler * 200)
            encoded = sum(3 if byte > 126 or byte < 32 else 1 for byte in error.details().encode())
            details = dict(error.trailing_metadata())["grpc-status-details-bin"]
            assert encoded + len(details) * 4 / 3 + 256 + 6 * 64 < MAX_HEADERS_BYTES

    scenario()


@in_loop
async def test_a_field_that_turns_out_wrong_on_the_way_is_told_behind_what_went_out() -> None:
    async with serving([65], steps_by_itself=False) as front:
        call = front.client.call(request_for(max_tokens=50))
        await front.engine.until(lambda: bool(front.engine.live))
        front.engine.step()
        await call.read()
        [uid] = front.engine.live
        front.engine.fail(uid, InvalidRequest("constraint", "takes too much at a token"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = caught.value
        assert violation_of(error).field == "constraint"
        assert dict(error.trailing_metadata())[TOKENS_SENT_KEY] == "3"
