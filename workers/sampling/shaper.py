"""What running sequences have done to logits, by slot, and its doing. Owned by the rank that decides; knows no drafts.

The functions are those of `shaping`; here are the parameters of each slot, on the device where they are tensors, and
what of them a batch needs at all, decided on the host. A batch's tables are made when its sequences first come together
and serve until others do: the rows of a round's target, those of each of its drafts, and the rounds behind it.
Histories are counted once per sequence and call, up to its first row; rows go through in blocks, since what is made of
them on the way is several times as large as logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from state.pools import DevicePools
from workers.demands import NO_SHAPING, Shaping
from workers.plan import NewSequence
from workers.sampling.registers import SamplingRegisters
from workers.sampling.shaping import Counts, completes_bad_word, count_tokens, forbid, mark, penalise, unpack

BLOCK = 64
"""Rows at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Laws to come. slots, slots_S: of the sequences, on the host and beside the log. owners_R: the sequence of each
    row, its place in `slots`. index_R: log index of the token that each law is of. first_S: the least of each
    sequence's, behind its prompt; the others are less than `width` beyond it. longest: a host bound of them all."""

    slots: Sequence[int]
    slots_S: Tensor
    owners_R: Tensor
    index_R: Tensor
    first_S: Tensor
    width: int
    longest: int


class Shaper:
    """Parameters by slot, on the device of the token log.

    pools: for the log and the prompts' lengths. registers: for the stop ids, which min_tokens keeps out.
    """

    def __init__(self, pools: DevicePools, registers: SamplingRegisters, vocab_size: int) -> None:
        self._pools, self._registers, self._vocab_size = pools, registers, vocab_size
        self._shapings: dict[int, Shaping] = {}
        # By slot, where it has some: ids int64 [K] and what is added float32 [K]; bool [V]; its bad words.
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._bans: dict[int, Tensor] = {}
        self._words: dict[int, _Words] = {}
        # Of the slots that were asked for last; nothing where one of them has changed hands since.
        self._last: tuple[tuple[int, ...], _Tables] | None = None

    def enter(self, sequences: Sequence[NewSequence]) -> None:
        """Sequences take their slots; whoever held them before has left."""
        self.leave(sequence.slot for sequence in sequences)
        for sequence in sequences:
            slot, shaping = sequence.slot, sequence.shaping
            if shaping == NO_SHAPING:
                continue
            self._shapings[slot] = shaping
            if shaping.bias:
                ids, added = zip(*shaping.bias, strict=True)
                device = self._pools.device
                self._biases[slot] = torch.tensor(ids).to(device), torch.tensor(added, dtype=torch.float32).to(device)
            if shaping.banned or shaping.allowed:
                self._bans[slot] = self._banned(shaping)
            if shaping.bad_words:
                self._words[slot] = _Words.of(shaping.bad_words, self._pools.device)

    def leave(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._last = None
            for tables in (self._shapings, self._biases, self._bans, self._words):
                tables.pop(slot, None)

    def shapes(self, slots: Sequence[int]) -> bool:
        """Whether any of them has anything done."""
        return any(slot in self._shapings for slot in slots)

    def shape(self, logits_RV: Tensor, rows: Rows, allowed_RB: Tensor | None = None) -> Tensor:
        """The logits that laws are made of. Rows that have nothing done keep their bits.

        allowed_RB: what constraints let stand, as `shaping.unpack` takes it; None where none forbids anything.
        """
        if allowed_RB is None and not self.shapes(rows.slots):
            return logits_RV
        tables = self._tables(tuple(rows.slots))
        counts = None if tables.penalties is None else self._count(rows, tables.penalties)
        blocks = []
        for start in range(0, len(logits_RV), BLOCK):
            part = slice(start, start + BLOCK)
            mask_RV = None if allowed_RB is None else unpack(allowed_RB[part], self._vocab_size)
            blocks.append(self._shape_block(logits_RV[part], rows, part, tables, counts, mask_RV))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _shape_block(
        self,
        logits_RV: Tensor,
        rows: Rows,
        part: slice,
        tables: _Tables,
        counts: Counts | None,
        mask_RV: Tensor | None,
    ) -> Tensor:
        owners_R, index_R = rows.owners_R[part], rows.index_R[part]
        slots_R = rows.slots_S.index_select(0, owners_R)
        if tables.penalties is not None and counts is not None:
            logits_RV = self._penalised(logits_RV, tables.penalties, counts, rows, part, slots_R)
        if tables.biases is not None:
            ids_RK, added_RK = (one_SK.index_select(0, owners_R) for one_SK in tables.biases)
            logits_RV = logits_RV.scatter_add(1, ids_RK, added_RK)
        hard_RV = None if tables.bans_SV is None else tables.bans_SV.index_select(0, owners_R)
        soft_RV = None
        if tables.least_S is not None:
            stops_RI = self._registers.stop_ids.index_select(0, slots_R)
            num_output_R = index_R - self._pools.prompt_len.index_select(0, slots_R)
            is_early_R = num_output_R < tables.least_S.index_select(0, owners_R)
            soft_RV = mark(stops_RI, is_early_R[:, None] & (stops_RI >= 0), self._vocab_size)
        if tables.words is not None:
            bad_RV = self._bad(tables.words, owners_R, slots_R, index_R)
            soft_RV = bad_RV if soft_RV is None else soft_RV | bad_RV
        return forbid(logits_RV, hard_RV, soft_RV, mask_RV)

    def _penalised(
        self, logits_RV: Tensor, penalties: _Penalties, counts: Counts, rows: Rows, part: slice, slots_R: Tensor
    ) -> Tensor:
        owners_R, index_R = rows.owners_R[part], rows.index_R[part]
        counts = counts.of(penalties.member_S.index_select(0, owners_R))
        if rows.width > 1:
            first_R = rows.first_S.index_select(0, owners_R)
            place_RD = first_R[:, None] + torch.arange(rows.width - 1, device=first_R.device)
            is_before_RD = place_RD < index_R[:, None]
            token_RD = self._pools.tokens_at(slots_R[:, None], torch.where(is_before_RD, place_RD, 0))
            counts = counts.behind(token_RD, is_before_RD)
        repetition_R, frequency_R, presence_R = penalties.by_sequence_3S.index_select(1, owners_R).unbind(0)
        return penalise(logits_RV, counts, repetition_R, frequency_R, presence_R)

    def _bad(self, words: _Words, owners_R: Tensor, slots_R: Tensor, index_R: Tensor) -> Tensor:
        """What would complete a bad word, bool [R, V]."""
        words_RKM = words.words.index_select(0, owners_R)
        place_RM = index_R[:, None] - torch.arange(words_RKM.shape[-1], 0, -1, device=index_R.device)
        before_RM = self._pools.tokens_at(slots_R[:, None], place_RM.clamp(min=0))
        hit_RK = completes_bad_word(before_RM, place_RM >= 0, words_RKM, words.lengths.index_select(0, owners_R))
        return mark(words.last.index_select(0, owners_R), hit_RK, self._vocab_size)

    def _count(self, rows: Rows, penalties: _Penalties) -> Counts:
        """Histories of those that penalise, up to their first rows."""
        pools, slots_N = self._pools, rows.slots_S.index_select(0, penalties.members_N)
        return count_tokens(
            pools.token_log[:, : rows.longest].index_select(0, slots_N).to(torch.int64),
            pools.prompt_len.index_select(0, slots_N),
            rows.first_S.index_select(0, penalties.members_N),
            self._vocab_size,
        )

    def _tables(self, slots: tuple[int, ...]) -> _Tables:
        if self._last is None or self._last[0] != slots:
            self._last = slots, self._make_tables(slots)
        return self._last[1]

    def _make_tables(self, slots: tuple[int, ...]) -> _Tables:
        shapings = [self._shapings.get(slot, NO_SHAPING) for slot in slots]
        has_least = any(one.min_tokens for one in shapings)
        return _Tables(
            penalties=_Penalties.of(shapings, self._pools.device) if any(one.penalises for one in shapings) else None,
            biases=self._stack_biases(slots) if any(slot in self._biases for slot in slots) else None,
            bans_SV=self._stack_bans(slots) if any(slot in self._bans for slot in slots) else None,
            least_S=torch.tensor([one.min_tokens for one in shapings]).to(self._pools.device) if has_least else None,
            words=_Words.stack([self._words.get(slot) for slot in slots]),
        )

    def _stack_biases(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids int64 and what is added float32, [S, K]. Filled up with −0.0, the one number that changes none."""
        most = max(len(self._biases[slot][0]) for slot in slots if slot in self._biases)
        device = self._pools.device
        ids_SK = torch.zeros(len(slots), most, dtype=torch.int64, device=device)
        added_SK = torch.full((len(slots), most), -0.0, device=device)
        for place, slot in enumerate(slots):
            if slot in self._biases:
                ids_K, added_K = self._biases[slot]
                ids_SK[place, : len(ids_K)], added_SK[place, : len(ids_K)] = ids_K, added_K
        return ids_SK, added_SK

    def _stack_bans(self, slots: Sequence[int]) -> Tensor:
        nothing_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._pools.device)
        return torch.stack([self._bans.get(slot, nothing_V) for slot in slots])

    def _banned(self, shaping: Shaping) -> Tensor:
        banned_V = torch.full((self._vocab_size,), bool(shaping.allowed))
        banned_V[list(shaping.allowed)] = False
        banned_V[list(shaping.banned)] = True
        return banned_V.to(self._pools.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Penalties:
    """members_N: the sequences that penalise. member_S: which of these each one goes by: of those that penalise
    nothing another one, whose counts change nothing. by_sequence_3S: float32, repetition, frequency and presence."""

    members_N: Tensor
    member_S: Tensor
    by_sequence_3S: Tensor

    @classmethod
    def of(cls, shapings: Sequence[Shaping], device: torch.device) -> _Penalties:
        members = [place for place, one in enumerate(shapings) if one.penalises]
        member_of = {place: member for member, place in enumerate(members)}
        values = [[one.repetition, one.frequency, one.presence] for one in shapings]
        return cls(
            members_N=torch.tensor(members).to(device),
            member_S=torch.tensor([member_of.get(place, 0) for place in range(len(shapings))]).to(device),
            by_sequence_3S=torch.tensor(values, dtype=torch.float32).T.contiguous().to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Bad words as `completes_bad_word` takes them, and their last tokens: of a sequence [K, M], [K], [K]; of several,
    which have as many of them as the most and as long ones as the longest, [S, K, M], [S, K], [S, K]."""

    words: Tensor
    lengths: Tensor
    last: Tensor

    @classmethod
    def of(cls, words: Sequence[Sequence[int]], device: torch.device) -> _Words:
        longest = max(map(len, words))
        table = [[*[0] * (longest - len(word)), *word] for word in words]
        table_KL = torch.tensor(table).to(device)
        return cls(
            words=table_KL[:, :-1],
            lengths=torch.tensor([len(word) for word in words]).to(device),
            last=table_KL[:, -1],
        )

    @classmethod
    def stack(cls, several: Sequence[_Words | None]) -> _Words | None:
        """None where no sequence has any."""
        there = [one for one in several if one is not None]
        if not there:
            return None
        most = max(len(one.words) for one in there)
        longest = max(one.words.shape[1] for one in there)
        nothing = cls(words=there[0].words[:0], lengths=there[0].lengths[:0], last=there[0].last[:0])
        filled = [nothing if one is None else one for one in several]
        return cls(
            words=torch.stack(
                [F.pad(one.words, (longest - one.words.shape[1], 0, 0, most - len(one.words))) for one in filled]
            ),
            lengths=torch.stack([F.pad(one.lengths, (0, most - len(one.lengths))) for one in filled]),
            last=torch.stack([F.pad(one.last, (0, most - len(one.last))) for one in filled]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """What of all that a batch of sequences needs, each None where none needs it. least_S: min_tokens."""

    penalties: _Penalties | None
    biases: tuple[Tensor, Tensor] | None
    bans_SV: Tensor | None
    least_S: Tensor | None
    words: _Words | None
