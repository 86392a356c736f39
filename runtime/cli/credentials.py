"""What the command line and the environment say of credentials. Knows no server; importing it is cheap.

A token stands in a file or in the environment, never on the command line, which every user of a machine can read.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.console import EXIT_USAGE, fail

if TYPE_CHECKING:
    from runtime.front.credentials import Credentials

TOKEN_VARIABLE = "OUTRIDER_TOKEN"
"""Environment variable with a token, where no file with one is named."""

_FLAGS = {"client.certificate": "--cert", "client.key": "--key", "certificate": "--cert", "key": "--key", "ca": "--ca"}

Ca = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="OUTRIDER_CA",
        help="Authorities of servers' certificates, in PEM form; without it servers are spoken to in plain text.",
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="OUTRIDER_CERT", help="Certificate to show to servers that ask for one."),
]
Key = Annotated[Path | None, typer.Option(metavar="FILE", envvar="OUTRIDER_KEY", help="Its private key.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="OUTRIDER_TOKEN_FILE",
        help=f"File with a token for servers that ask who calls; without it ${TOKEN_VARIABLE} is taken.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFlags:
    """As given, before any file is read."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None


_GIVEN: ContextVar[CredentialFlags | None] = ContextVar("credential flags", default=None)


def note_credentials(flags: CredentialFlags) -> None:
    """Of the command that runs."""
    _GIVEN.set(flags)


def credentials() -> Credentials | None:
    """What was given for servers that are there already; None where nothing was. Ends the command where it cannot be
    used."""
    from configs.load import SettingsError
    from runtime.front.credentials import Credentials

    flags = _GIVEN.get() or CredentialFlags()
    found = Credentials(ca=flags.ca, certificate=flags.cert, key=flags.key, token=_token(flags.token_file))
    if found == Credentials():
        return None
    try:
        found.security()
    except SettingsError as error:
        fail(_in_flags(str(error)), EXIT_USAGE)
    return found


def forget_token() -> None:
    """A server shows no token, and what it starts, ranks and Ray, would inherit this one."""
    os.environ.pop(TOKEN_VARIABLE, None)


def _token(path: Path | None) -> str | None:
    """None where there is none. No error repeats what was found."""
    if path is None:
        text, source = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    else:
        source = f"--token-file {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            fail(f"{source}: {error.strerror}; name a file that can be read", EXIT_USAGE)
        except UnicodeDecodeError:
            fail(f"{source}: not text; the file holds the token and nothing else", EXIT_USAGE)
    if text is None:
        return None
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        fail(f"{source}: holds no token: printable ASCII characters without spaces, on one line", EXIT_USAGE)
    return token


def _in_flags(text: str) -> str:
    """An error of Credentials in the words of the command line."""
    key, separator, rest = text.partition(": ")
    if separator and key in _FLAGS:
        return f"{_FLAGS[key]}: {rest}"
    return " ".join(_FLAGS.get(word, word) for word in text.split(" "))
