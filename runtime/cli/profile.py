"""`outrider profile`: starts ranks, measures what their steps cost, keeps and shows it. Knows no figures."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from configs.load import SettingsError
from configs.schema import Dtype, Numerics
from runtime.cli.bench_files import check_outputs, write_file
from runtime.cli.console import (
    ERR,
    EXIT_INTERRUPTED,
    EXIT_NO,
    EXIT_REFUSED,
    EXIT_USAGE,
    OUT,
    complain,
    fail,
    guarded,
    run,
    show,
)
from runtime.cli.serve import StopSignals, first_of
from runtime.cli.serve_flags import settings_from_flags
from runtime.cli.startup import StartupProgress, summary_panel

if TYPE_CHECKING:
    from configs.schema import ServeSettings
    from runtime.profile.document import Profile

profile = typer.Typer(invoke_without_command=True, no_args_is_help=False)
FLAGS = ("checkpoint", "dtype", "numerics", "tp", "dp", "ep", "memory_mib", "max_running", "max_model_len", "launcher")
"""Options with a setting behind them, by the names that `serve` gives them."""

Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings file in YAML, or a bundled one: demo, cpu, reference.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its key path; may be repeated.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots; needs outrider[bench].")
]


@profile.callback()
def measure(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint; the bundled demo model if left out.")
    ] = None,
    config: Config = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Weights and activations.")] = None,
    numerics: Annotated[Numerics | None, typer.Option(help="As for serve.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks with whole experts: dp x tp, or 1 for none.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory for the state of running sequences.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one batch.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output in tokens.")] = None,
    launcher: Annotated[
        Literal["ray", "process"] | None,
        typer.Option(help="How ranks are started.", show_default="process, unless settings say otherwise"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer loads, draft lengths and repeats.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile here.", show_default="where serve looks, in state_dir"),
    ] = None,
    html: Html = None,
    assignments: Assignments = None,
) -> None:
    """Measure what steps cost on this machine, by load, drafts and context: what the dynamic policy plans with.

    Give the settings of the server that is to use it. It starts ranks of its own, so nothing else should keep the
    machine busy. Takes minutes.
    """
    # Locals first: nothing else may stand among them.
    flags = {name: value for name, value in locals().items() if name in FLAGS}
    if context.invoked_subcommand is not None:
        return
    with guarded():
        settings = _settings(config, assignments or [], flags)
        check_outputs({"--out": out, "--html": html})
    run(_measure(settings, quick=quick, out=out, html=html))


@profile.command("show")
def show_profile(
    file: Annotated[
        Path | None, typer.Argument(help="A profile; the newest one of these settings' layout if left out.")
    ] = None,
    config: Config = None,
    html: Html = None,
    assignments: Assignments = None,
) -> None:
    """Print a profile that was measured."""
    with guarded():
        from runtime.profile.files import ProfileFileError, read

        check_outputs({"--html": html})
        settings = settings_from_flags(config, assignments or [], {})
        path = file if file is not None else _newest(settings)
        try:
            found = read(path)
        except ProfileFileError as error:
            fail(str(error), EXIT_USAGE)
        OUT.print(str(path), soft_wrap=True, markup=False)
        _present(found, html)


def _settings(config: str | None, assignments: list[str], flags: dict[str, Any]) -> ServeSettings:
    """As for `outrider serve`, but on child processes unless a launcher is named anywhere."""
    settings = settings_from_flags(config, assignments, flags)
    if "launcher" in settings.cluster.model_fields_set:
        return settings
    return settings_from_flags(config, assignments, {**flags, "launcher": "process"})


def _newest(settings: ServeSettings) -> Path:
    """Of the layout that the settings name; what only ranks could tell is not asked. Raises SettingsError."""
    from runtime.profile.files import FOLDER, kept_profiles

    layout, step = settings.parallel, settings.scheduler.max_step_tokens
    wanted = (layout.dp, layout.tp, layout.ep, step)
    for kept in kept_profiles(settings.state_dir):
        identity = kept.profile.identity
        if (identity.dp, identity.tp, identity.ep, identity.max_step_tokens) == wanted:
            return kept.path
    raise SettingsError(
        f"no profile of dp {layout.dp}, tp {layout.tp}, ep {layout.ep} and {step} tokens per step under "
        f"{settings.state_dir / FOLDER}; measure one with `outrider profile`, or name a file"
    )


async def _measure(settings: ServeSettings, *, quick: bool, out: Path | None, html: Path | None) -> None:
    """Until all is measured, or a signal ends it; no rank is left then either."""
    from runtime.profile.deployment import measure_deployment
    from runtime.profile.drive import ProfileError
    from runtime.profile.files import profile_path

    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"state_dir {settings.state_dir}: {error.strerror}; name a directory that can be made", EXIT_USAGE)
    measured: list[Profile] = []

    async def work() -> None:
        with _Bars(settings) as bars:
            measured.append(await measure_deployment(settings, bars.starting, bars.measuring, quick=quick))

    try:
        finished = await first_of(asyncio.create_task(work()), StopSignals().asked)
    except ProfileError as error:
        fail(str(error), EXIT_REFUSED)
    if not finished:
        raise typer.Exit(EXIT_INTERRUPTED)
    (found,) = measured
    path = out or profile_path(settings.state_dir, found.identity)
    is_kept = _keep(found, path)
    _present(found, html)
    if not is_kept:
        raise typer.Exit(EXIT_NO)


def _keep(found: Profile, path: Path) -> bool:
    """Whether it was written where it was to be; minutes of measuring are kept somewhere else if not."""
    from runtime.profile.files import write

    try:
        write(found, path)
    except OSError as error:
        complain(f"{path}: {error.strerror or error}; the profile is kept elsewhere")
        write(found, instead := Path(tempfile.mkdtemp(prefix="outrider-")) / "profile.json")
        ERR.print(f"wrote {instead}; move it to where it belongs", soft_wrap=True, markup=False)
        return False
    ERR.print(f"wrote {path}", soft_wrap=True, markup=False)
    return True


class _Bars:
    """How the start of the ranks goes, then the measurement, on standard error; a line per load where that is no
    terminal."""

    def __init__(self, settings: ServeSettings) -> None:
        self.starting = StartupProgress(settings.parallel)
        self._bar = Progress(
            TextColumn("{task.description:<44}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=ERR,
        )
        self._task = self._bar.add_task("", total=None)
        self._text = ""

    def __enter__(self) -> _Bars:
        self.starting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._text:
            self.starting.__exit__(kind, error, trace)
        self._bar.stop()

    def measuring(self, done: int, total: int, text: str) -> None:
        if not self._text:
            self.starting.__exit__(None, None, None)
            if ERR.is_terminal:
                self._bar.start()
        if text != self._text:
            self._text = text
            if not ERR.is_terminal:
                ERR.print(text, soft_wrap=True)
        self._bar.update(self._task, completed=done, total=total, description=text)


def _present(found: Profile, html: Path | None) -> None:
    from runtime.profile.forecast import Forecast
    from runtime.profile.table import REMARKS, facts, speed_table, step_table

    OUT.print(summary_panel("hardware profile", facts(found)))
    forecast = Forecast.of(found)
    for sampled in forecast.kinds:
        show(step_table(forecast, sampled=sampled))
        show(speed_table(forecast, sampled=sampled))
    for line in REMARKS:
        OUT.print(line, soft_wrap=True)

    def as_page() -> str:
        from runtime.profile.page import page

        return page(found)

    if not write_file("--html", html, as_page):
        raise typer.Exit(EXIT_NO)
