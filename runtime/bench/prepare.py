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
from runtime.bench.load import OWN, Policy, Share
from runtime.bench.machine import machine
from runtime.bench.prompts import Prompts, plain_vocabulary, prompts_for
from runtime.bench.report import load_name
from runtime.bench.workload import (
    RANDOM_PROMPT_TOKENS,
    Prompt,
    WorkloadError,
    constrained,
    conversations,
    heldout,
    heldout_texts,
    random_prompts,
    read_prompts,
)

if TYPE_CHECKING:
    from outrider.v1 import operator_pb2
    from runtime.front.client import OutriderClient


ORACLE = "oracle"
"""The drafter that takes recordings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """identity: the part of the report that is known beforehand."""

    prompts: Prompts
    identity: document.Identity


def read_workload(asked: Asked) -> list[Prompt] | None:
    """The prompts, before there is a server; None where they are drawn from its vocabulary. Raises WorkloadError."""
    if asked.prompts is not None:
        return read_prompts(asked.prompts)
    match asked.workload:
        case "code" | "code-edit":
            return heldout()
        case "json-schema":
            return constrained(heldout())
        case "chat":
            return conversations(heldout_texts())
        case "random":
            return None


async def prepare(client: OutriderClient, asked: Asked, workload: list[Prompt] | None) -> Prepared:
    """Raises BenchError for a server that refuses requests or policies, WorkloadError for prompts that it cannot take,
    and AioRpcError where it does not answer."""
    status = await client.get_status()
    check_serving(status)
    for policy in asked.policies:
        _check_policy(policy, status)
    for load in asked.loads:
        if load.acceptance is not None and status.model.drafter != ORACLE:
            raise BenchError(
                f"--acceptance {load.acceptance:g}: this server's drafter is {status.model.drafter or 'none'}, not "
                f"{ORACLE}; serve with speculation.drafter={ORACLE}, or give --acceptance {OWN}"
            )
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
    _check_extras(asked, prompts)
    return Prepared(prompts=prompts, identity=_identity(asked, status))


def _check_extras(asked: Asked, prompts: Prompts) -> None:
    """Raises WorkloadError where cells would send the same as others, and what an oracle does not go with."""
    has_predictions = bool(prompts.predictions) or asked.edit_every is not None
    if not (has_predictions or prompts.json_schemas) and len({one.ngram for one in asked.variants}) < len(
        asked.variants
    ):
        raise WorkloadError(
            "--variant: no prompt brings a prediction or a constraint that could be left out; take --workload "
            "code-edit or json-schema, or prompts that do"
        )
    if has_predictions and any(load.acceptance is not None for load in asked.loads):
        raise WorkloadError(
            f"--prompts: some bring predictions, which go without an oracle's drafts; give --acceptance {OWN} alone, "
            "or leave them out"
        )


def _check_policy(policy: Policy, status: operator_pb2.GetStatusResponse) -> None:
    """Raises BenchError where the server cannot serve it as what it is."""
    from outrider.v1 import operator_pb2

    most = status.model.gamma_max
    if policy.least_gamma_max > most:
        raise BenchError(f"--policy {policy}: this server drafts at most {most} tokens; ask for less")
    if policy.dynamic is not None and status.speculation.profile != operator_pb2.PROFILE_STATE_OK:
        raise BenchError(
            f"--policy {policy}: the server has no profile to plan with ({status.speculation.profile_detail}); have it "
            "measure one, or leave the policy out"
        )


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


def plan_of(asked: Asked, prompts: Prompts) -> document.Plan:
    """What was asked for, with rates in place of shares."""
    return document.Plan(
        workload=asked.workload if asked.prompts is None else asked.prompts.name,
        prompts=len(prompts.ids),
        predictions=len(prompts.predictions if asked.edit_every is None else prompts.ids),
        edit_every=asked.edit_every,
        constraints=len(prompts.json_schemas),
        prompt_tokens=spread(map(len, prompts.ids)),
        prompt_tokens_cut=asked.prompt_tokens,
        max_tokens=asked.max_tokens,
        ignore_eos=asked.ignore_eos,
        temperature=asked.temperature,
        seed=asked.seed,
        policies=[str(policy) for policy in asked.policies],
        loads=[load_name(load) for load in asked.loads if not isinstance(load, Share)],
        requests=max(asked.requests_of(load) for load in asked.loads),
        warmup=asked.warmup,
        repeats=asked.repeats,
        limits=asked.limits,
        records=asked.records,
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
        profile=status.speculation.profile_detail,
    )
