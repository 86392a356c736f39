"""Policies over real gRPC: dynamic ones, classes, the shadow and advice; and who changed what."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import pytest
from fakes.advice import ADVICE, SHADOW, VIEW
from fakes.front import in_loop, request_for, serving, status_of
from fakes.policies import NO_PROFILE, SOUND_PROFILE

from outrider.v1 import operator_pb2, operator_pb2_grpc
from runtime.front import policy_messages
from runtime.verification.policy import Dynamic, Fixed, Off, Policy, PolicyState
from runtime.verification.view import SpeculationView

Code = grpc.StatusCode
MEASURED = SpeculationView(profile=SOUND_PROFILE)


def message_of(policy: Policy) -> operator_pb2.VerificationPolicy:
    return policy_messages.policy_message(policy)


@in_loop
async def test_a_dynamic_policy_needs_a_profile_and_then_is_in_force() -> None:
    async with serving() as front:
        wanted = message_of(Dynamic(gamma_min=1, gamma_max=5, itl_limit_ms=30.0))
        code, text = await status_of(front.client.switch_policy(wanted))
        assert (code, text) == (Code.FAILED_PRECONDITION, f"policy.dynamic: {NO_PROFILE.detail}")
        assert (await front.client.get_policy()).revision == 1
        front.engine.policies.view = MEASURED
        state = await front.client.switch_policy(wanted, expected_revision=1)
        assert (state.policy, state.revision, state.fallback) == (wanted, 2, "")
        front.engine.policies.view = SpeculationView(profile=NO_PROFILE, fallback="the profile went stale")
        assert (await front.client.get_policy()).fallback == "the profile went stale"
        assert (await front.client.get_status()).policy.fallback == "the profile went stale"


@pytest.mark.parametrize("priority", [None, -7])
@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Fixed(9), "policy.fixed.gamma:"),
        (Dynamic(gamma_max=9), "policy.dynamic.gamma_max:"),
        (Dynamic(gamma_min=9), "policy.dynamic.gamma_min:"),
        (Dynamic(gamma_min=3, gamma_max=2), "policy.dynamic.gamma_min:"),
        (Dynamic(itl_limit_ms=-1.0), "policy.dynamic.itl_limit_ms:"),
        (Dynamic(min_gain=1.5), "policy.dynamic.min_gain:"),
        (Dynamic(min_survival=float("nan")), "policy.dynamic.min_survival:"),
    ],
    ids=str,
)
@in_loop
async def test_what_this_server_cannot_serve_is_refused_by_field(
    policy: Policy, field: str, priority: int | None
) -> None:
    async with serving() as front:
        front.engine.policies.view = MEASURED
        code, text = await status_of(front.client.switch_policy(message_of(policy), priority=priority))
        assert (code, text.startswith(field)) == (Code.INVALID_ARGUMENT, True), text
        if priority is None:
            code, text = await status_of(front.client.set_shadow(message_of(policy)))
            assert (code, text.startswith(field)) == (Code.INVALID_ARGUMENT, True), text
        assert (await front.client.get_policy()).revision == 1
        assert not (await front.client.get_status()).speculation.shadow.HasField("policy")


@in_loop
async def test_a_priority_gets_a_policy_of_its_own_and_loses_it_and_the_log_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        async with serving() as front:
            began = time.time()
            await front.client.switch_policy(message_of(Off()), priority=5)
            state = await front.client.switch_policy(message_of(Fixed(2)), priority=-1)
            assert [(one.priority, policy_messages.policy_of(one.policy)) for one in state.classes] == [
                (-1, Fixed(2)),
                (5, Off()),
            ]
            assert (state.policy.fixed.gamma, state.revision) == (4, 3)
            assert state.set_by.startswith("ipv4:127.0.0.1:")
            assert began <= state.set_at <= time.time()
            state = await front.client.switch_policy(None, priority=5)
            assert [one.priority for one in state.classes] == [-1]
            code, text = await status_of(front.client.switch_policy(None, priority=5))
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith("priority: 5 has no policy of its own")
    lines = [line.split(" ", 1)[1] for line in caplog.messages]
    assert lines == [
        "set policy off for priority 5: revision 2 from step 1",
        "set policy fixed gamma=2 for priority -1: revision 3 from step 1",
        "set policy as of the others for priority 5: revision 4 from step 1",
        f"was refused SetVerificationPolicy: {text}",
    ]


@in_loop
async def test_more_priorities_than_are_planned_for_are_refused() -> None:
    async with serving() as front:
        for priority in range(16):
            await front.client.switch_policy(message_of(Off()), priority=priority)
        code, text = await status_of(front.client.switch_policy(message_of(Off()), priority=16))
        assert (code, text.startswith("priority: 16 priorities have")) == (Code.INVALID_ARGUMENT, True)


@in_loop
async def test_before_anybody_sets_it_the_policy_is_the_settings_own() -> None:
    async with serving() as front:
        state = await front.client.get_policy()
        assert "settings" in state.set_by
        assert state.set_at > 0


@in_loop
async def test_a_client_that_leaves_while_its_policy_is_kept_is_named_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        async with serving() as front:
            began, written, set_policy = asyncio.Event(), asyncio.Event(), front.engine.policies.set

            async def set_and_keep(*args: object, **kwargs: object) -> PolicyState:
                state = await set_policy(*args, **kwargs)
                began.set()
                await written.wait()
                return state

            monkeypatch.setattr(front.engine.policies, "set", set_and_keep)
            setting = asyncio.create_task(front.client.set_policy(2))
            await began.wait()
            setting.cancel()
            await asyncio.wait({setting})
            await front.client.get_status()
            assert not caplog.messages
            written.set()
            await front.client.get_status()
    [line] = caplog.messages
    assert line.endswith("set policy fixed gamma=2: revision 2 from step 1")


@in_loop
async def test_a_shadow_is_set_replaced_and_ended_and_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider.audit"):
        async with serving() as front:
            for policy in (Dynamic(), Fixed(2)):
                code, text = await status_of(front.client.set_shadow(message_of(policy)))
                assert (code, NO_PROFILE.detail in text) == (Code.FAILED_PRECONDITION, True)
            front.engine.policies.view = MEASURED
            shadow = await front.client.set_shadow(message_of(Fixed(2)))
            assert (shadow.policy.fixed.gamma, shadow.steps) == (2, 0)
            assert list(shadow.steps_by_gamma) == [0] * 9
            await front.client.set_shadow(message_of(Off()))
            assert (await front.client.get_status()).speculation.shadow.policy.HasField("off")
            assert not (await front.client.set_shadow(None)).HasField("policy")
            assert not (await front.client.get_status()).speculation.shadow.HasField("policy")
            assert (await front.client.get_policy()).revision == 1, "nothing is run by it"
    lines = [line.split(" ", 1)[1] for line in caplog.messages]
    refused, done = lines[:2], lines[2:]
    assert all(line.startswith("was refused SetShadowPolicy: ") for line in refused)
    assert done == ["set shadow policy fixed gamma=2", "set shadow policy off", "ended the shadow policy"]


@in_loop
async def test_advice_is_the_engines_for_the_load_asked_about() -> None:
    async with serving() as front:
        code, text = await status_of(front.client.advise())
        assert (code, NO_PROFILE.detail in text) == (Code.FAILED_PRECONDITION, True)
        front.engine.policies.view = MEASURED
        code, text = await status_of(front.client.advise())
        assert (code, "nothing has been drafted" in text) == (Code.FAILED_PRECONDITION, True)
        front.engine.policies.advice = ADVICE
        assert await front.client.advise() == policy_messages.advice_message(ADVICE)
        await front.client.advise(num_sequences=1, context=1)
        await front.client.advise(num_sequences=4096)
        assert front.engine.policies.advised == [(None, None), (1, 1), (4096, None)]


@in_loop
async def test_the_status_tells_what_the_planner_does() -> None:
    async with serving() as front:
        front.engine.policies.view = VIEW
        told = (await front.client.get_status()).speculation
        assert told == policy_messages.speculation_message(VIEW, front.engine.status().statistics)
        assert told.shadow == policy_messages.shadow_message(SHADOW)


@pytest.mark.parametrize("max_drafts", [None, 0, 3, 2**32 - 1])
@in_loop
async def test_a_request_may_cap_its_own_drafts(max_drafts: int | None) -> None:
    async with serving() as front:
        async for _ in front.client.generate(request_for(max_tokens=2, max_drafts=max_drafts)):
            pass
        assert front.engine.submitted[0].max_drafts == max_drafts


@in_loop
async def test_a_field_of_a_newer_client_is_refused_also_inside_a_class_or_a_shadow() -> None:
    async with serving() as front:
        stub = operator_pb2_grpc.OperatorServiceStub(front.client.channel)
        unknown = operator_pb2.VerificationPolicy(
            dynamic=operator_pb2.VerificationPolicy.Dynamic.FromString(b"\xc0\x3e\x01")
        )
        for call in (
            stub.SetShadowPolicy(operator_pb2.SetShadowPolicyRequest(policy=unknown)),
            stub.SetVerificationPolicy(operator_pb2.SetVerificationPolicyRequest(policy=unknown, priority=2)),
        ):
            code, text = await status_of(call)
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith("policy.dynamic: field number 1000 is not known")
