"""`outrider doctor`: whether a server with these settings would work here, and what to do where not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from runtime.cli.console import EXIT_NO, OUT, guarded, write
from runtime.cli.options import with_flags
from runtime.cli.serve_flags import ServeFlags, loaded

if TYPE_CHECKING:
    from runtime.doctor.examination import Report

_MARKS = {
    "ok": "[green]ok     [/]",
    "note": "[dim]note   [/]",
    "warning": "[yellow]warning[/]",
    "failure": "[red]FAILURE[/]",
}


@with_flags(ServeFlags)
def doctor(
    flags: ServeFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this installation for a server with the settings given, and say what to do about each finding.

    Takes what `serve` takes. Starts processes of its own for a few seconds (torch, collectives, Ray) and changes
    nothing. Exits with 1 where something would keep the server from working; warnings alone are 0.
    """
    with guarded():
        settings = loaded(flags.source())
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
