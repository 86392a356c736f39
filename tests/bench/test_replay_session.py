"""Outputs recorded first, then replayed: what requests bring along, what rates become, and how outputs agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.bench import PROMPTS, asked_of, session_of
from fakes.engine import DESCRIPTION
from fakes.front import in_loop, serving
from fakes.policies import SOUND_PROFILE
from fakes.requests import request

from runtime.bench.errors import BenchError, PolicyRefused
from runtime.bench.figures import figures_of
from runtime.bench.load import Closed, Open, Policy, Share, Slot, parse_policies
from runtime.bench.prepare import plan_of, prepare
from runtime.bench.recording import Recording
from runtime.bench.session import Session
from runtime.bench.workload import Prompt
from runtime.request import Request
from runtime.verification.policy import Off
from runtime.verification.view import ProfileState, SpeculationView
from workers.plan import OracleDrafts

ORACLE = replace(DESCRIPTION, drafter="oracle")
LOADS = (Closed(2), Closed(2, 0.6), Share(0.5, 0.6))


def by_prompt(request: Request) -> list[int]:
    """Another answer to each of the two prompts."""
    return [request.prompt[0], 66, 67]


@in_loop
async def test_a_recording_is_made_before_all_cells_and_requests_bring_their_own_part_of_it() -> None:
    recorded_under, cells = [], 0

    async with serving(by_prompt, run_length=1, description=ORACLE) as front:

        def note_recording() -> None:
            recorded_under.append(len(front.engine.submitted))

        def note_cell(slot: object) -> None:
            nonlocal cells
            cells += 1
            if cells == 1:
                assert front.engine.policies.state.policy == Off()

        asked = asked_of(loads=LOADS, policies=(Policy(2),), records=True, fits_load=True, requests=None, warmup=0)
        session = Session(
            front.client,
            asked,
            PROMPTS,
            note_cell=note_cell,
            note_request=lambda: None,
            note_recording=note_recording,
        )
        await session.run()
        submitted = front.engine.submitted
        assert session.policy_left == ""
        assert (await front.client.get_policy()).policy.fixed.gamma == 4
    assert recorded_under == [0]
    # Two are recorded; then 8 of each closed loop and 16 of the open one, twice, as they report their rounds first.
    assert len(submitted) == 2 + 2 * (8 + 8 + 16)
    answers = {5: (5, 66, 67, 5, 66, 67), 7: (7, 66, 67, 7)}
    assert [one.oracle for one in submitted[:18]] == [None] * 18
    for one in submitted[18:]:
        assert one.oracle == OracleDrafts(continuation=answers[one.prompt[0]], acceptance=0.6)
    kinds = [type(load) for load in session.asked.loads]
    assert kinds == [Closed, Closed, Open]
    assert [run.slot.load for run in session.runs] == list(session.asked.loads)
    assert [load.rate for load in plan_of(session.asked, PROMPTS).loads][:2] == [None, None]
    for run in session.runs:
        agreement = figures_of([run], asked.limits).recording
        assert agreement is not None
        assert (agreement.identical, agreement.followed_share) == (len(run.records), 1.0)


@in_loop
async def test_outputs_that_leave_the_recording_are_counted_with_how_far_they_followed() -> None:
    answered: list[Request] = []

    def drifting(request: Request) -> list[int]:
        """The first answer to each prompt stays; later ones part from it at the fourth token."""
        if request.uid not in {one.uid for one in answered}:
            answered.append(request)
        is_first = [one.uid for one in answered if one.prompt == request.prompt].index(request.uid) == 0
        return [1, 2, 3, 4, 5, 6] if is_first else [1, 2, 3, 9, 9, 9]

    async with serving(drifting, run_length=1) as front:
        session = session_of(front, policies=(Policy(None),), records=True)
        await session.run()
    [run] = session.runs
    assert run.followed == (3, 3, 3, 3)
    agreement = figures_of(session.runs, session.asked.limits).recording
    assert (agreement.compared, agreement.identical, agreement.followed_share) == (4, 0, 12 / 20)


@in_loop
async def test_a_prompt_that_cannot_be_recorded_ends_the_run_with_its_reason() -> None:
    full = replace(DESCRIPTION, num_slots=1)
    async with serving(steps_by_itself=False, max_waiting=0, description=full) as front:
        front.engine.submit(request(999))
        session = session_of(front, records=True)
        with pytest.raises(BenchError, match=r"prompt 1 could not be recorded: RESOURCE_EXHAUSTED: "):
            await session.run()
        assert session.runs == []
        assert (await front.client.get_policy()).policy.fixed.gamma == 4


@in_loop
async def test_a_server_whose_drafter_takes_no_recordings_is_not_measured_with_them() -> None:
    workload = [Prompt(content="x")]
    async with serving() as front:
        with pytest.raises(BenchError, match=r"--acceptance 0\.6: this server's drafter is none, not oracle"):
            await prepare(front.client, asked_of(loads=LOADS), workload)
        await prepare(front.client, asked_of(loads=LOADS[:1]), workload)
    async with serving(description=ORACLE) as front:
        found = await prepare(front.client, asked_of(loads=LOADS), workload)
    assert found.identity.model.drafter == "oracle"


def test_shares_become_rates_of_three_digits_and_loads_have_their_own_numbers_of_requests():
    asked = asked_of(loads=(*LOADS, Share(1.0)), requests=None, fits_load=True, repeats=2, warmup=3)
    assert asked.at_rate(12.3456).loads == (Closed(2), Closed(2, 0.6), Open(6.17, 0.6), Open(12.3))
    assert [asked.requests_of(load) for load in (Closed(1), Closed(32, 0.3), Open(2.0), Share(0.5))] == [8, 32, 16, 16]
    assert asked.num_cells == 4 * 2 * 2
    assert asked.total_requests == 2 * (3 * (8 + 8 + 16 + 16) + 4 * 3)
    assert asked_of(loads=LOADS, requests=5, fits_load=True).requests_of(Closed(32)) == 5
    assert asked_of(loads=(Share(0.5), Closed(3), Closed(9))).recording_concurrency == 9
    assert asked_of(loads=(Share(0.5),)).recording_concurrency == 8


def test_an_output_follows_its_recording_up_to_the_first_token_that_differs():
    recording = Recording(outputs=((1, 2, 3), ()), requests_per_s=1.0)
    assert [recording.followed(0, tokens) for tokens in ((1, 2, 3), (1, 2), (1, 9, 3), (1, 2, 3, 4), ())] == [
        3,
        2,
        1,
        3,
        0,
    ]
    assert recording.followed(1, (1,)) == 0


DYNAMIC = parse_policies(["dynamic"])[0]
SPOILT = SpeculationView(profile=replace(SOUND_PROFILE, state=ProfileState.STALE, detail="steps take 3 times as long"))


@in_loop
async def test_a_cell_whose_policy_is_refused_for_a_while_is_measured_after_the_others() -> None:
    told: list[str] = []
    async with serving(run_length=1) as front:
        front.engine.policies.view = SPOILT

        def note_cell(slot: Slot) -> None:
            if (slot.repeat, slot.policy) == (1, Policy(None)):
                front.engine.policies.view = SpeculationView(profile=SOUND_PROFILE)

        asked = asked_of(policies=(DYNAMIC, Policy(None)), repeats=2)
        session = Session(
            front.client,
            asked,
            PROMPTS,
            note_cell=note_cell,
            note_request=lambda: None,
            note_put_off=told.append,
        )
        await session.run()
        assert session.policy_left == ""
        assert (await front.client.get_policy()).policy.fixed.gamma == 4
    order = [(run.slot.repeat, str(run.slot.policy)) for run in session.runs]
    assert order == [(0, "off"), (1, "off"), (1, "dynamic"), (0, "dynamic")]
    assert told == ["--policy dynamic: the server refuses it: policy.dynamic: steps take 3 times as long"]


@in_loop
async def test_a_policy_that_is_refused_to_the_end_ends_the_run_with_the_reason_and_keeps_the_cells() -> None:
    async with serving(run_length=1) as front:
        front.engine.policies.view = SPOILT
        session = session_of(front, policies=(DYNAMIC, Policy(None)), repeats=2)
        with pytest.raises(PolicyRefused, match=r"--policy dynamic: the server refuses it: policy\.dynamic: steps"):
            await session.run()
        assert [str(run.slot.policy) for run in session.runs] == ["off", "off"]
        assert (await front.client.get_policy()).policy.fixed.gamma == 4
