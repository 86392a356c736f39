"""The hardware profile as data: one JSON per model, layout and machine. Fields say their units and meanings.

`docs/profile.schema.json` is this tree as JSON Schema. SCHEMA_VERSION rises when a reader of an older one would misread
a newer profile. Values are as measured; whoever reads prices off them (runtime/verification/profile.py) smooths them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

SCHEMA_VERSION: Literal[1] = 1

MOST = 2**31 - 1
"""No count is larger: a file that says so was not measured."""
LONGEST_MS = 1e9
LEAST_STEP_MS = 1e-3
LONGEST_DRAFT = 1024

Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
Count = Annotated[int, Field(ge=1, le=MOST)]


class Part(BaseModel):
    """Base of all parts: immutable, numbers are numbers, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Identity(Part):
    """What was measured and where. A profile prices steps of a deployment that is the same in all of it."""

    model_type: str
    checkpoint: str = Field(description="Digest of the checkpoint.")
    dtype: str
    numerics: str
    devices: tuple[str, ...] = Field(min_length=1, description="One per rank, in order.")
    machines: tuple[str, ...] = Field(min_length=1, description="One per rank, in order.")
    torch_version: str
    outrider_version: str
    dp: Count
    tp: Count
    ep: Count
    worker_threads: Count = Field(description="Compute threads of a rank on CPUs.")
    collectives: str = Field(description="What carries them between ranks: gloo or nccl; none for a rank alone.")
    page_size: Count
    gamma_max: int = Field(ge=0, le=LONGEST_DRAFT)
    max_step_tokens: Count


class Method(Part):
    """How the figures came about."""

    warmup: int = Field(ge=0, description="Steps of each cell that count nowhere.")
    repeats: int = Field(ge=1, description="Steps of each cell that count, in turns with the other cells of its load.")
    statistic: Literal["median"] = "median"
    rank_reduce: Literal["max"] = Field("max", description="Parts of a step are the slowest rank's.")
    routing: str = Field(description="Which tokens the experts were given.")
    temperature: float = Field(gt=0, description="Of sequences that are sampled.")
    quick: bool = Field(description="Fewer cells and repeats.")
    duration_s: float = Field(ge=0)


class Timing(Part):
    """Over the repeats of a cell."""

    median: Milliseconds
    iqr: Milliseconds = Field(description="Between the quartiles.")
    n: int = Field(ge=1)


class Cell(Part):
    """Steps of one kind. Milliseconds; collective, dispatch and combine are part of the others."""

    sampled: bool = Field(description="Whether tokens are drawn; else the best is taken, of drafts too.")
    num_sequences: Count = Field(description="In decode, on each data-parallel rank.")
    context: float = Field(gt=0, le=MOST, description="Mean committed length over the steps of the load, tokens.")
    waiting: int = Field(
        ge=0, le=LONGEST_DRAFT, description="Drafts that waited for each sequence; 0: the drafter was not fed before."
    )
    gamma: int = Field(
        ge=0, le=LONGEST_DRAFT, description="Drafts drawn at the end for each sequence; 0: the drafter did not run."
    )
    rows: Count = Field(description="Of the target pass of a data-parallel rank, before padding to a tier.")
    step: Timing = Field(description="From planning to booking: host, links and the slowest rank.")
    target: Timing = Field(description="From the plan's arrival at the rank to the end of the target pass.")
    verify: Timing = Field(description="Deciding what stands, and sampling.")
    commit: Timing = Field(description="Lengths, recurrent state, convolution windows.")
    draft: Timing = Field(description="From the end of committing to the end of the step: drafting and reporting.")
    collective: Timing = Field(description="Waiting for and moving data between ranks.")
    dispatch: Timing = Field(description="Token rows to the owners of their experts.")
    combine: Timing = Field(description="Experts' outputs back to the rows.")

    @field_validator("step")
    @classmethod
    def _takes_time(cls, step: Timing) -> Timing:
        if step.median < LEAST_STEP_MS:
            raise ValueError("a step that takes hardly any time was not measured; measure the profile anew")
        return step


class Imbalance(Part):
    """Rows of experts on the busiest rank over the mean of all ranks, per step; 1 where all have the same."""

    p50: float = Field(ge=1)
    p95: float = Field(ge=1)
    n: int = Field(ge=1, description="Steps.")


class Profile(Part):
    """A whole profile."""

    schema_version: Literal[1] = SCHEMA_VERSION
    identity: Identity
    created: AwareDatetime = Field(description="UTC, ISO 8601.")
    method: Method
    tiers: tuple[int, ...] = Field(
        description="Numbers of rows that passes are padded up to, rising; empty where any number runs as it is."
    )
    imbalance: Imbalance | None = Field(description="null where ranks do not own whole experts.")
    cells: tuple[Cell, ...] = Field(min_length=1)

    @field_validator("tiers")
    @classmethod
    def _tiers_rise(cls, tiers: tuple[int, ...]) -> tuple[int, ...]:
        if tiers != tuple(sorted({*tiers})) or (tiers and not 1 <= tiers[0] <= tiers[-1] <= MOST):
            raise ValueError(f"{list(tiers)} do not rise from 1 or more; measure the profile anew")
        return tiers

    def age_days(self, now: datetime) -> float:
        """now: with a time zone."""
        return (now - self.created).total_seconds() / 86400
