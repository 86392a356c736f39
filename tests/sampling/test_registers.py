"""Registers by slot: the widest row of stop ids fits, and a batch is known to need what its sequences need."""

from __future__ import annotations

import dataclasses

import torch
from fakes.requests import request
from fakes.worker import describe

from runtime.intake import check_servable
from runtime.request import MAX_STOP_TOKEN_IDS
from runtime.scheduler.scheduler import Scheduler
from state.ledger import Ledger
from workers.demands import Constraint, Shaping, Typical
from workers.plan import MAX_EOS_IDS, MAX_STOP_IDS, NewSequence
from workers.sampling.registers import Modes, SamplingRegisters


def test_all_ids_of_the_checkpoint_and_all_of_a_request_fit_a_row() -> None:
    eos = tuple(range(MAX_EOS_IDS))
    own = tuple(range(MAX_EOS_IDS, MAX_EOS_IDS + MAX_STOP_TOKEN_IDS))
    wanted = request(1, stop_token_ids=own)
    wanted = dataclasses.replace(wanted, stopping=dataclasses.replace(wanted.stopping, eos_token_ids=eos))
    check_servable(wanted, describe(eos_token_ids=eos))
    ledger = Ledger(cache_groups=("target",), num_pages=(12,), page_size=4, num_slots=1)
    (new,) = Scheduler(ledger, max_step_tokens=32, gamma_max=4).admit([wanted])
    registers = SamplingRegisters(1, MAX_STOP_IDS, torch.device("cpu"))
    registers.enter([new])
    assert registers.stop_ids[new.slot].tolist() == [*eos, *own]


def sequence(slot: int, **fields: object) -> NewSequence:
    defaults: dict[str, object] = {
        "epoch": slot,
        "uid": slot,
        "prompt": (1,),
        "tables": ((1,),),
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "coupled": False,
        "stop_token_ids": (),
        "max_tokens": 1,
    }
    return NewSequence(slot=slot, **{**defaults, **fields})  # type: ignore[arg-type]


TYPICAL = Typical(epsilon=0.25, delta=0.5)

WAYS: dict[str, tuple[dict[str, object], set[str]]] = {
    "greedy": ({"temperature": 0.0}, set()),
    "standard": ({}, {"any_sampled", "any_standard"}),
    "coupled": ({"coupled": True}, {"any_sampled", "any_coupled"}),
    "cut": ({"top_k": 3}, {"any_sampled", "any_standard", "any_sorted"}),
    "locally typical": ({"typical_p": 0.5}, {"any_sampled", "any_standard", "any_typical"}),
    "lossy": ({"typical": TYPICAL}, {"any_sampled", "any_lossy"}),
    "lossy before coupled": ({"typical": TYPICAL, "coupled": True}, {"any_sampled", "any_lossy"}),
    "greedy is exact": ({"temperature": 0.0, "typical": TYPICAL}, set()),
    "logprobs": ({"temperature": 0.0, "num_logprobs": 0}, {"any_logprobs"}),
    "prompt logprobs": ({"temperature": 0.0, "num_prompt_logprobs": 0}, set()),
    "shaped": ({"temperature": 0.0, "shaping": Shaping(presence=0.5)}, {"any_whole"}),
    "constrained": ({"temperature": 0.0, "constraint": Constraint(kind="json_object")}, {"any_whole"}),
}


def needs(registers: SamplingRegisters, *slots: int) -> set[str]:
    modes = registers.modes(slots)
    return {name for name in Modes.__slots__ if getattr(modes, name)}


def test_a_batch_needs_what_its_sequences_need_and_no_more() -> None:
    registers = SamplingRegisters(len(WAYS), MAX_STOP_IDS, torch.device("cpu"))
    registers.enter([sequence(slot, **fields) for slot, (fields, _) in enumerate(WAYS.values(), 1)])
    for slot, (_, needed) in enumerate(WAYS.values(), 1):
        assert needs(registers, slot) == needed
    assert needs(registers, *range(1, 1 + len(WAYS))) == set(Modes.__slots__)
    assert needs(registers) == set()
    registers.enter([sequence(slot, temperature=0.0) for slot in range(1, 1 + len(WAYS))])
    assert needs(registers, *range(1, 1 + len(WAYS))) == set(), "nothing of former tenants"
    assert registers.num_logprobs == registers.num_prompt_logprobs == [None] * (1 + len(WAYS))


def test_who_is_verified_lossily_and_by_which_bar() -> None:
    registers = SamplingRegisters(3, MAX_STOP_IDS, torch.device("cpu"))
    registers.enter(
        [sequence(1, typical=TYPICAL, coupled=True), sequence(2, typical=TYPICAL, temperature=0.0), sequence(3)]
    )
    params = registers.typical_params(torch.tensor([3, 1, 2]))
    assert params.lossy_B.tolist() == [False, True, False]
    assert (params.epsilon_B[1], params.delta_B[1]) == (0.25, 0.5)
    assert registers.coupled.tolist() == [False] * 4
