"""Every field of a request: its default, its range, and the words of its refusal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.v1 import inference_pb2, types_pb2
from outrider.v1.inference_pb2 import GenerateRequest
from outrider.v1.types_pb2 import Sampling, Stopping
from runtime.front import convert
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, UnknownModel
from runtime.request import ReportParams, Request, SamplingParams, StopParams

MODEL = ServedModel(
    name="demo",
    vocab_size=100,
    max_model_len=32,
    eos_token_ids=(0,),
    default_max_tokens=lambda: 16,
    defaults=SamplingDefaults(),
)


def convert_request(
    message: GenerateRequest, prompt: tuple[int, ...] = (1, 2, 3), model: ServedModel = MODEL
) -> Request:
    options = convert.options_of(message, "r", model)
    return convert.request_of(options, prompt, field="text", uid=7, model=model)


def refusal(message: GenerateRequest, prompt: tuple[int, ...] = (1, 2, 3)) -> str:
    with pytest.raises(InvalidRequest) as caught:
        convert_request(message, prompt)
    return str(caught.value)


def test_defaults_of_an_empty_request() -> None:
    request = convert_request(GenerateRequest())
    assert (request.uid, request.request_id, request.prompt) == (7, "r", (1, 2, 3))
    assert replace(request.sampling, seed=0) == SamplingParams()
    assert request.stopping == StopParams(max_tokens=16, eos_token_ids=(0,))
    assert (request.priority, request.report, request.max_drafts) == (0, ReportParams(), None)
    assert (request.n, request.prediction, request.looks_back, request.oracle) == (1, (), False, None)


def test_defaults_of_the_checkpoint_apply_to_absent_fields_only() -> None:
    model = replace(MODEL, defaults=SamplingDefaults(temperature=0.5, top_k=20, top_p=0.75))
    absent = convert_request(GenerateRequest(), model=model).sampling
    assert (absent.temperature, absent.top_k, absent.top_p) == (0.5, 20, 0.75)
    given = convert_request(GenerateRequest(sampling=Sampling(temperature=0, top_k=0, top_p=1)), model=model).sampling
    assert (given.temperature, given.top_k, given.top_p) == (0, 0, 1)
    assert given.is_greedy


def test_every_field_arrives() -> None:
    message = GenerateRequest(
        model="demo",
        sampling=Sampling(temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, seed=9),
        stopping=Stopping(max_tokens=4, stop_token_ids=[5, 6, 5], stop=["a", "b", "a"], ignore_eos=True),
        priority=-3,
        report_rounds=True,
        max_drafts=3,
    )
    request = convert_request(message)
    assert request.sampling == SamplingParams(temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, seed=9, coupled=True)
    assert request.stopping == StopParams(max_tokens=4, stop_token_ids=(5, 6), stop_strings=("a", "b"))
    assert (request.priority, request.report, request.max_drafts) == (-3, ReportParams(rounds=True), 3)


@pytest.mark.parametrize("max_drafts", [0, 8, 9, 2**32 - 1])
def test_any_limit_of_drafts_is_taken_and_zero_is_one(max_drafts: int) -> None:
    assert convert_request(GenerateRequest(max_drafts=max_drafts)).max_drafts == max_drafts


@pytest.mark.parametrize(
    ("sampling", "coupled"),
    [
        (Sampling(), False),
        (Sampling(seed=0), True),
        (Sampling(seed=1, verification=types_pb2.VERIFICATION_STANDARD), False),
        (Sampling(verification=types_pb2.VERIFICATION_COUPLED), True),
        (Sampling(seed=1, verification=types_pb2.VERIFICATION_UNSPECIFIED), True),
    ],
)
def test_a_seed_chooses_coupled_verification_unless_told_otherwise(sampling: Sampling, coupled: bool) -> None:
    assert convert_request(GenerateRequest(sampling=sampling)).sampling.coupled is coupled


def test_a_drawn_seed_has_63_bits_and_differs() -> None:
    seeds = {convert_request(GenerateRequest()).sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 2**63
    assert max(seeds) > 2**56


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt", "expected"),
    [(None, 3, 16), (None, 20, 12), (5, 3, 5), (1000, 3, 29), (2**32 - 1, 31, 1)],
)
def test_max_tokens_is_clipped_to_the_context(max_tokens: int | None, num_prompt: int, expected: int) -> None:
    message = GenerateRequest(stopping=Stopping(max_tokens=max_tokens))
    assert convert_request(message, (1,) * num_prompt).stopping.max_tokens == expected


def test_a_top_k_of_the_whole_vocabulary_is_no_top_k() -> None:
    for top_k, expected in ((99, 99), (100, 0), (2**32 - 1, 0)):
        assert convert_request(GenerateRequest(sampling=Sampling(top_k=top_k))).sampling.top_k == expected


def test_negative_zero_is_zero() -> None:
    sampling = convert_request(GenerateRequest(sampling=Sampling(temperature=-0.0, min_p=-0.0))).sampling
    assert math.copysign(1, sampling.temperature) == math.copysign(1, sampling.min_p) == 1
    assert sampling.is_greedy


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        *(
            (GenerateRequest(sampling=Sampling(**{field: value})), f"sampling.{field}: ")
            for field, values in {
                "temperature": (math.nan, math.inf, -math.inf, -0.5, 1e-30, 1e30),
                "top_p": (math.nan, math.inf, -0.5, 0.0, 1.5),
                "min_p": (math.nan, math.inf, -0.5, 1.5),
            }.items()
            for value in values
        ),
        (GenerateRequest(sampling=Sampling(verification=77)), "sampling.verification: 77 is unknown"),
        (GenerateRequest(stopping=Stopping(max_tokens=0)), "stopping.max_tokens: must be at least 1"),
        (GenerateRequest(stopping=Stopping(stop_token_ids=[5, 100])), "stopping.stop_token_ids[1]: 100 is outside"),
        (GenerateRequest(stopping=Stopping(stop_token_ids=range(17))), "stopping.stop_token_ids: 17 ids; at most 16"),
        (GenerateRequest(stopping=Stopping(stop=["a", ""])), "stopping.stop[1]: is empty"),
        (GenerateRequest(stopping=Stopping(stop=["한" * 86])), "stopping.stop[0]: 258 bytes long; at most 256"),
        (GenerateRequest(stopping=Stopping(stop=[str(i) for i in range(17)])), "stopping.stop: 17 strings; at most 16"),
    ],
)
def test_refusals_name_the_field(message: GenerateRequest, expected: str) -> None:
    assert refusal(message).startswith(expected)


def test_lists_are_counted_before_anything_in_them_is_looked_at() -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage.FromString(b"\xc0\x3e\x01")] * 4097)
    assert refusal(GenerateRequest(chat=chat)) == "chat.messages: 4097 messages; at most 4096 are taken"
    with pytest.raises(InvalidRequest, match=r"^chat\.messages: 4097 messages"):
        convert.check_counts(inference_pb2.TokenizeRequest(chat=chat), MODEL)
    assert refusal(GenerateRequest(stopping=Stopping(stop=[""] * 17))).startswith("stopping.stop: 17 strings; at most")
    ids = Stopping(stop_token_ids=[1000] * 17)
    assert refusal(GenerateRequest(stopping=ids)).startswith("stopping.stop_token_ids: 17 ids; at most 16")
    prompt = GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1000] * 32))
    assert refusal(prompt).startswith("token_ids: the prompt has 32 tokens and the context holds 32")


def test_unknown_fields_are_not_listed_when_they_are_many() -> None:
    stopping = Stopping.FromString(b"\xc0\x3e\x01" * 2000)
    assert refusal(GenerateRequest(stopping=stopping)).startswith("GenerateRequest: 6001 bytes are fields not known")


def test_prompts_that_do_not_fit_are_refused_with_the_numbers() -> None:
    assert refusal(GenerateRequest(), ()) == "text: the prompt has no tokens; give at least one"
    assert refusal(GenerateRequest(), (1,) * 32) == (
        "text: the prompt has 32 tokens and the context holds 32; at most 31 leave room for an answer"
    )


def test_prompt_ids_are_checked_against_the_vocabulary() -> None:
    assert convert.prompt_ids_of(inference_pb2.TokenIds(ids=[0, 99]), MODEL) == (0, 99)
    with pytest.raises(
        InvalidRequest, match=r"token_ids\.ids\[1\]: 100 is outside the vocabulary; ids go from 0 to 99"
    ):
        convert.prompt_ids_of(inference_pb2.TokenIds(ids=[5, 100, 200]), MODEL)


@pytest.mark.parametrize("name", ["math", ""])
def test_lora_is_refused_by_name(name: str) -> None:
    assert refusal(GenerateRequest(lora_adapter=name)) == ("lora_adapter: LoRA adapters are not served; leave it out")


@pytest.mark.parametrize(
    "image", [inference_pb2.Image(), inference_pb2.Image(url="http://x"), inference_pb2.Image(data=b"1")]
)
def test_images_are_refused_by_the_message_that_holds_them(image: inference_pb2.Image) -> None:
    spoken = inference_pb2.ChatMessage(role="user", content="hi")
    shown = inference_pb2.ChatMessage(role="user", content="what is this?", images=[image])
    with pytest.raises(InvalidRequest) as caught:
        convert.messages_of(inference_pb2.Chat(messages=[spoken, shown]))
    assert str(caught.value) == "chat.messages[1].images: images are not served; send text alone"


def test_another_model_is_not_found() -> None:
    with pytest.raises(UnknownModel, match="'gpt' is not served here, 'demo' is"):
        convert.options_of(GenerateRequest(model="gpt"), "r", MODEL)


def test_chat_needs_messages_with_roles() -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[1\]\.role"):
        convert.messages_of(
            inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user"), inference_pb2.ChatMessage()])
        )
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    assert convert.messages_of(chat) == ([{"role": "user", "content": "hi"}], True)
    chat.add_generation_prompt = False
    assert convert.messages_of(chat)[1] is False


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("GenerateRequest", GenerateRequest.FromString(b"\xc0\x3e\x01")),
        ("sampling", GenerateRequest(sampling=Sampling.FromString(b"\xc0\x3e\x01"))),
        (
            "chat.messages",
            GenerateRequest(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage.FromString(b"\xc0\x3e\x01")])),
        ),
    ],
)
def test_fields_of_a_newer_client_are_refused(path: str, message: GenerateRequest) -> None:
    assert refusal(message) == (
        f"{path}: field number 1000 is not known to this server; leave it out or ask a newer one"
    )


@pytest.mark.parametrize(
    ("message", "metadata", "expected"),
    [
        (GenerateRequest(request_id="a b"), {}, "a b"),
        (GenerateRequest(request_id="field"), {"x-request-id": "header"}, "field"),
        (GenerateRequest(), {"x-request-id": "header"}, "header"),
    ],
)
def test_the_request_id_is_the_callers(message: GenerateRequest, metadata: dict[str, str], expected: str) -> None:
    assert convert.request_id_of(message, metadata) == expected


@pytest.mark.parametrize("request_id", ["", " a", "a\n", "é", "x" * 257])
def test_request_ids_that_cannot_travel_back_are_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^request_id: must be 1 to 256 printable ASCII characters"):
        convert.request_id_of(GenerateRequest(request_id=request_id), {})
