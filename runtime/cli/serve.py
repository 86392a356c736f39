"""`outrider serve`: settings from flags and YAML, a deployment and its clean end. Knows nothing of its parts."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.logging import RichHandler

from configs.load import SettingsError, load_settings, parse_assignment, settings_file
from configs.schema import Dtype, Numerics, ServeSettings
from runtime.audit import AUDIT
from runtime.cli.console import ERR, EXIT_USAGE, OUT, fail, run
from runtime.cli.startup import StartupProgress, accounting_table, model_line, summary_panel

FLAG_KEYS = {
    "checkpoint": "model.path",
    "served_name": "model.served_name",
    "dtype": "model.dtype",
    "numerics": "model.numerics",
    "tp": "parallel.tp",
    "dp": "parallel.dp",
    "ep": "parallel.ep",
    "host": "server.host",
    "port": "server.port",
    "metrics_port": "metrics.port",
    "policy": "speculation.policy",
    "gamma": "speculation.gamma",
    "measure_profile": "speculation.measure_profile",
    "memory_mib": "cache.memory_mib",
    "max_running": "cache.max_running",
    "max_model_len": "cache.max_model_len",
    "launcher": "cluster.launcher",
    "ray_address": "cluster.ray_address",
}
"""The setting behind each flag."""


def settings_from_flags(config: str | None, assignments: list[str], flags: dict[str, Any]) -> ServeSettings:
    """YAML file, then `--set`, then the flags that were given; later ones win. Ends the command on a SettingsError."""
    try:
        overrides = dict(parse_assignment(text) for text in assignments)
        overrides.update({FLAG_KEYS[name]: value for name, value in flags.items() if value is not None})
        return load_settings(settings_file(config) if config else None, overrides)
    except SettingsError as error:
        fail(str(error), EXIT_USAGE)


def serve(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint directory in Hugging Face format; the bundled demo model if left out."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings file in YAML, or a bundled one: demo, cpu, reference.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    metrics_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Port of the metrics, or none; the one after --port if left out.")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Weights and activations.")] = None,
    numerics: Annotated[
        Numerics | None, typer.Option(help="reference: bitwise reproducible, several times slower.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, which cut every layer.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks, each with sequences of its own.")] = None,
    ep: Annotated[
        int | None, typer.Option(help="Ranks with whole experts: all of them (dp x tp), or 1 for none.")
    ] = None,
    policy: Annotated[
        Literal["off", "fixed", "dynamic"] | None,
        typer.Option(help="Speculation at start, unless operators have set another since."),
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Drafts per round under the fixed policy.")] = None,
    measure_profile: Annotated[
        bool | None,
        typer.Option("--measure-profile", help="Measure a hardware profile at start where none fits; takes minutes."),
    ] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory for the state of running sequences.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one batch.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output in tokens.")] = None,
    launcher: Annotated[Literal["ray", "process"] | None, typer.Option(help="How ranks are started.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; a local one is started if left out.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least severe messages to print on standard error."),
    ] = "warning",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its key path; may be repeated."),
    ] = None,
) -> None:
    """Serve a checkpoint over gRPC until Ctrl-C or SIGTERM.

    A first signal lets running streams finish (server.drain_s), a second one ends them at once. All settings with
    their meaning: outrider settings.
    """
    # Locals first: nothing else may stand among them.
    flags = {name: value for name, value in locals().items() if name in FLAG_KEYS}
    logging.basicConfig(
        level=log_level.upper(), format="%(name)s: %(message)s", handlers=[RichHandler(console=ERR, show_path=False)]
    )
    AUDIT.setLevel(logging.INFO)
    run(_serve(settings_from_flags(config, assignments or [], flags)))


class StopSignals:
    """Counts SIGINT and SIGTERM while a loop runs: the first asks for an orderly end, the second for one at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()


async def first_of(work: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Waits for the work or the event. True when the work ended first; then its error is raised here.

    Where the event came first the work is cancelled, and its end awaited; both can take seconds, hence a word before.
    """
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait((work, waiter), return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if work.done():
        work.result()
        return True
    ERR.print("stopping")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return False


async def _serve(settings: ServeSettings) -> None:
    from runtime.serve import Deployment  # grpc and perhaps ray: not paid for by `--help`

    signals = StopSignals()
    deployment = Deployment(settings, keeps_state=True)
    try:
        with StartupProgress(settings.parallel) as progress:
            if not await first_of(asyncio.create_task(deployment.start(progress)), signals.asked):
                return
        OUT.print(accounting_table(deployment.ranks))
        rows = [("model", f"{settings.model.served_name}: {model_line(deployment.description)}"), *deployment.facts()]
        OUT.print(summary_panel("outrider", rows))
        OUT.print(f"ready: {deployment.address}", soft_wrap=True)
        await signals.asked.wait()
        OUT.print(f"draining: streams have {settings.server.drain_s:g} s to finish; once more to end them now")
        await first_of(asyncio.create_task(deployment.stop(settings.server.drain_s)), signals.insisted)
    finally:
        await deployment.stop(0)
