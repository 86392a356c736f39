"""Incremental text equals the tokenizer's own decoding of the whole, and never shows half a character."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from configs.load import demo_checkpoint
from runtime.stream.detokenizer import REPLACEMENT, ByteDetokenizer, Vocabulary, WindowDetokenizer

TOKENIZER = tokenizers.Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)
BYTE_TOKEN = {VOCABULARY.token_bytes(i)[0]: i for i in range(1, 4096) if len(VOCABULARY.token_bytes(i)) == 1}

SCRIPTS = ["한국어 문장", "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301 n\u0303 ก็", "naïve — “quoted”", "𝒜𝓁𝑔𝑒𝒷𝓇𝒶", "汉字", "\x00\t\r\n"]


def pieces(ids: list[int]) -> list[str]:
    detokenizer = VOCABULARY.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def test_demo_vocabulary_is_detokenised_by_bytes_and_holds_every_byte() -> None:
    assert isinstance(VOCABULARY.detokenizer(), ByteDetokenizer)
    assert sorted(BYTE_TOKEN) == list(range(256))


@given(st.lists(st.integers(0, 4095), max_size=60))
@example([4095, 0, 17])
def test_random_ids_decode_exactly(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.binary(max_size=40))
@example(b"\xf0\x9f\x98")
@example(b"\xf0\x9f\xf0\x9f\x98\x80\xed\xa0\x80\xc0\xaf\xff")
def test_random_bytes_decode_exactly(data: bytes) -> None:
    ids = [BYTE_TOKEN[byte] for byte in data]
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=8), max_size=4).map("".join), st.booleans())
def test_text_comes_back_and_no_piece_has_a_replacement(text: str, one_byte_per_token: bool) -> None:
    ids = [BYTE_TOKEN[byte] for byte in text.encode()] if one_byte_per_token else TOKENIZER.encode(text).ids
    if "<|endoftext|>" in text:
        return
    got = pieces(ids)
    assert "".join(got) == text
    assert sum(piece.count(REPLACEMENT) for piece in got) == text.count(REPLACEMENT)


def test_a_character_is_released_with_its_last_byte() -> None:
    assert pieces([BYTE_TOKEN[byte] for byte in "a한b".encode()]) == ["a", "", "", "한", "b", ""]


def test_invalid_bytes_become_replacements_as_soon_as_they_are_certain() -> None:
    assert pieces([BYTE_TOKEN[byte] for byte in b"\xe2\x82a"]) == ["", "", REPLACEMENT + "a", ""]
    assert pieces([BYTE_TOKEN[0x80]]) == [REPLACEMENT, ""]
    assert pieces([BYTE_TOKEN[0xE2]]) == ["", REPLACEMENT]


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    ids = [BYTE_TOKEN[0xC3], 0, BYTE_TOKEN[0xA9]]
    assert pieces(ids) == ["", "", "é", ""]


@pytest.fixture(scope="module")
def fallback_tokenizer() -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: words begin with ▁, unknown characters are spelled as bytes."""
    words = ["<unk>", "▁Hello", "▁world", "ly", "▁", "é"] + [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@given(data=st.data())
def test_other_decoders_decode_exactly_through_a_window(
    fallback_tokenizer: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    """Words, special tokens and well-formed characters spelled as bytes, in any order."""
    vocab = fallback_tokenizer.get_vocab()
    word = st.sampled_from(["▁Hello", "▁world", "ly", "▁", "é", "<s>"]).map(lambda name: [vocab[name]])
    spelled = st.sampled_from(["é", "한", "😀"]).map(lambda char: [vocab[f"<0x{byte:02X}>"] for byte in char.encode()])
    ids = [token_id for part in data.draw(st.lists(word | spelled, max_size=20)) for token_id in part]
    detokenizer = Vocabulary(fallback_tokenizer).detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    got = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]
    assert "".join(got) == fallback_tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(REPLACEMENT in piece for piece in got)


def test_other_decoders_do_not_count_tokens_without_text_against_a_character(
    fallback_tokenizer: tokenizers.Tokenizer,
) -> None:
    vocab = fallback_tokenizer.get_vocab()
    detokenizer = Vocabulary(fallback_tokenizer).detokenizer()
    ids = [vocab["▁"], *(vocab[f"<0x{byte:02X}>"] for byte in "😀".encode())]
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "", "", "😀"]


def test_other_decoders_do_not_count_special_tokens_against_a_character(
    fallback_tokenizer: tokenizers.Tokenizer,
) -> None:
    vocab = fallback_tokenizer.get_vocab()
    detokenizer = Vocabulary(fallback_tokenizer).detokenizer()
    names = ["<0xF0>", "<s>", "<0x9F>", "<s>", "<0x98>", "<0x80>"]
    assert [detokenizer.push(vocab[name]) for name in names] == ["", "", "", "", "", "😀"]


@pytest.mark.parametrize(
    ("names", "revealed"),
    [
        (["<0xC3>", "ly"], [0, 1]),
        (["<0xC3>", "<0xA9>", "ly"], [0, 0, 0]),
        (["<0xF0>", "<0x9F>", "<s>", "ly"], [0, 0, 0, 2]),
        (["ly", "ly"], [0, 0]),
    ],
)
def test_other_decoders_tell_what_a_token_reveals_of_those_before_it(
    fallback_tokenizer: tokenizers.Tokenizer, names: list[str], revealed: list[int]
) -> None:
    vocab = fallback_tokenizer.get_vocab()
    detokenizer = Vocabulary(fallback_tokenizer).detokenizer()
    got = []
    for name in names:
        got.append(detokenizer.num_revealed(vocab[name]))
        detokenizer.push(vocab[name])
    assert got == revealed


def test_other_decoders_hold_invalid_bytes_for_four_tokens_at_most(fallback_tokenizer: tokenizers.Tokenizer) -> None:
    vocab = fallback_tokenizer.get_vocab()
    detokenizer = Vocabulary(fallback_tokenizer).detokenizer()
    got = [detokenizer.push(vocab["<0x80>"]) for _ in range(4)]
    assert got == ["", "", "", REPLACEMENT * 4]
    assert detokenizer.push(vocab["<0xE2>"]) == ""
    assert detokenizer.finish() == REPLACEMENT
