"""`outrider simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from fakes import profiles
from typer.testing import CliRunner

from runtime.cli.main import app
from runtime.profile import files

FORMULA = ("--gpu", "h200", "--geometry", "qwen3-next")
SHORT = ("--steps", "16", "--warmup", "4")


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_prints_a_table_and_writes_document_and_page(tmp_path: Path) -> None:
    document, page = tmp_path / "study.json", tmp_path / "study.html"
    found = simulate(
        *FORMULA, *SHORT, "--dp", "2", "--sequences", "2,3", "--policy", "off,fixed:5,dynamic:max=2",
        *("--json", str(document), "--html", str(page), "--set", "memory_share=0.5"),
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "memory_share 0.5" in found.output
    cells = json.loads(document.read_text())["cells"]
    assert [(cell["load"], cell["policy"]) for cell in cells] == [
        (load, policy) for load in ("2 per rank", "3 per rank") for policy in ("off", "fixed:5", "dynamic:max=2")
    ]
    assert cells[0]["ratio_to_off"] == cells[1]["ratio_to_fixed_5"] == 1
    assert len(cells[2]["steps_by_gamma"]) <= 3
    assert all(cell["steps"] == 16 for cell in cells)
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org", "")


def test_runs_over_a_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    files.write(profiles.profile(profiles.grid()), path)
    found = simulate("--profile", str(path), *SHORT, "--sequences", "2,32", "--policy", "off,dynamic", "--context", "0")
    assert found.exit_code == 0, found.output
    assert "the profile has at most 8" in found.output


def test_an_open_loop_names_its_rate() -> None:
    found = simulate(*FORMULA, *SHORT, "--sequences", "4", "--open-rate", "3,5", "--policy", "off")
    assert found.exit_code == 0, found.output
    assert "3/s" in found.output
    assert "5/s" in found.output


def test_says_where_a_model_does_not_fit() -> None:
    found = simulate("--gpu", "h100", "--geometry", "deepseek-v3", *SHORT, "--sequences", "1", "--policy", "off")
    assert found.exit_code == 0, found.output
    assert "and h100 has 80" in found.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--profile FILE, or --gpu"),
        (("--gpu", "h200"), "--gpu goes with --geometry"),
        (("--gpu", "tpu", "--geometry", "demo"), "--gpu tpu: not known; there are h100"),
        (("--gpu", "h200", "--geometry", "gpt"), "--geometry gpt: not known; there are deepseek-v3"),
        ((*FORMULA, "--ep", "3", "--dp", "4"), "parallel.ep is 3"),
        ((*FORMULA, "--set", "hbm=3"), "--set hbm: no such figure; there are active"),
        ((*FORMULA, "--set", "memory_share"), "not of the form KEY=VALUE"),
        ((*FORMULA, "--set", "experts=8.5"), "--set experts=8.5: give a whole number"),
        ((*FORMULA, "--set", "memory_share=fast"), "--set memory_share=fast: give a number"),
        ((*FORMULA, "--set", "memory_share=-1"), "--set memory_share=-1: give a number above 0"),
        ((*FORMULA, "--set", "weight_bytes=4"), "1 is FP8, 2 is bfloat16"),
        ((*FORMULA, "--set", "active=600"), "active is 600, of 512 experts"),
        ((*FORMULA, "--dp", "3"), "ep is 3, which does not divide the 512 experts"),
        ((*FORMULA, "--sequences", "1,x"), "--sequences '1,x': give numbers"),
        ((*FORMULA, "--sequences", "0"), "--sequences '0': give whole numbers from 1"),
        ((*FORMULA, "--output-tokens", "9-3"), "--output-tokens '9-3'"),
        ((*FORMULA, "--prompt-tokens", "many"), "--prompt-tokens 'many'"),
        ((*FORMULA, "--acceptance", "1.5"), "--acceptance is"),
        ((*FORMULA, "--decay", "0"), "--decay is 0"),
        ((*FORMULA, "--policy", "fixed:7"), "raise --gamma-max"),
        ((*FORMULA, "--policy", "best"), "--policy 'best': not off"),
        ((*FORMULA, "--max-step-tokens", "5"), "--max-step-tokens 5: verifying 5 drafts takes 7"),
        ((*FORMULA, "--open-rate", "-1"), "--open-rate '-1'"),
        ((*FORMULA, "--open-rate", "1e-300"), "--open-rate '1e-300'"),
        ((*FORMULA, "--imbalance", "inf"), "--imbalance"),
        ((*FORMULA, "--pad-rows", "1000000000000"), "--pad-rows"),
        ((*FORMULA, "--json", "/"), "is a directory"),
        (("--profile", "/nowhere.json"), "--profile /nowhere.json"),
        (("--profile", "/nowhere.json", "--tp", "2"), "go with --gpu"),
    ],
)
def test_refuses_by_name_and_with_a_remedy(arguments: tuple[str, ...], told: str) -> None:
    found = simulate(*arguments)
    assert found.exit_code == 2
    assert told in found.stderr.replace("\n", " ")
