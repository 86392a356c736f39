"""How large a message of a client may be, and each part of it that takes work. Knows no tokenizer and no engine.

Everything here is looked at before the work it bounds: a message before it is parsed, counts before entries, the size
of a text before it is rendered or encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.front.errors import InvalidRequest

STOCK_LIMIT_BYTES = 4 * 1024 * 1024
"""Longest message that a gRPC peer takes without options of its own."""

REQUEST_LIMIT_BYTES = 16 * 1024 * 1024
"""Longest request at any context length: a message is parsed on the event loop, at worst in some 60 ms per MiB."""

REQUEST_BYTES_PER_TOKEN = 16
"""Room in a request per token of context. Text has four or five bytes per token, ids have up to five."""

METADATA_LIMIT_BYTES = 16 * 1024
"""Names and values of a call's metadata; what gRPC announces to its peers, and leaves to them to keep."""

OPEN_LIMIT_BYTES = 64 * 1024
"""Longest message in a stream to a service that is open to all: reflection answers with all that it was asked."""

MAX_CHAT_MESSAGES = 4096

LOGPROBS_LIMIT_BYTES = STOCK_LIMIT_BYTES // 2
"""Log-probabilities in one frame that no reader's pace bounds; the rest is for text, ids, and what waits unread."""

_REPLY_FRAMING_BYTES = 1024
"""More than a reply holds besides its ids, the special tokens that a tokenizer adds among them."""


def request_limit_bytes(max_model_len: int) -> int:
    """Longest request: gRPC's own limit, and more where the context needs it. Beyond, gRPC says RESOURCE_EXHAUSTED."""
    return min(max(STOCK_LIMIT_BYTES, REQUEST_BYTES_PER_TOKEN * max_model_len), REQUEST_LIMIT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBound:
    """The longest text that is encoded, in UTF-8 bytes. because: what sets it, as the refusal says it."""

    max_bytes: int
    because: str

    def check(self, field: str, size_bytes: int) -> None:
        """Raises InvalidRequest for a text past the bound. field: where it came from."""
        if size_bytes > self.max_bytes:
            raise InvalidRequest(
                field, f"{size_bytes} bytes of text; at most {self.max_bytes} are taken, since {self.because}"
            )


def prompt_bound(max_model_len: int, longest_token_bytes: int) -> TextBound:
    """Texts that may fit the context: each token covers at most `longest_token_bytes` of them.

    Where a normalizer shortens texts, some past the bound could fit too; they are refused all the same.
    """
    return TextBound(
        max_bytes=max_model_len * longest_token_bytes,
        because=f"the context holds {max_model_len} tokens of at most {longest_token_bytes} bytes each",
    )


def reply_bound(vocab_size: int) -> TextBound:
    """Texts whose ids fit one message to a stock client: there are at most as many as bytes, each a varint."""
    id_bytes = _id_bytes(vocab_size)
    return TextBound(
        max_bytes=(STOCK_LIMIT_BYTES - _REPLY_FRAMING_BYTES) // id_bytes,
        because=f"a reply of up to as many ids of {id_bytes} bytes fits the {STOCK_LIMIT_BYTES} that clients read",
    )


def logprobs_bytes(num_tokens: int, num_top: int, vocab_size: int) -> int:
    """The most that log-probabilities of so many tokens take in a frame, each with `num_top` alternatives."""
    one = 1 + _id_bytes(vocab_size) + 5  # a tag and an id, a tag and a float32
    alternatives = num_top * (2 + one)  # a tag and a length each
    return num_tokens * (1 + 2 + one + alternatives)


def _id_bytes(vocab_size: int) -> int:
    """Of the largest id as a varint."""
    return -(-max(1, (vocab_size - 1).bit_length()) // 7)
