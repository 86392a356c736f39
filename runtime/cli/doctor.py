"""`outrider doctor`: whether a server with these settings would work here, and what to do where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from configs.schema import Dtype, Numerics
from runtime.cli.console import EXIT_NO, OUT, guarded, write
from runtime.cli.serve import FLAG_KEYS, settings_from_flags

if TYPE_CHECKING:
    from runtime.doctor.examination import Report

_MARKS = {
    "ok": "[green]ok     [/]",
    "note": "[dim]note   [/]",
    "warning": "[yellow]warning[/]",
    "failure": "[red]FAILURE[/]",
}


def doctor(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; the bundled demo model if left out.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings file in YAML, or a bundled one: demo, cpu, reference.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    metrics_port: Annotated[str | None, typer.Option(metavar="PORT", help="Port of the metrics, or none.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Weights and activations.")] = None,
    numerics: Annotated[Numerics | None, typer.Option(help="As for serve.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks with whole experts: dp x tp, or 1 for none.")] = None,
    policy: Annotated[
        Literal["off", "fixed", "dynamic"] | None, typer.Option(help="Speculation at the server's start.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Drafts per round under the fixed policy.")] = None,
    measure_profile: Annotated[
        bool | None, typer.Option("--measure-profile", help="The server measures a hardware profile where none fits.")
    ] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory for the state of running sequences.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one batch.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output in tokens.")] = None,
    launcher: Annotated[Literal["ray", "process"] | None, typer.Option(help="How ranks are started.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster to join.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="Of the server.", show_default="info")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its key path; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this installation for a server with the settings given, and say what to do about each finding.

    Takes what `serve` takes. Starts processes of its own for a few seconds (torch, collectives, Ray) and changes
    nothing. Exits with 1 where something would keep the server from working; warnings alone are 0.
    """
    # Locals first: nothing else may stand among them.
    flags = {name: value for name, value in locals().items() if name in FLAG_KEYS}
    with guarded():
        settings = settings_from_flags(config, assignments or [], flags)
        from runtime.doctor.examination import examine
        from runtime.doctor.inquiry import inquire

        report = examine(inquire(settings))
        write(_document(report) + "\n") if as_json else _print(report)
    if not report.is_well:
        raise typer.Exit(EXIT_NO)


def _document(report: Report) -> str:
    findings = [
        {"topic": topic, "level": finding.level.value, "text": finding.text, "remedy": finding.remedy}
        for topic, found in report.topics.items()
        for finding in found
    ]
    return json.dumps({"is_well": report.is_well, "findings": findings}, indent=1)


def _print(report: Report) -> None:
    for topic, findings in report.topics.items():
        for finding in findings:
            OUT.print(f"{_MARKS[finding.level.value]} {topic:<11}  {escape(finding.text)}", soft_wrap=True)
            if finding.remedy:
                OUT.print(f"        {'':<11}  [bold]do:[/] {escape(finding.remedy)}", soft_wrap=True)
    from runtime.doctor.finding import Level, counted

    counts = f"{counted(report.count(Level.FAILURE), 'failure')}, {counted(report.count(Level.WARNING), 'warning')}"
    OUT.print(f"{counts}: " + ("it will work" if report.is_well else "it will not work"))
