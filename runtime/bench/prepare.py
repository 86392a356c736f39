"""Before anything is measured: whether the server can be, what it is, and which prompts it gets. Asks it over gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.load import demo_checkpoint
from runtime.bench import document
from runtime.bench.asked import Asked
from runtime.bench.condition import check_serving
from runtime.bench.errors import BenchError
from runtime.bench.figures import spread
from runtime.bench.machine import machine
from runtime.bench.prompts import Prompts, plain_vocabulary, prompts_for
from runtime.bench.report import load_name
from runtime.bench.workload import RANDOM_PROMPT_TOKENS, Prompt, WorkloadError, heldout, random_prompts, read_prompts

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """plan, identity: parts of the report that are known beforehand."""

    prompts: Prompts
    plan: document.Plan
    identity: document.Identity


def read_workload(asked: Asked) -> list[Prompt] | None:
    """The prompts, before there is a server; None where they are drawn from its vocabulary. Raises WorkloadError."""
    if asked.prompts is not None:
        return read_prompts(asked.prompts)
    return heldout() if asked.workload == "code" else None


async def prepare(client: OutriderClient, asked: Asked, workload: list[Prompt] | None) -> Prepared:
    """Raises BenchError for a server that refuses requests or policies, WorkloadError for prompts that it cannot take,
    and AioRpcError where it does not answer."""
    status = await client.get_status()
    check_serving(status)
    for policy in asked.policies:
        if policy.num_drafts > status.model.gamma_max:
            most = status.model.gamma_max
            raise BenchError(f"--policy {policy}: this server drafts at most {most} tokens; ask for less")
    if workload is None:
        vocabulary = _vocabulary(asked, status)
        workload = random_prompts(vocabulary, asked.prompt_tokens or RANDOM_PROMPT_TOKENS, asked.seed)
    prompts = await prompts_for(
        client,
        status.model,
        workload[: asked.most_requests],
        longest=asked.prompt_tokens,
        max_tokens=asked.max_tokens,
    )
    return Prepared(prompts=prompts, plan=_plan(asked, prompts), identity=_identity(asked, status))


def _vocabulary(asked: Asked, status: operator_pb2.GetStatusResponse) -> list[int]:
    """Ids to draw from. A server does not tell which ids are special; its checkpoint does."""
    from runtime.front.tokenizer import Tokenizer

    directory = asked.tokenizer if asked.settings is None else asked.settings.model.path
    if directory is None:
        directory = demo_checkpoint()
        if status.model.name != directory.name:
            raise WorkloadError(
                f"--workload random leaves out special tokens; name the tokenizer of {status.model.name} with "
                "--tokenizer DIR"
            )
    return plain_vocabulary(Tokenizer.load(directory), status.model)


def _plan(asked: Asked, prompts: Prompts) -> document.Plan:
    return document.Plan(
        workload=asked.workload if asked.prompts is None else asked.prompts.name,
        prompts=len(prompts.ids),
        prompt_tokens=spread(map(len, prompts.ids)),
        prompt_tokens_cut=asked.prompt_tokens,
        max_tokens=asked.max_tokens,
        ignore_eos=asked.ignore_eos,
        temperature=asked.temperature,
        seed=asked.seed,
        policies=[str(policy) for policy in asked.policies],
        loads=[load_name(load) for load in asked.loads],
        requests=asked.requests_per_cell,
        warmup=asked.warmup,
        repeats=asked.repeats,
        limits=asked.limits,
    )


def _identity(asked: Asked, status: operator_pb2.GetStatusResponse) -> document.Identity:
    names = document.Model.model_fields
    return document.Identity(
        model=document.Model(**{name: getattr(status.model, name) for name in names}),
        devices=[rank.device for rank in status.ranks],
        versions=dict(status.versions),
        machine=machine(),
        own_server=asked.settings is not None,
        settings=None if asked.settings is None else asked.settings.model_dump(mode="json"),
    )
