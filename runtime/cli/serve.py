"""`outrider serve`: settings from flags and YAML, a deployment and its clean end. Knows nothing of its parts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from configs.schema import ServeSettings
from runtime.cli.console import ERR, OUT, run, unheard
from runtime.cli.credentials import forget_token
from runtime.cli.options import with_flags
from runtime.cli.serve_flags import ServeFlags, loaded
from runtime.cli.startup import StartupProgress, accounting_table, model_line, summary_panel

if TYPE_CHECKING:
    from runtime.reload import SettingsSource
    from runtime.serve import Deployment


@with_flags(ServeFlags)
def serve(flags: ServeFlags) -> None:
    """Serve a checkpoint over gRPC until Ctrl-C or SIGTERM.

    A first signal has routers look elsewhere (server.withdraw_s) and running streams finish (server.drain_s), a second
    one ends them at once. SIGHUP, or a change of the file, has the configuration read again. All settings with their
    meaning: outrider settings.
    """
    source = flags.source()
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
