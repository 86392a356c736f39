"""Files that a measurement is written to. What cannot be written costs nothing but itself. Knows no figures."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from configs.load import SettingsError
from runtime.cli.console import ERR, complain
from runtime.replaced_file import replace_text

if TYPE_CHECKING:
    from runtime.bench.document import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to write; None writes none."""

    json: Path | None
    html: Path | None

    def check(self) -> None:
        """Raises SettingsError where what was asked for could not be written after minutes of measuring."""
        check_outputs({"--json": self.json, "--html": self.html})


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Files by option; None where none is asked for. Raises SettingsError where one could not be written."""
    named: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise SettingsError(f"{option} {path}: is a directory; name a file in it")
        if not path.absolute().parent.is_dir():
            raise SettingsError(f"{option} {path}: no such directory; make it, or name another file")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise SettingsError(f"{option} {path}: cannot be written; name another file")
        if (other := named.setdefault(os.path.realpath(path), option)) != option:
            raise SettingsError(f"{other} and {option} both name {path}; name two files")
    if paths.get("--html") is not None and importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--html draws plots with matplotlib, which is not installed: pip install 'outrider[bench]'")


def write_files(report: Report, outputs: Outputs) -> bool:
    """Whether all that were asked for were written; each that was not is told by option, path and reason."""

    def as_json() -> str:
        return report.model_dump_json(indent=1) + "\n"

    def as_page() -> str:
        from runtime.bench.page import page

        return page(report)

    done = [
        write_file("--json", outputs.json, as_json),
        write_file("--html", outputs.html, as_page),
    ]
    return all(done)


def write_file(option: str, path: Path | None, make: Callable[[], str]) -> bool:
    """Whether it was written, or nothing was asked for; else option, path and reason are told."""
    if path is None:
        return True
    try:
        _put(path, make())
    except Exception as error:  # plotting may raise anything; the measurement is worth more than the picture
        reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        complain(f"{option} {path}: {reason}; it was not written")
        return False
    ERR.print(f"wrote {escape(str(path))}", soft_wrap=True)
    return True


def _put(path: Path, text: str) -> None:
    """Replaces a file at once, so that none is left half written. What is no plain file is written as it stands."""
    folder = path.absolute().parent
    if _is_stdout(path):
        # Opening it anew would cut off what the tables have written there.
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if not os.access(folder, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    replace_text(path, text)


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # not there yet, or nothing to write to
        return False
