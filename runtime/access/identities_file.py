"""The file of identities: YAML, strict, with errors that name line and remedy. Knows no callers.

    identities:
      - name: gateway
        roles: [generate]
        certificate: spiffe://cluster.example/ns/front/sa/gateway
      - name: ada
        roles: [operate]
        token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        limits: {concurrency: 4, tokens_per_minute: 60000, max_context: 8192}

Tokens do not stand in it, only their SHA-256; and no error repeats what stands in a token's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from configs.load import SettingsError
from configs.strict_yaml import StrictLoader
from runtime.access.directory import Directory, Entry
from runtime.access.identity import RESERVED, Identity, Limits, Role

SETTING = "access.identities"

MAX_IDENTITIES = 4096
"""A token is compared with every one that is known."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,63}")
_QUOTED = re.compile(r"""\s(['"])(?!<).{2,}\1""")
"""What errors of YAML repeat of the text, kinds of its own tokens aside: '<anchor>'."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

_HOW_TO_HASH = 'printf %s "$TOKEN" | sha256sum'


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("is not of 1 to 64 letters, digits and . _ : / + -, the first a letter or digit")
    if name in RESERVED:
        raise ValueError(f"{name} stands in logs for who has no identity; choose another name")
    return name


def _checked_digest(given: object) -> object:
    # Whatever stands here may be the token itself: it is not repeated, and not handed to what would.
    digest = given.lower() if isinstance(given, str) else ""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"is not a SHA-256 in 64 hexadecimal digits; make it with {_HOW_TO_HASH}")
    if digest == _OF_NOTHING:
        raise ValueError(f"is the SHA-256 of an empty token; make it with {_HOW_TO_HASH}")
    return digest


def _as_list(given: object) -> object:
    return [] if given is None else given if isinstance(given, list) else [given]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class _Limits(_Model):
    concurrency: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_context: Annotated[int, Field(ge=2)] | None = None


class _Identity(_Model):
    name: Annotated[str, AfterValidator(_checked_name)]
    roles: Annotated[list[Annotated[Role, Field(strict=False)]], Field(min_length=1)]
    token_sha256: Annotated[list[Annotated[str, BeforeValidator(_checked_digest)]], BeforeValidator(_as_list)] = []
    certificate: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []
    limits: _Limits = _Limits()

    @model_validator(mode="after")
    def _is_known_by_something(self) -> _Identity:
        if not self.token_sha256 and not self.certificate:
            raise ValueError("has neither token_sha256 nor certificate; give one, or nobody can be it")
        return self


class _Document(_Model):
    identities: Annotated[list[_Identity], Field(min_length=1, max_length=MAX_IDENTITIES)]


_KEYS = {1: list(_Document.model_fields), 3: list(_Identity.model_fields), 4: list(_Limits.model_fields)}
"""What is known at a place, by its depth."""


def load_identities(path: Path) -> Directory:
    """Raises SettingsError: a line per problem, with its place and a remedy."""
    text = _read(path)
    try:
        loader = StrictLoader(text)
        root = loader.get_single_node()
        document = loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{SETTING}: {path}:{line}: {_QUOTED.sub('', error.problem or 'not YAML')}") from None
    except (yaml.YAMLError, RecursionError):
        raise SettingsError(f"{SETTING}: {path}: not YAML; write it as docs/access.md shows") from None
    if root is None or not isinstance(document, dict):
        raise SettingsError(f"{SETTING}: {path}:1: expected a block `identities:` with a list under it")
    try:
        checked = _Document.model_validate(document)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise SettingsError("\n".join(_explain(path, root, problem) for problem in problems)) from None
    twice = list(_given_twice(checked.identities))
    if twice:
        raise SettingsError("\n".join(f"{_place(path, root, loc)}: {problem}" for loc, problem in twice))
    return Directory(map(_entry_of, checked.identities))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{SETTING}: {path}: {error.strerror}; name a YAML file that can be read") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{SETTING}: {path}: not UTF-8 text; save the file as UTF-8") from None


def _explain(path: Path, root: yaml.Node, problem: Any) -> str:
    """One line for one of pydantic's errors, none of which holds what was given."""
    loc = tuple(problem["loc"])
    place = _place(path, root, loc)
    match problem["type"]:
        case "extra_forbidden":
            known = _KEYS[len(loc)]
            return f"{place}: unknown key; known here are {', '.join(known)}"
        case "enum":
            return f"{place}: no role; give some of {', '.join(role.value for role in Role)}"
        case "missing":
            return f"{place}: is missing; add it"
        case _:
            message = str(problem["msg"]).removeprefix("Value error, ")
            return f"{place}: {message[:1].lower()}{message[1:]}"


def _place(path: Path, root: yaml.Node, loc: Sequence[str | int]) -> str:
    """access.identities: FILE:LINE: identities[2].name"""
    node, key = root, ""
    for part in loc:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
        node = _below(node, part) or node
    return f"{SETTING}: {path}:{node.start_mark.line + 1}: {key}" if key else f"{SETTING}: {path}"


def _below(node: yaml.Node, part: str | int) -> yaml.Node | None:
    """The node of a key or an entry; None where the document has none."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        entry: yaml.Node = node.value[part]
        return entry
    return None


def _given_twice(identities: Sequence[_Identity]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What two identities have in common, at its second place."""
    names: dict[str, int] = {}
    tokens: dict[str, str] = {}
    certificates: dict[str, str] = {}
    for number, identity in enumerate(identities):
        at = ("identities", number)
        if identity.name in names:
            yield (*at, "name"), f"{identity.name} is there already; each identity has a name of its own"
        names[identity.name] = number
        for kind, known, given in (
            ("token_sha256", tokens, identity.token_sha256),
            ("certificate", certificates, identity.certificate),
        ):
            for one in given:
                if one in known:
                    yield (*at, kind), f"is {known[one]}'s already; give each to one identity, once"
                known[one] = identity.name


def _entry_of(identity: _Identity) -> Entry:
    return Entry(
        identity=Identity(
            name=identity.name, roles=frozenset(identity.roles), limits=Limits(**identity.limits.model_dump())
        ),
        token_digests=tuple(map(bytes.fromhex, identity.token_sha256)),
        certificates=tuple(identity.certificate),
    )
