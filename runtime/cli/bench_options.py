"""What the benchmark's commands share: options of the server and the files, and settings of a server of their own.
Knows no load and no figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runtime.bench.load import Policy
from runtime.cli.console import EXIT_USAGE, fail
from runtime.cli.options import checked_address
from runtime.cli.serve_flags import settings_from_flags

if TYPE_CHECKING:
    from configs.schema import ServeSettings

OWN_SERVER = ["server.port=0", "metrics.port=none"]
"""Free ports: a server that runs already keeps its own."""

Checkpoint = Annotated[
    Path | None, typer.Argument(help="Checkpoint for a server of its own; the bundled demo model if left out.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Running server to measure, as host:port. Its policy is switched, and put back at the end.",
        callback=checked_address,
    ),
]
Config = Annotated[str | None, typer.Option(metavar="FILE", help="Settings of a server of its own, as for serve.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting of a server of its own; may be repeated."),
]
Launcher = Annotated[
    Literal["ray", "process"] | None,
    typer.Option(
        help="How ranks of a server of its own are started.", show_default="process, unless settings say otherwise"
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='JSONL instead of a workload: {"prompt": text}, {"token_ids": \\[...]} or {"messages": \\[...]} a line, '
        'with "max_tokens", "prediction" and "json_schema" where it has them.',
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots; needs outrider\\[bench].")
]


def check_server(address: str | None, *of_its_own: object) -> None:
    """Ends the command where a running server is named, and options of one of its own too."""
    if address is not None and any(of_its_own):
        fail(
            "a checkpoint, --config, --set and --launcher are for a server of its own; leave out --address",
            EXIT_USAGE,
        )


def own_settings(
    config: str | None,
    assignments: list[str],
    flags: dict[str, Any],
    policies: Sequence[Policy],
    *,
    oracle: bool = False,
) -> ServeSettings:
    """As for `outrider serve`, but on free ports; and unless the settings say otherwise anywhere, on child processes,
    with a hardware profile measured where none fits and a policy needs one, and with the oracle drafter where it is
    asked for."""
    weakest = [*OWN_SERVER]
    settings = settings_from_flags(config, [*weakest, *assignments], flags)
    if "launcher" not in settings.cluster.model_fields_set:
        flags = {**flags, "launcher": "process"}
    given = settings.speculation.model_fields_set
    if any(policy.dynamic is not None for policy in policies) and "measure_profile" not in given:
        weakest.append("speculation.measure_profile=true")
    if oracle and "drafter" not in given:
        weakest.append("speculation.drafter=oracle")
    return settings_from_flags(config, [*weakest, *assignments], flags)
