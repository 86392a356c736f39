"""What policies would do on 1, 8 and 64 ranks that are not there: the table and the picture of simulator.md.

Runs `outrider simulate` for each deployment, prints the table in Markdown and writes simulator.svg. Takes half
an hour; figures are in virtual time, so that a busy machine changes none of them.

    python docs/benchmarks/simulator.py [--steps 32] [--out docs/benchmarks/simulator.svg]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from runtime.bench.canvas import PANEL_HEIGHT, PANEL_WIDTH, STYLE, svg_text

FIXED = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5")
SEQUENCES = (16, 60)
Cell = dict[str, Any]
"""As in the document that `outrider simulate --json` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One deployment. acceptance: as --acceptance takes it."""

    gpu: str
    geometry: str
    dp: int
    acceptance: str = "0.8"

    def __str__(self) -> str:
        return f"{self.geometry}, {self.dp} × {self.gpu.upper()}, {self.acceptance.replace(',', ' ')}"


CASES = (
    Case(gpu="h200", geometry="qwen3-next", dp=1),
    Case(gpu="h200", geometry="qwen3-next", dp=8),
    Case(gpu="h200", geometry="qwen3-next", dp=64),
    Case(gpu="h200", geometry="deepseek-v3", dp=8),
    Case(gpu="h200", geometry="deepseek-v3", dp=64),
    Case(gpu="gb300", geometry="deepseek-v3", dp=64),
    Case(gpu="gb300", geometry="deepseek-v3", dp=64, acceptance="0.8,0.45,0.4"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="Steps that count on 64 ranks; fewer ranks take more.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    args = parser.parse_args()
    found: dict[Case, list[Cell]] = {}
    for case in CASES:
        steps, is_large = args.steps * min(32, 64 // case.dp), case.dp > 8
        # Fixed lengths learn nothing. Where a step is of few sequences all policies are to meet the same ones.
        fixed = simulate(case, FIXED, steps, warmup=16 if is_large else 128)
        found[case] = fixed + simulate(case, ("dynamic",), steps, warmup=128)
        print(*rows(case, found[case]), sep="\n", flush=True)
    args.out.write_text(picture(found), encoding="utf-8")


def simulate(case: Case, policies: Sequence[str], steps: int, *, warmup: int) -> list[Cell]:
    """The cells of one deployment, as the document has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.json"
        command = [str(Path(sys.executable).with_name("outrider")), "simulate", "--gpu", case.gpu]
        command += ["--geometry", case.geometry, "--dp", str(case.dp), "--acceptance", case.acceptance]
        command += ["--policy", ",".join(policies), "--sequences", ",".join(map(str, SEQUENCES))]
        command += ["--steps", str(steps), "--warmup", str(warmup), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cells: list[Cell] = json.loads(file.read_text(encoding="utf-8"))["cells"]
        return cells


def rows(case: Case, found: Sequence[Cell]) -> list[str]:
    """Of the table in simulator.md, one per load."""
    lines = []
    for sequences in SEQUENCES:
        cells = {cell["policy"]: cell for cell in found if cell["traffic"]["sequences"] == sequences}
        off, five, dynamic = (cells[name]["tokens_per_s"] for name in ("off", "fixed:5", "dynamic"))
        best = max(cell["tokens_per_s"] for name, cell in cells.items() if name != "dynamic")
        fixed = " | ".join(f"{cells[f'fixed:{n}']['tokens_per_s'] / off:.2f}" for n in range(1, 6))
        chosen = cells["dynamic"]
        lines.append(
            f"| {case} | {sequences} | {cells['off']['tokens_per_s_per_rank']:.0f} | {fixed} | **{dynamic / off:.2f}** "
            f"| {dynamic / five - 1:+.1%} | {dynamic / best - 1:+.1%} "
            f"| {chosen['gamma']:.1f} | {chosen['budget']:.0%} | {chosen['step_ms']:.1f} |"
        )
    return lines


def picture(found: dict[Case, list[Cell]]) -> str:
    """Ratios to off by policy, a panel per deployment, two lines per load."""
    with matplotlib.rc_context(STYLE):
        width = 4
        height = -(-len(found) // width)
        canvas = Canvas(figsize=(width * PANEL_WIDTH * 0.8, height * PANEL_HEIGHT), layout="constrained")
        panels = canvas.subplots(height, width, squeeze=False).flatten()
        for axes, (case, cells) in zip(panels, found.items(), strict=False):
            draw(axes, cells)
            axes.set_title(str(case), fontsize=8)
        for axes in panels[len(found) :]:
            axes.remove()
        for axes in panels[::width]:
            axes.set(ylabel="tokens/s, ratio to off")
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
        return svg_text(canvas)


def draw(axes: Axes, cells: Sequence[Cell]) -> None:
    for number, sequences in enumerate(SEQUENCES):
        speeds = {cell["policy"]: cell["tokens_per_s"] for cell in cells if cell["traffic"]["sequences"] == sequences}
        ratios = [speeds[policy] / speeds["off"] for policy in FIXED]
        axes.plot(range(6), ratios, marker="o", color=f"C{number}", label=f"fixed, {sequences} per rank")
        dynamic = speeds["dynamic"] / speeds["off"]
        axes.axhline(dynamic, linestyle="--", color=f"C{number}", label=f"dynamic, {sequences} per rank")
    axes.set(xlabel="fixed γ", xticks=range(6), ylim=(0, None))


if __name__ == "__main__":
    main()
