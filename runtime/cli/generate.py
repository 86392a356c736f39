"""`outrider generate`: one prompt to a server, or to one of its own, streamed to the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from configs.load import demo_checkpoint, load_settings
from runtime.bench.completion import rounds_of
from runtime.cli.console import ERR, EXIT_USAGE, OUT, fail, guarded, natural_width, run, write
from runtime.cli.credentials import credentials
from runtime.cli.generate_flags import GenerateFlags, request_of
from runtime.cli.options import checked_address, with_flags
from runtime.cli.own_server import own_server
from runtime.cli.rounds import COLOURS, SIGNS, Marks, legend, paint
from runtime.cli.token_table import token_table

if TYPE_CHECKING:
    from outrider.v1 import inference_pb2, types_pb2
    from runtime.front.tokenizer import Tokenizer


@with_flags(GenerateFlags)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    flags: GenerateFlags,
    address: Annotated[
        str | None,
        typer.Option(
            help="Server to ask, as host:port; one of its own on the demo model if left out.", callback=checked_address
        ),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint for a server of its own.")] = None,
    gamma: Annotated[int | None, typer.Option(min=0, help="Drafts per round of a server of its own.")] = None,
    show_rounds: Annotated[
        bool,
        typer.Option(
            "--show-rounds",
            help="Mark drafts by their fate: in colour, else in signs. A stop string's tokens are shown too.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="With --address: directory of the served model's tokenizer, which spells rejected drafts and likely "
            "tokens."
        ),
    ] = None,
) -> None:
    """Continue a prompt and stream the text.

    The text goes to standard output, everything else to standard error. What is left out is the server's to choose;
    proto/outrider/v1 says what each field means.
    """
    if address is not None and (checkpoint is not None or gamma is not None):
        fail("--checkpoint and --gamma belong to a server of its own; leave out --address, or them", EXIT_USAGE)
    if show_rounds and flags.echo:
        fail("--show-rounds shows what rounds brought, and none brought the prompt; leave out --echo", EXIT_USAGE)
    with guarded():
        request = request_of(prompt, flags)
        request.report_rounds = show_rounds
    run(_generate(request, address, checkpoint, gamma, tokenizer))


async def _generate(
    request: inference_pb2.GenerateRequest,
    address: str | None,
    checkpoint: Path | None,
    gamma: int | None,
    tokenizer_directory: Path | None,
) -> None:
    from runtime.front.client import OutriderClient

    shown = None if address is None else credentials()
    async with _server(address, checkpoint, gamma) as at, OutriderClient(at, shown) as client:
        tokenizer = None
        if request.report_rounds or request.HasField("logprobs") or request.HasField("prompt_logprobs"):
            served = (await client.get_model()).name
            tokenizer = _tokenizer(tokenizer_directory or checkpoint, served, is_needed=request.report_rounds)
        printer = _Printer(request, tokenizer)
        async for frame in client.generate(request):
            printer.take(frame)


class _Printer:
    """Shows frames as they come; of several sequences the first one, and the others one after another behind it.

    tokenizer: spells tokens; None where there is none.
    """

    def __init__(self, request: inference_pb2.GenerateRequest, tokenizer: Tokenizer | None) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._marks: Marks | None = None
        if request.report_rounds:
            self._marks = SIGNS if OUT.no_color or OUT.color_system is None else COLOURS
            OUT.print(legend(self._marks))
        self._turn = 0
        self._waiting: dict[int, list[inference_pb2.GenerateResponse]] = {}
        self._shown: list[inference_pb2.GenerateResponse] = []

    def take(self, frame: inference_pb2.GenerateResponse) -> None:
        for one in self._in_turn(frame):
            self._show(one)
        if frame.HasField("total"):
            ERR.print(f"[dim]all {self._request.n}: {_counts(frame.total)}[/]", soft_wrap=True)

    def _in_turn(self, frame: inference_pb2.GenerateResponse) -> Iterator[inference_pb2.GenerateResponse]:
        """What may be shown now that this one is there."""
        self._waiting.setdefault(frame.index, []).append(frame)
        while frames := self._waiting.pop(self._turn, None):
            yield from frames
            if not frames[-1].HasField("finish"):
                return
            self._turn += 1

    def _show(self, frame: inference_pb2.GenerateResponse) -> None:
        if self._request.n > 1 and not self._shown:
            write(f"[{frame.index}]\n")
        self._shown.append(frame)
        if self._marks is None or self._tokenizer is None:
            write(frame.text)
        else:
            OUT.print(paint(rounds_of(frame), self._spell, self._marks), end="", soft_wrap=True)
        if frame.HasField("finish"):
            write("\n")
            self._report(frame)
            self._shown = []

    def _report(self, last: inference_pb2.GenerateResponse) -> None:
        """After a sequence: why it ended, the counts, and its tokens where they were asked for."""
        from outrider.v1 import types_pb2

        reason = types_pb2.FinishReason.Name(last.finish.reason).removeprefix("FINISH_REASON_").lower()
        lossy = "; not the model's own law, by typical verification" if last.HasField("lossy_verification") else ""
        ERR.print(f"[dim]{reason}: {_counts(last.usage)}; seed {last.usage.seed}{lossy}[/]", soft_wrap=True)
        spell = None if self._tokenizer is None else self._spell
        if prompt_logprobs := [one for frame in self._shown for one in frame.prompt_logprobs]:
            ids = [one.token_id for one in prompt_logprobs]
            _tell(token_table(ids, prompt_logprobs, (), title="prompt", first=1, spell=spell))
        logprobs = [one for frame in self._shown for one in frame.logprobs]
        offsets = [offset for frame in self._shown for offset in frame.offsets]
        if logprobs or offsets:
            ids = [token_id for frame in self._shown for token_id in frame.token_ids]
            # An echoed prompt has offsets and no log-probabilities here.
            num_echoed = len(ids) - last.usage.completion_tokens
            ids, offsets = ids[num_echoed:], offsets[num_echoed:]
            _tell(token_table(ids, logprobs, offsets, title="output", spell=spell))

    def _spell(self, token_id: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id])


def _tell(table: Table) -> None:
    ERR.print(table, width=None if ERR.is_terminal else natural_width(table))


def _counts(usage: types_pb2.Usage) -> str:
    text = (
        f"{usage.completion_tokens} tokens in {usage.rounds} passes; "
        f"{usage.accepted} of {usage.drafted} drafts accepted"
    )
    for kind, accepted, drafted in (
        ("predicted", usage.predicted_accepted, usage.predicted_drafted),
        ("looked up", usage.ngram_accepted, usage.ngram_drafted),
    ):
        text += f", {accepted} of {drafted} {kind} ones" if drafted else ""
    return text


def _tokenizer(directory: Path | None, served_name: str, *, is_needed: bool) -> Tokenizer | None:
    """The vocabulary to spell tokens with: frames carry the ids of rejected drafts and of alternatives only. None where
    none is known; ends the command where it is needed."""
    from runtime.front.tokenizer import Tokenizer

    if directory is None:
        directory = demo_checkpoint()
        if served_name != directory.name:
            if is_needed:
                fail(
                    f"--show-rounds spells rejected drafts; name the tokenizer of {served_name} with --tokenizer DIR",
                    EXIT_USAGE,
                )
            return None
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
