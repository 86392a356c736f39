"""A profile as one HTML page that needs nothing else: tables and pictures. Knows no files beside its template."""

from __future__ import annotations

from pathlib import Path

from runtime.bench.template import render
from runtime.profile import table
from runtime.profile.document import Profile
from runtime.profile.forecast import ACCEPTANCES, Forecast
from runtime.profile.plots import pictures

TEMPLATE = Path(__file__).with_name("profile.html.j2")


def page(profile: Profile) -> str:
    """HTML text. Needs matplotlib."""
    forecast = Forecast.of(profile)
    return render(
        TEMPLATE,
        profile=profile,
        forecast=forecast,
        acceptances=ACCEPTANCES,
        facts=table.facts(profile),
        pictures=pictures(forecast),
        cell_fields=type(profile.cells[0]).model_fields,
    )
