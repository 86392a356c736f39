"""Tokenizer files of a checkpoint: what is read, how chats are rendered, and the words when something is wrong."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import tokenizers
from fakes.front import in_loop

from configs.load import demo_checkpoint
from runtime.front.defaults import SamplingDefaults
from runtime.front.errors import InvalidRequest
from runtime.front.tokenizer import LONG_TEXT_CHARS, Tokenizer
from workers.plan import LoadError

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "<hi> é"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with the demo tokenizer alone."""
    shutil.copy(demo_checkpoint() / "tokenizer.json", tmp_path)
    return tmp_path


def render(directory: Path, template: str, **config: object) -> str:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return Tokenizer.load(directory).render_chat(MESSAGES, add_generation_prompt=True)


def test_the_template_sees_messages_special_tokens_and_the_flag(checkpoint: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'system' %}\n{% continue %}{% endif %}\n"
        "{{ m.role }}: {{ m.content }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    )
    text = render(checkpoint, template, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>")
    assert text == "<s>user: <hi> é</s>\nbot:"


def test_json_in_templates_is_not_escaped_for_html(checkpoint: Path) -> None:
    assert render(checkpoint, "{{ messages[1] | tojson }}") == '{"role": "user", "content": "<hi> é"}'


def test_the_year_can_be_asked_for(checkpoint: Path) -> None:
    assert render(checkpoint, "{{ strftime_now('%Y') }}").isdecimal()


def test_a_list_of_templates_has_a_default_one(checkpoint: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(checkpoint).render_chat(MESSAGES, add_generation_prompt=True) == "yes"


def test_a_template_file_goes_before_the_configuration(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("from the file")
    assert render(checkpoint, "from the configuration") == "from the file"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.upper() }}", "no element 9"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
    ],
)
def test_a_template_that_refuses_is_a_bad_request(checkpoint: Path, template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat: the chat template refuses these messages: .*{reason}"):
        render(checkpoint, template)


def test_without_a_template_chats_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template; send text or token_ids"):
        Tokenizer.load(checkpoint).render_chat(MESSAGES, add_generation_prompt=True)


@in_loop
async def test_long_texts_are_encoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    class Recording:
        """The library's tokenizer, telling where it ran."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            threads.append(threading.current_thread().name)
            return getattr(self._inner, name)

    tokenizer = Tokenizer.load(demo_checkpoint())
    monkeypatch.setattr(tokenizer, "_tokenizer", Recording(tokenizer._tokenizer))
    text = "x = 1\n" * (LONG_TEXT_CHARS // 6 + 1)
    assert tokenizer.decode(await tokenizer.encode(text)) == text
    assert await tokenizer.encode("x")
    assert threads[1] == threading.main_thread().name != threads[0]


def test_special_tokens_of_a_chat_are_the_templates_own(checkpoint: Path) -> None:
    """A tokenizer that adds a special token to texts does not add it to chats."""
    document = json.loads((checkpoint / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": end},
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(document))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": "hi"}))
    tokenizer = Tokenizer.load(checkpoint)
    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    @in_loop
    async def scenario() -> None:
        plain = await tokenizer.encode("hi")
        chat = await tokenizer.encode_chat(MESSAGES, add_generation_prompt=True)
        assert plain == [*chat, 0]
        # Long texts are encoded by another call of the library.
        long_text = "naïve <|endoftext|> x = 1\n" * LONG_TEXT_CHARS
        assert await tokenizer.encode(long_text) == library.encode(long_text).ids

    scenario()


def test_tokenizer_files_that_cannot_be_used_are_named(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(checkpoint / "nowhere")
    with pytest.raises(LoadError, match=r"the chat template is not valid: line 2"):
        render(checkpoint, "\n{% if %}")
    (checkpoint / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: expected an object, found list"):
        Tokenizer.load(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json: "):
        Tokenizer.load(checkpoint)


def test_truncation_and_padding_of_the_file_are_not_applied(checkpoint: Path) -> None:
    document = json.loads((checkpoint / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (checkpoint / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.load(checkpoint)

    @in_loop
    async def scenario() -> None:
        assert tokenizer.decode(await tokenizer.encode("def f(x): return x")) == "def f(x): return x"

    scenario()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": False},
            SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"temperature": None, "top_p": 1}, SamplingDefaults()),
    ],
)
def test_sampling_defaults_of_a_checkpoint(
    tmp_path: Path, config: dict[str, object], expected: SamplingDefaults
) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingDefaults.load(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"top_p": "0.9"}', "top_p: '0.9' is not a number"),
        ('{"top_p": 0}', "top_p: 0 is out of range"),
        ('{"temperature": NaN}', "temperature: nan is out of range"),
        ('{"top_k": -1}', "top_k: -1 is out of range"),
    ],
)
def test_sampling_defaults_that_cannot_be_used_are_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match=f"generation_config.json: {problem}"):
        SamplingDefaults.load(tmp_path)
