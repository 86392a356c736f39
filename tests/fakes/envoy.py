"""A real Envoy with a configuration of deploy/envoy, its addresses changed to free loopback ports."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fakes.http import asking

SHIPPED = Path(__file__).parents[2] / "deploy" / "envoy"
SECTION = (SHIPPED.parents[1] / "docs" / "gateways.md").read_text().split("\n## Envoy\n")[1].split("\n## ")[0]
"""What is written of it for users."""

ENVOY = Path(sys.executable).parent / "envoy"

Configuration = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envoy:
    """address: host:port of its listener. admin: that of its own figures. log: lines of access, as they are written."""

    address: str
    admin: str
    log: asyncio.Queue[dict[str, Any]]

    async def statistics(self, prefix: str = "cluster.outrider.") -> dict[str, int]:
        """Counters and gauges whose names begin so, without it."""
        async with asking("GET", self.admin, f"/stats?format=json&filter=^{prefix}") as answer:
            found = (await answer.json())["stats"]
        return {one["name"].removeprefix(prefix): one["value"] for one in found if "value" in one}

    async def replicas(self) -> dict[str, bool]:
        """By address, whether health checks let calls reach it."""
        async with asking("GET", self.admin, "/clusters?format=json") as answer:
            [cluster] = [one for one in (await answer.json())["cluster_statuses"] if one["name"] == "outrider"]
        states = {}
        for host in cluster["host_statuses"]:
            place = host["address"]["socket_address"]
            health = host["health_status"]
            is_up = not any(health.get(flag) for flag in ("failed_active_health_check", "failed_outlier_check"))
            states[f"{place['address']}:{place['port_value']}"] = is_up
        return states

    async def until_replicas(self, wanted: dict[str, bool]) -> None:
        """Returns when health checks have found that. Envoy tells it to nobody who does not ask."""
        while await self.replicas() != wanted:
            await asyncio.sleep(0.02)


def shipped(name: str) -> Configuration:
    """One of the files of deploy/envoy."""
    configuration: Configuration = yaml.safe_load((SHIPPED / name).read_text())
    return configuration


def adapted(configuration: Configuration, replicas: Sequence[str]) -> Configuration:
    """The same on free loopback ports, over these replicas, which are looked at five times as often."""
    configuration["admin"]["address"]["socket_address"].update(address="127.0.0.1", port_value=0)
    resources = configuration["static_resources"]
    for listener in resources["listeners"]:
        listener["address"]["socket_address"].update(address="127.0.0.1", port_value=0)
    [cluster] = resources["clusters"]
    places = [{"address": host, "port_value": int(port)} for host, port in (one.rsplit(":", 1) for one in replicas)]
    [group] = cluster["load_assignment"]["endpoints"]
    group["lb_endpoints"] = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
    for check in cluster.get("health_checks", ()):
        check.update(interval="0.2s", no_traffic_interval="0.2s")
    return configuration


@asynccontextmanager
async def running_envoy(
    folder: Path,
    replicas: Sequence[str],
    *,
    name: str = "plain.yaml",
    home: Path = SHIPPED,
) -> AsyncIterator[Envoy]:
    """Starts and ends it. folder: for its files. replicas: host:port each. home: what paths in the file start from."""
    configuration = adapted(shipped(name), replicas)
    path, admin_path = folder / name, folder / f"{name}.admin"
    path.write_text(yaml.safe_dump(configuration))
    options = ("--admin-address-path", str(admin_path), "--disable-hot-restart", "--concurrency", "1")
    process = await asyncio.create_subprocess_exec(
        ENVOY,
        *("-c", str(path), *options, "--file-flush-interval-msec", "10"),
        cwd=home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    log: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    readers = [asyncio.create_task(_read_access_log(process.stdout, log))]
    try:
        await _until_started(process.stderr)
        readers.append(asyncio.create_task(_read_to_end(process.stderr)))
        admin = admin_path.read_text().strip()
        async with asking("GET", admin, "/listeners?format=json") as answer:
            [listener] = (await answer.json())["listener_statuses"]
        place = listener["local_address"]["socket_address"]
        yield Envoy(f"{place['address']}:{place['port_value']}", admin, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _until_started(stderr: asyncio.StreamReader) -> None:
    said = []
    async for line in stderr:
        said.append(line.decode())
        if "starting workers" in said[-1]:
            return
    raise AssertionError("Envoy did not start:\n" + "".join(said[-20:]))


async def _read_access_log(stdout: asyncio.StreamReader, log: asyncio.Queue[dict[str, Any]]) -> None:
    async for line in stdout:
        log.put_nowait(json.loads(line))


async def _read_to_end(stream: asyncio.StreamReader) -> None:
    async for _ in stream:
        pass
