"""`outrider generate`: one prompt to a server, or to one of its own, streamed to the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from configs.load import demo_checkpoint, load_settings
from runtime.bench.completion import rounds_of
from runtime.cli.console import ERR, EXIT_USAGE, OUT, fail, guarded, run, write
from runtime.cli.options import UINT32_MAX, UINT64_MAX, checked_address, checked_text, text_of_stdin
from runtime.cli.own_server import own_server
from runtime.cli.rounds import COLOURS, SIGNS, legend, paint

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2
    from runtime.front.tokenizer import Tokenizer


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="Server to ask, as host:port; one of its own on the demo model if left out.", callback=checked_address
        ),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint for a server of its own.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="Keep the k likeliest tokens; 0 keeps all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Keep the likeliest tokens up to this mass.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=UINT64_MAX, help="Makes the text reproducible, whatever the policy.")
    ] = None,
    verification: Annotated[
        Literal["standard", "coupled"] | None,
        typer.Option(help="How sampled drafts are verified; coupled goes with a seed."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(min=0, max=UINT32_MAX, help="End with this token; may be repeated.")
    ] = None,
    max_drafts: Annotated[
        int | None,
        typer.Option(min=0, max=UINT32_MAX, help="Drafts per round at most, whatever the policy; 0 decodes plainly."),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    gamma: Annotated[int | None, typer.Option(min=0, help="Drafts per round of a server of its own.")] = None,
    show_rounds: Annotated[
        bool, typer.Option("--show-rounds", help="Mark drafts by their fate: in colour, else in signs.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --address and --show-rounds: directory of the served model's tokenizer.")
    ] = None,
) -> None:
    """Continue a prompt and stream the text.

    The text goes to standard output, everything else to standard error.
    """
    if address is not None and (checkpoint is not None or gamma is not None):
        fail("--checkpoint and --gamma belong to a server of its own; leave out --address, or them", EXIT_USAGE)
    text = text_of_stdin() if prompt == "-" else checked_text(prompt, "the prompt")
    stops = [checked_text(one, "--stop") for one in stop or ()]
    with guarded():
        from outrider.v1 import inference_pb2, types_pb2

        request = inference_pb2.GenerateRequest(
            sampling=types_pb2.Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                verification=f"VERIFICATION_{verification.upper()}" if verification else None,
            ),
            stopping=types_pb2.Stopping(
                max_tokens=max_tokens, stop_token_ids=stop_token_id or (), stop=stops, ignore_eos=ignore_eos
            ),
            report_rounds=show_rounds,
            max_drafts=max_drafts,
        )
        if chat:
            request.chat.messages.add(role="user", content=text)
        else:
            request.text = text
    run(_generate(request, address, checkpoint, gamma, tokenizer))


async def _generate(
    request: inference_pb2.GenerateRequest,
    address: str | None,
    checkpoint: Path | None,
    gamma: int | None,
    tokenizer_directory: Path | None,
) -> None:
    from runtime.front.client import OutriderClient

    async with _server(address, checkpoint, gamma) as at, OutriderClient(at) as client:
        if not request.report_rounds:
            async for frame in client.generate(request):
                write(frame.text)
                _report(frame)
            return
        served = (await client.get_model()).name
        tokenizer = _tokenizer(tokenizer_directory or checkpoint, served)
        marks = SIGNS if OUT.no_color or OUT.color_system is None else COLOURS
        OUT.print(legend(marks))
        async for frame in client.generate(request):
            OUT.print(paint(rounds_of(frame), lambda token: tokenizer.decode([token]), marks), end="", soft_wrap=True)
            _report(frame)


def _report(frame: inference_pb2.GenerateResponse) -> None:
    """After the last frame, and only then: why it ended, and the counts."""
    if not frame.HasField("finish"):
        return
    from outrider.v1 import types_pb2

    write("\n")
    reason = types_pb2.FinishReason.Name(frame.finish.reason).removeprefix("FINISH_REASON_").lower()
    usage = frame.usage
    ERR.print(
        f"[dim]{reason}: {usage.completion_tokens} tokens in {usage.rounds} passes; "
        f"{usage.accepted} of {usage.drafted} drafts accepted; seed {usage.seed}[/]",
        soft_wrap=True,
    )


def _tokenizer(directory: Path | None, served_name: str) -> Tokenizer:
    """The vocabulary to spell rejected drafts with: frames carry their ids only."""
    from runtime.front.tokenizer import Tokenizer

    if directory is None:
        directory = demo_checkpoint()
        if served_name != directory.name:
            fail(
                f"--show-rounds spells rejected drafts; name the tokenizer of {served_name} with --tokenizer DIR",
                EXIT_USAGE,
            )
    return Tokenizer.load(directory)


@contextlib.asynccontextmanager
async def _server(address: str | None, checkpoint: Path | None, gamma: int | None) -> AsyncIterator[str]:
    """The given server, or one that lives as long as the command: a child process on a free loopback port."""
    if address is not None:
        yield address
        return
    overrides: dict[str, object] = {
        "cluster.launcher": "process",
        "server.port": 0,
        "metrics.port": "none",
        "model.path": checkpoint,
    }
    if gamma is not None:
        overrides["speculation.gamma"] = gamma
    async with own_server(load_settings(None, overrides)) as own_address:
        yield own_address
