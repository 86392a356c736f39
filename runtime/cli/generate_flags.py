"""The flags of `outrider generate`, one for each thing a request may ask for, and the message they make. Knows no
server.

Numbers are refused here where no message holds them; whether they make sense is the server's to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runtime.cli.console import EXIT_USAGE, fail
from runtime.cli.options import UINT32_MAX, UINT64_MAX, checked_text, text_of_stdin

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2, types_pb2

SAMPLING, ENDS, CONSTRAINT = "How tokens are drawn", "Where the output ends", "What the output must be (one of them)"
DRAFTS, OUTPUT, REQUEST = "What is drafted", "What is returned", "The request"

INT32_MAX = 2**31 - 1


def _flag(panel: str, help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


def _count(panel: str, help_text: str, *, least: int = 0) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, min=least, max=UINT32_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """As they were given; what was not is left to the server."""

    temperature: Annotated[float | None, _flag(SAMPLING, "0 is greedy.", min=0)] = None
    top_k: Annotated[int | None, _count(SAMPLING, "Keep the k likeliest tokens; 0 keeps all.")] = None
    top_p: Annotated[float | None, _flag(SAMPLING, "Keep the likeliest tokens up to this mass.", min=0, max=1)] = None
    min_p: Annotated[float | None, _flag(SAMPLING, "Drop tokens below this share of the likeliest.", min=0, max=1)] = (
        None
    )
    typical_p: Annotated[
        float | None, _flag(SAMPLING, "Keep the tokens nearest to the entropy up to this mass.", min=0, max=1)
    ] = None
    repetition_penalty: Annotated[
        float | None, _flag(SAMPLING, "Above 1 makes tokens of prompt and output less likely.", min=0)
    ] = None
    frequency_penalty: Annotated[
        float | None, _flag(SAMPLING, "Taken from a token's logit each time that it was output, -2 to 2.")
    ] = None
    presence_penalty: Annotated[
        float | None, _flag(SAMPLING, "Taken from a token's logit if it was output at all, -2 to 2.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _flag(SAMPLING, "Add BIAS to the logit of a token; may be repeated.", metavar="ID=BIAS"),
    ] = None
    ban_token_id: Annotated[
        list[int] | None,
        _flag(SAMPLING, "Never output this token; may be repeated.", metavar="ID", min=0, max=UINT32_MAX),
    ] = None
    allow_token_id: Annotated[
        list[int] | None,
        _flag(SAMPLING, "Output no tokens but these; may be repeated.", metavar="ID", min=0, max=UINT32_MAX),
    ] = None
    bad_word: Annotated[list[str] | None, _flag(SAMPLING, "Never output this text; may be repeated.")] = None
    seed: Annotated[
        int | None, _flag(SAMPLING, "Makes the text reproducible, whatever the policy.", min=0, max=UINT64_MAX)
    ] = None
    verification: Annotated[
        Literal["standard", "coupled", "typical"] | None,
        _flag(
            SAMPLING, "How drafts are verified. coupled goes with a seed; typical is lossy, and refused unless allowed."
        ),
    ] = None
    typical_epsilon: Annotated[float | None, _flag(SAMPLING, "Of typical verification.", min=0, max=1)] = None
    typical_delta: Annotated[float | None, _flag(SAMPLING, "Of typical verification.", min=0, max=1)] = None

    max_tokens: Annotated[int | None, _count(ENDS, "Most tokens to generate.", least=1)] = None
    min_tokens: Annotated[int | None, _count(ENDS, "Fewest tokens to generate.")] = None
    stop: Annotated[list[str] | None, _flag(ENDS, "End before this string; may be repeated.")] = None
    stop_token_id: Annotated[
        list[int] | None,
        _flag(ENDS, "End with this token; may be repeated.", metavar="ID", min=0, max=UINT32_MAX),
    ] = None
    include_stop: Annotated[bool, _flag(ENDS, "Return what ended the text as a part of it.", "--include-stop")] = False
    ignore_eos: Annotated[bool, _flag(ENDS, "Go on past the end-of-sequence token.", "--ignore-eos")] = False
    time_limit_ms: Annotated[int | None, _count(ENDS, "Return what there is after so long.", least=1)] = None

    json_schema: Annotated[
        str | None, _flag(CONSTRAINT, "A JSON Schema; @FILE reads it from a file.", metavar="SCHEMA")
    ] = None
    json_object: Annotated[bool, _flag(CONSTRAINT, "Any JSON object.", "--json-object")] = False
    regex: Annotated[str | None, _flag(CONSTRAINT, "A regular expression; @FILE reads it from a file.")] = None
    lark: Annotated[str | None, _flag(CONSTRAINT, "A Lark grammar; @FILE reads it from a file.", metavar="GRAMMAR")] = (
        None
    )
    choice: Annotated[list[str] | None, _flag(CONSTRAINT, "One of these texts; may be repeated.")] = None

    max_drafts: Annotated[
        int | None, _count(DRAFTS, "Drafts per round at most, whatever the policy; 0 decodes plainly.")
    ] = None
    prediction: Annotated[
        str | None,
        _flag(DRAFTS, "Text that the output may have much in common with; @FILE reads it from a file.", metavar="TEXT"),
    ] = None
    prediction_ids: Annotated[
        str | None, _flag(DRAFTS, "The same as token ids, comma between them.", metavar="IDS")
    ] = None
    ngram: Annotated[bool, _flag(DRAFTS, "Look for drafts in prompt and output first.", "--ngram")] = False

    n: Annotated[int | None, _count(OUTPUT, "Independent sequences, shown one after another.", least=1)] = None
    logprobs: Annotated[
        int | None, _count(OUTPUT, "Show each token's log-probability, and so many of the likeliest ones.")
    ] = None
    prompt_logprobs: Annotated[int | None, _count(OUTPUT, "The same of the prompt.")] = None
    echo: Annotated[bool, _flag(OUTPUT, "Begin with the prompt.", "--echo")] = False
    offsets: Annotated[bool, _flag(OUTPUT, "Show where in the text each token begins.", "--offsets")] = False
    whole: Annotated[bool, _flag(OUTPUT, "Wait for the end, and stream nothing.", "--whole")] = False

    chat: Annotated[bool, _flag(REQUEST, "Send the prompt as a user's chat message.", "--chat")] = False
    system: Annotated[str | None, _flag(REQUEST, "With --chat: a system message before it.", metavar="TEXT")] = None
    no_generation_prompt: Annotated[
        bool, _flag(REQUEST, "With --chat: do not have the template open the answer.", "--no-generation-prompt")
    ] = False
    token_ids: Annotated[bool, _flag(REQUEST, "The prompt is token ids, comma between them.", "--token-ids")] = False
    request_id: Annotated[str | None, _flag(REQUEST, "Name of the request.", metavar="ID")] = None
    model: Annotated[str | None, _flag(REQUEST, "Served name that must be the server's.", metavar="NAME")] = None
    priority: Annotated[int | None, _flag(REQUEST, "Lower is served first.", min=-INT32_MAX - 1, max=INT32_MAX)] = None


def request_of(prompt: str, flags: GenerateFlags) -> inference_pb2.GenerateRequest:
    """The message. Ends the command where flags do not go together, or say nothing that a message could hold."""
    from outrider.v1 import inference_pb2

    request = inference_pb2.GenerateRequest(
        request_id=_optional(flags.request_id, "--request-id"),
        model=_optional(flags.model, "--model"),
        sampling=_sampling(flags),
        stopping=_stopping(flags),
        priority=flags.priority,
        stream=False if flags.whole else None,
        max_drafts=flags.max_drafts,
        constraint=_constraint(flags),
        n=flags.n,
        logprobs=flags.logprobs,
        prompt_logprobs=flags.prompt_logprobs,
        echo=flags.echo or None,
        report_offsets=flags.offsets or None,
        prediction=_prediction(flags),
        ngram=flags.ngram or None,
    )
    _set_input(request, text_of_stdin() if prompt == "-" else checked_text(prompt, "the prompt"), flags)
    return request


def _set_input(request: inference_pb2.GenerateRequest, prompt: str, flags: GenerateFlags) -> None:
    if not flags.chat and (flags.system is not None or flags.no_generation_prompt):
        fail("--system and --no-generation-prompt go with --chat; add it, or leave them out", EXIT_USAGE)
    if flags.chat and flags.token_ids:
        fail("--chat and --token-ids do not go together; leave one out", EXIT_USAGE)
    if flags.chat:
        if flags.system is not None:
            request.chat.messages.add(role="system", content=checked_text(flags.system, "--system"))
        request.chat.messages.add(role="user", content=prompt)
        if flags.no_generation_prompt:
            request.chat.add_generation_prompt = False
    elif flags.token_ids:
        request.token_ids.ids.extend(_ids(prompt, "the prompt"))
    else:
        request.text = prompt


def _sampling(flags: GenerateFlags) -> types_pb2.Sampling:
    from outrider.v1 import types_pb2

    typical = None
    if flags.typical_epsilon is not None or flags.typical_delta is not None:
        typical = types_pb2.Typical(epsilon=flags.typical_epsilon, delta=flags.typical_delta)
    return types_pb2.Sampling(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        typical_p=flags.typical_p,
        seed=flags.seed,
        verification=f"VERIFICATION_{flags.verification.upper()}" if flags.verification else None,
        typical=typical,
        repetition_penalty=flags.repetition_penalty,
        frequency_penalty=flags.frequency_penalty,
        presence_penalty=flags.presence_penalty,
        logit_bias=dict(map(_bias, flags.logit_bias or ())),
        banned_token_ids=flags.ban_token_id or (),
        allowed_token_ids=flags.allow_token_id or (),
        bad_words=_texts(flags.bad_word, "--bad-word"),
    )


def _stopping(flags: GenerateFlags) -> types_pb2.Stopping:
    from outrider.v1 import types_pb2

    return types_pb2.Stopping(
        max_tokens=flags.max_tokens,
        stop_token_ids=flags.stop_token_id or (),
        stop=_texts(flags.stop, "--stop"),
        ignore_eos=flags.ignore_eos or None,
        min_tokens=flags.min_tokens,
        include_stop=flags.include_stop or None,
        time_limit_ms=flags.time_limit_ms,
    )


def _constraint(flags: GenerateFlags) -> types_pb2.Constraint | None:
    from outrider.v1 import types_pb2

    kinds = {name: getattr(flags, name) for name in ("json_schema", "regex", "lark")}
    given: dict[str, Any] = {
        name: _text_or_file(text, f"--{name.replace('_', '-')}") for name, text in kinds.items() if text is not None
    }
    if flags.json_object:
        given["json_object"] = True
    if flags.choice:
        given["choice"] = types_pb2.Choices(texts=_texts(flags.choice, "--choice"))
    if len(given) > 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        fail(f"{names}: a request has one constraint at most; leave one", EXIT_USAGE)
    return types_pb2.Constraint(**given) if given else None


def _prediction(flags: GenerateFlags) -> inference_pb2.Prediction | None:
    from outrider.v1 import inference_pb2

    if flags.prediction is not None and flags.prediction_ids is not None:
        fail("--prediction and --prediction-ids say the same; leave one out", EXIT_USAGE)
    if flags.prediction is not None:
        return inference_pb2.Prediction(text=_text_or_file(flags.prediction, "--prediction"))
    if flags.prediction_ids is not None:
        ids = _ids(flags.prediction_ids, "--prediction-ids")
        return inference_pb2.Prediction(token_ids=inference_pb2.TokenIds(ids=ids))
    return None


def _optional(text: str | None, flag: str) -> str | None:
    return None if text is None else checked_text(text, flag)


def _texts(texts: Sequence[str] | None, flag: str) -> list[str]:
    return [checked_text(text, flag) for text in texts or ()]


def _text_or_file(text: str, flag: str) -> str:
    """The text, or that of the file which it names behind an @."""
    if not text.startswith("@"):
        return checked_text(text, flag)
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"{flag}: {path} is not UTF-8 text: {error.reason} at byte {error.start}", EXIT_USAGE)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        why = error.strerror if isinstance(error, OSError) else error
        fail(f"{flag}: {path}: {why}; give the path of a text file behind the @", EXIT_USAGE)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.rpartition("=")
    try:
        return _id(token_id), float(bias)
    except ValueError:
        fail(f"--logit-bias {text!r}: not of the form ID=BIAS, as in 17=-2.5", EXIT_USAGE)


def _ids(text: str, what: str) -> list[int]:
    try:
        return [_id(part) for part in text.replace(",", " ").split()]
    except ValueError:
        fail(f"{what} is not token ids with commas between them, as in 17,4,911", EXIT_USAGE)


def _id(text: str) -> int:
    """Raises ValueError."""
    if not (text.isascii() and text.isdecimal() and int(text) <= UINT32_MAX):
        raise ValueError(text)
    return int(text)
