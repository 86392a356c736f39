"""The `openai` client through a real smg: what comes out is what our own face says, to the token and to the count.

One request at a time is the same run whichever way it comes; what must hold for many at once holds in reference
numerics, where no batch changes a bit. The gateway cannot see the checkpoint's directory: it fetches the tokenizer from
the server, as it does on another machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from flow.house import House, Reply, open_house
from flow.house import request as request_for
from gateway.smg_gateway import Smg, open_smg
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from outrider.v1 import inference_pb2, operator_pb2
from runtime.front.vllm.service import VllmEngine

PROMPT = "def add(a, b):\n    return"
MESSAGES: Any = [{"role": "system", "content": "You write code."}, {"role": "user", "content": "Sum a list."}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Site:
    house: House
    smg: Smg
    client: openai.OpenAI
    is_reference: bool

    def ours(self, message: inference_pb2.GenerateRequest) -> Reply:
        return self.house.run(self.house.generate(message))


@pytest.fixture(scope="module", params=["default", pytest.param("reference", marks=pytest.mark.full)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    describe = VllmEngine.GetModelInfo

    async def from_far_away(self: VllmEngine, message: Any, context: Any) -> vllm.GetModelInfoResponse:
        info = await describe(self, message, context)
        info.model_path = info.tokenizer_path = "/models/of/another/machine"
        return info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmEngine, "GetModelInfo", from_far_away)
        with (
            open_house(model__numerics=request.param) as house,
            open_smg([house.deployment.address], tmp_path_factory.mktemp("smg")) as smg,
            smg.client() as client,
        ):
            yield Site(house, smg, client, is_reference=request.param == "reference")
            house.check_baseline()


def chat_of(messages: Any) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])


def test_the_model_is_listed(site: Site) -> None:
    assert [model.id for model in site.client.models.list()] == ["demo"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 7}, {"seed": 7, "temperature": 0.5, "top_p": 0.9}])
def test_completions_are_ours_streamed_or_not(site: Site, sampling: dict[str, Any]) -> None:
    expected = request_for(PROMPT, 20, temperature=1.0)
    for name, value in sampling.items():
        setattr(expected.sampling, name, value)
    ours = site.ours(expected)
    whole = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, **sampling)
    [choice] = whole.choices
    assert choice.text == ours.text
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        ours.usage.prompt_tokens,
        ours.usage.completion_tokens,
    )
    streamed = list(
        site.client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **sampling,
        )
    )
    assert "".join(part.choices[0].text for part in streamed if part.choices) == ours.text
    assert [part.choices[0].finish_reason for part in streamed if part.choices][-1] == choice.finish_reason
    usage = streamed[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_seeds_make_streams_repeat_and_differ(site: Site) -> None:
    def text(seed: int) -> str:
        done = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, seed=seed)
        return done.choices[0].text

    assert text(1) == text(1)
    assert text(2) != text(3)


def test_chats_go_through_the_checkpoints_template(site: Site) -> None:
    message = request_for("", 12, seed=3, temperature=1.0)
    message.chat.CopyFrom(chat_of(MESSAGES))
    ours = site.ours(message)
    whole = site.client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=12, seed=3, temperature=1.0
    )
    assert whole.usage is not None
    assert whole.choices[0].message.content == ours.text
    assert whole.usage.prompt_tokens == ours.usage.prompt_tokens
    streamed = list(
        site.client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_completion_tokens=12,
            seed=3,
            temperature=1.0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in streamed if part.choices) == ours.text
    usage = streamed[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        ours.usage.prompt_tokens,
        ours.usage.completion_tokens,
    )


@pytest.mark.parametrize("stop", ["\n\n", "urn a", ["never", "\n"]])
def test_stops_end_the_text_and_the_work_at_one_place(site: Site, stop: Any) -> None:
    free = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=32, temperature=0)
    ours = site.ours(request_for(PROMPT, 32, stop=[stop] if isinstance(stop, str) else stop))
    done = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=32, temperature=0, stop=stop)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].text == ours.text
    assert free.choices[0].text.startswith(ours.text)
    assert done.usage is not None
    assert done.usage.completion_tokens == ours.usage.completion_tokens < 32
    streamed = site.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=32, temperature=0, stop=stop, stream=True
    )
    assert "".join(part.choices[0].text for part in streamed if part.choices) == ours.text


def test_log_probabilities_are_ours(site: Site) -> None:
    message = request_for("", 6)
    message.chat.CopyFrom(chat_of(MESSAGES))
    message.logprobs = 3
    told = [one for frame in site.ours(message).frames for one in frame.logprobs]
    done = site.client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert done.choices[0].logprobs is not None
    content = done.choices[0].logprobs.content
    assert content is not None
    assert [one.logprob for one in content] == pytest.approx([one.logprob for one in told])
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        pytest.approx([top.logprob for top in one.top]) for one in told
    ]
    assert "".join(one.token for one in content) == done.choices[0].message.content


def test_answers_follow_a_schema(site: Site) -> None:
    done = site.client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}},
    )
    assert done.choices[0].finish_reason == "stop"
    answer = json.loads(done.choices[0].message.content or "")
    assert answer.keys() == {"size"}
    assert 0 <= answer["size"] <= 99
    done = site.client.chat.completions.create(
        model="demo", messages=MESSAGES, seed=1, max_completion_tokens=60, response_format={"type": "json_object"}
    )
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [({"regex": "[ab]{4}"}, None), ({"ebnf": 'root ::= "yes" | "no"'}, {"yes", "no"})],
    ids=["regex", "ebnf"],
)
def test_smgs_own_constraints_are_followed(site: Site, constraint: dict[str, str], allowed: set[str] | None) -> None:
    done = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, seed=2, extra_body=constraint)
    text = done.choices[0].text
    assert (text in allowed) if allowed else (len(text) == 4 and set(text) <= set("ab"))


def test_several_choices_are_ours_and_the_prompt_counts_once(site: Site) -> None:
    message = request_for(PROMPT, 8, temperature=1.0, seed=11)
    message.n = 2
    texts = ["", ""]
    for frame in site.ours(message).frames:
        texts[frame.index] += frame.text
    done = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, n=2, seed=11)
    assert [choice.text for choice in sorted(done.choices, key=lambda one: one.index)] == texts
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (9, 16)
    streamed = ["", ""]
    for part in site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, n=2, seed=11, stream=True):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_drafts_are_reported_as_part_of_the_output(site: Site) -> None:
    ours = site.ours(request_for(PROMPT, 20)).usage
    done = site.client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, temperature=0)
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None
    assert rejected is not None
    assert 0 < accepted == ours.completion_tokens - ours.rounds + (ours.trimmed > 0)
    assert accepted + rejected == ours.drafted


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"extra_body": {"regex": "("}}, 400, "sampling_params.regex: character 1: unclosed group"),
        ({"extra_body": {"json_schema": '{"type": 3}'}}, 400, "sampling_params.json_schema: "),
        ({"stop": ["x" * 300]}, 400, "sampling_params.stop[0]: 300 bytes long"),
        ({"n": 17}, 400, "sampling_params.n: 17 sequences run at the same time"),
        ({"prompt": PROMPT * 100}, 400, "maximum context length is 512 tokens"),
        ({"model": "gpt"}, 404, "gpt"),
    ],
    ids=["regex", "schema", "stop", "n", "context", "model"],
)
def test_what_is_wrong_comes_back_as_a_400_that_names_it(
    site: Site, body: dict[str, Any], status: int, words: str
) -> None:
    before = site.house.deployment.statistics().requests.submitted
    with pytest.raises(openai.APIStatusError) as caught:
        site.client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 8, **body})
    assert caught.value.status_code == status
    assert words in caught.value.response.text
    assert site.house.deployment.statistics().requests.submitted == before


def status_of(site: Site) -> operator_pb2.GetStatusResponse:
    assert site.house.client is not None
    return site.house.run(site.house.client.get_status())


@pytest.mark.parametrize("leave", ["streaming", "waiting for it all"])
def test_work_ends_when_the_client_leaves(site: Site, leave: str) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    before = aborted(site)
    if leave == "streaming":
        parts = site.client.completions.create(**body, stream=True)
        assert next(iter(parts)).choices
        assert status_of(site).batches[0].running == 1
        parts.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            site.client.completions.create(**body, timeout=0.3)
    site.house.run(site.house.idle(), timeout_s=10)
    assert aborted(site) == before + 1
    status = status_of(site)
    assert (status.batches[0].running, status.waiting) == (0, 0)


def aborted(site: Site) -> int:
    ended = site.house.deployment.statistics().requests.ended
    return sum(count for end, count in ended.items() if end.value == "aborted")


def test_sixty_four_at_once_are_each_their_own(site: Site) -> None:
    patterns = [f"s{number}[a-z]{{4}}" for number in range(8)]

    def one(number: int) -> tuple[str, int]:
        parts = site.client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=16,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"regex": patterns[number % len(patterns)]},
        )
        text, tokens = "", 0
        for part in parts:
            text += "".join(choice.text for choice in part.choices)
            tokens = part.usage.completion_tokens if part.usage else tokens
        return text, tokens

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    for number, (text, _) in enumerate(answers):
        assert re.fullmatch(patterns[number % len(patterns)], text)
    for number in range(64) if site.is_reference else ():
        expected = request_for(PROMPT, 16, temperature=1.0, seed=number)
        expected.constraint.regex = patterns[number % len(patterns)]
        ours = site.ours(expected)
        assert answers[number] == (ours.text, ours.usage.completion_tokens)
