"""What is done to logits against a plain reading of the words, bit for bit, and against transformers' processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from constraints.tiny_tokenizers import compiler_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.tiny_rank import CPU, TinyRank, World, new_sequence, table
from torch import Tensor

from workers.demands import NO_SHAPING, Shaping
from workers.sampling.shaper import BLOCK, Rows
from workers.sampling.shaping import forbid, unpack

V, PROMPT, LONGEST, SLOTS = 7, 3, 16, 5
NEVER = float("-inf")


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> TinyRank:
    compiler = compiler_of(tmp_path_factory.mktemp("tokenizer"), list("abcdef"))
    world = World(target=table(0, V), drafter=table(1, V), vocab_size=V)
    return TinyRank(world, compiler, num_slots=SLOTS, max_length=LONGEST)


def plain(
    logits: Sequence[float],
    history: Sequence[int],
    shaping: Shaping,
    stops: Sequence[int] = (),
    allowed: set[int] | None = None,
    num_prompt: int = PROMPT,
) -> list[float]:
    """By the words of `workers.demands.Shaping`, one number after the other. allowed: by the constraint."""
    float32 = np.float32
    shaped = [float32(value) for value in logits]
    output = list(history[num_prompt:])
    for token in range(len(shaped)):
        value = shaped[token]
        if token in history:
            value = value / float32(shaping.repetition) if value > 0 else value * float32(shaping.repetition)
        value = value - float32(shaping.frequency) * float32(output.count(token))
        value = value - float32(shaping.presence) * float32(token in output)
        shaped[token] = value + float32(dict(shaping.bias).get(token, -0.0))
    everything = set(range(len(shaped)))
    met = everything if allowed is None else allowed
    hard = met & (set(shaping.allowed) or everything) - set(shaping.banned)
    endings = [word for word in shaping.bad_words if tuple(history[len(history) - len(word) + 1 :]) == word[:-1]]
    soft = hard - {word[-1] for word in endings if len(word) - 1 <= len(history)}
    if len(output) < shaping.min_tokens:
        soft -= set(stops)
    left = soft or hard or met or everything
    return [float(value) if token in left else NEVER for token, value in enumerate(shaped)]


def rows_of(rank: TinyRank, owners: Sequence[int], index: Sequence[int], first: Sequence[int], width: int) -> Rows:
    slots = list(range(1, 1 + len(first)))
    return Rows(
        slots=slots,
        slots_S=torch.tensor(slots),
        owners_R=torch.tensor(owners),
        index_R=torch.tensor(index),
        first_S=torch.tensor(first),
        width=width,
        longest=max(index) + 1,
    )


def packed(masks: Sequence[set[int]]) -> Tensor:
    bits = np.array([[token in mask for token in range(V)] for mask in masks], np.uint8)
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))


tokens = st.integers(0, V - 1)
shapings = st.builds(
    Shaping,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    frequency=st.sampled_from([0.0, 0.3, -2.0]),
    presence=st.sampled_from([0.0, 0.7, -0.1]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, 0.1, 3.3]), max_size=3).map(lambda d: tuple(d.items())),
    allowed=st.one_of(st.just(()), st.lists(tokens, min_size=1, max_size=4, unique=True).map(tuple)),
    banned=st.lists(tokens, max_size=4, unique=True).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=2, max_size=4).map(tuple), max_size=5).map(tuple),
    min_tokens=st.integers(0, 4),
)
logits = st.lists(st.integers(-9, 9).map(lambda n: n / 3), min_size=V, max_size=V)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Shaping, list[int], int, list[int], list[list[float]], list[set[int]]]:
    """Shaping, the log, how many of its tokens are committed, stops, and per row logits and what the constraint lets
    stand."""
    shaping = draw(st.one_of(st.just(NO_SHAPING), shapings))
    log = draw(st.lists(tokens, min_size=PROMPT, max_size=PROMPT + 6))
    num_committed = draw(st.integers(PROMPT, len(log)))
    stops = draw(st.lists(tokens, max_size=2, unique=True))
    num_rows = len(log) - num_committed + 1
    rows = draw(st.lists(logits, min_size=num_rows, max_size=num_rows))
    masks = draw(st.lists(st.sets(tokens, min_size=1), min_size=num_rows, max_size=num_rows))
    return shaping, log, num_committed, stops, rows, masks


@settings(max_examples=settings().max_examples // 4)
@given(batch=st.lists(sequences(), min_size=1, max_size=SLOTS), constrained=st.booleans())
def test_each_row_of_a_mixed_batch_is_what_the_words_say(
    rank: TinyRank,
    batch: list[tuple[Shaping, list[int], int, list[int], list[list[float]], list[set[int]]]],
    constrained: bool,
) -> None:
    """Rows of decoding, of drafts and of sequences that ask for nothing, in one call, bit for bit."""
    owners, index, first, raw, expected, masks = [], [], [], [], [], []
    for s, (shaping, log, num_committed, stops, rows, allowed) in enumerate(batch):
        sequence = new_sequence(1 + s, tuple(log[:PROMPT]), tuple(stops), shaping=shaping)
        rank.pools.enter([1 + s], [sequence.prompt], [()])
        rank.pools.token_log[1 + s, : len(log)] = torch.tensor(log, dtype=torch.int32)
        rank.pools.token_log[1 + s, len(log) :] = V - 1  # what lies there counts for nothing
        rank.registers.enter([sequence])
        rank.processing.enter([sequence])
        first.append(num_committed)
        for j, row in enumerate(rows):
            owners.append(s)
            index.append(num_committed + j)
            raw.append(row)
            masks.append(allowed[j])
            expected.append(plain(row, log[: num_committed + j], shaping, stops, allowed[j] if constrained else None))
    width = 1 + max(len(log) - committed for _, log, committed, *_ in batch)
    rows = rows_of(rank, owners, index, first, width)
    shaped = rank.processing._shaper.shape(torch.tensor(raw), rows, packed(masks) if constrained else None)
    assert torch.equal(shaped, torch.tensor(expected))


def test_rows_beyond_a_block_are_as_those_within(rank: TinyRank) -> None:
    shaping = Shaping(repetition=1.5, frequency=0.5, bias=((2, 1.0),), bad_words=((1, 2),), min_tokens=9, banned=(3,))
    rank.enter([1], shaping=shaping)
    history = [0, 1, 1]
    rank.commit(1, history[1:])
    raw = torch.randn(3 * BLOCK + 1, V, generator=torch.Generator().manual_seed(0))
    rows = rows_of(rank, [0] * len(raw), [3] * len(raw), [3], 1)
    shaped = rank.processing._shaper.shape(raw, rows)
    expected = [plain(row.tolist(), history, shaping, num_prompt=1) for row in raw]
    assert torch.equal(shaped, torch.tensor(expected))


def test_what_asks_for_nothing_keeps_its_bits_beside_what_does(rank: TinyRank) -> None:
    rank.enter([1], shaping=NO_SHAPING)
    rank.enter([2], shaping=Shaping(repetition=2.0, frequency=1.0, presence=1.0, bias=((0, 1.0),), banned=(1,)))
    raw = torch.tensor([[-0.0, 0.0, 1e-40, NEVER, -3.3, 1e38, 5.0]] * 2)
    shaped = rank.processing._shaper.shape(raw, rows_of(rank, [0, 1], [1, 1], [1, 1], 1))
    assert torch.equal(shaped[0].view(torch.int32), raw[0].view(torch.int32))
    assert not torch.equal(shaped[1], raw[1])
    alone = rank.processing._shaper.shape(raw[:1], rows_of(rank, [0], [1], [1], 1))
    assert alone.data_ptr() == raw.data_ptr(), "nothing to do, and something was done"


@given(st.lists(st.tuples(*[st.sets(tokens)] * 3), min_size=1, max_size=6), st.tuples(*[st.booleans()] * 3))
def test_bans_give_way_in_their_order(rows: list[tuple[set[int], ...]], are_there: tuple[bool, ...]) -> None:
    """soft, then hard with it; the constraint last of all."""
    kinds = [
        torch.tensor([[token in row[kind] for token in range(V)] for row in rows]) if there else None
        for kind, there in enumerate(are_there)
    ]
    out = forbid(torch.zeros(len(rows), V), *kinds) == NEVER
    for row, found in zip(rows, out, strict=True):
        hard, soft, mask = (bans if there else set() for bans, there in zip(row, are_there, strict=True))
        everything = set(range(V))
        left = everything - hard - soft - mask or everything - hard - mask or everything - mask or everything
        assert set((~found).nonzero().flatten().tolist()) == left


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 4096, 4097])
def test_masks_are_unpacked_as_numpy_packs_them(vocab_size: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (3, vocab_size), dtype=np.uint8)
    allowed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    assert torch.equal(unpack(allowed, vocab_size), torch.from_numpy(bits == 0))


class TestAsTransformers:
    """Where transformers has the same processor."""

    history = torch.tensor([[3, 1, 4, 1, 5, 2, 2]])
    scores = torch.randn(1, V, generator=torch.Generator().manual_seed(3)) * 3

    def ours(self, rank: TinyRank, shaping: Shaping, stops: tuple[int, ...] = (), num_prompt: int = PROMPT) -> Tensor:
        log = self.history[0].tolist()
        sequence = new_sequence(1, tuple(log[:num_prompt]), stops, shaping=shaping)
        rank.pools.enter([1], [sequence.prompt], [()])
        rank.pools.token_log[1, : len(log)] = torch.tensor(log, dtype=torch.int32)
        rank.registers.enter([sequence])
        rank.processing.enter([sequence])
        return rank.processing._shaper.shape(self.scores.clone(), rows_of(rank, [0], [len(log)], [len(log)], 1))

    @pytest.mark.parametrize("penalty", [0.6, 1.2, 3.0])
    def test_repetition(self, rank: TinyRank, penalty: float) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        theirs = RepetitionPenaltyLogitsProcessor(penalty)(self.history, self.scores.clone())
        torch.testing.assert_close(self.ours(rank, Shaping(repetition=penalty)), theirs, rtol=0, atol=0)

    def test_bad_words(self, rank: TinyRank) -> None:
        from transformers import NoBadWordsLogitsProcessor

        words = [[2, 2, 6], [2, 3], [5, 2, 2, 1], [4, 2, 0], [2, 2, 2, 2, 5], [2, 5]]
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([-1]))(self.history, self.scores.clone())
        assert torch.equal(self.ours(rank, Shaping(bad_words=tuple(map(tuple, words)))), theirs)

    @pytest.mark.parametrize("least", [3, 4, 5])
    def test_min_tokens(self, rank: TinyRank, least: int) -> None:
        from transformers import MinNewTokensLengthLogitsProcessor

        their = MinNewTokensLengthLogitsProcessor(PROMPT, least, [0, 6], device=CPU)
        theirs = their(self.history, self.scores.clone())
        assert torch.equal(self.ours(rank, Shaping(min_tokens=least), stops=(0, 6)), theirs)

    def test_banned_and_biased(self, rank: TinyRank) -> None:
        from transformers import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

        theirs = SuppressTokensLogitsProcessor([1, 6], device=CPU)(self.history, self.scores.clone())
        assert torch.equal(self.ours(rank, Shaping(banned=(1, 6))), theirs)
        biased = SequenceBiasLogitsProcessor([[[0], 1.5], [[3], -2.25]])(self.history, self.scores.clone())
        assert torch.equal(self.ours(rank, Shaping(bias=((0, 1.5), (3, -2.25)))), biased)


def test_a_bad_word_may_begin_in_the_prompt_but_not_before_it(rank: TinyRank) -> None:
    rank.enter([1], shaping=Shaping(bad_words=((0, 4), (0, 0, 3))))
    shaped = rank.processing._shaper.shape(torch.zeros(1, V), rows_of(rank, [0], [1], [1], 1))
    assert (shaped[0] == NEVER).nonzero().flatten().tolist() == [4]


def test_a_slot_keeps_nothing_of_who_had_it(rank: TinyRank, tmp_path: Path) -> None:
    raw, rows = torch.ones(1, V), rows_of(rank, [0], [1], [1], 1)
    rank.enter([1], shaping=Shaping(bias=((2, 1.0),), banned=(1,), min_tokens=5, presence=1.0, bad_words=((0, 3),)))
    assert not torch.equal(rank.processing._shaper.shape(raw, rows), raw)
    rank.enter([1], shaping=Shaping(bias=((3, 1.0),)))
    assert rank.processing._shaper.shape(raw, rows).tolist() == [[1, 1, 1, 2, 1, 1, 1]]
    rank.enter([1], shaping=NO_SHAPING)
    assert torch.equal(rank.processing._shaper.shape(raw, rows), raw)


def test_a_batchs_tables_are_those_of_its_slots_in_their_order(rank: TinyRank) -> None:
    """Also where the same ones were together before: in another order, or one of them another sequence, or none."""
    of = {
        1: Shaping(presence=1.0, bias=((2, 1.0),), banned=(1,), bad_words=((1, 3),)),
        2: Shaping(repetition=2.0, bias=((3, 1.0), (4, 2.0)), min_tokens=2, bad_words=((1, 5), (0, 1, 2), (1, 1, 6))),
        3: NO_SHAPING,
    }
    for slot, shaping in of.items():
        rank.enter([slot], shaping=shaping)
        rank.commit(slot, [1])

    def check(*slots: int) -> None:
        count = len(slots)
        rows = rows_of(rank, range(count), [2] * count, [2] * count, 1)
        shaped = rank.processing._shaper.shape(
            torch.ones(count, V), replace(rows, slots=slots, slots_S=torch.tensor(slots))
        )
        assert shaped.tolist() == [plain([1.0] * V, [0, 1], of[slot], num_prompt=1) for slot in slots]

    for slots in ((1, 2), (2, 1), (1, 2), (3, 2, 1), (1,), (2, 1)):
        check(*slots)
    of[1] = Shaping(frequency=1.0, banned=(2,), bad_words=((1, 4), (0, 1, 0)))
    rank.enter([1], shaping=of[1])
    rank.commit(1, [1])
    check(2, 1)
    of[1] = NO_SHAPING
    rank.processing.leave([1])
    check(2, 1)
