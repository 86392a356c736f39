"""What only a process with torch can find out about an installation: `python -m workers.checkup WHAT`. Prints one JSON
object; knows no runtime and reads no weight.

devices               torch, GPUs and their memory, what carries collectives, kernels
checkpoint            whether the files fit their config.json and the settings, and what a rank of them would take;
                      settings come on standard input as a WorkerSettings
collectives CARRIER   processes of this machine that add numbers up, as ranks do
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from configs.load import demo_checkpoint
from configs.schema import WorkerSettings
from parallel.collectives import CollectiveError, CollectiveLog, Group
from parallel.mesh import Mesh
from parallel.rendezvous import Carrier, RankGroups, c10d, join_groups
from state.accounting import MemoryPlan, plan_memory
from workers.address import join_address
from workers.channel import LOOPBACK
from workers.loading import checked_max_model_len, choose_dtype
from workers.machine import name_machine
from workers.models.checkpoint import Checkpoint
from workers.models.config import MTP_PREFIX, Qwen3NextConfig
from workers.models.layouts import shard_table
from workers.models.qwen3_next import Qwen3Next
from workers.models.rules import table_shapes
from workers.models.weights import check_parameters
from workers.ops.default import DefaultOps
from workers.plan import LoadError

KERNELS = ("flashinfer", "triton")
"""Packages that make GPUs faster where they are installed."""


def devices() -> dict[str, Any]:
    """Asks CUDA, which takes seconds where there are GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [
            {
                "name": torch.cuda.get_device_name(index),
                "total_bytes": torch.cuda.mem_get_info(index)[1],
                "free_bytes": torch.cuda.mem_get_info(index)[0],
            }
            for index in range(count)
        ],
        "nccl": _nccl_version() if count and c10d.is_nccl_available() else None,
        "gloo": bool(c10d.is_gloo_available()),
        "kernels": [name for name in KERNELS if importlib.util.find_spec(name) is not None],
    }


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def checkpoint(settings: WorkerSettings) -> dict[str, Any]:
    """`problem` says why a rank would refuse to load; "" where none would."""
    mesh = Mesh.of(settings.parallel)
    device = torch.device("cuda" if settings.model.device != "cpu" and torch.cuda.is_available() else "cpu")
    try:
        with Checkpoint.open(settings.model.path or demo_checkpoint()) as opened:
            drafts = opened.config.num_mtp_layers > 0 and settings.speculation.gamma_max > 0
            config = opened.config if drafts else replace(opened.config, num_mtp_layers=0)
            dtype = choose_dtype(settings, config, device)
            skipped = () if drafts else (MTP_PREFIX,)
            parameters: dict[int, dict[str, torch.Tensor]] = {}
            for rank in range(mesh.size):
                table = shard_table(config, mesh, rank)
                parameters[rank] = {
                    name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in table_shapes(table).items()
                }
                check_parameters(opened, table, parameters[rank], skip_prefixes=skipped)
            identity, num_tensors = opened.identity(), len(opened.tensors)
        memory = _memory(settings, mesh, config, parameters[0], dtype, drafts=drafts)
    except LoadError as error:
        return {"problem": str(error)}
    return {
        "problem": "",
        "model_type": config.model_type,
        "checkpoint": identity,
        "num_tensors": num_tensors,
        "dtype": str(dtype).removeprefix("torch."),
        "gamma_max": settings.speculation.gamma_max if drafts else 0,
        "parameter_bytes": [sum(map(_size, held.values())) for held in parameters.values()],
        "state_bytes": memory.total_bytes,
        "num_slots": memory.sizes.num_slots,
        "device": device.type,
        "machine": name_machine(device, settings.threads),
        "torch": torch.__version__,
    }


def _memory(
    settings: WorkerSettings,
    mesh: Mesh,
    config: Qwen3NextConfig,
    parameters: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    drafts: bool,
) -> MemoryPlan:
    """What rank 0 would allocate beside its parameters, which hold no numbers here. Raises LoadError."""
    log = CollectiveLog()

    def group(name: str, size: int) -> Group:
        return Group(name, 0, size, None if size == 1 else object(), log)  # nothing is ever sent

    tp = group("tp.0", mesh.tp)
    groups = RankGroups(mesh=mesh, rank=0, tp=tp, world=group("world", mesh.size), log=log)
    max_model_len = checked_max_model_len(settings.cache, config)
    with torch.device("meta"):
        ops = DefaultOps(dtype, torch.device("meta"), tp)
        model = Qwen3Next(config, parameters, ops, groups, max_length=max_model_len, drafts=drafts)
    try:
        return plan_memory(
            model.state_layout,
            settings.cache,
            max_model_len=max_model_len,
            max_step_tokens=settings.max_step_tokens,
            gamma_max=settings.speculation.gamma_max if drafts else 0,
            hidden_window=settings.speculation.hidden_window,
            drafting=drafts,
        )
    except ValueError as error:
        raise LoadError(str(error)) from error


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def collectives(carrier: Carrier, size: int, timeout_s: float) -> dict[str, Any]:
    """`size` processes, this one among them, meet on loopback and add up their numbers. `problem` says why they could
    not; "" where they could."""
    store = c10d.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    address = join_address(LOOPBACK, store.port)
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "workers.checkup", "collectives", carrier]
            + [f"--size={size}", f"--timeout-s={timeout_s}", f"--rank={rank}", f"--store={address}"],
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, size)
    ]
    try:
        total = _add_up(store, carrier, 0, size, timeout_s)
        expected = size * (size + 1) // 2
        problem = "" if total == expected else f"{size} ranks added up to {total} instead of {expected}"
    except (CollectiveError, RuntimeError) as error:
        problem = str(error)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return {"problem": problem}


def join_collectives(carrier: Carrier, rank: int, size: int, address: str, timeout_s: float) -> dict[str, Any]:
    """One of the others."""
    host, _, port = address.rpartition(":")
    store = c10d.TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s))
    _add_up(store, carrier, rank, size, timeout_s)
    store.wait(["done"], timedelta(seconds=timeout_s))
    return {}


def _add_up(store: Any, carrier: Carrier, rank: int, size: int, timeout_s: float) -> int:
    device = torch.device("cuda", rank) if carrier == "nccl" else torch.device("cpu")
    if carrier == "nccl":
        torch.cuda.set_device(device)
    groups = join_groups(Mesh(tp=size), rank, store, carrier=carrier, bind_host=LOOPBACK, timeout_s=timeout_s)
    total = int(groups.tp.all_reduce(torch.full((1024,), rank + 1, device=device))[0])
    if rank == 0:
        store.set("done", "")
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m workers.checkup", description="Looks at an installation.")
    parser.add_argument("what", choices=("devices", "checkpoint", "collectives"))
    parser.add_argument("carrier", nargs="?", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--size", type=int, default=2, help="processes that meet")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="longest wait for each other")
    parser.add_argument("--rank", type=int, help="which of them this is; left out for the first")
    parser.add_argument("--store", help="host:port where they meet")
    options = parser.parse_args(arguments)
    carrier: Carrier = options.carrier
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": devices,
        "checkpoint": lambda: checkpoint(WorkerSettings.model_validate_json(sys.stdin.read())),
        "collectives": (
            (lambda: collectives(carrier, options.size, options.timeout_s))
            if options.rank is None
            else lambda: join_collectives(carrier, options.rank, options.size, options.store, options.timeout_s)
        ),
    }
    print(json.dumps(found[options.what]()))


if __name__ == "__main__":
    main()
