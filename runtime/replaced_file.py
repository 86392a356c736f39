"""Text files that are replaced at once, so that none is ever left half written. Knows no format."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def replace_text(path: Path, text: str, *, lasting: bool = False) -> None:
    """Makes the file's folder, where it is missing, and leaves nothing beside the file. One that is there keeps its
    mode. What is no plain file (a link, a pipe, a device) is written as it stands, for a rename would take its place.

    lasting: returns when the new text would outlast a loss of power. Raises OSError; a plain file's old text stands
    then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    # No number of a process: servers in containers that share a folder may all have the same.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if lasting:
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Makes a rename in the folder lasting."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
