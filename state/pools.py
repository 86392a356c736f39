"""Device memory of one rank: paged KV, convolution windows, recurrent matrices, records, and the per-slot registers.

Every tensor has a null page or a null slot at index 0, where padding reads and writes; no sequence lives there.
Knows no model and no schedule. Committed state changes in four places only: StepTransaction.commit moves it on,
`enter` zeroes it for a new sequence, `fork` copies it for one that begins as another one stands, `leave` zeroes the
lengths of a freed slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from state.accounting import PoolSizes
from state.layout import ConvSpec, GatedDeltaSpec, PagedKVSpec, StateLayout
from state.pages import num_pages_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPool:
    """Windows of all Y layers with one spec, for S slots: committed [Y, S + 1, T − 1, C] and records [Y, rows, C]."""

    spec: ConvSpec
    layers: tuple[int, ...]
    committed: Tensor
    records: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPool:
    """Recurrent matrices of all layers with one spec, [Y, S + 1, H, K, V] float32, and their records per row."""

    spec: GatedDeltaSpec
    layers: tuple[int, ...]
    committed: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor


class DevicePools:
    """All state of one rank.

    kv[layer]: [2, (pages + 1) · page_size, num_kv_heads, head_dim]. tables[group]: int64 [S + 1, pages per sequence].

    Registers by slot: committed_len; token_log (known tokens, then waiting drafts); prompt_len; hidden_window (target
    hidden states of the last committed tokens, at index position mod W); draft_len (drafter KV covers positions below
    it, but for [gap_start, gap_end)); draft_law, score and confidence of the waiting drafts.

    keeps_laws: whether this rank draws drafts; those that are told of them keep no laws.
    """

    def __init__(self, layout: StateLayout, sizes: PoolSizes, device: torch.device, *, keeps_laws: bool = True) -> None:
        self.layout = layout
        self.sizes = sizes
        self.device = device
        slots, max_rows = sizes.num_slots + 1, sizes.max_rows
        pages_per_sequence = num_pages_for(sizes.max_length, sizes.page_size)
        activation = DTYPES[layout.activation_dtype]

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pages = dict(zip(layout.cache_groups, sizes.num_pages, strict=True))
        self.tables = {group: zeros(slots, pages_per_sequence, dtype=torch.int64) for group in layout.cache_groups}
        self.kv: dict[int, Tensor] = {}
        conv: dict[ConvSpec, list[int]] = {}
        delta: dict[GatedDeltaSpec, list[int]] = {}
        for layer, specs in enumerate(layout.layers):
            for spec in specs:
                if isinstance(spec, PagedKVSpec):
                    tokens = (pages[spec.group] + 1) * sizes.page_size
                    self.kv[layer] = zeros(2, tokens, spec.num_kv_heads, spec.head_dim, dtype=DTYPES[spec.dtype])
                elif isinstance(spec, ConvSpec):
                    conv.setdefault(spec, []).append(layer)
                else:
                    delta.setdefault(spec, []).append(layer)
        self.conv = [
            ConvPool(
                spec=spec,
                layers=tuple(layers),
                committed=zeros(len(layers), slots, spec.width - 1, spec.channels, dtype=DTYPES[spec.dtype]),
                records=zeros(len(layers), max_rows, spec.channels, dtype=DTYPES[spec.dtype]),
            )
            for spec, layers in conv.items()
        ]
        self.delta = [
            DeltaPool(
                spec=spec,
                layers=tuple(layers),
                committed=zeros(len(layers), slots, spec.num_value_heads, spec.key_dim, spec.value_dim),
                k=zeros(len(layers), max_rows, spec.num_key_heads, spec.key_dim),
                v=zeros(len(layers), max_rows, spec.num_value_heads, spec.value_dim),
                beta=zeros(len(layers), max_rows, spec.num_value_heads),
                log_decay=zeros(len(layers), max_rows, spec.num_value_heads),
            )
            for spec, layers in delta.items()
        ]
        self.conv_of = {layer: (pool, i) for pool in self.conv for i, layer in enumerate(pool.layers)}
        self.delta_of = {layer: (pool, i) for pool in self.delta for i, layer in enumerate(pool.layers)}

        self.committed_len = zeros(slots, dtype=torch.int64)
        self.prompt_len = zeros(slots, dtype=torch.int64)
        self.token_log = zeros(slots, sizes.max_length + 1, dtype=torch.int32)
        self.hidden_window = zeros(slots, sizes.hidden_window, layout.hidden_size, dtype=activation)
        self.draft_len = zeros(slots, dtype=torch.int64)
        self.gap_start = zeros(slots, dtype=torch.int64)
        self.gap_end = zeros(slots, dtype=torch.int64)
        self.draft_law = zeros(slots, sizes.gamma_max if keeps_laws else 0, layout.vocab_size)
        self.score = zeros(slots, sizes.gamma_max)
        self.confidence = zeros(slots, sizes.gamma_max)

    def enter(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Gives slots to new sequences: state zeroed, tables and prompt written. `tables[i][g]`: pages of group g."""
        if not slots:
            return
        index = torch.tensor(slots, dtype=torch.int64).to(self.device)
        for conv in self.conv:
            conv.committed.index_fill_(1, index, 0)
        for delta in self.delta:
            delta.committed.index_fill_(1, index, 0)
        for register in (self.committed_len, self.draft_len, self.gap_start, self.gap_end):
            register.index_fill_(0, index, 0)
        # A former tenant's draft laws and hidden states are masked by lengths and need no zeroing.
        for register in (self.score, self.confidence):
            register.index_fill_(0, index, 0)
        self.prompt_len.index_copy_(
            0, index, torch.tensor([len(p) for p in prompts], dtype=torch.int64).to(self.device)
        )
        for slot, prompt in zip(slots, prompts, strict=True):
            self.token_log[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self._write_tables(slots, tables)

    def fork(
        self,
        sources: Sequence[int],
        slots: Sequence[int],
        tables: Sequence[Sequence[Sequence[int]]],
        pages: Sequence[Sequence[tuple[int, int] | None]],
    ) -> None:
        """Gives slots to new sequences that begin as others stand, without drafts: `slots[i]` gets what is committed in
        `sources[i]`, its prompt among it. Who names its own slot goes on as it stands.

        `tables[i][g]`: pages of group g; those that both have are read alone from now on. `pages[i][g]`: (page, its
        copy), where both go on writing to one.
        """
        if not slots:
            return
        source, target = torch.tensor([sources, slots], dtype=torch.int64).to(self.device).unbind()
        for committed in (*(conv.committed for conv in self.conv), *(delta.committed for delta in self.delta)):
            committed.index_copy_(1, target, committed.index_select(1, source))
        for register in (
            self.committed_len,
            self.prompt_len,
            self.token_log,
            self.hidden_window,
            self.draft_len,
            self.gap_start,
            self.gap_end,
        ):
            register.index_copy_(0, target, register.index_select(0, source))
        for register in (self.score, self.confidence):
            register.index_fill_(0, target, 0)
        self._write_tables(slots, tables)
        for g, group in enumerate(self.layout.cache_groups):
            self._copy_pages(group, [pair for each in pages if (pair := each[g]) is not None])

    def _write_tables(self, slots: Sequence[int], tables: Sequence[Sequence[Sequence[int]]]) -> None:
        for g, group in enumerate(self.layout.cache_groups):
            for slot, pages in zip(slots, tables, strict=True):
                row = self.tables[group][slot]
                row.zero_()
                row[: len(pages[g])] = torch.tensor(pages[g], dtype=torch.int64)

    def _copy_pages(self, group: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Of (page, its copy), in all layers of a group."""
        if not pairs:
            return
        page_size = self.sizes.page_size
        pages_2P = torch.tensor(pairs, dtype=torch.int64).T.to(self.device)
        rows_2R = (pages_2P[..., None] * page_size + torch.arange(page_size, device=self.device)).flatten(1)
        for layer, specs in enumerate(self.layout.layers):
            if any(isinstance(spec, PagedKVSpec) and spec.group == group for spec in specs):
                self.kv[layer].index_copy_(1, rows_2R[1], self.kv[layer].index_select(1, rows_2R[0]))

    def leave(self, slots: Sequence[int]) -> None:
        """Zeroes the lengths of freed slots and points their tables at the null page; the rest stays until `enter`."""
        if slots:
            index = torch.tensor(slots, dtype=torch.int64).to(self.device)
            for table in self.tables.values():
                table.index_fill_(0, index, 0)
            for register in (self.committed_len, self.draft_len):
                register.index_fill_(0, index, 0)

    def tokens_at(self, slot: Tensor, index: Tensor) -> Tensor:
        """Logged tokens, int64; slot and index broadcast."""
        cells = slot * self.token_log.shape[1] + index
        return self.token_log.view(-1).index_select(0, cells.reshape(-1)).view(cells.shape).to(torch.int64)

    def log_tokens(self, slot: Tensor, index: Tensor, tokens: Tensor) -> None:
        """Writes tokens of one shape to the log; slot and index broadcast to it. No cell may be named twice."""
        cells = slot * self.token_log.shape[1] + index
        self.token_log.view(-1).index_copy_(0, cells.reshape(-1), tokens.reshape(-1).to(self.token_log.dtype))

    def kv_rows(self, group: str, slot_N: Tensor, position_N: Tensor) -> Tensor:
        """Row of kv[layer] that holds `position` of `slot`; elementwise over equal shapes."""
        table = self.tables[group]
        page_size = self.sizes.page_size
        page_N = table.view(-1).index_select(0, (slot_N * table.shape[1] + position_N // page_size).reshape(-1))
        return page_N.view(position_N.shape) * page_size + position_N % page_size

    def kv_rows_of(self, group: str, slots_B: Tensor, length: int) -> Tensor:
        """Rows of kv[layer] that hold positions 0 .. length − 1 of each slot, int64 [B, length]."""
        page_size = self.sizes.page_size
        pages_BP = self.tables[group][:, : num_pages_for(length, page_size)].index_select(0, slots_B)
        within_T = torch.arange(page_size, device=slots_B.device)
        return (pages_BP[..., None] * page_size + within_T).flatten(1)[:, :length]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that counts against the memory budget, named."""
        for layer, kv in self.kv.items():
            yield f"kv.{layer}", kv
        for i, conv in enumerate(self.conv):
            yield f"conv.{i}.committed", conv.committed
            yield f"conv.{i}.records", conv.records
        for i, delta in enumerate(self.delta):
            yield f"delta.{i}.committed", delta.committed
            for name in ("k", "v", "beta", "log_decay"):
                yield f"delta.{i}.records.{name}", getattr(delta, name)
        for name in ("token_log", "hidden_window", "draft_law"):
            yield name, getattr(self, name)
        for group, table in self.tables.items():
            yield f"table.{group}", table

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    def check_integrity(self) -> list[str]:
        """Violated invariants of the null slot, the null page and the registers; empty when all hold."""
        found = [
            f"{name}: the null slot was written"
            for name, tensor in self.tensors()
            if name.endswith(".committed") and bool(tensor[:, 0].any())
        ]
        found += [f"{group}: the null slot has pages" for group, table in self.tables.items() if bool(table[0].any())]
        found += [
            f"kv.{layer}: the null page is not finite"
            for layer, kv in self.kv.items()
            if not bool(kv[:, : self.sizes.page_size].isfinite().all())
        ]
        if bool((self.draft_len > self.committed_len).any()):
            found.append("drafter KV is longer than the committed length")
        return found
