"""Each check of `outrider doctor`, both ways: what it says where all is well, and what where it is not."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fakes.inquiries import (
    CHECKPOINT,
    DEVICES,
    GIB,
    GPU,
    MACHINE,
    inquiry,
    levels,
    proc_with,
    text_of,
    with_room,
)

from configs.load import demo_checkpoint
from runtime.doctor import cluster, devices, disk, limits, memory, model, ports, versions
from runtime.doctor.child import ChildFailed


def test_python_and_packages_by_the_numbers_of_their_releases() -> None:
    assert levels(versions.check_python(inquiry(), "3.12.1")) == ["ok"]
    assert "3.10.9" in text_of(versions.check_python(inquiry(), "3.10.9"))
    assert levels(versions.check_python(inquiry(), "3.10.9")) == ["failure"]

    def version_of(name: str) -> str:
        known = {"fine": "2.13.0+cpu", "old": "1.9.9", "new": "9.0"}
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    def look(*requirements: str, **settings: Any) -> str:
        return text_of(versions.check_packages(inquiry(**settings), requirements, version_of))

    assert look("fine>=2.9", "old<2,>=1.9") == "ok: 2 packages are there, in versions that fit; "
    assert "failure: old is 1.9.9, and >=1.10 is needed; pip install 'old>=1.10'" in look("old>=1.10")
    assert "failure: new is 9.0, and <9,>=7 is needed" in look("new<9,>=7")
    assert "failure: missing is not installed" in look("missing>=1")
    assert "failure" not in look("missing; extra == 'dev'")
    tracing = "missing>=1; extra == 'otel'"
    assert "note: the extra otel is not installed: nothing can be traced" in look(tracing)
    assert "pip install 'outrider[otel]'" in look(tracing, tracing__endpoint="http://127.0.0.1:4317")


def test_the_packages_of_this_very_installation_fit() -> None:
    assert "failure" not in levels(versions.check_packages(inquiry()))
    assert levels(versions.check_stubs(inquiry())) == ["ok"]


def test_stubs_that_their_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "STUBS", ("runtime.nowhere",))
    assert levels(versions.check_stubs(inquiry())) == ["failure"]


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_ports_that_are_free_and_taken() -> None:
    assert levels(ports.check_ports(inquiry(server__port=0))) == ["ok", "ok"]
    with taken_port() as port:
        for key in ("server__port", "operator__port", "metrics__port"):
            found = text_of(ports.check_ports(inquiry(**{"server__port": 0, "metrics__port": 0, key: port})))
            assert f"failure: cannot listen on 127.0.0.1:{port}" in found
            assert key.replace("__", ".") in found
    assert "give server.host an address" in text_of(ports.check_ports(inquiry(server__host="nowhere.invalid")))


def test_enough_ports_for_ranks() -> None:
    assert levels(ports.check_worker_ports(inquiry())) == ["ok"]
    elsewhere = inquiry(cluster__worker_bind_host="192.0.2.7")
    assert "ranks cannot listen on 192.0.2.7" in text_of(ports.check_worker_ports(elsewhere))
    with taken_port() as port:
        bounds = {"cluster__worker_port_min": port, "cluster__worker_port_max": port}
        assert levels(ports.check_worker_ports(inquiry(**bounds))) == ["failure"]
        assert levels(ports.check_worker_ports(inquiry(**bounds, cluster__ray_address="127.0.0.1:6379"))) == ["warning"]
    with taken_port() as port:
        pass
    bounds = {"cluster__worker_port_min": port, "cluster__worker_port_max": port}
    assert levels(ports.check_worker_ports(inquiry(**bounds))) == ["ok"]
    assert levels(ports.check_worker_ports(inquiry(**bounds, server__port=port))) == ["failure"], "the front takes it"


def test_torch_and_gpus() -> None:
    assert levels(devices.check_torch(inquiry())) == ["ok", "note"]
    assert "libtorch is a teapot" in text_of(devices.check_torch(inquiry(devices=None)))
    assert "failure: model.device is cuda" in text_of(devices.check_torch(inquiry(model__device="cuda")))
    gpus = DEVICES | {"cuda": "13.0", "gpus": [GPU], "nccl": "2.27", "kernels": ["triton"]}
    assert levels(devices.check_torch(inquiry(devices=gpus))) == ["ok", "ok"]
    two = text_of(devices.check_torch(inquiry(devices=gpus, parallel__tp=2)))
    assert "failure: 2 ranks need a GPU each, and there are 1" in two
    assert "failure" not in text_of(devices.check_torch(inquiry(devices=gpus, parallel__tp=2, model__device="cpu")))
    plain = text_of(devices.check_torch(inquiry(devices=gpus | {"kernels": []})))
    assert "warning: neither flashinfer nor triton" in plain


def test_collectives_by_meeting() -> None:
    asked: list[tuple[str, ...]] = []

    def meet(*command: str, timeout_s: float) -> dict[str, Any]:
        asked.append(command)
        return {"problem": "nobody came" if command[2] in broken else ""}

    def look(**more: Any) -> str:
        return text_of(devices.check_collectives(inquiry(**more), meet))

    broken: set[str] = set()
    assert look().startswith("ok: gloo")
    assert "not looked at" in look(devices=None)
    assert "failure: torch is built without gloo" in look(devices=DEVICES | {"gloo": False})
    assert "failure: cluster.collectives is nccl" in look(cluster__collectives="nccl", parallel__tp=2)
    assert "warning: cluster.collectives is nccl" in look(cluster__collectives="nccl"), "one rank serves all the same"
    gpus = DEVICES | {"gpus": [GPU] * 4, "nccl": "2.27"}
    asked.clear()
    assert "ok: nccl: 2 processes" in look(devices=gpus, parallel__tp=2)
    assert [command[2:4] for command in asked] == [("gloo", "--size=2"), ("nccl", "--size=2")]
    broken = {"gloo", "nccl"}
    assert "warning: gloo" in look()
    both = look(devices=gpus, parallel__tp=2)
    assert "failure: gloo" in both
    assert "failure: nccl" in both
    assert "NCCL_SOCKET_IFNAME" in both


def test_collectives_that_hang_are_a_failure() -> None:
    def hang(*command: str, timeout_s: float) -> dict[str, Any]:
        raise ChildFailed("nothing came of it within 40 s")

    assert "failure: gloo" in text_of(devices.check_collectives(inquiry(parallel__tp=2), hang))


NODE = {"host": "node-1", "total": {"CPU": 4.0}, "free": {"CPU": 1.0}}


def test_ray_is_entered_and_has_room() -> None:
    def answer(*command: str, timeout_s: float, given: str) -> dict[str, Any]:
        return {"nodes": [NODE, NODE], "version": "2.60.0"}

    def refuse(*command: str, timeout_s: float, given: str) -> dict[str, Any]:
        raise ChildFailed("ConnectionError: nobody listens")

    def look(ask: Any = answer, **settings: Any) -> str:
        return text_of(cluster.check_ray(inquiry(cluster__launcher="ray", **settings), ask))

    assert levels(cluster.check_ray(inquiry(), answer)) == ["note"]
    assert look() == "ok: a Ray of our own, version 2.60.0: 2 nodes; "
    assert "session_latest" in look(refuse)
    joined = {"cluster__ray_address": "127.0.0.1:6379"}
    assert "ok: it has room for 2 ranks of {CPU: 1}" in look(**joined, parallel__tp=2)
    assert "warning: it has room for 2 of 4 ranks" in look(**joined, parallel__tp=4)
    assert "failure: it has room for 8 ranks of {CPU: 1}, and 16 are wanted" in look(**joined, parallel__tp=16)
    assert "room for 0 ranks of {CPU: 1, GPU: 1}" in look(**joined, model__device="cuda")
    assert "ray status" in look(refuse, **joined)


def test_a_checkpoint_that_fits_and_some_that_do_not(tmp_path: Path) -> None:
    assert levels(model.check_checkpoint(inquiry())) == ["ok"]
    misfit = CHECKPOINT | {"problem": "config.json: 3 missing: a, b, c; download it again"}
    assert levels(model.check_checkpoint(inquiry(checkpoint=misfit))) == ["failure"]
    assert levels(model.check_checkpoint(inquiry(checkpoint=None))) == ["failure"]
    assert levels(model.check_checkpoint(inquiry(checkpoint=CHECKPOINT | {"num_slots": 3, "gamma_max": 0}))) == [
        "ok",
        "note",
        "note",
    ]
    assert "choose other parallel sizes" in text_of(model.check_checkpoint(inquiry(parallel__tp=7)))
    (tmp_path / "config.json").write_text('{"model_type": "another"}')
    assert levels(model.check_checkpoint(inquiry(model__path=tmp_path))) == ["failure"]


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    assert levels(model.check_tokenizer(inquiry())) == ["ok"]
    source = demo_checkpoint()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    look = inquiry(model__path=tmp_path)
    assert levels(model.check_tokenizer(look)) == ["note"]
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    assert levels(model.check_tokenizer(look)) == ["warning"]
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    assert levels(model.check_tokenizer(look)) == ["failure"]
    (tmp_path / "tokenizer.json").unlink()
    assert levels(model.check_tokenizer(look)) == ["failure"]


def test_a_profile_is_missed_where_the_policy_needs_one(tmp_path: Path) -> None:
    look = {"state_dir": tmp_path}
    assert levels(model.check_profile(inquiry(**look))) == ["note"]
    dynamic = {**look, "speculation__policy": "dynamic"}
    assert levels(model.check_profile(inquiry(**dynamic))) == ["warning"]
    assert "`outrider profile`" in text_of(model.check_profile(inquiry(**dynamic)))
    assert levels(model.check_profile(inquiry(**dynamic, speculation__measure_profile=True))) == ["note"]
    assert levels(model.check_profile(inquiry(**dynamic, checkpoint=None))) == ["note"]
    assert levels(model.check_profile(inquiry(**dynamic, cluster__ray_address="127.0.0.1:6379"))) == ["note"]


def test_memory_of_the_machine_the_container_and_gpus(tmp_path: Path) -> None:
    def look(machine: Any, found: dict[str, Any] | None = CHECKPOINT, **more: Any) -> list[str]:
        return levels(memory.check_memory(inquiry(machine=machine, checkpoint=found, **more)))

    assert look(proc_with(tmp_path, 8 << 20)) == ["ok"]
    assert look(proc_with(tmp_path, 1 << 20)) == ["failure"]
    assert look(proc_with(tmp_path, 1400 << 10)) == ["warning"]
    assert look(proc_with(tmp_path, 8 << 20, most=str(GIB))) == ["failure"], "the container's limit counts"
    assert look(proc_with(tmp_path, 8 << 20, most=str(8 * GIB), current=7 * GIB)) == ["failure"]
    assert look(replace(MACHINE, proc=tmp_path / "none", cgroup=tmp_path / "none")) == ["note"]
    assert look(MACHINE, None) == ["note"]
    assert look(MACHINE, cluster__ray_address="127.0.0.1:6379") == ["note"]
    on_gpu = CHECKPOINT | {"device": "cuda", "parameter_bytes": [70 * GIB]}
    big = proc_with(tmp_path, 90 << 20)
    assert look(big, on_gpu, devices=DEVICES | {"gpus": [GPU]}) == ["ok", "ok"]
    assert look(big, on_gpu, devices=DEVICES | {"gpus": [GPU | {"free_bytes": 60 * GIB}]}) == ["failure", "ok"]


def test_room_on_disks_and_in_shared_memory(tmp_path: Path) -> None:
    for free, level in ((50 * GIB, "ok"), (GIB // 2, "warning"), (1 << 20, "failure")):
        machine = with_room(free)
        assert levels(disk.check_state_dir(inquiry(machine=machine, state_dir=tmp_path / "new" / "folder"))) == [level]
        assert levels(disk.check_temporary(inquiry(machine=machine))) == [level]
    assert not (tmp_path / "new").exists(), "it looks, and makes nothing"
    (tmp_path / "file").write_text("")
    assert levels(disk.check_state_dir(inquiry(state_dir=tmp_path / "file" / "below"))) == ["failure"]
    elsewhere = replace(MACHINE, environment={"TMPDIR": str(tmp_path / "gone")})
    assert levels(disk.check_temporary(inquiry(machine=elsewhere))) == ["failure"]

    small = with_room(64 << 20, 64 << 20)
    assert levels(disk.check_shared_memory(inquiry(machine=small))) == ["ok"], "one rank, no Ray: nobody needs it"
    assert levels(disk.check_shared_memory(inquiry(machine=small, cluster__launcher="ray"))) == ["warning"]
    assert levels(disk.check_shared_memory(inquiry(cluster__launcher="ray", parallel__tp=2))) == ["ok"]


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    def missing(path: Path) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    machine = replace(MACHINE, total_bytes=missing)
    assert levels(disk.check_shared_memory(inquiry(machine=machine))) == ["ok"]
    assert levels(disk.check_shared_memory(inquiry(machine=machine, cluster__launcher="ray"))) == ["failure"]


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, whom tests may run as, may write anywhere
    assert levels(disk.check_state_dir(inquiry(state_dir=tmp_path))) == ["failure"]
    assert levels(disk.check_temporary(inquiry())) == ["failure"]


def test_limits_of_the_process() -> None:
    def look(**values: int) -> list[str]:
        def limit(which: int) -> tuple[int, int]:
            names = {
                resource.RLIMIT_NOFILE: "files",
                resource.RLIMIT_NPROC: "processes",
                resource.RLIMIT_STACK: "stack",
            }
            value = values.get(names[which], resource.RLIM_INFINITY)
            return value, value

        return levels(limits.check_limits(inquiry(machine=replace(MACHINE, limit=limit))))

    assert look() == ["ok", "ok", "ok"]
    assert look(files=2048) == ["warning", "ok", "ok"]
    assert look(files=256) == ["failure", "ok", "ok"]
    assert look(processes=512, stack=1 << 16) == ["ok", "warning", "warning"]


def test_cpus_for_all_threads(tmp_path: Path) -> None:
    def look(num_cpus: int, quota: str = "max 100000", **settings: Any) -> list[str]:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        return levels(
            limits.check_cpus(inquiry(machine=replace(MACHINE, num_cpus=num_cpus, cgroup=tmp_path), **settings))
        )

    assert look(2) == ["ok"]
    assert look(2, parallel__tp=2) == ["note"]
    assert look(2, parallel__tp=2, cluster__worker_threads=2) == ["warning"]
    assert look(8, "150000 100000", parallel__tp=2) == ["warning"], "the container has one and a half"
    assert look(1, cluster__ray_address="127.0.0.1:6379") == ["note"]


def test_thread_variables_are_numbers() -> None:
    def look(**environment: str) -> list[str]:
        return levels(limits.check_threads(inquiry(machine=replace(MACHINE, environment=environment))))

    assert look() == look(OMP_NUM_THREADS="4") == ["ok"]
    assert look(OMP_NUM_THREADS="many") == look(MKL_NUM_THREADS="0") == ["warning"]


def test_the_clock() -> None:
    def look(**changes: Any) -> list[str]:
        return levels(limits.check_clock(inquiry(machine=replace(MACHINE, **changes))))

    assert look() == look(is_clock_kept=lambda: None) == ["ok"]
    assert look(is_clock_kept=lambda: False) == ["warning"]
    assert look(now=lambda: datetime.fromisoformat("1970-01-01T00:10:00+00:00")) == ["failure"]
