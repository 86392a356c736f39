"""The Dockerfile, line by line, as far as that goes without building: its sources, its pins, its user, its commands."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest
from oracles.manifests import ROOT, Manifests, objects_of, parsed

PACKAGED = ("pyproject.toml", "README.md", "LICENSE", "configs", "parallel", "proto", "runtime", "state", "workers")


@dataclass(frozen=True)
class Step:
    """One instruction, continuation lines joined; stage: the name of the stage it is of."""

    stage: str
    name: str
    text: str


def steps() -> list[Step]:
    text = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found, stage = [], ""
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Step(stage, name, rest.strip()))
    return found


STEPS = steps()


def of(name: str, stage: str | None = None) -> list[str]:
    return [step.text for step in STEPS if step.name == name and stage in (None, step.stage)]


def test_every_instruction_is_one():
    known = {
        "ARG",
        "FROM",
        "WORKDIR",
        "ENV",
        "COPY",
        "RUN",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
    }
    assert {step.name for step in STEPS} <= known | {"CMD"}
    assert [step.stage for step in STEPS if step.name == "FROM"] == ["build", "cpu", "cuda"]


def test_the_base_is_pinned_and_of_the_version_that_is_tested():
    (image,) = (text.partition("=")[2] for text in of("ARG", "") if text.startswith("PYTHON_IMAGE"))
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", image)
    assert {text.split()[0] for text in of("FROM")} == {"${PYTHON_IMAGE}", "cpu"}
    assert sys.version_info[:2] == (3, 11)


def test_every_source_of_a_copy_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for text in of("COPY", "build"):
        *sources, _ = text.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source
    copied = {source for text in of("COPY", "build") for source in text.split()[:-1]}
    assert copied == {*PACKAGED, "requirements.lock"}


def test_what_the_image_does_not_need_stays_out_of_the_build():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {name.partition("/")[0] for name in tracked.splitlines() if "/" in name}
    assert folders - set(PACKAGED) <= ignored
    assert {".git", ".venv", ".outrider"} <= ignored


def test_versions_come_from_the_lock():
    assert any("PIP_CONSTRAINT=/src/requirements.lock" in text for text in of("ENV", "build"))
    installs = [text for text in of("RUN") if "pip install" in text]
    assert len(installs) == 2
    assert "grep '^torch==' requirements.lock" in installs[0]
    assert not any(re.search(r"install [^&]*\b(apt|--upgrade|-U)\b", text) for text in of("RUN"))


@pytest.mark.full
def test_the_lock_satisfies_what_the_image_installs():
    # What pip would do in the image, asked of the environment that the lock has made: it would fetch nothing.
    extras = re.search(r'"\.\[([\w,]+)\]"', " ".join(of("RUN")))
    assert extras
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--quiet"]
    report = ["--report", "-", "--constraint", "requirements.lock", f".[{extras[1]}]"]
    done = subprocess.run([*command, *report], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["install"]
    assert set(found["requested_extras"]) == set(extras[1].split(",")) <= set(found["metadata"]["provides_extra"])


@pytest.mark.parametrize("stage", ["build", "cpu", "cuda"])
def test_shell_lines_are_shell(stage):
    for text in of("RUN", stage):
        subprocess.run(["bash", "-n", "-c", text], check=True)


def test_it_runs_as_the_user_of_the_manifests():
    (user,) = of("USER")
    assert STEPS.index(Step("cpu", "USER", user)) < STEPS.index(Step("cpu", "ENTRYPOINT", of("ENTRYPOINT")[0]))
    for pod in Manifests(objects_of("gpu-cluster")).pods:
        context = pod.spec["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert of("USER", "cuda") == [], "the last stage may not go back to root"


def test_its_commands_are_ours_and_its_ports_those_of_the_manifests():
    (entry,), (command,) = map(json.loads, of("ENTRYPOINT")), map(json.loads, of("CMD"))
    name, context = parsed([entry[0] if isinstance(entry, list) else entry, *command])
    assert name == "serve"
    assert context.params["host"] == "0.0.0.0"
    health = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    assert parsed(health)[0] == "health"
    ((_, _, settings),) = Manifests(objects_of("cpu-demo")).servers()
    wanted = (settings.server.port, settings.metrics.port, settings.operator.port)
    assert tuple(map(int, of("EXPOSE")[0].split())) == wanted


def test_what_manifests_run_is_on_the_path_of_every_shell():
    links = next(shlex.split(text) for text in of("RUN", "cpu") if text.startswith("ln "))
    pods = Manifests(objects_of("gpu-cluster")).pods
    run = {container["command"][0] for pod in pods for container in pod.containers if "command" in container}
    assert {one.rpartition("/")[2] for one in links[2:-1]} == run
    assert links[-1] == "/usr/local/bin/"
