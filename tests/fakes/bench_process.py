"""`outrider bench` in this process, and the `outrider` command in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from runtime.cli.main import app

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
COUNTING = ("-m", "fakes.outrider_counting")
ITSELF = ("-c", "from runtime.cli.main import main; main()")
TINY = ("--requests", "2", "--max-tokens", "8", "--repeats", "1", "--warmup", "1")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def start(*arguments: str, cwd: Path, program: tuple[str, str] = COUNTING) -> subprocess.Popen[str]:
    """program: with a counting worker in the model's place, or the command itself."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)
