"""Reports of cells made by hand, for tests of what is shown of them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from fakes.bench import NO_LIMITS, completion_of, round_of
from rich.table import Table

from runtime.bench import document
from runtime.bench.completion import Completion
from runtime.bench.counters import ServerCounts
from runtime.bench.document import Report
from runtime.bench.figures import CellRun, spread
from runtime.bench.load import Closed, Policy
from runtime.bench.machine import machine
from runtime.bench.report import build_report, load_name

ROOT = Path(__file__).parents[2]
OFF, TWO = Policy(None), Policy(2)
COUNTS = ServerCounts(
    steps=5, emitted=10, drafted_by_position=(4, 4), admitted_by_position=(4, 4), accepted_by_position=(3, 1),
    rank_s=1.0, target_s=0.5, draft_s=0.2, execute_s=1.5, host_s=0.1,
)  # fmt: skip


def report_of(
    *runs: CellRun,
    planned: int | None = None,
    temperature: float = 0.0,
    device: str = "cpu",
    records: bool = False,
    **asked: object,
) -> Report:
    """asked: changes of the plan."""
    limits = NO_LIMITS.model_copy(update={"first_token_ms": 10.0})
    plan = document.Plan(
        workload="code", prompts=2, prompt_tokens=spread([3, 5]), prompt_tokens_cut=None, max_tokens=6, ignore_eos=True,
        temperature=temperature, seed=0, policies=["off", "fixed:2"], loads=[load_name(Closed(2))], requests=2,
        warmup=1, repeats=1, limits=limits, records=records, predictions=0, edit_every=None, constraints=0,
    ).model_copy(update=asked)  # fmt: skip
    model = document.Model(
        name="<b>demo</b>", model_type="x", num_parameters=1, dtype="float32", numerics="default", vocab_size=9,
        context_length=9, gamma_max=8, dp=1, tp=1, ep=1, drafter="mtp",
    )  # fmt: skip
    identity = document.Identity(
        model=model,
        devices=[device],
        versions={"python": "3"},
        machine=machine(),
        own_server=True,
        settings={"a": 1},
        profile="x.json",
    )
    return build_report(
        runs,
        plan=plan,
        identity=identity,
        cells_planned=len(runs) if planned is None else planned,
        started_at="2030-01-01T00:00:00+00:00",
        duration_s=3.0,
    )


def streams(*accepted: int, gamma: int = 2, margin: float = 1.0) -> Completion:
    """A round without drafts, then one of γ for each of `accepted`."""
    return completion_of([round_of(0, 0), *(round_of(one, gamma, margin=margin) for one in accepted)], at_length=False)


def validate(report: Report) -> None:
    """Holds a report against the schema in the documents."""
    schema = json.loads((ROOT / "docs" / "benchmarks" / "bench.schema.json").read_text())
    jsonschema.validators.validator_for(schema).check_schema(schema)
    jsonschema.validate(json.loads(report.model_dump_json()), schema)


def cells(table: Table, heading: str) -> list[str]:
    """A column, by its heading."""
    [column] = [column for column in table.columns if column.header == heading]
    return list(column.cells)
