"""What is asked of a server before anything is measured: prompts it can take, policies it can serve, its condition."""

from __future__ import annotations

import pytest
from fakes.bench import asked_of
from fakes.front import in_loop, serving
from fakes.policies import SOUND_PROFILE

from runtime.bench.completion import generate_request
from runtime.bench.errors import BenchError
from runtime.bench.load import Policy, parse_policies
from runtime.bench.prepare import plan_of, prepare
from runtime.bench.prompts import Prompts
from runtime.bench.workload import Prompt, WorkloadError
from runtime.verification.view import SpeculationView


@in_loop
async def test_preparing_reads_who_is_served_and_turns_texts_into_ids() -> None:
    async with serving() as front:
        workload = [
            Prompt(content="def main():"),
            Prompt(content=(1, 2, 3), max_tokens=9),
            Prompt(content="never sent"),
        ]
        asked = asked_of(requests=2, prompt_tokens=2)
        found = await prepare(front.client, asked, workload)
        text = await front.client.tokenize("def main():")
    assert found.prompts == Prompts(ids=(tuple(text[:2]), (1, 2)), max_tokens=(6, 9))
    assert found.identity.model.model_type == "qwen3_next"
    assert found.identity.devices == ["cpu"]
    assert not found.identity.own_server
    assert plan_of(asked, found.prompts).prompts == 2


@in_loop
async def test_random_prompts_of_a_model_that_is_not_the_demo_need_its_tokenizer() -> None:
    async with serving(settings={"model.served_name": "other"}) as front:
        with pytest.raises(WorkloadError, match="name the tokenizer of other with --tokenizer DIR"):
            await prepare(front.client, asked_of(workload="random"), None)
    async with serving() as front:
        found = await prepare(front.client, asked_of(workload="random", prompt_tokens=11), None)
        assert {len(ids) for ids in found.prompts.ids} == {11}


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ([Prompt(content=(4096,))], "prompt 1: id 4096 is past the vocabulary of 4096 ids"),
        ([Prompt(content=(1,)), Prompt(content=(1,) * 510)], "prompt 2: 510 tokens and 6 more are past the context"),
        ([Prompt(content=(1,), max_tokens=600)], "prompt 1: 1 tokens and 600 more"),
        ([Prompt(content=(1,), max_tokens=600, where="x.jsonl:7")], "x.jsonl:7: 1 tokens and 600 more"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_named(workload, words) -> None:
    @in_loop
    async def check() -> None:
        async with serving() as front:
            with pytest.raises(WorkloadError) as caught:
                await prepare(front.client, asked_of(), workload)
        assert str(caught.value).startswith(words)

    check()


@in_loop
async def test_a_server_that_drains_or_drafts_too_little_is_not_measured() -> None:
    async with serving() as front:
        with pytest.raises(BenchError, match="--policy fixed:9: this server drafts at most 8 tokens"):
            await prepare(front.client, asked_of(policies=(Policy(9),)), [Prompt(content="x")])
        await front.client.drain()
        with pytest.raises(BenchError, match="the server is draining and refuses requests"):
            await prepare(front.client, asked_of(), [Prompt(content="x")])
        assert front.engine.submitted == []


@in_loop
async def test_a_dynamic_policy_needs_a_profile_and_a_drafter_that_is_long_enough() -> None:
    workload = [Prompt(content="x")]
    async with serving() as front:
        dynamic, long = parse_policies(["dynamic,dynamic:max=9"])
        with pytest.raises(BenchError, match=r"--policy dynamic: the server has no profile to plan with \(no hardware"):
            await prepare(front.client, asked_of(policies=(dynamic,)), workload)
        front.engine.policies.view = SpeculationView(profile=SOUND_PROFILE)
        with pytest.raises(BenchError, match="--policy dynamic:max=9: this server drafts at most 8 tokens"):
            await prepare(front.client, asked_of(policies=(long,)), workload)
        found = await prepare(front.client, asked_of(policies=(dynamic,)), workload)
    assert found.identity.profile == "measured on this machine"


@in_loop
async def test_a_request_of_text_is_the_same_as_one_of_its_ids() -> None:
    async with serving() as front:
        ids = await front.client.tokenize("import os")
        for prompt in ("import os", ids):
            request = generate_request(prompt, 3, report_rounds=False)
            _ = [frame async for frame in front.client.generate(request)]
        one, other = front.engine.submitted
    assert one.prompt == other.prompt == tuple(ids)
