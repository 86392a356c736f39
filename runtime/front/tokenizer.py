"""The checkpoint's tokenizer and chat template: text to ids on the way in. Knows nothing of requests or wire types."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.sandbox
import tokenizers

from runtime.front.bounds import TextBound
from runtime.front.errors import InvalidRequest
from runtime.front.files import read_object
from runtime.stream.detokenizer import Detokenizer, Vocabulary
from workers.plan import LoadError

LONG_TEXT_CHARS = 4096
"""Texts past this are encoded in a thread: about a millisecond of work, more than a step of the loop can spare."""

LONG_CHAT_MESSAGES = 32
"""Chats past this are rendered in a thread, for the same reason."""

GIANT_TEXT_CHARS = 256 * 1024
"""Texts past this share one thread, so that they keep nobody else waiting for the seconds they may take."""

NUM_ENCODERS = 2
"""Threads for all other long texts."""

TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template can raise over messages it was not written for."""

_T = TypeVar("_T")


class Tokenizer:
    """Encodes, decodes and renders chats for one checkpoint.

    chat_template: jinja source, None where the checkpoint has none.
    special_tokens: names a template may use (`bos_token`, `eos_token`, ...) and their text.
    longest_token_bytes: the most UTF-8 bytes of text that one token stands for.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Raises jinja2.TemplateSyntaxError where the chat template is not one."""
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self.longest_token_bytes = self._vocabulary.longest_token_bytes()
        self._special_tokens = dict(special_tokens or {})
        self._template = None if chat_template is None else _environment().from_string(chat_template)
        # Threads of our own: what is queued in them and cancelled is skipped, and nothing else waits behind it.
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, thread_name_prefix="encode")
        self._giants_encoder = ThreadPoolExecutor(1, thread_name_prefix="encode-giant")

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads `tokenizer.json` and, where there are some, `tokenizer_config.json` and `chat_template.jinja` of a
        checkpoint directory. Raises LoadError that names the file."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise LoadError(f"{path}: no such file; a checkpoint needs its tokenizer beside its weights")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            raise LoadError(f"{path}: {error}") from error
        # Prompts are refused when they are too long, never cut, and batches are not padded here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_object(directory / "tokenizer_config.json")
        special_tokens = {
            name: str(value["content"] if isinstance(value, dict) else value)
            for name, value in config.items()
            if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        try:
            return cls(tokenizer, _chat_template(directory, config), special_tokens)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(f"{directory}: the chat template is not valid: line {error.lineno}: {error}") from error

    async def encode(self, text: str, bound: TextBound | None = None) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself adds. Long texts do not block the loop, and
        a call that is cancelled before its turn costs nothing.

        Raises InvalidRequest at once where the text is past the bound.
        """
        if bound is not None:
            bound.check("text", len(text.encode()))
        return await self._encode(text, add_special_tokens=True)

    async def encode_part(self, text: str, bound: TextBound, field: str) -> list[int]:
        """Ids of a text that stands behind another one, so without special tokens. Otherwise as `encode`; field: where
        the text came from."""
        bound.check(field, len(text.encode()))
        return await self._encode(text, add_special_tokens=False)

    def encode_word(self, text: str) -> list[int]:
        """Ids of a text of a few bytes, without special tokens, at once."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, bound: TextBound | None = None
    ) -> list[int]:
        """Ids of a rendered chat. Special tokens are the template's business. Threads and cancelling as in `encode`.

        Raises InvalidRequest, where the texts or the rendered chat are past the bound before anything is encoded.
        """
        parts = [part for message in messages for part in message.values()]
        if bound is not None:
            bound.check("chat", sum(len(part.encode()) for part in parts))

        def render() -> str:
            return self.render_chat(messages, add_generation_prompt=add_generation_prompt)

        num_chars = sum(map(len, parts))
        is_short = num_chars <= LONG_TEXT_CHARS and len(messages) <= LONG_CHAT_MESSAGES
        text = render() if is_short else await self._in_thread(render, num_chars)
        if bound is not None:
            bound.check("chat", len(text.encode()))
        return await self._encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The text of a chat, by the checkpoint's template.

        Raises InvalidRequest when there is no template, or when it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("chat", "this checkpoint has no chat template; send text or token_ids")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest("chat", f"the chat template refuses these messages: {error}; change them") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out, invalid bytes as U+FFFD."""
        return self._vocabulary.decode(list(token_ids))

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        return self._vocabulary.detokenizer()

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            # `encode` keeps the interpreter's lock as long as it runs; the batch form lets go of it.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

        if len(text) <= LONG_TEXT_CHARS:
            # Not the batch form: it may wait for a thread pool that all calls share.
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return await self._in_thread(encode, len(text))

    async def _in_thread(self, work: Callable[[], _T], num_chars: int) -> _T:
        threads = self._encoders if num_chars <= GIANT_TEXT_CHARS else self._giants_encoder
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template file if there is one, else the configuration's entry: a text, or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return None if template is None else str(template)


def _environment() -> jinja2.Environment:
    """The environment that published templates are written for, in a sandbox: a template is data of the checkpoint."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
