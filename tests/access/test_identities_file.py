"""The file of identities: what is read, and what each mistake is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from configs.load import SettingsError
from runtime.access.directory import Directory
from runtime.access.identities_file import load_identities
from runtime.access.identity import Identity, Limits, Role
from runtime.front.errors import Unauthenticated

TOKEN = "s3cret-of-ada"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()

GOOD = f"""\
identities:
  - name: gateway
    roles: [generate]
    certificate: spiffe://example/gateway
    limits: {{concurrency: 4, tokens_per_minute: 6000, max_context: 128}}
  - name: ada@example.org
    roles: [operate, generate]
    token_sha256: [{DIGEST}, {OTHER}]
    certificate: [ada.example, Ada Example]
""".replace("ada@example.org", "ada")


def load(tmp_path: Path, text: str) -> Directory:
    path = tmp_path / "identities.yaml"
    path.write_text(text)
    return load_identities(path)


def test_identities_are_found_by_what_they_are_known_by(tmp_path):
    directory = load(tmp_path, GOOD)
    ada = Identity(name="ada", roles=frozenset({Role.OPERATE, Role.GENERATE}))
    assert directory.by_token(TOKEN) == directory.by_token("another") == ada
    assert directory.by_certificate(["x", "ada.example"], None) == ada
    assert directory.by_certificate(["x"], "Ada Example") == ada
    gateway = directory.by_certificate(["spiffe://example/gateway"], "Ada Example")
    assert gateway.limits == Limits(concurrency=4, tokens_per_minute=6000, max_context=128)
    assert directory.names == {"ada", "gateway"}
    assert directory.named("ada") == ada
    assert directory.named("nobody") is None


@pytest.mark.parametrize("token", ["", "s3cret-of-ad", "s3cret-of-ada ", "S3CRET-OF-ADA", DIGEST, "é", "\udcff"])
def test_a_wrong_token_is_nobodys_and_is_not_repeated(tmp_path, token):
    with pytest.raises(Unauthenticated) as caught:
        load(tmp_path, GOOD).by_token(token)
    assert not token or token not in str(caught.value)


def test_a_certificate_of_nobody_or_of_two_is_refused_by_name(tmp_path):
    directory = load(tmp_path, GOOD)
    with pytest.raises(Unauthenticated, match=r"\(mallory.example, Mallory\)"):
        directory.by_certificate(["mallory.example"], "Mallory")
    with pytest.raises(Unauthenticated, match=r"several identities \(ada, gateway\)"):
        directory.by_certificate(["spiffe://example/gateway", "ada.example"], None)


IDENTITY = f"identities:\n  - name: a\n    roles: [generate]\n    token_sha256: {DIGEST}\n"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "expected a block `identities:`"),
        ("- a\n", 1, "expected a block `identities:`"),
        ("identities:\n", 1, "identities: input should be a valid list"),
        ("identities: []\n", 1, "identities: list should have at least 1 item"),
        ("identities: [\n", 2, ""),
        ("ids: []\n", 1, "identities: is missing; add it"),
        (IDENTITY + "more: 1\n", 5, "more: unknown key; known here are identities"),
        (
            IDENTITY + "    role: x\n",
            5,
            "identities[0].role: unknown key; known here are name, roles, token_sha256, certificate, limits",
        ),
        (
            IDENTITY + "    limits: {rpm: 3}\n",
            5,
            "identities[0].limits.rpm: unknown key; known here are concurrency, tokens_per_minute, max_context",
        ),
        (
            IDENTITY + "    limits:\n      concurrency: 0\n",
            6,
            "identities[0].limits.concurrency: input should be greater",
        ),
        (
            IDENTITY + "    limits: {concurrency: '3'}\n",
            5,
            "identities[0].limits.concurrency: input should be a valid int",
        ),
        (
            IDENTITY + "    limits: {concurrency: true}\n",
            5,
            "identities[0].limits.concurrency: input should be a valid i",
        ),
        (IDENTITY + "    limits: {max_context: 1}\n", 5, "identities[0].limits.max_context: input should be greater"),
        (IDENTITY + "    name: b\n", 5, "name is given twice; keep one"),
        (
            IDENTITY.replace("[generate]", "[admin]"),
            3,
            "identities[0].roles[0]: no role; give some of generate, observe, ",
        ),
        (IDENTITY.replace("[generate]", "[]"), 3, "identities[0].roles: list should have at least 1 item"),
        (IDENTITY.replace("    roles: [generate]\n", ""), 2, "identities[0].roles: is missing; add it"),
        (IDENTITY.replace("name: a", "name: a b"), 2, "identities[0].name: is not of 1 to 64 letters"),
        (IDENTITY.replace("name: a", "name: anyone"), 2, "identities[0].name: anyone stands in logs for"),
        (IDENTITY.replace("name: a", "name: 2001-99-99"), 2, "is no value of the kind that it looks like; put it in"),
        (IDENTITY.replace("name: a", "name: 7"), 2, "identities[0].name: input should be a valid string"),
        (IDENTITY.replace(f"    token_sha256: {DIGEST}\n", ""), 2, "identities[0]: has neither token_sha256 nor cert"),
        (IDENTITY.replace(DIGEST, "7"), 4, "identities[0].token_sha256[0]: is not a SHA-256 in 64 hexadecimal digits"),
        (
            IDENTITY.replace(DIGEST, hashlib.sha256(b"").hexdigest()),
            4,
            "identities[0].token_sha256[0]: is the SHA-256 of an empty token",
        ),
        (
            IDENTITY + f"  - name: a\n    roles: [observe]\n    token_sha256: {OTHER}\n",
            5,
            "identities[1].name: a is there already",
        ),
        (
            IDENTITY + f"  - name: b\n    roles: [observe]\n    token_sha256:\n      - {DIGEST}\n",
            8,
            "identities[1].token_sha256: is a's already; give each to one identity, once",
        ),
        (
            IDENTITY + "    certificate: x\n  - {name: b, roles: [observe], certificate: x}\n",
            6,
            "identities[1].certificate: is a's already",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, text, line, problem):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"access.identities: {tmp_path / 'identities.yaml'}:{line}: {problem}")


def test_every_problem_is_told_at_once(tmp_path):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, "identities:\n  - {name: a b, roles: [x], token_sha256: y}\n")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("form", ["*{}", "!{} x", "!!int {}", "!!float {}", "!!bool {}", "!!timestamp {}"])
def test_a_token_that_is_no_yaml_is_not_repeated(tmp_path, form):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, IDENTITY.replace(DIGEST, form.format(TOKEN)))
    assert TOKEN.lower() not in str(caught.value).lower()
    assert str(caught.value).startswith(f"access.identities: {tmp_path / 'identities.yaml'}:4: ")


@pytest.mark.parametrize("quoted", [TOKEN, f"'{TOKEN}'", f"[{TOKEN}]", f"{{a: {TOKEN}}}"])
def test_a_token_in_the_place_of_its_digest_is_not_repeated(tmp_path, quoted):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, IDENTITY.replace(DIGEST, quoted))
    assert TOKEN not in str(caught.value)
    assert 'printf %s "$TOKEN" | sha256sum' in str(caught.value)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, make, problem):
    path = tmp_path / "identities.yaml"
    make(path)
    with pytest.raises(SettingsError, match=f"access.identities: {path}: {problem}"):
        load_identities(path)
