"""A real server with tokens and keys is served by, refuses and is watched: no secret stands anywhere it can be read."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import yaml
from fakes.certificates import make_authority
from fakes.front import request_for
from fakes.servers import printed_until_ready

from runtime.front.client import OutriderClient
from runtime.front.credentials import Credentials

ROOT = Path(__file__).parents[2]
TOKENS = ("token-of-ada-9f8e7d", "token-of-bob-1a2b3c", "token-of-nobody-5d5d5d")
PROMPT = "prompt-that-nobody-else-reads"


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "tests"))
    mine = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "OUTRIDER_TOKEN": TOKENS[0]}
    return {**os.environ, **mine}


def shown_of_processes(root: int) -> str:
    """Arguments of a process and all below it, and the environment of these."""
    lines, waiting = "", [root]
    while waiting:
        pid = waiting.pop()
        if pid != root:
            lines += Path(f"/proc/{pid}/environ").read_text().replace("\0", " ") + "\n"
        lines += Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") + "\n"
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    return lines


async def session(address: str, ca: Path) -> str:
    """Is served, is refused in each way, and returns all that errors said."""
    said = ""

    async def expect_error(call: grpc.aio.Call) -> None:
        nonlocal said
        assert await call.code() is not grpc.StatusCode.OK
        said += f"{await call.details()} {await call.trailing_metadata()}\n"

    def as_(token: str | None) -> OutriderClient:
        return OutriderClient(address, Credentials(ca=ca, token=token))

    async with as_(TOKENS[0]) as ada, as_(TOKENS[1]) as bob, as_(TOKENS[2]) as nobody, as_(None) as silent:
        assert [frame async for frame in bob.generate(request_for(text=PROMPT, max_tokens=4))]
        await expect_error(bob.call(request_for(text=PROMPT, max_tokens=4000)))
        await expect_error(bob.call(request_for(ids=[1] * 30, max_tokens=60)))
        await expect_error(bob.channel.unary_unary("/outrider.v1.OperatorService/Drain")(b""))
        await expect_error(nobody.call(request_for(text=PROMPT)))
        await expect_error(silent.call(request_for(text=PROMPT)))
        await expect_error(silent.call(request_for(), metadata=[("authorization", f"Basic {TOKENS[0]}")]))
        await ada.set_policy(1)
        await expect_error(ada.channel.unary_unary("/outrider.v1.OperatorService/SetVerificationPolicy")(b""))
        said += str(await ada.get_status()) + str(await ada.list_requests())
    return said


def test_no_secret_is_told_logged_or_shown(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "pki")
    issued = authority.issue("front")
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in TOKENS]
    entries = [
        {"name": "ada", "roles": ["operate"], "token_sha256": digests[0]},
        {"name": "bob", "roles": ["generate"], "token_sha256": digests[1], "limits": {"tokens_per_minute": 100}},
    ]
    identities = tmp_path / "identities.yaml"
    identities.write_text(yaml.safe_dump({"identities": entries}))
    settings = {
        "cluster.launcher": "process",
        "server.tls.certificate": issued.certificate,
        "server.tls.key": issued.key,
        "access.identities": identities,
        "access.audit_log": tmp_path / "audit.jsonl",
        "state_dir": tmp_path / "state",
        "metrics.port": 0,
    }
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "fakes.outrider_counting", "serve", "--port", "0", "--log-level", "debug"]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [*command, *assignments],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        printed, address = printed_until_ready(process)
        try:
            said = asyncio.run(session(address, authority.certificate))
            shown = shown_of_processes(process.pid)
            metrics_at = next(part for part in printed.split() if part.startswith("http://"))
            with urllib.request.urlopen(metrics_at) as page:
                metrics = page.read().decode()
            # Half a file in the place of the identities: refused, and not repeated.
            identities.write_text(f"identities:\n  - name: {TOKENS[0]}\n    token_sha256: {TOKENS[0]}\n")
            process.send_signal(signal.SIGHUP)
        finally:
            process.send_signal(signal.SIGTERM)
            printed += process.communicate(timeout=60)[0]
    assert process.returncode == 0
    written = {
        str(path.relative_to(tmp_path)): path.read_text(errors="replace")
        for path in [tmp_path / "stderr", tmp_path / "audit.jsonl", *(tmp_path / "state").rglob("*")]
        if path.is_file()
    }
    places = {"errors": said, "processes": shown, "metrics": metrics, "standard output": printed, **written}
    assert "outrider_" in metrics
    assert "fakes.outrider_counting serve" in shown
    assert "PYTHONPATH" in shown, "the rank is looked at too"
    assert "UNAUTHENTICATED" in written["audit.jsonl"]
    key = "".join(issued.key.read_text().splitlines()[1:-1])
    secrets = [*TOKENS, *digests, key[:40], key[-40:], PROMPT]
    found = [
        (place, secret) for place, text in places.items() for secret in secrets if secret in text.replace("\n", "")
    ]
    assert found == []
