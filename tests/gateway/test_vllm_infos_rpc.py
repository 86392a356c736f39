"""What vllm.grpc.engine.VllmEngine tells of model, server, load and health; and what it does not do."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import tokenizers
from fakes.engine import DESCRIPTION
from fakes.front import in_loop, status_of
from gateway.vllm_face import Face, face_serving, message_for
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from configs.load import demo_checkpoint
from parallel.mesh import Mesh
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import MissingFeature
from runtime.front.vllm import checkpoint, presence
from runtime.front.vllm.checkpoint import CHUNK_BYTES, CheckpointFacts, TokenizerArchive, defaults_json
from runtime.front.vllm.loads import SHORTEST_S, OutputRate
from runtime.front.vllm.service import VllmEngine

Code = grpc.StatusCode
FACE = presence.VLLM_ENGINE


async def loads_of(face: Face, **fields: int) -> Sequence[vllm.SchedulerLoad]:
    return list((await face.stub.GetLoads(vllm.GetLoadsRequest(**fields))).loads)


@in_loop
async def test_the_model_is_described_as_it_is_served() -> None:
    async with face_serving() as face:
        info = await face.stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, info.vocab_size) == ("demo", "qwen3_next", 4096)
        assert (info.max_context_length, info.max_req_input_len) == (512, 511)
        assert (list(info.eos_token_ids), info.is_generation, info.supports_vision) == ([0], True, False)
        assert list(info.architectures) == ["Qwen3NextForCausalLM"]
        # Where the gateway is on the same machine it reads the files there; elsewhere it asks for them.
        assert Path(info.tokenizer_path) == Path(info.model_path) == demo_checkpoint()
        assert info.default_sampling_params_json == ""


@in_loop
async def test_the_server_is_described_as_it_is_now() -> None:
    async with face_serving(steps_by_itself=False, mesh=Mesh(dp=2, tp=1, ep=1)) as face:
        info = await face.stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (info.active_requests, info.is_paused, info.last_receive_timestamp) == (0, False, 0.0)
        assert (info.data_parallel_size, info.max_num_seqs, info.block_size) == (2, 128, 16)
        assert (info.server_type, info.constrained_decoding_start) == ("outrider", "first_token")
        call = face.stub.Generate(message_for(n=2))
        await face.engine.until(lambda: len(face.engine.live) == 2)
        face.engine.drain()
        info = await face.stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (info.active_requests, info.is_paused) == (2, True)
        assert info.last_receive_timestamp > 0
        assert info.uptime_seconds > 0
        call.cancel()


@in_loop
async def test_loads_are_told_per_rank_and_add_up() -> None:
    small = replace(DESCRIPTION, num_slots=2, num_pages=(1000, 100))
    async with face_serving(steps_by_itself=False, mesh=Mesh(dp=2, tp=1, ep=1), description=small) as face:
        assert [load.num_total_reqs for load in await loads_of(face)] == [0, 0]
        calls = [face.stub.Generate(message_for(ids=[1] * 30, max_tokens=100)) for _ in range(7)]
        await face.engine.until(lambda: len(face.engine.live) == 7)
        face.engine.step()
        loads = await loads_of(face)
        assert [load.dp_rank for load in loads] == [0, 1]
        assert [load.num_running_reqs for load in loads] == [2, 2]
        # One queue for all ranks: three wait, and each rank is told its share.
        assert [load.num_waiting_reqs for load in loads] == [2, 1]
        assert sum(load.num_waiting_uncached_tokens for load in loads) == 3 * 30
        for load in loads:
            assert load.num_total_reqs == load.num_running_reqs + load.num_waiting_reqs
            assert (load.max_running_requests, load.utilization) == (2, 1.0)
            # Of the group that is fullest, in whole pages.
            assert load.max_total_num_tokens == 100 * 16
            assert load.num_used_tokens % 16 == 0
            assert load.token_usage == pytest.approx(load.num_used_tokens / (100 * 16))
            assert 0 < load.token_usage < 1
        [second] = await loads_of(face, dp_rank=1)
        assert second.dp_rank == 1
        for wrong in (-1, 2):
            code, text = await status_of(face.stub.GetLoads(vllm.GetLoadsRequest(dp_rank=wrong)))
            assert (code, text) == (Code.INVALID_ARGUMENT, f"dp_rank: {wrong} is no rank; there are 2, from 0")
        for call in calls:
            call.cancel()
        await face.engine.until(lambda: not face.engine.live)


@in_loop
async def test_sequences_that_share_a_waiting_prompt_count_its_tokens_once() -> None:
    async with face_serving(steps_by_itself=False) as face:
        call = face.stub.Generate(message_for(ids=[1] * 30, n=4))
        await face.engine.until(lambda: len(face.engine.live) == 4)
        [load] = await loads_of(face)
        assert (load.num_waiting_reqs, load.num_waiting_uncached_tokens) == (4, 30)
        call.cancel()


def test_a_rate_is_taken_between_readings_that_lay_apart() -> None:
    now = [10.0]
    rate = OutputRate(lambda: now[0])
    assert rate.read(1000) == 0.0
    now[0] += 2
    assert rate.read(1000) == 500.0
    now[0] += SHORTEST_S / 2
    assert rate.read(5000) == 500.0
    now[0] += SHORTEST_S / 2
    assert rate.read(5000) == 4000 / SHORTEST_S
    now[0] += 4
    assert rate.read(5000) == 0.0


@in_loop
async def test_health_agrees_with_grpcs_own_for_this_service() -> None:
    async with face_serving() as face:
        health = health_pb2_grpc.HealthStub(face.front.client.channel)

        async def said() -> tuple[bool, int]:
            mine = await face.stub.HealthCheck(vllm.HealthCheckRequest())
            return mine.healthy, (await health.Check(health_pb2.HealthCheckRequest(service=FACE))).status

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await said() == (True, serving)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=FACE))
        assert (await watch.read()).status == serving
        face.engine.drain()
        assert (await watch.read()).status == not_serving
        assert await said() == (False, not_serving)
        reply = await face.stub.HealthCheck(vllm.HealthCheckRequest())
        assert reply.message == "send new requests elsewhere (draining)"
        face.engine.resume()
        assert (await watch.read()).status == serving
        face.engine.set_serving(False)
        assert (await watch.read()).status == not_serving
        assert await said() == (False, not_serving)
        watch.cancel()


@in_loop
async def test_what_is_not_done_is_refused_by_name() -> None:
    async with face_serving() as face:
        for call, name in (
            (face.stub.Embed(vllm.EmbedRequest()), "Embed"),
            (face.stub.FlushCache(common_pb2.FlushCacheRequest()), "FlushCache"),
            (face.stub.StartProfile(common_pb2.StartProfileRequest()), "StartProfile"),
            (face.stub.StopProfile(common_pb2.StopProfileRequest()), "StopProfile"),
            (face.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()), "SubscribeKvEvents"),
        ):
            code, text = await status_of(call)
            assert code is Code.UNIMPLEMENTED
            assert text.startswith(f"{name}: ")


def test_every_method_of_the_service_is_answered_by_us() -> None:
    """A newer proto's method would say "Method not implemented!" and name nothing."""
    service = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
    assert {method.name for method in service.methods} <= vars(VllmEngine).keys()


@in_loop
async def test_the_tokenizer_comes_as_an_archive_with_its_fingerprint() -> None:
    async with face_serving() as face:

        async def fetch() -> bytes:
            chunks = [chunk async for chunk in face.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            data = b"".join(chunk.data for chunk in chunks)
            assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
            assert all(len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
            return data

        data, again = await asyncio.gather(fetch(), fetch())
        assert data == again
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert sorted(archive.namelist()) == [
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ]
            theirs = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        ours = tokenizers.Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
        assert theirs.encode("def f(x):").ids == ours.encode("def f(x):").ids


def test_replicas_have_one_archive_and_large_ones_come_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 100)
    parts = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("tokenizer.json", "chat_template.jinja", "vocab.json", "model.safetensors", "notes.txt"):
            (folder / file).write_text(f"{file} " * 40)
        parts.append(list(asyncio.run(TokenizerArchive(folder).chunks())))
    assert parts[0] == parts[1]
    assert len(parts[0]) > 3
    with zipfile.ZipFile(io.BytesIO(b"".join(part.data for part in parts[0]))) as archive:
        assert archive.namelist() == ["chat_template.jinja", "tokenizer.json", "vocab.json"]


def test_an_archive_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        archive = TokenizerArchive(tmp_path)
        with pytest.raises(MissingFeature, match="holds no tokenizer"):
            await archive.chunks()
        (tmp_path / "tokenizer.json").write_text("{}")
        assert list(await archive.chunks())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ((), -1, -1)),
        ({"architectures": ["A"], "bos_token_id": 3, "pad_token_id": None}, (("A",), 3, -1)),
        ({"bos_token_id": [7, 8], "pad_token_id": True}, ((), 7, -1)),
        ({"architectures": ["A"], "bos_token_id": 1, "text_config": {"bos_token_id": 2}}, (("A",), 2, -1)),
    ],
)
def test_facts_of_a_configuration(tmp_path: Path, config: object, expected: tuple[object, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = CheckpointFacts.load(tmp_path)
    assert (facts.architectures, facts.bos_token_id, facts.pad_token_id) == expected


def test_only_defaults_of_the_checkpoints_own_are_told() -> None:
    assert defaults_json(SamplingDefaults()) == ""
    own = SamplingDefaults(temperature=0.6, top_k=20)
    assert json.loads(defaults_json(own)) == {"temperature": 0.6, "top_k": 20}


def test_the_face_is_served_where_its_stubs_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert presence.why_absent() == ""
    for error, told in (
        (ModuleNotFoundError(name="smg_grpc_proto"), "smg-grpc-proto is not installed; pip install 'outrider[smg]'"),
        (ModuleNotFoundError(name="smg_grpc_proto.generated"), "smg-grpc-proto lacks smg_grpc_proto.generated"),
        (RuntimeError("grpc is too old"), "the installed smg-grpc-proto cannot be used: grpc is too old"),
    ):

        def fail(name: str, error: Exception = error) -> None:
            raise error

        presence.why_absent.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(presence.importlib, "import_module", fail)
            assert presence.why_absent().startswith(told)
        presence.why_absent.cache_clear()
