"""The simulator beside the live engine on the bundled model: tokens per second of both, and their ratio.

Measures a hardware profile (or takes one), then the live engine with `outrider bench` at several concurrencies and
policies, then simulates the same requests over that profile. How often drafts stand is read off the live counters of
the longest fixed policy at each concurrency, position by position; how far chances scatter is not to be read there, and
stated. The simulator knows of no client and no link beyond what the profile has of them. Takes minutes; nothing else
should keep the machine busy.

    python docs/benchmarks/simulator_check.py [--profile FILE] [--concurrency 1,4,16] [--repeats 3] [--temperature 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.bench.load import parse_policies
from runtime.simulate.acceptance import Acceptance
from runtime.simulate.deployment import measured
from runtime.simulate.figures import Figures
from runtime.simulate.loop import Scenario, Simulation
from runtime.simulate.study import policy_of
from runtime.simulate.traffic import Lengths, Traffic

OUTRIDER = str(Path(sys.executable).with_name("outrider"))
Group = dict[str, Any]
"""One policy under one load, as the document of `outrider bench` has it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="measured with the same settings; measures one if left out")
    parser.add_argument("--policy", default="off,fixed:1,fixed:3,fixed:5,dynamic")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--concentration", type=float, default=2.0, help="how little chances of drafts scatter")
    parser.add_argument("--set", dest="settings", action="append", default=["cache.memory_mib=1024"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [part for setting in args.settings for part in ("--set", setting)]
        profile = args.profile or Path(folder) / "profile.json"
        if args.profile is None:
            subprocess.run([OUTRIDER, "profile", "--out", str(profile), *settings], check=True)
        groups = live(args, profile, Path(folder) / "bench.json", settings)
        found = table(args, profile, groups)
    Console(width=140).print(found)


def live(args: argparse.Namespace, profile: Path, file: Path, settings: list[str]) -> list[Group]:
    """What `outrider bench` measured, one concurrency after the other."""
    groups: list[Group] = []
    for concurrency in map(int, args.concurrency.split(",")):
        command = [OUTRIDER, "bench", "--policy", args.policy, "--concurrency", str(concurrency), "--json", str(file)]
        command += ["--requests", str(num_requests(concurrency)), "--repeats", str(args.repeats)]
        command += ["--prompt-tokens", str(args.prompt_tokens), "--max-tokens", str(args.max_tokens)]
        command += ["--temperature", str(args.temperature), "--set", f"speculation.profile={profile}", *settings]
        subprocess.run(command, check=True)
        groups += json.loads(file.read_text(encoding="utf-8"))["groups"]
    return groups


def num_requests(concurrency: int) -> int:
    """Per cell: four for each client, so that starts and ends, at which fewer run, are a small part."""
    return max(16, 4 * concurrency)


def acceptance(groups: list[Group], concurrency: int) -> tuple[float, ...]:
    """Chance of each draft behind those before it, by the counters of the longest fixed policy at a concurrency."""
    fixed = [
        group for group in groups if group["load"]["concurrency"] == concurrency and group["policy"].startswith("fixed")
    ]
    drafts = max(fixed, key=lambda group: int(group["policy"].removeprefix("fixed:")))["figures"]["drafts"]
    reached = [drafts["admitted"][0], *drafts["accepted"]]
    return tuple(accepted / before for before, accepted in zip(reached, drafts["accepted"], strict=False) if before)


def simulated(
    args: argparse.Namespace, profile: Path, policy: str, concurrency: int, rates: tuple[float, ...]
) -> Figures:
    deployment = measured(profile)
    (name,) = parse_policies([policy])
    assert deployment.max_step_tokens is not None
    scenario = Scenario(
        believed=deployment.costs,
        true=deployment.costs,
        dp=deployment.dp,
        traffic=Traffic(
            sequences=concurrency,
            prompt=Lengths(args.prompt_tokens, args.prompt_tokens),
            output=Lengths(args.max_tokens, args.max_tokens),
            temperature=args.temperature,
            requests=num_requests(concurrency),
            staggered=False,
        ),
        acceptance=Acceptance(rates=rates, concentration=args.concentration),
        gamma_max=deployment.gamma_max,
        max_step_tokens=deployment.max_step_tokens,
        warmup=0,
        steps=10**9,
    )
    return asyncio.run(Simulation(scenario, policy_of(name)).run())


def table(args: argparse.Namespace, profile: Path, groups: list[Group]) -> Table:
    found = Table(title="tokens/s, live and simulated over the profile of this machine", title_justify="left", box=None)
    for column in ("at a time", "policy", "live", "simulated", "ratio", "tokens/pass, live", "simulated"):
        found.add_column(column, justify="left" if column == "policy" else "right")
    for group in groups:
        concurrency, policy, figures = group["load"]["concurrency"], group["policy"], group["figures"]
        there = simulated(args, profile, policy, concurrency, acceptance(groups, concurrency))
        speed = figures["rates"]["tokens_per_s"]
        found.add_row(
            str(concurrency),
            policy,
            f"{speed:.0f}",
            f"{there.tokens_per_s:.0f}",
            f"{there.tokens_per_s / speed:.2f}",
            f"{figures['tokens_per_pass']:.2f}",
            f"{there.tokens_per_step:.2f}",
        )
    return found


if __name__ == "__main__":
    main()
