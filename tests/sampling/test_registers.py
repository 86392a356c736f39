"""The registers of stopping: the widest row that checkpoint and request may ask for together fits."""

from __future__ import annotations

import dataclasses

import torch
from fakes.requests import request
from fakes.worker import describe

from runtime.intake import check_servable
from runtime.request import MAX_STOP_TOKEN_IDS
from runtime.scheduler.scheduler import Scheduler
from state.ledger import Ledger
from workers.plan import MAX_EOS_IDS, MAX_STOP_IDS
from workers.sampling.registers import SamplingRegisters


def test_all_ids_of_the_checkpoint_and_all_of_a_request_fit_a_row() -> None:
    eos = tuple(range(MAX_EOS_IDS))
    own = tuple(range(MAX_EOS_IDS, MAX_EOS_IDS + MAX_STOP_TOKEN_IDS))
    wanted = request(1, stop_token_ids=own)
    wanted = dataclasses.replace(wanted, stopping=dataclasses.replace(wanted.stopping, eos_token_ids=eos))
    check_servable(wanted, describe(eos_token_ids=eos))
    ledger = Ledger(cache_groups=("target",), num_pages=(12,), page_size=4, num_slots=1)
    new = Scheduler(ledger, max_step_tokens=32, gamma_max=4).admit(wanted)
    registers = SamplingRegisters(1, MAX_STOP_IDS, torch.device("cpu"))
    registers.enter([new])
    assert registers.stop_ids[new.slot].tolist() == [*eos, *own]
