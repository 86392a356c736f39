"""docs/access.md: what it says to copy and run does what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from configs.access import AccessSettings
from configs.load import load_settings
from runtime.access.certificates import read_certificate
from runtime.access.identities_file import load_identities
from runtime.access.identity import Role

PAGE = (Path(__file__).parents[2] / "docs" / "access.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the certificates were made and the files lie."""
    path = tmp_path_factory.mktemp("access")
    subprocess.run(["bash", "-euc", blocks("bash")[0]], cwd=path, check=True, capture_output=True)
    serve, identities = blocks("yaml")
    (path / "serve.yaml").write_text(serve)
    (path / "identities.yaml").write_text(identities)
    return path


def test_the_settings_and_the_certificates_that_it_makes_are_good(folder: Path) -> None:
    settings = load_settings(folder / "serve.yaml", {})
    assert read_certificate(settings.server.tls, "server.tls").client_ca is None
    assert read_certificate(settings.operator.tls, "operator.tls").client_ca == (folder / "pki/ca.crt").read_bytes()
    assert settings.access.identities == folder / "identities.yaml"


def test_the_identities_are_good(folder: Path) -> None:
    directory = load_identities(folder / "identities.yaml")
    assert directory.names == {"gateway", "dashboard", "ada"}
    assert directory.by_certificate(["spiffe://example/gateway"], "gateway").name == "gateway"
    assert directory.by_certificate(["ada.example"], "ada").roles == {Role.GENERATE, Role.OPERATE}


def test_a_token_made_as_it_says_is_known_by_the_digest_that_it_prints(folder: Path) -> None:
    done = subprocess.run(["bash", "-euc", blocks("bash")[1]], cwd=folder, check=True, capture_output=True, text=True)
    token = (folder / "ada.token").read_text().strip()
    path = folder / "with_token.yaml"
    entry = {"name": "ada", "roles": ["observe"], "token_sha256": done.stdout.strip()}
    path.write_text(yaml.safe_dump({"identities": [entry]}))
    assert load_identities(path).by_token(token).name == "ada"
    assert (folder / "ada.token").stat().st_mode & 0o077 == 0


def test_every_setting_of_access_is_told_of() -> None:
    assert [name for name in AccessSettings.model_fields if f"access.{name}" not in PAGE] == []
