"""How a memory budget becomes pool sizes, and the table printed about it. Pure; knows no tensors and no allocator.

    budget ≥ records + (num_slots + 1) · bytes per slot + (num_pages + 1) · bytes per page, all groups together

The ones are the null slot and the null page of each group. All groups have the same number of pages, since a sequence
holds as many in one as in another.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import CacheSettings
from state.layout import ITEMSIZE, StateLayout
from state.pages import num_pages_for, num_reserved_tokens

PADDING_ROWS = 32
"""Token rows are padded to a multiple of this; padded rows write records too."""
TYPICAL_TOKENS = 512
"""Prompt + output of the sequence that the printed table calls typical."""

WORTH_SAYING = 0.75
"""The table advises fewer slots where those that were asked for leave less than this share of what could run."""

_TOKEN_BYTES = 4
_PROBABILITY_BYTES = 4
_PAGE_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """How much is allocated. Counts exclude the null page and the null slot.

    num_pages: per cache group, in the order of StateLayout.cache_groups.
    max_rows: rows of the largest pass, padding included.
    max_length: longest sequence with its scratch: max_model_len + gamma_max + 1.
    gamma_max, hidden_window: 0 on a rank without a drafter.
    """

    num_slots: int
    num_pages: tuple[int, ...]
    page_size: int
    max_rows: int
    max_length: int
    gamma_max: int
    hidden_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBytes:
    """What one slot takes, by part.

    state: recurrent and convolution state. hidden_window: target hidden states that wait for the drafter.
    draft_laws: distributions of the waiting drafts. token_log: known tokens and waiting drafts. tables: page numbers.
    """

    state: int
    hidden_window: int
    draft_laws: int
    token_log: int
    tables: int

    @property
    def total(self) -> int:
        return self.state + self.hidden_window + self.draft_laws + self.token_log + self.tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Pool sizes and the bytes they come to.

    kv_bytes: per cache group, null page included. pages_per_longest: pages per group of a sequence of max_model_len.
    """

    sizes: PoolSizes
    cache_groups: tuple[str, ...]
    slot: SlotBytes
    kv_bytes: tuple[int, ...]
    record_bytes: int
    budget_bytes: int
    pages_per_longest: int

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each cache group, all its layers together."""
        return tuple(size // (pages + 1) for size, pages in zip(self.kv_bytes, self.sizes.num_pages, strict=True))

    @property
    def slots_bytes(self) -> int:
        """All slots, the null slot included."""
        return (self.sizes.num_slots + 1) * self.slot.total

    @property
    def total_bytes(self) -> int:
        """Everything the pools take; at most budget_bytes."""
        return sum(self.kv_bytes) + self.slots_bytes + self.record_bytes

    def num_sequences_of(self, num_tokens: int) -> tuple[int, str]:
        """How many sequences of `num_tokens` tokens run at once, and what limits them ("slots" or "pages")."""
        pages_each = num_pages_for(num_reserved_tokens(num_tokens, self.sizes.gamma_max), self.sizes.page_size)
        by_pages = min((pages // pages_each for pages in self.sizes.num_pages), default=self.sizes.num_slots)
        return (by_pages, "pages") if by_pages < self.sizes.num_slots else (self.sizes.num_slots, "slots")

    def num_balanced_sequences_of(self, num_tokens: int) -> int:
        """How many of them the budget would run at once if it held one slot for each and the rest in pages."""
        pages_each = num_pages_for(num_reserved_tokens(num_tokens, self.sizes.gamma_max), self.sizes.page_size)
        page_bytes = sum(self.page_bytes)
        # What is left of the budget beside the records, the null slot and the null pages.
        left = self.budget_bytes - self.record_bytes - self.slot.total - page_bytes
        return left // (self.slot.total + pages_each * page_bytes)


def plan_memory(
    layout: StateLayout,
    cache: CacheSettings,
    *,
    max_model_len: int,
    max_step_tokens: int,
    gamma_max: int,
    hidden_window: int,
    drafting: bool,
) -> MemoryPlan:
    """Divides `cache.memory_mib` between slots and pages.

    There are `cache.max_running` slots, or fewer where the budget would not leave the pages of one sequence of
    `max_model_len` tokens beside them; the rest goes to pages, up to what all slots together can hold.

    drafting: whether the rank has a drafter; without one no hidden states wait and no draft laws are kept.

    Raises ValueError, with the figures, when the budget does not hold one longest sequence.
    """
    gamma_max, hidden_window = (gamma_max, hidden_window) if drafting else (0, 0)
    max_length = num_reserved_tokens(max_model_len, gamma_max)
    pages_per_longest = num_pages_for(max_length, cache.page_size)
    slot = SlotBytes(
        state=layout.state_bytes_per_slot,
        hidden_window=hidden_window * layout.hidden_size * ITEMSIZE[layout.activation_dtype],
        draft_laws=gamma_max * layout.vocab_size * _PROBABILITY_BYTES,
        token_log=(max_length + 1) * _TOKEN_BYTES,
        tables=len(layout.cache_groups) * pages_per_longest * _PAGE_NUMBER_BYTES,
    )
    group_page_bytes = tuple(layout.kv_bytes_per_token(group) * cache.page_size for group in layout.cache_groups)
    page_bytes = sum(group_page_bytes)
    max_rows = max_step_tokens + PADDING_ROWS
    record_bytes = max_rows * layout.record_bytes_per_row

    budget = cache.memory_mib << 20
    pages_for_one = (pages_per_longest + 1) * page_bytes
    for_one = record_bytes + 2 * slot.total + pages_for_one
    if for_one > budget:
        raise ValueError(
            f"cache.memory_mib is {cache.memory_mib}, but one sequence of {max_model_len} tokens needs "
            f"{_bytes(for_one)}: records {_bytes(record_bytes)}, slots {_bytes(2 * slot.total)}, "
            f"pages {_bytes(pages_for_one)}; raise cache.memory_mib to {-(-for_one // (1 << 20))} or lower "
            "cache.max_model_len or scheduler.max_step_tokens"
        )
    num_slots = min(cache.max_running, 1 + (budget - for_one) // slot.total)
    num_pages = num_slots * pages_per_longest
    if page_bytes:
        left = budget - record_bytes - (num_slots + 1) * slot.total
        num_pages = min(num_pages, left // page_bytes - 1)
    return MemoryPlan(
        sizes=PoolSizes(
            num_slots=num_slots,
            num_pages=(num_pages,) * len(layout.cache_groups),
            page_size=cache.page_size,
            max_rows=max_rows,
            max_length=max_length,
            gamma_max=gamma_max,
            hidden_window=hidden_window,
        ),
        cache_groups=layout.cache_groups,
        slot=slot,
        kv_bytes=tuple((num_pages + 1) * size for size in group_page_bytes),
        record_bytes=record_bytes,
        budget_bytes=budget,
        pages_per_longest=pages_per_longest,
    )


def accounting_rows(
    layout: StateLayout, plan: MemoryPlan, *, max_model_len: int, max_running: int
) -> tuple[tuple[str, str], ...]:
    """Rows (what, figure) of the table printed at start.

    max_running: slots that were asked for; a row says when memory holds fewer.
    """
    sizes, slot = plan.sizes, plan.slot
    per_token = ", ".join(f"{group} {_bytes(layout.kv_bytes_per_token(group))}" for group in plan.cache_groups)
    fewer = "" if sizes.num_slots == max_running else f", {max_running} asked for: memory holds no more"
    rows = [
        ("KV per token", per_token or "none"),
        ("state per sequence, recurrent and convolution", _bytes(slot.state)),
        ("beside it: hidden window", _bytes(slot.hidden_window)),
        ("beside it: draft laws", _bytes(slot.draft_laws)),
        ("beside it: token log and tables", _bytes(slot.token_log + slot.tables)),
        ("records per draft row", _bytes(layout.record_bytes_per_row)),
        ("records", f"{_bytes(plan.record_bytes)}: {sizes.max_rows} rows"),
        ("slots", f"{_bytes(plan.slots_bytes)}: {sizes.num_slots} sequences{fewer}"),
    ]
    rows += [
        (f"pages, {group}", f"{_bytes(size)}: {pages} pages of {sizes.page_size} tokens")
        for group, pages, size in zip(plan.cache_groups, sizes.num_pages, plan.kv_bytes, strict=True)
    ]
    rows.append(("all", f"{_bytes(plan.total_bytes)} of {_bytes(plan.budget_bytes)}"))
    lengths = [(max_model_len, "longest")]
    if max_model_len > TYPICAL_TOKENS:
        lengths.insert(0, (TYPICAL_TOKENS, "typical"))
    for num_tokens, word in lengths:
        count, limit = plan.num_sequences_of(num_tokens)
        rows.append((f"sequences of {num_tokens} tokens ({word})", f"{count}, limited by {limit}"))
    common = lengths[0][0]
    count, limit = plan.num_sequences_of(common)
    balanced = plan.num_balanced_sequences_of(common)
    if limit == "pages" and count < WORTH_SAYING * balanced:
        rows.append(("warning: slots take the room of pages", f"cache.max_running {balanced} would run {balanced}"))
    return tuple(rows)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
