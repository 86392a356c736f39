"""What the terminal shows while a deployment comes up and when it stands. Knows nothing of how it is started."""

from __future__ import annotations

from types import TracebackType

from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from runtime.cli.console import ERR
from workers.plan import WorkerDescription


class StartupProgress:
    """One bar per stage of the start, on standard error. Call it with (stage, done, total); total 0 means unknown.

    Where standard error is no terminal, one line per stage.
    """

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=ERR,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartupProgress:
        if ERR.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._complete_all()
        if ERR.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            # Stages follow one another: the start of one is the end of those before.
            self._complete_all()
            self._tasks[stage] = self._bars.add_task(stage, total=None)
            if not ERR.is_terminal:
                ERR.print(stage, soft_wrap=True)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _complete_all(self) -> None:
        for task in self._bars.tasks:
            total = task.total or 1
            self._bars.update(task.id, completed=total, total=total)


def accounting_table(description: WorkerDescription) -> Table:
    """The worker's memory accounting, as it reported it."""
    table = Table(title="memory accounting", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in description.accounting:
        table.add_row(what, figure)
    return table


def summary_panel(title: str, rows: list[tuple[str, str]]) -> Panel:
    """A box of name and value pairs."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(f"[bold]{name}[/]", value)
    return Panel(grid, title=title, title_align="left", expand=False)


def model_line(description: WorkerDescription) -> str:
    """The model in one line: family, size, arithmetic, device."""
    millions = description.num_parameters / 1e6
    arithmetic = f"{description.dtype} on {description.device}, {description.numerics} numerics"
    return f"{description.model_type}, {millions:.2f} M parameters, {arithmetic}"
