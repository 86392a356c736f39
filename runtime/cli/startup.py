"""What the terminal shows while a deployment comes up and when it stands. Knows nothing of how it is started."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from configs.schema import ParallelSettings
from runtime.cli.console import ERR, unheard
from workers.plan import WorkerDescription


class StartupProgress:
    """How the ranks' start goes, on standard error. Call it with (rank, stage, done, total); total 0 means unknown.

    One rank has a bar per stage; of several each has one bar, which shows its present stage. Where standard error is no
    terminal, a line per rank and stage.
    """

    def __init__(self, parallel: ParallelSettings) -> None:
        self._num_ranks = parallel.dp * parallel.tp
        self._bars = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=ERR,
        )
        self._tasks: dict[int, TaskID] = {}
        self._stages: set[tuple[int, str]] = set()

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

    def __call__(self, rank: int, stage: str, done: int, total: int) -> None:
        if (rank, stage) not in self._stages:
            self._stages.add((rank, stage))
            self._begin(rank, stage if self._num_ranks == 1 else f"rank {rank}: {stage}")
        self._bars.update(self._tasks[rank], completed=done, total=total or None)

    def _begin(self, rank: int, what: str) -> None:
        """Stages of a rank follow one another: the start of one is the end of those before."""
        if self._num_ranks == 1:
            self._complete_all()
        if self._num_ranks == 1 or rank not in self._tasks:
            self._tasks[rank] = self._bars.add_task(what, total=None)
        else:
            self._bars.reset(self._tasks[rank], description=what)
            # A reset cannot say that the total is unknown, and keeps that of the stage before.
            next(task for task in self._bars.tasks if task.id == self._tasks[rank]).total = None
        if not ERR.is_terminal:
            with unheard():
                ERR.print(what, soft_wrap=True)

    def _complete_all(self) -> None:
        for task in self._bars.tasks:
            total = task.total or 1
            self._bars.update(task.id, completed=total, total=total)


def accounting_table(ranks: Sequence[WorkerDescription]) -> Table:
    """Memory accounting, as rank 0 reported it: the other ranks have pools of the same sizes. Where there are several,
    a row of what each holds of the parameters."""
    table = Table(title="memory accounting", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in ranks[0].accounting:
        table.add_row(what, figure)
    if len(ranks) > 1:
        sizes = ", ".join(f"{rank.parameter_bytes / 2**20:.4g}" for rank in ranks)
        table.add_row("parameters, by rank", f"{sizes} MiB")
    return table


def summary_panel(title: str, rows: list[tuple[str, str]]) -> Panel:
    """A box of name and value pairs."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(f"[bold]{name}[/]", value)
    return Panel(grid, title=title, title_align="left", expand=False)


def model_line(description: WorkerDescription) -> str:
    """The model in one line: family, size, arithmetic, device."""
    size = f"{description.num_parameters / 1e6:.2f} M parameters"
    arithmetic = f"{description.dtype} on {description.device}, {description.numerics} numerics"
    return f"{description.model_type}, {size}, {arithmetic}"
