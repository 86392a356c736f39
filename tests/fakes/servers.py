"""What the tests of the command share: reading along until a server says that it is ready."""

from __future__ import annotations

import subprocess

READY = "ready: "


def printed_until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All that a server printed up to its ready line, and that line's address; the last line where it never came."""
    assert process.stdout
    printed = line = ""
    for line in process.stdout:
        printed += line
        if line.startswith(READY):
            break
    return printed, line.removeprefix(READY).strip()
