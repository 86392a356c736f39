"""A rank answers to its own runtime: whoever has not the secret of its life learns nothing, takes nothing, and keeps
nobody waiting."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence

import grpc
import pytest
from fakes import echo_worker
from grpc_health.v1 import health_pb2

from configs.access import WorkerTlsSettings
from outrider.v1 import worker_pb2
from workers import wire
from workers.channel import LOOPBACK, make_channel
from workers.client import WorkerClient
from workers.server import NUM_THREADS, serve_worker
from workers.terms import SECRET_KEY, LinkTerms

SECRET = echo_worker.TERMS.secret

METHODS = [
    *(
        f"/{service.full_name}/{method.name}"
        for file in (worker_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    ),
    "/outrider.v1.WorkerService/Explode",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
]

STRANGERS: dict[str, Sequence[tuple[str, str | bytes]]] = {
    "nothing": (),
    "another": ((SECRET_KEY, "another"),),
    "an empty one": ((SECRET_KEY, ""),),
    "the beginning": ((SECRET_KEY, SECRET[:-1]),),
    "more than it": ((SECRET_KEY, SECRET + "x"),),
    "under another key": (("authorization", f"Bearer {SECRET}"), ("secret", SECRET)),
    "in binary": ((f"{SECRET_KEY}-bin", SECRET.encode()),),
}


@pytest.fixture
def address() -> Iterator[str]:
    echo_worker.GATE.clear()
    echo_worker.WAITING.clear()
    server, address = serve_worker(
        echo_worker.load, epoch=1, secret=SECRET, bind_host=LOOPBACK, advertise_host=None, ports=range(1)
    )
    yield address
    echo_worker.GATE.set()
    server.stop(None).wait()


def refusal(channel: grpc.Channel, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[object, str]:
    """What a call gets: its code and words."""
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=5))
    return caught.value.code(), caught.value.details()


def test_methods_are_all_of_both_services() -> None:
    assert {method.rpartition("/")[2] for method in METHODS} >= {
        *("Load", "Execute", "CheckIntegrity", "Prepare", "Check", "Watch")
    }


@pytest.mark.parametrize("shown", STRANGERS)
def test_a_stranger_gets_one_answer_to_everything_and_claims_nothing(address: str, shown: str) -> None:
    with make_channel(address) as channel:
        answers = {refusal(channel, method, STRANGERS[shown]) for method in METHODS}
    assert answers == {(grpc.StatusCode.UNAUTHENTICATED, "a rank answers to its own runtime")}
    serve_one_step(address)  # neither Load nor Execute has been taken


def test_strangers_who_send_nothing_and_never_leave_take_no_thread(address: str) -> None:
    never: list[Iterator[bytes]] = []
    with make_channel(address) as channel:
        calls = []
        for method in itertools.islice(itertools.cycle(METHODS), 4 * NUM_THREADS):
            never.append(iter(lambda: echo_worker.GATE.wait() and b"", b""))  # a request that does not come
            calls.append(channel.stream_stream(method)(never[-1]))
        serve_one_step(address)
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}


def test_a_stranger_does_not_make_the_rank_read_what_it_sends(address: str) -> None:
    with make_channel(address) as channel:
        call = channel.stream_stream("/outrider.v1.WorkerService/Execute")(iter([b"x" * (128 << 20)]), timeout=5)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    serve_one_step(address)


def test_refusals_do_not_fill_the_log_nor_tell_what_was_shown(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with make_channel(address) as channel:
        for _ in range(12):
            refusal(channel, METHODS[0], ((SECRET_KEY, "a-guess"),))
        serve_one_step(address)
    told = [record.getMessage() for record in caplog.records if record.name == "workers.terms"]
    assert [text.partition(" calls")[0] for text in told] == ["1", "10"]
    assert LOOPBACK in told[0]
    assert not any(secret in record.getMessage() for record in caplog.records for secret in (SECRET, "a-guess"))


def test_every_life_has_a_secret_of_its_own_which_no_text_shows() -> None:
    first, second = (LinkTerms.fresh(WorkerTlsSettings()) for _ in range(2))
    assert first.secret != second.secret
    assert len(first.secret) >= 32
    assert first.secret not in f"{first} {first!r}"


def serve_one_step(address: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, echo_worker.TERMS)
        try:
            async with asyncio.timeout(5):
                await client.load(echo_worker.settings(), lambda *_: None)
                plan = echo_worker.plan(1, 1)
                assert (await client.execute(plan, wire.encode_plan(plan))).step_id == 1
                assert await client.check_integrity() == ["1 steps"]
        finally:
            await client.close()

    asyncio.run(run())
