"""`outrider bench` and what stands under it. Knows no options."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from runtime.cli.bench import bench
from runtime.cli.bench_replay import replay

MEASURE = "measure"


class _MeasureByDefault(TyperGroup):
    """Whatever does not begin with a command's name is for `measure`: a checkpoint, an option, nothing at all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


bench_commands = typer.Typer(cls=_MeasureByDefault, no_args_is_help=False)
bench_commands.command(
    MEASURE, epilog="outrider bench replay measures where the dynamic policy keeps up: see its --help."
)(bench)
bench_commands.command("replay")(replay)


@bench_commands.callback()
def _bench() -> None:
    """Measure speed and speculation by policy and load; `bench replay`: where the dynamic policy keeps up."""
