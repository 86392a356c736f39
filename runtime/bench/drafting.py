"""The report's parts about drafts: how many stood, where they came from, and what they cost. Data alone."""

from __future__ import annotations

from pydantic import Field

from runtime.bench.part import Part


class Lengths(Part):
    """Committed tokens per target pass, counted and by formula. Of requests that report their rounds: the same prompts
    under the same load, just before the first repeat; reporting costs time, so their speed is not measured. A decode
    pass is one after the prompt's last chunk. A full round is a decode pass that verified gamma drafts and began at
    least gamma + 1 tokens before its request's longest; formulas and prefixes are of those. One that an end of sequence
    cut counts by the drafts accepted before the cut."""

    gamma: int = Field(description="Drafts per round under the policy; 0 for off.")
    decode_passes: int
    tokens_per_pass: float | None = Field(description="Over all decode passes; null where there was none.")
    full_rounds: int
    near_limit_rounds: int = Field(
        description="Began within gamma + 1 tokens of the request's longest: counted apart, cut or not."
    )
    other_length_rounds: int = Field(description="Others that verified more or fewer drafts than gamma.")
    accepted_prefixes: list[int] = Field(
        description="Entry j: full rounds in which the first j drafts were accepted and no more, j from 0 to gamma."
    )
    survival: list[float] = Field(description="Entry j - 1: share of full rounds in which the first j were accepted.")
    tokens_per_full_round: float | None = Field(
        description="Sum over full rounds of accepted drafts + 1 / full rounds: what they commit, were none cut."
    )
    by_survival: float | None = Field(
        description="1 + sum over j of P(first j accepted): equals tokens_per_full_round, whatever the drafts."
    )
    acceptance_rate: float | None = Field(
        description="alpha: drafts accepted / drafts examined in full rounds, where examined are the accepted ones "
        "and, if any fell, the first that did. null where nothing was examined."
    )
    by_rate: float | None = Field(
        description="(1 - alpha^(gamma+1)) / (1 - alpha), as if every draft were accepted with probability alpha "
        "(arXiv 2211.17192, equation 1)."
    )
    rate_misleads: bool = Field(description="Whether by_rate is more than 3 % off by_survival.")


class Drafts(Part):
    """Drafts by position in all rounds of the cell, by the server's counters; entry 0 is the first draft."""

    drafted: list[int]
    admitted: list[int]
    accepted: list[int]


class DraftUse(Part):
    """Drafts of one origin."""

    drafted: int
    admitted: int = Field(description="Of those, drafts that were verified.")
    accepted: int = Field(description="Of those, drafts that stood.")


class Origins(Part):
    """Drafts by where they came from, in requests that finished, by their usage."""

    drafter: DraftUse = Field(description="From the model's drafter.")
    prediction: DraftUse = Field(description="From the prediction that the request brought.")
    ngram: DraftUse = Field(description="Looked up in prompt and output.")
    forbidden: int = Field(
        description="Admitted drafts at and behind the first one of their round that the constraint forbids."
    )


class Work(Part):
    """Drafting and verification of all steps of the cell, by the server's counters."""

    steps_by_gamma: list[int] = Field(description="Entry k: steps in which k drafts were drawn for each sequence.")
    gamma_mean: float | None = Field(description="Mean drafts drawn for each sequence; null without steps.")
    budget_sum: int = Field(description="Draft rows that steps might verify, summed: K, where drafts waited.")
    budget_per_step: float | None = Field(description="K of a step on average; null without steps.")
    drafted: int = Field(description="Drafts that waited for verification, of all rounds.")
    admitted: int = Field(description="Of those, drafts that were verified.")
    accepted: int = Field(description="Of those, drafts that stood.")
    rollback_tokens: int = Field(description="Draft rows verified and not accepted: what was rolled back.")
    zero_budget_steps: int = Field(description="Steps in which drafts waited and none was verified.")
    explored_steps: int = Field(description="Steps that drafted or verified more than seemed to pay, to learn.")
    predicted_steps: int = Field(description="Steps whose time the hardware profile predicted.")
    predicted_ms: float | None = Field(description="Predicted time of those steps, mean; null without any.")
    measured_ms: float | None = Field(description="Their time as it was, mean.")
    error_ms: float | None = Field(description="Mean of |predicted - measured|.")
    fallback: str = Field(
        description="Why dynamic ran as a fixed draft length at the end of a cell; empty where it did not."
    )
