"""`outrider serve`: settings from flags and YAML, a deployment and its clean end. Knows nothing of its parts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.load import SettingsError, parse_assignment, settings_file
from configs.schema import Dtype, Numerics, ServeSettings
from runtime.cli.console import ERR, EXIT_USAGE, OUT, fail, run, unheard
from runtime.cli.credentials import forget_token
from runtime.cli.startup import StartupProgress, accounting_table, model_line, summary_panel

if TYPE_CHECKING:
    from runtime.reload import SettingsSource
    from runtime.serve import Deployment

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
    "log_level": "logs.level",
}
"""The setting behind each flag."""


def source_from_flags(config: str | None, assignments: list[str], flags: dict[str, Any]) -> SettingsSource:
    """YAML file, then `--set`, then the flags that were given; later ones win. Ends the command on a SettingsError."""
    from runtime.reload import SettingsSource

    try:
        overrides = dict(parse_assignment(text) for text in assignments)
        overrides.update({FLAG_KEYS[name]: value for name, value in flags.items() if value is not None})
        return SettingsSource(path=settings_file(config) if config else None, overrides=overrides)
    except SettingsError as error:
        fail(str(error), EXIT_USAGE)


def settings_from_flags(config: str | None, assignments: list[str], flags: dict[str, Any]) -> ServeSettings:
    """What comes of them. Ends the command on a SettingsError."""
    return loaded(source_from_flags(config, assignments, flags))


def loaded(source: SettingsSource) -> ServeSettings:
    """Ends the command on a SettingsError."""
    try:
        return source.load()
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
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="Least severe lines to write on standard error.", show_default="info"),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its key path; may be repeated."),
    ] = None,
) -> None:
    """Serve a checkpoint over gRPC until Ctrl-C or SIGTERM.

    A first signal has routers look elsewhere (server.withdraw_s) and running streams finish (server.drain_s), a second
    one ends them at once. SIGHUP, or a change of the file, has the configuration read again. All settings with their
    meaning: outrider settings.
    """
    # Locals first: nothing else may stand among them.
    flags = {name: value for name, value in locals().items() if name in FLAG_KEYS}
    source = source_from_flags(config, assignments or [], flags)
    settings = loaded(source)
    from runtime.observe.logs import configure_logs  # not paid for by `--help`

    configure_logs(settings.logs)
    run(_serve(settings, source))


class StopSignals:
    """Counts SIGINT and SIGTERM while a loop runs: the first asks for an orderly end, the second for one at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def follow_hang_ups(self, act: Callable[[], None]) -> None:
        """Has SIGHUP do that from now on. It comes too when the terminal has gone, and asks for an orderly end then."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_hang_up, act, ERR.is_terminal)

    def _on_signal(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()

    def _on_hang_up(self, act: Callable[[], None], had_terminal: bool) -> None:
        if had_terminal and not ERR.is_terminal:
            self._on_signal()
        else:
            act()


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
    with unheard():
        ERR.print("stopping")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return False


async def _serve(settings: ServeSettings, source: SettingsSource) -> None:
    signals = StopSignals()  # before all that takes time
    signals.follow_hang_ups(lambda: None)  # the configuration has just been read
    forget_token()
    from runtime.observe.logs import configure_logs
    from runtime.serve import Deployment  # grpc and perhaps ray: not paid for by `--help`

    deployment = Deployment(settings, keeps_state=True, source=source)
    deployment.settings.add_listener(lambda settings: configure_logs(settings.logs))
    signals.follow_hang_ups(deployment.reloader.reload_soon)
    try:
        with StartupProgress(settings.parallel) as progress:
            if not await first_of(asyncio.create_task(deployment.start(progress)), signals.asked):
                return
        rows = [("model", f"{settings.model.served_name}: {model_line(deployment.description)}"), *deployment.facts()]
        with unheard():
            OUT.print(accounting_table(deployment.ranks))
            OUT.print(summary_panel("outrider", rows))
            OUT.print(f"ready: {deployment.address}", soft_wrap=True)
        await signals.asked.wait()
        await _end(deployment, signals.insisted)
    finally:
        await deployment.stop(0)


async def _end(deployment: Deployment, insisted: asyncio.Event) -> None:
    """Withdraws, then lets streams finish; returns early where somebody insists."""
    server = deployment.settings.now.server
    if server.withdraw_s:
        with unheard():
            OUT.print(
                f"withdrawing: health says NOT_SERVING, and requests are taken for {server.withdraw_s:g} s more; once "
                "more to end now",
                soft_wrap=True,
            )
    if not await first_of(asyncio.create_task(deployment.withdraw()), insisted):
        return
    server = deployment.settings.now.server  # a reload may have changed it meanwhile
    with unheard():
        OUT.print(
            f"draining: streams have {server.drain_s:g} s to finish, {deployment.num_calls} are open; once more to end "
            "them now",
            soft_wrap=True,
        )
    if await first_of(asyncio.create_task(deployment.stop(server.drain_s)), insisted):
        with unheard():
            OUT.print("stopped")
