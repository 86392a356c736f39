"""From token ids to text, one token at a time, never half a character. Knows nothing of requests or stop strings.

Two ways, chosen once per tokenizer:

    decoder is ByteLevel   every token is bytes: an incremental UTF-8 decoder holds back what may still become a
                           character, and nothing else. Concatenated text equals `Tokenizer.decode` of all ids exactly.
    any other decoder      a window of ids is decoded again with every token (what a token says may depend on the one
                           before it), and text that ends in U+FFFD waits for up to MAX_PENDING tokens.

`tokenizers.decoders.DecodeStream` does neither: it keeps invalid bytes for ever and has no end of stream.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

REPLACEMENT = "\ufffd"

MAX_PENDING = 4
"""Longest UTF-8 character in bytes: once that many tokens wait, their U+FFFD is no longer an incomplete character."""


class Detokenizer(Protocol):
    """The text of one sequence, as it grows."""

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain, possibly none. Special tokens add no text."""
        ...

    def finish(self) -> str:
        """Ends the text: returns what was held back, incomplete characters as U+FFFD."""
        ...

    def num_revealed(self, token_id: int) -> int:
        """Of the characters that a push of this token would return, those that are of the tokens before it alone: what
        was held back as the beginning of a character, and turns out to be none."""
        ...


class Vocabulary:
    """What tokens say, shared by all sequences. Makes the detokenizer that fits the tokenizer's decoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        return ByteDetokenizer(self) if self._is_byte_level else WindowDetokenizer(self)

    def longest_token_bytes(self) -> int:
        """The most UTF-8 bytes of text that one token stands for, special ones included; at least 1."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        entries = self._tokenizer.get_vocab(with_added_tokens=False)
        # The byte alphabet has one character per byte.
        lengths = map(len, entries) if self._is_byte_level else (len(entry.encode()) for entry in entries)
        return max(1, *lengths, *(len(token.content.encode()) for token in added))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def decode(self, token_ids: list[int]) -> str:
        """The whole text of some ids, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; empty for special tokens and ids outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = None if self.is_special(token_id) else self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _byte_level_bytes(token)
        return known


class ByteDetokenizer:
    """Detokenizer of byte-level vocabularies; O(bytes of the token) per push."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        # "replace" puts one U+FFFD per maximal invalid subpart, as the tokenizer's own lossy decoding does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def num_revealed(self, token_id: int) -> int:
        held, _ = self._utf8.getstate()
        first = self._token_bytes(token_id)[:1]
        if not held or not first:
            return 0
        # The decoder holds back a little more than beginnings of characters: of a surrogate, two bytes.
        return 0 if _begins_char(held + first) else len(held.decode(errors="replace"))


class WindowDetokenizer:
    """Detokenizer over `Tokenizer.decode`, for decoders whose text depends on the token before.

    ids:   ... published ... │ context │ pending │
    text:  ... published ............. │ not yet │      new text = decode(context + pending) beyond decode(context)

    A byte-fallback run that turns invalid after characters of it were published keeps those characters; `decode` of the
    whole would replace them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_waits = 0

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._vocabulary.decode(self._context + self._pending)
        # Pushes are counted and not pending tokens: a token may also be pending because it says nothing yet.
        self._num_waits = self._num_waits + 1 if text.endswith(REPLACEMENT) else 0
        if 0 < self._num_waits < MAX_PENDING:
            return ""
        self._num_waits = 0
        return self._publish(text)

    def finish(self) -> str:
        return self._publish(self._vocabulary.decode(self._context + self._pending)) if self._pending else ""

    def num_revealed(self, token_id: int) -> int:
        if not self._num_waits or self._vocabulary.is_special(token_id):
            return 0
        held = self._vocabulary.decode(self._context + self._pending)
        text = self._vocabulary.decode([*self._context, *self._pending, token_id])
        # Another byte may go on with the character; what is no byte does not.
        stays = text.startswith(held) and text[len(held) :].strip(REPLACEMENT)
        return len(held) - len(self._context_text) if stays else 0

    def _publish(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        if new_text:
            self._context, self._pending = self._pending, []
            self._context_text = self._vocabulary.decode(self._context)
        return new_text


def _begins_char(data: bytes) -> bool:
    """Whether two bytes or more are a character of several, or can become one."""
    size = 2 if data[0] < 0xE0 else 3 if data[0] < 0xF0 else 4
    try:
        return len(data.ljust(size, b"\x80").decode()) == 1
    except UnicodeDecodeError:
        return False


def _byte_level_bytes(token: str) -> bytes:
    """The bytes a vocabulary entry stands for; an entry with characters outside the byte alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 are shifted past U+0100 in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()
