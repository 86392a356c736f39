"""From settings to a rank that can step: checkpoint, numerics, model, pools, registers, proposer. Knows no plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.load import demo_checkpoint
from configs.schema import CacheSettings, WorkerSettings
from parallel.collectives import CollectiveError
from parallel.mesh import Mesh
from parallel.rendezvous import Carrier, RankGroups, alone, join_groups, open_store, wait_for_all
from state.accounting import accounting_rows, plan_memory
from state.pools import DTYPES, DevicePools
from workers.constraints.compiler import Compiler
from workers.constraints.trial import Trials
from workers.draft.confidence import Measure, Scorer, choose_measure
from workers.draft.mtp import MtpProposer
from workers.draft.oracle import OracleProposer
from workers.draft.proposer import Proposer
from workers.inputs import StepInputs
from workers.machine import name_machine
from workers.models.checkpoint import Checkpoint
from workers.models.config import MTP_PREFIX, Qwen3NextConfig
from workers.models.layouts import shard_table
from workers.models.qwen3_next import Qwen3Next
from workers.models.rules import TensorRule, table_shapes
from workers.models.weights import LoadReport, load_parameters
from workers.ops.base import Ops
from workers.ops.default import DefaultOps
from workers.ops.reference import ReferenceOps
from workers.plan import MAX_STOP_IDS, CollectiveFailed, LoadError, Progress, WorkerDescription
from workers.sampling.processing import Processing
from workers.sampling.registers import SamplingRegisters
from workers.selftest import check_columns, check_invariance

# Kept in float32 whatever the activations are: small, and exponentiated.
_FLOAT32_PARAMETERS = (".a_log", ".dt_bias", ".confidence.weight", ".confidence.bias")


@dataclass(slots=True, kw_only=True)
class Rank:
    """Everything a step works on. processing: on the rank that decides; None elsewhere."""

    model: Qwen3Next
    ops: Ops
    pools: DevicePools
    registers: SamplingRegisters
    processing: Processing | None
    proposer: Proposer | None
    inputs: StepInputs
    groups: RankGroups
    checks_peers: bool
    description: WorkerDescription


Meet = Callable[[WorkerSettings, Mesh, torch.device, Progress], RankGroups]
"""Finds the other ranks. Raises LoadError, CollectiveFailed."""


def load_rank(settings: WorkerSettings, progress: Progress, meet: Meet | None = None) -> Rank:
    """Loads the checkpoint and allocates the pools under the memory budget.

    With several ranks it returns when all of them have come; `meet` replaces the way they find each other.
    progress(stage, done, total): bytes while reading weights. Raises LoadError: the checkpoint, the layout, a setting
    or the memory budget does not work, with its name; CollectiveFailed when the ranks do not find each other.
    """
    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    seat = settings.seat
    mesh = Mesh.of(settings.parallel)
    device = _device(settings)
    folder = settings.model.path or demo_checkpoint()
    with Checkpoint.open(folder) as checkpoint:
        has_head = checkpoint.config.num_mtp_layers > 0 and checkpoint.config.has_confidence_head
        measure = choose_measure(settings.speculation.confidence, has_head=has_head)
        drafts = checkpoint.config.num_mtp_layers > 0 and settings.speculation.gamma_max > 0
        config = checkpoint.config if drafts else replace(checkpoint.config, num_mtp_layers=0)
        dtype = choose_dtype(settings, config, device)
        table = shard_table(config, mesh, seat.rank)
        weights, report = _weights(checkpoint, config, table, dtype, device, progress)
        identity = checkpoint.identity()
    groups = (meet or _meet)(settings, mesh, device, progress)
    ops = _ops(settings, dtype, device, groups)
    max_model_len = checked_max_model_len(settings.cache, config)
    gamma_max = settings.speculation.gamma_max if drafts else 0
    model = Qwen3Next(config, weights, ops, groups, max_length=max_model_len + gamma_max + 2, drafts=drafts)
    if settings.model.numerics == "reference":
        check_columns(weights, ops)
        _check(model, ops, progress)
    try:
        memory = plan_memory(
            model.state_layout,
            settings.cache,
            max_model_len=max_model_len,
            max_step_tokens=settings.max_step_tokens,
            gamma_max=gamma_max,
            hidden_window=settings.speculation.hidden_window,
            drafting=drafts,
        )
    except ValueError as error:
        raise LoadError(str(error)) from error
    progress("allocating", 0, 1)
    sizes = memory.sizes
    pools = DevicePools(model.state_layout, sizes, device, keeps_laws=groups.tp.leads)
    registers = SamplingRegisters(sizes.num_slots, MAX_STOP_IDS, device)
    processing = None
    if groups.tp.leads:
        tokenizer = (folder / "tokenizer.json", config.vocab_size, config.eos_token_ids)
        compiler = Compiler(*tokenizer, Trials(*tokenizer).try_out)
        processing = Processing(pools, registers, compiler, config.vocab_size)
    proposer = _proposer(settings, model, pools, registers, processing, ops, groups, measure)
    progress("allocating", 1, 1)
    return Rank(
        model=model,
        ops=ops,
        pools=pools,
        registers=registers,
        processing=processing,
        proposer=proposer,
        inputs=StepInputs(sizes.num_slots, device),
        groups=groups,
        checks_peers=settings.check_ranks,
        description=WorkerDescription(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            max_model_len=max_model_len,
            eos_token_ids=config.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            numerics=settings.model.numerics,
            device=str(device),
            num_parameters=sum(math.prod(rule.shape) for rule in table),
            parameter_bytes=report.parameter_bytes,
            gamma_max=gamma_max,
            page_size=settings.cache.page_size,
            cache_groups=memory.cache_groups,
            num_pages=sizes.num_pages,
            page_bytes=memory.page_bytes,
            num_slots=sizes.num_slots,
            slot_bytes=memory.slot.total,
            record_bytes=memory.record_bytes,
            accounting=accounting_rows(
                model.state_layout,
                memory,
                max_model_len=max_model_len,
                max_running=settings.cache.max_running,
            ),
            load_s=time.perf_counter() - started,
            rank=seat.rank,
            num_ranks=mesh.size,
            machine=name_machine(device, settings.threads),
            checkpoint=identity,
            torch_version=torch.__version__,
            row_multiple=ops.row_multiple,
            drafter=settings.speculation.drafter if drafts else "",
        ),
    )


def _proposer(
    settings: WorkerSettings,
    model: Qwen3Next,
    pools: DevicePools,
    registers: SamplingRegisters,
    processing: Processing | None,
    ops: Ops,
    groups: RankGroups,
    measure: Measure,
) -> Proposer | None:
    """None where nothing drafts."""
    if model.drafter is None:
        return None
    scorer = Scorer(measure=measure, head=model.drafter.confidence)
    parts = (model, pools, registers, processing, ops, groups.tp, pools.sizes.gamma_max, scorer)
    return OracleProposer(*parts) if settings.speculation.drafter == "oracle" else MtpProposer(*parts)


def _device(settings: WorkerSettings) -> torch.device:
    wanted = settings.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LoadError("model.device is cuda, but torch finds no GPU; set it to cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Ray shows each rank its own GPU only; child processes see all of them.
    device = torch.device("cuda", settings.seat.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _meet(settings: WorkerSettings, mesh: Mesh, device: torch.device, progress: Progress) -> RankGroups:
    """The groups of this rank, once every rank has read its weights."""
    seat = settings.seat
    if mesh.size == 1:
        return alone()
    if settings.collectives == "nccl" and device.type != "cuda":
        raise LoadError("cluster.collectives is nccl, but this rank runs on a CPU; set it to gloo or auto")
    if seat.store_address is None:
        raise LoadError(f"rank {seat.rank} of {mesh.size} was not told where the ranks meet")
    carrier: Carrier = "nccl" if device.type == "cuda" and settings.collectives != "gloo" else "gloo"
    progress("meeting the other ranks", 0, 1)
    try:
        store = open_store(seat.store_address, listen_fd=seat.store_fd)
        wait_for_all(store, mesh, seat.rank)
        groups = join_groups(
            mesh,
            seat.rank,
            store,
            carrier=carrier,
            bind_host=seat.bind_host,
            timeout_s=settings.collective_timeout_s,
        )
    except CollectiveError as error:
        raise CollectiveFailed(str(error)) from error
    progress("meeting the other ranks", 1, 1)
    return groups


def _ops(settings: WorkerSettings, dtype: torch.dtype, device: torch.device, groups: RankGroups) -> Ops:
    if settings.model.numerics == "default":
        return DefaultOps(dtype, device, groups.tp)
    try:
        return ReferenceOps(settings.model.k_slices, groups.tp)
    except ValueError as error:
        raise LoadError(str(error)) from error


def _check(model: Qwen3Next, ops: Ops, progress: Progress) -> None:
    try:
        check_invariance(model, ops, progress)
    except ValueError as error:  # a width that the slices of reference numerics do not divide
        raise LoadError(str(error)) from error
    except CollectiveError as error:
        raise CollectiveFailed(str(error)) from error


def choose_dtype(settings: WorkerSettings, config: Qwen3NextConfig, device: torch.device) -> torch.dtype:
    """Of weights and activations. Raises LoadError."""
    wanted = settings.model.dtype
    if settings.model.numerics == "reference":
        if wanted == "bfloat16":
            raise LoadError("model.numerics reference is float32 only; set model.dtype to float32 or auto")
        return torch.float32
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[config.dtype]
    return DTYPES[wanted]


def checked_max_model_len(cache: CacheSettings, config: Qwen3NextConfig) -> int:
    """What `cache.max_model_len` comes to. Raises LoadError."""
    if cache.max_model_len is None:
        return config.context_length
    if cache.max_model_len > config.context_length:
        raise LoadError(
            f"cache.max_model_len is {cache.max_model_len}, but the checkpoint's context is {config.context_length} "
            "tokens; lower it"
        )
    return cache.max_model_len


def _weights(
    checkpoint: Checkpoint,
    config: Qwen3NextConfig,
    table: tuple[TensorRule, ...],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> tuple[dict[str, Tensor], LoadReport]:
    weights = {
        name: torch.empty(shape, dtype=torch.float32 if name.endswith(_FLOAT32_PARAMETERS) else dtype, device=device)
        for name, shape in table_shapes(table).items()
    }
    report = load_parameters(
        checkpoint,
        table,
        weights,
        lambda done, total: progress("reading weights", done, total),
        skip_prefixes=() if config.num_mtp_layers else (MTP_PREFIX,),
    )
    return weights, report
