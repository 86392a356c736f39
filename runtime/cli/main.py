"""The `outrider` command: its subcommands in one table. Knows nothing of what they do; importing it is cheap."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from runtime.cli.bench_group import bench_commands
from runtime.cli.check import check
from runtime.cli.console import OUT
from runtime.cli.credentials import Ca, Cert, CredentialFlags, Key, TokenFile, note_credentials
from runtime.cli.demo import demo
from runtime.cli.doctor import doctor
from runtime.cli.drain import drain, resume
from runtime.cli.generate import generate
from runtime.cli.health import health
from runtime.cli.policy import policy
from runtime.cli.profile import profile
from runtime.cli.reload import reload
from runtime.cli.requests import abort, requests
from runtime.cli.serve import serve
from runtime.cli.settings import settings
from runtime.cli.simulate import simulate
from runtime.cli.status import status
from runtime.cli.top import top

app = typer.Typer(
    name="outrider",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(generate)
app.command()(demo)
app.add_typer(bench_commands, name="bench")
app.command()(simulate)
app.add_typer(profile, name="profile")
app.add_typer(policy, name="policy")
app.command()(status)
app.command()(top)
app.command()(requests)
app.command()(abort)
app.command()(drain)
app.command()(resume)
app.command()(reload)
app.command()(check)
app.command()(health)
app.command()(settings)
app.command()(doctor)


def _print_version(asked: bool) -> None:
    if asked:
        OUT.print(importlib.metadata.version("outrider"))
        raise typer.Exit


@app.callback()
def _outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
) -> None:
    """Serve mixture-of-experts and hybrid language models with exact speculative decoding.

    The options here are for commands that talk to a running server.
    """
    note_credentials(CredentialFlags(ca=ca, cert=cert, key=key, token_file=token_file))


def main() -> None:
    """Entry point of the console script."""
    app()
