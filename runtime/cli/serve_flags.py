"""The flags of commands that take the settings of a server, and the settings that come of them. Knows no server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.load import SettingsError, parse_assignment, settings_file
from configs.schema import Dtype, Numerics, ServeSettings
from runtime.cli.console import EXIT_USAGE, fail

if TYPE_CHECKING:
    from runtime.reload import SettingsSource

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """As they were given; what was not is left to the settings file."""

    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint directory in Hugging Face format; the bundled demo model if left out."),
    ] = None
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings file in YAML, or a bundled one: demo, cpu, reference.")
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None
    metrics_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Port of the metrics, or none; the one after --port if left out.")
    ] = None
    served_name: Annotated[str | None, typer.Option(help="Model name that clients use.")] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Weights and activations.")] = None
    numerics: Annotated[
        Numerics | None, typer.Option(help="reference: bitwise reproducible, several times slower.")
    ] = None
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, which cut every layer.")] = None
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks, each with sequences of its own.")] = None
    ep: Annotated[int | None, typer.Option(help="Ranks with whole experts: all of them (dp x tp), or 1 for none.")] = (
        None
    )
    policy: Annotated[
        Literal["off", "fixed", "dynamic"] | None,
        typer.Option(help="Speculation at start, unless operators have set another since."),
    ] = None
    gamma: Annotated[int | None, typer.Option(help="Drafts per round under the fixed policy.")] = None
    measure_profile: Annotated[
        bool | None,
        typer.Option("--measure-profile", help="Measure a hardware profile at start where none fits; takes minutes."),
    ] = None
    memory_mib: Annotated[int | None, typer.Option(help="Memory for the state of running sequences.")] = None
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one batch.")] = None
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output in tokens.")] = None
    launcher: Annotated[Literal["ray", "process"] | None, typer.Option(help="How ranks are started.")] = None
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; a local one is started if left out.")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="Least severe lines to write on standard error.", show_default="info"),
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its key path; may be repeated."),
    ] = None

    def source(self) -> SettingsSource:
        """As `source_from_flags`."""
        return source_from_flags(self.config, self.assignments or [], {name: getattr(self, name) for name in FLAG_KEYS})
