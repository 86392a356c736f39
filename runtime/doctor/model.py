"""The checkpoint: its files, whether they fit the settings, tokenizer and chat template; and the hardware profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from runtime.doctor.child import ChildFailed
from runtime.doctor.finding import Finding, failure, note, ok, size_text, split_remedy, warning
from runtime.doctor.inquiry import Inquiry
from runtime.front.defaults import SamplingDefaults
from runtime.front.tokenizer import Tokenizer
from runtime.profile import files
from runtime.profile.identity import identity_of
from runtime.verification.view import ProfileState
from workers.models.layouts import check_layout
from workers.plan import LoadError, WorkerDescription

UNKNOWN_RANK = WorkerDescription(
    model_type="",
    vocab_size=0,
    context_length=0,
    max_model_len=0,
    eos_token_ids=(),
    dtype="",
    numerics="",
    device="",
    num_parameters=0,
    parameter_bytes=0,
    gamma_max=0,
    page_size=0,
    cache_groups=(),
    num_pages=(),
    page_bytes=(),
    num_slots=0,
    slot_bytes=0,
    record_bytes=0,
    accounting=(),
)
"""A rank of which nothing is known; a profile is of a few things that ranks say, which are put in."""


def check_checkpoint(inquiry: Inquiry) -> Iterator[Finding]:
    """config.json and the layout at once; tensors against the table by a child, which reads no weight."""
    path = inquiry.settings.model.path
    assert path is not None, "settings without a checkpoint"
    try:
        check_layout(path, inquiry.mesh)
        found = inquiry.checkpoint()
    except LoadError as error:
        yield split_remedy(str(error))
        return
    except ChildFailed as error:
        yield failure(f"{path} could not be looked at: {error}", "see what is said of torch")
        return
    if found["problem"]:
        yield split_remedy(found["problem"])
        return
    size = size_text(sum(found["parameter_bytes"]))
    yield ok(f"{path}: {found['model_type']}, {found['num_tensors']} tensors as its config.json says; {size} to load")
    if found["num_slots"] < inquiry.settings.cache.max_running:
        yield note(
            f"cache.memory_mib {inquiry.settings.cache.memory_mib} holds {found['num_slots']} sequences at once, "
            f"of cache.max_running {inquiry.settings.cache.max_running}"
        )
    if not found["gamma_max"]:
        yield note("nothing is drafted: the checkpoint has no MTP head, or speculation.gamma_max is 0")


def check_tokenizer(inquiry: Inquiry) -> Iterator[Finding]:
    """Tokenizer, chat template and sampling defaults, as the front reads them."""
    path = inquiry.settings.model.path
    assert path is not None, "settings without a checkpoint"
    try:
        tokenizer, _ = Tokenizer.load(path), SamplingDefaults.load(path)
    except LoadError as error:
        yield split_remedy(str(error))
        return
    if tokenizer.has_chat_template:
        yield from _render(tokenizer)
    else:
        yield note(f"{path} has no chat template: chat requests are refused, text and ids are served")


def _render(tokenizer: Tokenizer) -> Iterator[Finding]:
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        yield warning(f"the chat template fails on a plain message: {error}", "use the template of the model's makers")
    else:
        yield ok("the tokenizer is there, and its chat template takes a plain message")


def check_profile(inquiry: Inquiry) -> Iterator[Finding]:
    """Whether one fits what ranks of this machine would say of themselves. A cluster's nodes may be others."""
    settings = inquiry.settings
    needs_it = settings.speculation.policy == "dynamic"
    try:
        found = inquiry.checkpoint()
    except ChildFailed:
        found = {"problem": "unknown"}
    if found["problem"] or not found["gamma_max"]:
        yield note("not looked at: there is no checkpoint to draft with")
        return
    if settings.cluster.ray_address:
        yield note("ranks run where the Ray cluster puts them; `outrider profile` there says what fits")
        return
    _, status = files.find(
        settings.state_dir,
        identity_of(settings, inquiry.mesh, [_rank_of(inquiry, found)] * inquiry.mesh.size),
        now=inquiry.machine.now(),
        max_age_days=settings.speculation.profile_max_age_days,
        explicit=settings.speculation.profile,
    )
    if status.state is ProfileState.OK:
        yield ok(status.detail)
    elif needs_it and not settings.speculation.measure_profile:
        what, _, remedy = status.detail.rpartition("; ")
        yield warning(f"speculation.policy is dynamic and will run as a fixed draft length: {what}", remedy)
    else:
        why = "it is measured at start" if needs_it else "the dynamic policy, which needs one, is not set"
        yield note(f"no hardware profile fits; {why}")


def _rank_of(inquiry: Inquiry, found: dict[str, Any]) -> WorkerDescription:
    settings = inquiry.settings
    return replace(
        UNKNOWN_RANK,
        model_type=found["model_type"],
        checkpoint=found["checkpoint"],
        dtype=found["dtype"],
        numerics=settings.model.numerics,
        device=found["device"],
        machine=found["machine"],
        torch_version=found["torch"],
        page_size=settings.cache.page_size,
        gamma_max=found["gamma_max"],
    )
