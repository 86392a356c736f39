"""One run of `outrider bench`: finds or starts the server, measures with a progress bar, shows the report and has it
written. Knows no options and no figures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from runtime.bench.load import Slot
from runtime.cli.bench_files import Outputs, write_files
from runtime.cli.console import (
    ERR,
    EXIT_INTERRUPTED,
    EXIT_NO,
    EXIT_REFUSED,
    OUT,
    complain,
    fail,
    natural_width,
    show,
)
from runtime.cli.credentials import credentials
from runtime.cli.own_server import own_server
from runtime.cli.serve import StopSignals

if TYPE_CHECKING:
    from configs.schema import ServeSettings
    from runtime.bench.asked import Asked
    from runtime.bench.document import Report
    from runtime.bench.prepare import Prepared
    from runtime.bench.session import Session


LEAST_COLUMNS = 3
"""Load, policy and a figure."""


async def bench_run(asked: Asked, outputs: Outputs, address: str | None) -> None:
    """Measures until all is done, a signal comes, or the server fails; then what was measured is shown and written.

    address: of a running server, where `asked` has no settings of one.
    """
    from runtime.bench.errors import BenchError
    from runtime.bench.table import has_failures

    measuring = _Measuring(asked)
    error: Exception | None = None
    interrupted = False
    try:
        interrupted = not await _finished(asyncio.create_task(measuring.run(address)), StopSignals())
    except Exception as raised:  # raised again below: what was measured comes first, whatever ended it
        error = raised
    report = measuring.report()
    unshown: OSError | None = None
    written = True
    if report is not None:
        try:
            _show(report)
        except OSError as raised:
            unshown = raised
        written = write_files(report, outputs)
    elif interrupted:
        ERR.print("no cell was measured to its end")
    if measuring.policy_left and address is not None:
        complain(f"the policy of before was not put back: {measuring.policy_left}; set it with outrider policy set")
    if isinstance(error, BenchError):
        fail(str(error), EXIT_REFUSED)
    if error is not None:
        raise error
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not written or (report is not None and has_failures(report)):
        raise typer.Exit(EXIT_NO)
    if unshown is not None:
        raise unshown


async def _finished(work: asyncio.Task[None], signals: StopSignals) -> bool:
    """Waits for the work, whose error is raised here; False where a signal ended it.

    The first signal has it end in order: the policy is put back, and a server of its own stopped. A second one ends
    that too.
    """
    asked, insisted = (asyncio.create_task(event.wait()) for event in (signals.asked, signals.insisted))
    try:
        await asyncio.wait((work, asked), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            ERR.print("stopping; once more to end at once")
            work.cancel()
            await asyncio.wait((work, insisted), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            await asyncio.wait((work,))
    finally:
        asked.cancel()
        insisted.cancel()
    if work.cancelled():
        return False
    work.result()
    return True


class _Measuring:
    """One benchmark. What is done of it can be reported however it ended."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._prepared: Prepared | None = None
        self._session: Session | None = None

    async def run(self, address: str | None) -> None:
        """Raises BenchError, WorkloadError, and what starting a server or asking it raises."""
        from runtime.bench.prepare import prepare, read_workload
        from runtime.bench.session import Session
        from runtime.front.client import OutriderClient

        workload = read_workload(self._asked)
        shown = None if address is None else credentials()
        async with _server(self._asked.settings, address) as at, OutriderClient(at, shown) as client:
            self._prepared = await prepare(client, self._asked, workload)
            with _CellProgress(self._asked, len(self._prepared.prompts.ids)) as progress:
                self._session = Session(
                    client,
                    self._asked,
                    self._prepared.prompts,
                    note_cell=progress.note_cell,
                    note_request=progress.note_request,
                    note_recording=progress.note_recording,
                    note_put_off=progress.note_put_off,
                )
                await self._session.run()

    def report(self) -> Report | None:
        """None where no cell was measured to its end."""
        from runtime.bench.prepare import plan_of
        from runtime.bench.report import build_report

        if self._session is None or self._prepared is None or not self._session.runs:
            return None
        return build_report(
            self._session.runs,
            plan=plan_of(self._session.asked, self._prepared.prompts),
            identity=self._prepared.identity,
            cells_planned=self._asked.num_cells,
            started_at=self._session.started_at,
            duration_s=self._session.duration_s,
        )

    @property
    def policy_left(self) -> str:
        """As in Session."""
        return self._session.policy_left if self._session is not None else ""


@contextlib.asynccontextmanager
async def _server(settings: ServeSettings | None, address: str | None) -> AsyncIterator[str]:
    """The given server, or one that lives as long as the measurement."""
    if settings is None:
        assert address is not None, "neither settings nor an address"
        yield address
        return
    async with own_server(settings) as own_address:
        yield own_address


class _CellProgress:
    """How far the requests of all cells are, on standard error; where it is no terminal, a line per cell."""

    def __init__(self, asked: Asked, num_prompts: int) -> None:
        self._num_cells, self._cell = asked.num_cells, 0
        self._bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=ERR,
        )
        total = asked.total_requests + (num_prompts if asked.records else 0)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _CellProgress:
        if ERR.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if ERR.is_terminal:
            self._bar.stop()

    def note_cell(self, slot: Slot) -> None:
        self._cell += 1
        self._say(f"cell {self._cell}/{self._num_cells}: {slot.load}, {slot.policy}")

    def note_put_off(self, reason: str) -> None:
        self._cell -= 1
        ERR.print(escape(f"put off: {reason}"), soft_wrap=True)

    def note_recording(self) -> None:
        self._say("recording what is answered without drafts")

    def _say(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if not ERR.is_terminal:
            ERR.print(text, soft_wrap=True)

    def note_request(self) -> None:
        self._bar.advance(self._task)


def _show(report: Report) -> None:
    from runtime.bench.origin_table import origin_lines, origin_table
    from runtime.bench.table import comparison_lines, cost_table, remarks, speed_table, work_table
    from runtime.bench.verdict_table import verdict_lines, verdict_table

    if not report.complete:
        OUT.print(f"ended early: {len(report.cells)} of {report.cells_planned} cells were measured")
    for table in (
        speed_table(report),
        cost_table(report),
        work_table(report),
        origin_table(report),
        verdict_table(report.verdict),
    ):
        if not table.row_count:
            continue
        left_out: list[str] = []
        if OUT.is_terminal:
            left_out = fit(table, OUT.width)
            OUT.print(table, crop=False)
        else:
            show(table)
        if left_out:
            OUT.print(f"no room for {', '.join(left_out)}: --json has all, and so has a wider terminal", soft_wrap=True)
        OUT.print()
    dtype = report.identity.model.dtype
    compared = (line for one in report.comparisons for line in comparison_lines(one, dtype))
    for line in [*remarks(report), *origin_lines(report), *compared, *verdict_lines(report.verdict)]:
        OUT.print(escape(line), soft_wrap=True)


def fit(table: Table, width: int) -> list[str]:
    """Takes columns off the right of a table until it fits whole, and gives their headings. What is left of a number
    that was cut would be read as another."""
    left_out: list[str] = []
    while len(table.columns) > LEAST_COLUMNS and natural_width(table) > width:
        left_out.insert(0, str(table.columns.pop().header))
    table.width = natural_width(table)
    return left_out
