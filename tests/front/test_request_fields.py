"""Every sampling, stopping, constraint and output field: what it becomes, each of its limits, and the words of its
refusal. Limits are tried on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.v1.inference_pb2 import GenerateRequest, Prediction, TokenIds
from outrider.v1.types_pb2 import VERIFICATION_TYPICAL, Choices, Constraint, Sampling, Stopping, Typical
from runtime.front import convert
from runtime.front.bounds import LOGPROBS_LIMIT_BYTES, STOCK_LIMIT_BYTES, logprobs_bytes
from runtime.front.convert import ServedModel
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest, MissingFeature
from runtime.front.replies import frame_of
from runtime.request import ReportParams, Request, StopParams, Usage
from runtime.stream.text_stream import Delta
from workers import demands
from workers.demands import NO_SHAPING, Shaping, TokenLogprob

NAN, INF = math.nan, math.inf


def letters(text: str) -> list[int]:
    """A token per character: `a` is 1, a space is 0, and beyond the vocabulary is what is no letter."""
    return [ord(char) - 96 if char != " " else 0 for char in text]


MODEL = ServedModel(
    name="demo",
    vocab_size=27,
    max_model_len=64,
    eos_token_ids=(26,),
    default_max_tokens=lambda: 16,
    defaults=SamplingDefaults(),
    takes_typical=True,
    encode=letters,
)


def convert_request(message: GenerateRequest, model: ServedModel = MODEL, num_prompt: int = 3) -> Request:
    options = convert.options_of(message, "r", model)
    return convert.request_of(options, (1,) * num_prompt, field="text", uid=7, model=model)


def refusal(message: GenerateRequest, model: ServedModel = MODEL, num_prompt: int = 3) -> str:
    with pytest.raises(InvalidRequest) as caught:
        convert_request(message, model, num_prompt)
    assert str(caught.value) == f"{caught.value.field}: {caught.value.problem}"
    return str(caught.value)


def sampling(**fields: Any) -> GenerateRequest:
    return GenerateRequest(sampling=Sampling(**fields))


def stopping(**fields: Any) -> GenerateRequest:
    return GenerateRequest(stopping=Stopping(**fields))


def constrained(**kind: Any) -> GenerateRequest:
    return GenerateRequest(constraint=Constraint(**kind))


def test_every_field_arrives() -> None:
    message = GenerateRequest(
        sampling=Sampling(
            typical_p=0.5,
            repetition_penalty=1.25,
            frequency_penalty=-0.5,
            presence_penalty=2,
            logit_bias={3: -100, 1: 0.5, 2: 0},
            banned_token_ids=[9, 4, 9],
            allowed_token_ids=[1, 2, 3, 8, 1],
            bad_words=["ab", "c"],
            verification=VERIFICATION_TYPICAL,
            typical=Typical(epsilon=0.25),
        ),
        stopping=Stopping(max_tokens=9, min_tokens=4, include_stop=True, time_limit_ms=1500),
        constraint=Constraint(regex="[ab]+"),
        n=3,
        logprobs=2,
        prompt_logprobs=0,
        echo=True,
        report_offsets=True,
        ngram=True,
    )
    request = convert_request(message)
    assert request.sampling.shaping == Shaping(
        repetition=1.25,
        frequency=-0.5,
        presence=2,
        bias=((1, 0.5), (3, -100)),
        allowed=(1, 2, 3, 8),
        banned=(3, 4, 9),
        bad_words=((1, 2), (0, 1, 2), (0, 3)),
        min_tokens=4,
    )
    assert (request.sampling.typical_p, request.sampling.typical) == (0.5, demands.Typical(epsilon=0.25, delta=0.3))
    assert request.sampling.constraint == demands.Constraint(kind="regex", text="[ab]+")
    assert request.stopping == StopParams(
        max_tokens=9, eos_token_ids=(26,), min_tokens=4, include_stop=True, time_limit_s=1.5
    )
    assert request.report == ReportParams(num_logprobs=2, num_prompt_logprobs=0, echo=True, offsets=True)
    assert (request.n, request.looks_back) == (3, True)


def test_a_plain_request_is_not_shaped() -> None:
    assert convert_request(GenerateRequest()).sampling.shaping == NO_SHAPING
    off = sampling(repetition_penalty=1, frequency_penalty=-0.0, presence_penalty=0, logit_bias={3: -0.0}, typical_p=1)
    assert convert_request(off).sampling.shaping == NO_SHAPING


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", (0.0, -0.0, 1e-6, 1000.0), (NAN, INF, -INF, -1.0, 1e-7, 1001.0, 1e38)),
        ("top_p", (1e-38, 1.0), (NAN, INF, -INF, -0.5, 0.0, -0.0, 1.0001)),
        ("min_p", (0.0, -0.0, 1.0), (NAN, INF, -INF, -1e-9, 1.0001)),
        ("typical_p", (1e-38, 1.0), (NAN, INF, -INF, -0.5, 0.0, -0.0, 1.0001)),
        ("repetition_penalty", (0.0078125, 0.01, 100.0), (NAN, INF, -INF, -1.0, 0.0, -0.0, 1e-40, 0.0078, 100.1)),
        ("frequency_penalty", (-2.0, -0.0, 2.0), (NAN, INF, -INF, -2.1, 2.1)),
        ("presence_penalty", (-2.0, -0.0, 2.0), (NAN, INF, -INF, -2.1, 2.1)),
    ],
)
def test_numbers_are_taken_up_to_their_limits(field: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        convert_request(sampling(**{field: value}))
    for value in bad:
        assert refusal(sampling(**{field: value})).startswith(f"sampling.{field}: ")


def test_biases_are_checked_one_by_one() -> None:
    for bias in (-100.0, 0.0, 100.0):
        convert_request(sampling(logit_bias={26: bias}))
    for bias in (NAN, INF, -INF, -100.1, 100.1):
        assert refusal(sampling(logit_bias={3: bias})).startswith(f"sampling.logit_bias[3]: {bias:g} is not from -100 ")
    assert refusal(sampling(logit_bias={27: 1.0})) == (
        "sampling.logit_bias[27]: 27 is outside the vocabulary; ids go from 0 to 26"
    )


@pytest.mark.parametrize("field", ["banned_token_ids", "allowed_token_ids"])
def test_ids_lie_in_the_vocabulary(field: str) -> None:
    convert_request(sampling(**{field: [0, 26]}))
    assert refusal(sampling(**{field: [0, 27, 2**32 - 1]})).startswith(f"sampling.{field}[1]: 27 is outside the vocab")


@pytest.mark.parametrize(
    ("make", "most", "field"),
    [
        (lambda count: sampling(logit_bias=dict.fromkeys(range(count), 1.0)), 1024, "sampling.logit_bias"),
        (lambda count: sampling(banned_token_ids=[1] * count), 1024, "sampling.banned_token_ids"),
        (lambda count: sampling(allowed_token_ids=[1] * count), 65536, "sampling.allowed_token_ids"),
        (lambda count: sampling(bad_words=["ab"] * count), 64, "sampling.bad_words"),
        (lambda count: stopping(stop_token_ids=[1] * count), 16, "stopping.stop_token_ids"),
        (lambda count: stopping(stop=["a"] * count), 16, "stopping.stop"),
        (lambda count: constrained(choice=Choices(texts=["a"] * count)), 1024, "constraint.choice.texts"),
    ],
)
def test_lists_are_taken_up_to_their_limits(make: Callable[[int], GenerateRequest], most: int, field: str) -> None:
    large = replace(MODEL, vocab_size=2000)
    convert_request(make(most), large)
    words = refusal(make(most + 1), large)
    assert words.startswith(f"{field}: {most + 1} ")
    assert words.endswith(f"at most {most} are taken")


def test_bans_that_leave_nothing_are_refused_by_who_bans() -> None:
    everything = list(range(27))
    assert refusal(sampling(banned_token_ids=everything)).startswith("sampling.banned_token_ids: bans every token")
    assert refusal(sampling(allowed_token_ids=[1, 2], banned_token_ids=[2, 1])).startswith("sampling.banned_token_ids:")
    one_token = replace(MODEL, encode=lambda text: [1] if text.startswith(" ") else [2])
    assert refusal(sampling(allowed_token_ids=[1, 2], bad_words=["x"]), one_token).startswith(
        "sampling.bad_words: bans"
    )
    convert_request(sampling(banned_token_ids=everything[1:]))
    convert_request(sampling(allowed_token_ids=[1, 2], bad_words=["ab"]))


def test_min_tokens_needs_a_token_that_does_not_end_the_output() -> None:
    def asked(**more: Any) -> GenerateRequest:
        return GenerateRequest(
            sampling=Sampling(allowed_token_ids=[26, 5]), stopping=Stopping(stop_token_ids=[5], min_tokens=1, **more)
        )

    assert refusal(asked()).startswith("stopping.min_tokens: every token that is allowed ends the output; ")
    convert_request(asked(ignore_eos=True))
    constrained_too = asked()
    constrained_too.constraint.json_object = True
    convert_request(constrained_too)


def test_a_constraint_comes_before_bans() -> None:
    message = sampling(banned_token_ids=range(27))
    message.constraint.json_object = True
    convert_request(message)


def test_bad_words_are_looked_for_at_the_start_and_behind_a_space() -> None:
    shaping = convert_request(sampling(bad_words=["ab", " ab", "d"])).sampling.shaping
    assert (shaping.bad_words, shaping.banned) == (((1, 2), (0, 1, 2), (0, 4)), (4,))


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("", "has no characters but spaces"),
        (" \t\u3000", "has no characters but spaces"),
        ("x" * 65, "65 bytes long; at most 64 are taken"),
        ("한" * 22, "66 bytes long; at most 64 are taken"),
    ],
)
def test_bad_words_that_are_none_are_refused(word: str, problem: str) -> None:
    assert refusal(sampling(bad_words=["ok", word])).startswith(f"sampling.bad_words[1]: {problem}")


def test_bad_words_that_the_model_cannot_say_are_refused_or_need_no_ban() -> None:
    assert convert_request(sampling(bad_words=["~"])).sampling.shaping == NO_SHAPING, "its id is beyond the vocabulary"
    nothing = replace(MODEL, encode=lambda text: [])
    assert refusal(sampling(bad_words=["ab"]), nothing).startswith("sampling.bad_words[0]: 'ab' has no tokens")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (stopping(max_tokens=0), "stopping.max_tokens: must be at least 1"),
        (stopping(min_tokens=17), "stopping.min_tokens: 17 is above max_tokens, 16; lower it"),
        (stopping(min_tokens=6, max_tokens=5), "stopping.min_tokens: 6 is above max_tokens, 5"),
        (stopping(min_tokens=10**9), "stopping.min_tokens: 1000000000 is above max_tokens, 16"),
        (stopping(time_limit_ms=0), "stopping.time_limit_ms: is 0; leave it out for no limit"),
        (stopping(stop_token_ids=[26, 27]), "stopping.stop_token_ids[1]: 27 is outside the vocabulary"),
        (stopping(stop=["a", ""]), "stopping.stop[1]: is empty"),
        (stopping(stop=["x" * 257]), "stopping.stop[0]: 257 bytes long; at most 256"),
        (GenerateRequest(n=0), "n: 0 is not from 1 to 64"),
        (GenerateRequest(n=65), "n: 65 is not from 1 to 64"),
        (GenerateRequest(logprobs=21), "logprobs: 21 is above 20"),
        (GenerateRequest(prompt_logprobs=2**32 - 1), "prompt_logprobs: 4294967295 is above 20"),
        (sampling(typical=Typical(epsilon=0.5)), "sampling.typical: goes with verification VERIFICATION_TYPICAL"),
        *(
            (
                sampling(verification=VERIFICATION_TYPICAL, typical=Typical(**{name: value})),
                f"sampling.typical.{name}: {value:g} is not above 0 and at most 1",
            )
            for name in ("epsilon", "delta")
            for value in (NAN, INF, -INF, 0.0, -0.5, 1.5)
        ),
    ],
)
def test_refusals_name_the_field(message: GenerateRequest, expected: str) -> None:
    assert refusal(message).startswith(expected)


def test_tokens_are_clipped_to_the_context_together() -> None:
    stop = convert_request(stopping(max_tokens=10**9, min_tokens=10**9), num_prompt=60).stopping
    assert (stop.max_tokens, stop.min_tokens) == (4, 4)
    assert convert_request(stopping(time_limit_ms=2**32 - 1)).stopping.time_limit_s == pytest.approx(4294967.295)
    assert convert_request(stopping(min_tokens=16)).stopping.min_tokens == 16


def test_typical_verification_needs_the_servers_leave() -> None:
    wanted = sampling(verification=VERIFICATION_TYPICAL)
    assert convert_request(wanted).sampling.typical == demands.Typical()
    with pytest.raises(MissingFeature, match=r"sampling\.verification: .*speculation\.allow_typical"):
        convert_request(wanted, replace(MODEL, takes_typical=False))
    greedy = sampling(verification=VERIFICATION_TYPICAL, temperature=0)
    assert convert_request(greedy).sampling.typical is None, "a greedy draft stands if it is the likeliest token"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ({"json_object": True}, "", None),
        ({"json_schema": "{}"}, "{}", None),
        ({"json_schema": "true"}, "true", None),
        ({"regex": "a+"}, "a+", None),
        ({"lark": 'start: "a"'}, 'start: "a"', None),
        ({"choice": Choices(texts=["a", "b", "a"])}, '["a", "b"]', None),
        ({"choice": Choices(texts=["한", '"'])}, '["한", "\\""]', None),
        ({}, "", "constraint: is empty; set one of json_schema, json_object, regex, lark, choice, or leave it out"),
        ({"json_object": False}, "", "constraint.json_object: is false"),
        ({"json_schema": ""}, "", "constraint.json_schema: is empty"),
        ({"json_schema": "{"}, "", "constraint.json_schema: is no JSON: Expecting property name"),
        ({"json_schema": "[]"}, "", "constraint.json_schema: is no schema"),
        ({"json_schema": "false"}, "", "constraint.json_schema: is false, which nothing meets"),
        ({"json_schema": '{"maximum": NaN}'}, "", "constraint.json_schema: is no JSON: NaN is no number of JSON"),
        ({"json_schema": "[" * 50_000}, "", "constraint.json_schema: is no JSON: "),
        ({"json_schema": '"' + "x" * 65_536}, "", "constraint.json_schema: 65537 bytes long"),
        ({"regex": " \n"}, "", "constraint.regex: is empty"),
        ({"regex": "한" * 22_000}, "", "constraint.regex: 66000 bytes long; at most 65536 are taken"),
        ({"lark": ""}, "", "constraint.lark: is empty"),
        ({"choice": Choices()}, "", "constraint.choice.texts: is empty; give at least one"),
        ({"choice": Choices(texts=["a", ""])}, "", "constraint.choice.texts[1]: is empty"),
        ({"choice": Choices(texts=["x" * 40_000, "y" * 40_000])}, "", "constraint.choice.texts: 80"),
    ],
)
def test_constraints_are_read_or_refused_by_kind(kind: dict[str, Any], text: str, expected: str | None) -> None:
    if expected is not None and text == "":
        assert refusal(constrained(**kind)).startswith(expected)
        return
    [name] = kind
    assert convert_request(constrained(**kind)).sampling.constraint == demands.Constraint(kind=name, text=text)


def test_of_two_constraints_the_wire_keeps_the_last() -> None:
    two = constrained(regex="a").SerializeToString() + constrained(json_object=True).SerializeToString()
    assert convert_request(GenerateRequest.FromString(two)).sampling.constraint == demands.Constraint(
        kind="json_object"
    )


def test_predictions_are_bounded_by_context_and_vocabulary() -> None:
    ids = "prediction.token_ids.ids"
    assert convert.prediction_of(ids, [0, 26], MODEL) == (0, 26)
    assert convert.prediction_of(ids, [], MODEL) == ()
    assert len(convert.prediction_of(ids, [1] * 64, MODEL)) == 64
    with pytest.raises(InvalidRequest, match=r"prediction\.token_ids\.ids: 65 ids, and the context holds 64"):
        convert.prediction_of(ids, [1] * 65, MODEL)
    with pytest.raises(InvalidRequest, match=r"prediction\.token_ids\.ids\[1\]: 27 is outside the vocabulary"):
        convert.prediction_of(ids, [1, 27], MODEL)
    long = GenerateRequest(prediction=Prediction(token_ids=TokenIds(ids=[99] * 65)))
    assert refusal(long).startswith("prediction.token_ids.ids: 65 ids, and the context holds 64")


def test_alternatives_are_no_more_than_there_are_tokens() -> None:
    tiny = replace(MODEL, vocab_size=5, eos_token_ids=(4,))
    report = convert_request(GenerateRequest(logprobs=20, prompt_logprobs=6), tiny).report
    assert (report.num_logprobs, report.num_prompt_logprobs) == (5, 5)


def test_reports_that_a_frame_could_not_hold_are_refused() -> None:
    long = replace(MODEL, max_model_len=100_000, vocab_size=150_000)
    one = logprobs_bytes(1, 20, long.vocab_size)
    most = LOGPROBS_LIMIT_BYTES // one
    convert_request(GenerateRequest(prompt_logprobs=20), long, most + 1)
    words = refusal(GenerateRequest(prompt_logprobs=20), long, most + 2)
    assert words.startswith(f"prompt_logprobs: {most + 1} tokens with 20 alternatives each may take ")
    whole = GenerateRequest(logprobs=20, stream=False, stopping=Stopping(max_tokens=most))
    convert_request(whole, long)
    whole.stopping.max_tokens += 1
    assert refusal(whole, long).startswith(f"logprobs: {most + 1} tokens with 20 alternatives each may take ")
    whole.stream = True
    convert_request(whole, long)
    both = GenerateRequest(logprobs=20, prompt_logprobs=20, stream=False, stopping=Stopping(max_tokens=most // 2 + 1))
    assert refusal(both, long, most // 2 + 2).startswith("logprobs: ")
    both.logprobs, both.prompt_logprobs = 0, 0
    convert_request(both, long, most // 2 + 2)


@pytest.mark.parametrize("vocab_size", [2, 128, 129, 16_384, 151_936, 2**21 + 1])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities_take_no_more_than_is_reckoned(vocab_size: int, num_top: int) -> None:
    one = TokenLogprob(token=vocab_size - 1, logprob=-1.5, top=((vocab_size - 1, -1.5),) * num_top)
    delta = Delta(text="", token_ids=(), usage=Usage(prompt=0), logprobs=(one,) * 50)
    size_bytes = (
        frame_of(delta, convert_request(GenerateRequest())).ByteSize()
        - frame_of(replace(delta, logprobs=()), convert_request(GenerateRequest())).ByteSize()
    )
    assert size_bytes <= logprobs_bytes(50, num_top, vocab_size) <= size_bytes + 50 * (num_top + 1)
    assert LOGPROBS_LIMIT_BYTES < STOCK_LIMIT_BYTES


def test_a_field_of_a_newer_client_is_found_beside_a_map() -> None:
    message = sampling(logit_bias={1: 1.0, 2: 2.0})
    message.sampling.MergeFromString(b"\xc0\x3e\x01")
    assert refusal(message).startswith("sampling: field number 1000 is not known to this server")


def test_the_lossy_way_is_named_in_every_frame_of_a_request_that_goes_it() -> None:
    delta = Delta(text="a", token_ids=(1,), usage=Usage(prompt=1))
    for message, is_lossy in (
        (sampling(verification=VERIFICATION_TYPICAL), True),
        (sampling(verification=VERIFICATION_TYPICAL, temperature=0), False),
        (GenerateRequest(), False),
    ):
        frame = frame_of(delta, convert_request(message))
        assert frame.HasField("lossy_verification") is is_lossy
        assert frame.lossy_verification == (VERIFICATION_TYPICAL if is_lossy else 0)
