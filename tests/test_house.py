"""The house holds what its documents promise: layout, first lines, addresses, imports, commands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "workers", "parallel", "state", "configs")
NOT_OURS = ("configs/models/demo/recipe/",)
"""Brought in as it was: what was run to make the checkpoint."""
TOP_LEVEL = {
    *(".ci", ".dockerignore", ".gitignore", "LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements.lock"),
    *("runtime", "workers", "parallel", "state", "proto", "configs", "tests", "deploy", "docs"),
}
MAX_LINES = 400
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(pattern: str) -> list[Path]:
    """Files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in sorted(set(listing.stdout.splitlines())) if (path := ROOT / name).is_file()]


def our_python() -> list[Path]:
    def is_ours(name: str) -> bool:
        return not name.startswith(NOT_OURS) and not name.startswith("proto/")

    return [path for path in tracked("*.py") if is_ours(path.relative_to(ROOT).as_posix())]


OUR_PYTHON = our_python()


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_top_level_is_the_agreed_one():
    assert {named(path).split("/")[0] for path in tracked("*")} == TOP_LEVEL


def test_every_path_named_in_the_structure_exists():
    text = (ROOT / "docs" / "structure.md").read_text()
    names = set(
        re.findall(r"`((?:\.ci|runtime|workers|parallel|state|proto|configs|tests|deploy|docs)(?:/[\w./-]+)?)`", text)
    )
    assert len(names) > 20
    assert sorted(name for name in names if not (ROOT / name).exists()) == []


def test_the_structure_names_every_folder():
    text = (ROOT / "docs" / "structure.md").read_text()
    folders = {named(path.parent) for room in ROOMS for path in tracked(f"{room}/*.py")} - {
        "configs/models/demo/recipe"
    }
    assert sorted(folder for folder in folders if f"`{folder}" not in text) == []


def test_the_structure_takes_ten_steps():
    steps = re.findall(r"^(\d+)\. \*\*", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)
    assert steps == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("path", OUR_PYTHON, ids=named)
def test_a_file_says_what_lives_in_it_and_is_short(path):
    source = path.read_text()
    lines = source.splitlines()
    assert len(lines) <= MAX_LINES
    if path.name == "__init__.py" and not lines:
        return
    assert lines[0].startswith('"""')
    assert ast.get_docstring(ast.parse(source))


def test_no_file_is_named_after_nothing():
    vague = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert [named(path) for path in OUR_PYTHON if path.stem in vague] == []
    assert tracked("tests/*__init__.py") == []
    assert tracked("proto/*__init__.py") == []


def test_test_files_have_names_of_their_own():
    names = [path.name for path in tracked("tests/*.py") if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_addresses_in_code_and_settings_are_loopback():
    address = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d{1,3}){3})(?![\d.])")
    files = [path for path in [*OUR_PYTHON, *tracked("configs/serve/*.yaml")] if not named(path).startswith("tests/")]
    found = [
        (named(path), match)
        for path in files
        for match in address.findall(path.read_text())
        if not match.startswith("127.")
    ]
    assert found == []


@pytest.mark.parametrize(
    "module",
    [
        "runtime.cli.main",
        "runtime.serve",
        "runtime.engine",
        "runtime.front.server",
        "runtime.front.client",
        "runtime.cluster.supervisor",
    ],
)
def test_the_host_side_loads_no_torch(module):
    code = f"import sys, {module}; print([name for name in ('torch', 'safetensors') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_rooms_are_packages_and_proto_is_a_source_root():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == [*ROOMS, "proto/outrider"]
    assert all((ROOT / room / "__init__.py").is_file() for room in ROOMS)


def test_every_folder_with_code_is_a_package():
    # hatchling would ship it, but a namespace package beside regular ones hides from mypy and import-linter.
    folders = {path.parent for room in ROOMS for path in tracked(f"{room}/*.py")} - {
        ROOT / "configs/models/demo/recipe"
    }
    assert sorted(named(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []


def normalised(distribution: str) -> str:
    """The name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_lock_pins_what_the_project_needs_and_torch_leads():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert lines[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {normalised(line.split("==")[0]) for line in lines}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    names = {normalised(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}
    assert names - pinned == set()
    assert not any(name.startswith("nvidia") for name in pinned)


def test_dependencies_are_what_the_code_imports():
    distributions = packages_distributions()
    imported = set()
    for path in OUR_PYTHON:
        if named(path).startswith("tests/") or named(path).startswith(".ci/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    ours = {*ROOMS, "outrider", *sys.stdlib_module_names}
    # Packages share the names google and opentelemetry; what the SDK builds on comes with it.
    shared = {
        "google.protobuf": "protobuf",
        "google.rpc": "googleapis-common-protos",
        "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-grpc",
        **{f"opentelemetry.{part}": "opentelemetry-sdk" for part in ("context", "sdk", "trace", "util")},
    }
    names = {shared.get(".".join(name.split(".")[:2]), name.split(".")[0]) for name in imported}
    found = {normalised(dist) for name in names - ours for dist in distributions.get(name, [name])}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(one for name in extras.keys() - {"dev"} for one in extras[name])]
    assert found == {normalised(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) - {"in"} <= targets
    from typer.main import get_command

    from runtime.cli.main import app

    commands = get_command(app).commands
    used = re.findall(r"^outrider (\w+)(.*?)(?:#.*)?$", text, re.MULTILINE)
    assert {name for name, _ in used} <= set(commands)
    assert len(used) >= 6
    for name, rest in used:
        command = commands[name]
        flags = {
            flag
            for part in (command, *getattr(command, "commands", {}).values())
            for p in part.params
            for flag in p.opts
        }
        assert set(re.findall(r"--[a-z-]+", rest)) <= flags, name


def test_links_of_the_documents_lead_somewhere():
    for document in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{named(document)}: {target}"


def test_the_readme_client_is_short_and_compiles():
    snippet = re.search(r"<!-- client -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet
    compile(snippet[1], "README.md", "exec")
    assert len(snippet[1].splitlines()) <= 15


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_scripts_can_be_run():
    for name in (".ci/run", ".ci/wheel_smoke", "deploy/gpu_check.sh"):
        assert (ROOT / name).stat().st_mode & 0o111, name
        subprocess.run(["bash", "-n", ROOT / name], check=True)
