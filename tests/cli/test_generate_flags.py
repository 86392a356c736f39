"""`outrider generate`: every flag reaches its field, what makes no sense is refused before anyone is asked, and the
answer is readable, however many sequences it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.commands import closed_port
from fakes.wild_requests import leaf_paths
from rich.console import Console
from typer.testing import CliRunner

from configs.load import demo_checkpoint
from outrider.v1.inference_pb2 import Finish, GenerateRequest, GenerateResponse, TokenIds
from outrider.v1.types_pb2 import (
    FINISH_REASON_LENGTH,
    VERIFICATION_TYPICAL,
    Alternative,
    Constraint,
    TokenLogprob,
    Usage,
)
from runtime.cli import console, generate
from runtime.cli.generate_flags import GenerateFlags, request_of
from runtime.cli.main import app
from runtime.cli.options import with_flags
from runtime.cli.token_table import token_table
from runtime.front.tokenizer import Tokenizer

NOT_OFFERED = {
    *("lora_adapter", "chat.messages.images.url", "chat.messages.images.data"),
    *("oracle.continuation", "oracle.acceptance"),
}
"""Not served, or for measurements alone."""


def parsed(*arguments: str) -> GenerateRequest:
    """The message that a command line makes."""
    found: list[GenerateRequest] = []
    command = typer.Typer(pretty_exceptions_enable=False)

    @command.command()
    @with_flags(GenerateFlags)
    def make(prompt: str, flags: GenerateFlags) -> None:
        found.append(request_of(prompt, flags))

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output + result.stderr
    return found[0]


EVERYTHING = (
    "hi", "--temperature", "0.5", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.25", "--typical-p", "0.5",
    "--repetition-penalty", "1.5", "--frequency-penalty", "-0.5", "--presence-penalty", "2",
    "--logit-bias", "17=-2.5", "--logit-bias", "3=1", "--ban-token-id", "4", "--ban-token-id", "5",
    "--allow-token-id", "6", "--bad-word", "no", "--seed", "9", "--verification", "typical",
    "--typical-epsilon", "0.25", "--typical-delta", "0.5",
    "--max-tokens", "7", "--min-tokens", "2", "--stop", "a", "--stop", "b", "--stop-token-id", "8", "--include-stop",
    "--ignore-eos", "--time-limit-ms", "1500",
    "--max-drafts", "3", "--ngram", "--prediction", "soon",
    "--n", "2", "--logprobs", "4", "--prompt-logprobs", "0", "--echo", "--offsets", "--whole",
    "--request-id", "r", "--model", "demo", "--priority", "-3",
)  # fmt: skip


def test_every_flag_reaches_its_field() -> None:
    request = parsed(*EVERYTHING, "--regex", "[a-z]+")
    assert request == GenerateRequest(
        request_id="r",
        model="demo",
        text="hi",
        sampling={
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.25,
            "typical_p": 0.5,
            "seed": 9,
            "repetition_penalty": 1.5,
            "frequency_penalty": -0.5,
            "presence_penalty": 2,
            "logit_bias": {17: -2.5, 3: 1.0},
            "banned_token_ids": [4, 5],
            "allowed_token_ids": [6],
            "bad_words": ["no"],
            "verification": VERIFICATION_TYPICAL,
            "typical": {"epsilon": 0.25, "delta": 0.5},
        },
        stopping={
            "max_tokens": 7,
            "min_tokens": 2,
            "stop": ["a", "b"],
            "stop_token_ids": [8],
            "include_stop": True,
            "ignore_eos": True,
            "time_limit_ms": 1500,
        },
        priority=-3,
        stream=False,
        max_drafts=3,
        constraint={"regex": "[a-z]+"},
        n=2,
        logprobs=4,
        prompt_logprobs=0,
        echo=True,
        report_offsets=True,
        prediction={"text": "soon"},
        ngram=True,
    )


def test_every_field_has_a_flag(tmp_path: Path) -> None:
    requests = [
        parsed(*EVERYTHING, *more)
        for more in (
            ("--json-schema", "{}"),
            ("--json-object",),
            ("--regex", "a"),
            ("--lark", 'start: "a"'),
            ("--choice", "a"),
        )
    ]
    requests.append(parsed("1,2", "--token-ids", "--prediction-ids", "3, 4"))
    requests.append(parsed("hi", "--chat", "--system", "be brief", "--no-generation-prompt"))
    reached = {path for request in requests for path in set_paths(request)} | {"report_rounds"}  # by --show-rounds
    assert reached | NOT_OFFERED == set(leaf_paths(GenerateRequest.DESCRIPTOR))


def set_paths(message: Any, path: str = "") -> set[str]:
    found = set()
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            found.add(name)
        else:
            for part in value if field.is_repeated else (value,):
                found |= set_paths(part, f"{name}.")
    return found


def test_what_is_left_out_is_left_to_the_server() -> None:
    request = parsed("hi")
    assert request.text == "hi"
    assert set_paths(request) == {"text"}
    assert not request.HasField("constraint")
    assert not request.HasField("stream")


def test_texts_may_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("한\n@x", encoding="utf-8")
    for flag, field in (("--json-schema", "json_schema"), ("--regex", "regex"), ("--lark", "lark")):
        assert parsed("hi", flag, f"@{path}").constraint == Constraint(**{field: "한\n@x"})
    assert parsed("hi", "--prediction", f"@{path}").prediction.text == "한\n@x"


def test_ids_are_taken_in_place_of_text() -> None:
    request = parsed("1, 2,4095", "--token-ids", "--prediction-ids", "7")
    assert (request.token_ids, request.prediction.token_ids) == (TokenIds(ids=[1, 2, 4095]), TokenIds(ids=[7]))


def test_a_chat_has_its_messages_in_order() -> None:
    chat = parsed("hi", "--chat", "--system", "be brief").chat
    assert [(one.role, one.content) for one in chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert not chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x", "--logit-bias", "17"), "--logit-bias '17': not of the form ID=BIAS"),
        (("x", "--logit-bias", "a=1"), "--logit-bias 'a=1': not of the form ID=BIAS"),
        (("x", "--logit-bias", f"{2**32}=1"), "not of the form ID=BIAS"),
        (("x", "--logit-bias", "1=much"), "not of the form ID=BIAS"),
        (("1 b", "--token-ids"), "the prompt is not token ids"),
        (("x", "--prediction-ids", "-1"), "--prediction-ids is not token ids"),
        (("x", "--prediction", "a", "--prediction-ids", "1"), "--prediction and --prediction-ids say the same"),
        (("x", "--regex", "a", "--json-object"), "--regex, --json-object: a request has one constraint at most"),
        (("x", "--lark", "a", "--choice", "b"), "--lark, --choice: a request has one constraint at most"),
        (("x", "--json-schema", "@/nowhere"), "--json-schema: /nowhere: No such file or directory"),
        (("x", "--prediction", "@."), "--prediction: .: Is a directory"),
        (("x", "--system", "y"), "--system and --no-generation-prompt go with --chat"),
        (("x", "--chat", "--token-ids"), "--chat and --token-ids do not go together"),
        (("x", "--bad-word", "\udce9"), "--bad-word is not UTF-8 text"),
        (("x", "--show-rounds", "--echo"), "--show-rounds shows what rounds brought, and none brought the prompt"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_anyone_is_asked(arguments: tuple[str, ...], words: str) -> None:
    with closed_port() as address:
        result = CliRunner().invoke(app, ["generate", *arguments, "--address", address])
    assert result.exit_code == console.EXIT_USAGE
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"caf\xe9")
    result = CliRunner().invoke(app, ["generate", "x", "--regex", f"@{tmp_path / 'bad'}"])
    assert result.exit_code == console.EXIT_USAGE
    assert "is not UTF-8 text: unexpected end of data at byte 3" in result.stderr


def test_the_help_has_a_panel_for_each_concern() -> None:
    result = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "120"})
    for words in ("How tokens are drawn", "Where the output ends", "What the output must be", "What is drafted"):
        assert words in result.output


def frame(index: int, text: str, *ids: int, ends: bool = False, **fields: Any) -> GenerateResponse:
    usage = Usage(prompt_tokens=2, completion_tokens=len(ids), rounds=1, accepted=0, drafted=3, seed=40 + index)
    finish = Finish(reason=FINISH_REASON_LENGTH) if ends else None
    return GenerateResponse(index=index, text=text, token_ids=ids, usage=usage, finish=finish, **fields)


def printed(
    capsys: pytest.CaptureFixture[str], request: GenerateRequest, *frames: GenerateResponse, spells: bool = False
) -> tuple[str, str]:
    printer = generate._Printer(request, Tokenizer.load(demo_checkpoint()) if spells else None)
    for one in frames:
        printer.take(one)
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_sequences_are_shown_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = printed(
        capsys,
        GenerateRequest(n=3),
        frame(1, "one "),
        frame(0, "zero "),
        frame(2, "two ", ends=True),
        frame(1, "more", ends=True),
        frame(0, "more", ends=True, total=Usage(completion_tokens=6, rounds=3)),
    )
    assert out == "[0]\nzero more\n[1]\none more\n[2]\ntwo \n"
    assert [line.rpartition("; ")[2] for line in err.splitlines()[:3]] == ["seed 40", "seed 41", "seed 42"]
    assert err.splitlines()[3].startswith("all 3: 6 tokens in 3 passes")


def test_the_first_sequence_is_streamed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    printer = generate._Printer(GenerateRequest(n=2), None)
    printer.take(frame(0, "now"))
    assert capsys.readouterr().out == "[0]\nnow"
    printer.take(frame(1, "later"))
    assert capsys.readouterr().out == ""


def logprob(token_id: int, value: float, *others: int) -> TokenLogprob:
    top = [Alternative(token_id=other, logprob=-1.0 - other) for other in others]
    return TokenLogprob(token_id=token_id, logprob=value, top=top)


def test_log_probabilities_are_a_table_behind_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    request = GenerateRequest(logprobs=1, prompt_logprobs=0, echo=True, report_offsets=True)
    only = frame(
        0,
        "hiA[",
        70,
        71,
        ends=True,
        logprobs=[logprob(70, -0.25, 300), logprob(71, -1.5, 301)],
        prompt_logprobs=[logprob(66, -2.0)],
        offsets=[0, 1, 2, 3],
    )
    only.token_ids[:0] = [65, 66]
    for spells in (False, True):
        out, err = printed(capsys, request, only, spells=spells)
        assert out == "hiA[\n"
        tokenizer = Tokenizer.load(demo_checkpoint())
        name = {i: repr(tokenizer.decode([i])) if spells else str(i) for i in (66, 70, 71, 300, 301)}
        rows = [line.split() for line in err.splitlines()]
        assert ["prompt"] in rows
        assert ["1", name[66], "-2.000", "13.5%"] in rows
        assert [*f"0 {name[70]} 2 -0.250 77.9% {name[300]} -301.000".split()] in rows
        assert [*f"1 {name[71]} 3 -1.500 22.3% {name[301]} -302.000".split()] in rows


def test_offsets_alone_are_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = printed(capsys, GenerateRequest(report_offsets=True), frame(0, "ab", 5, 6, ends=True, offsets=[0, 1]))
    assert [line.split() for line in err.splitlines()][-2:] == [["0", "5", "0"], ["1", "6", "1"]]


def test_lossy_verification_and_looked_up_drafts_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    last = frame(0, "x", 5, ends=True, lossy_verification=VERIFICATION_TYPICAL)
    last.usage.predicted_drafted, last.usage.predicted_accepted = 3, 2
    last.usage.ngram_drafted = 1
    _, err = printed(capsys, GenerateRequest(), last)
    assert "not the model's own law" in err
    assert "2 of 3 predicted ones, 0 of 1 looked up ones" in err


def test_a_token_without_text_shows_its_number() -> None:
    shown = Console(width=80)
    table = token_table([0, 5], (), (), title="output", spell=lambda token_id: "" if token_id == 0 else " a")
    with shown.capture() as capture:
        shown.print(table)
    assert [line.split() for line in capture.get().splitlines()][-2:] == [["0", "0"], ["1", "'", "a'"]]
