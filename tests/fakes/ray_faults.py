"""Runtimes whose Ray is lost under them: `python -m fakes.ray_faults CASE WHICH FOLDER`.

kill, hang, stop: a local Ray; WHICH is gcs_server or raylet. cluster, leave: one that is joined; WHICH is its port.
Each prints what happened, one JSON object, and ends on its own. In processes of their own, for Ray has been seen to end
the one in which it misses its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fakes import echo_worker
from fakes.supervised import is_gone

from configs.schema import ClusterSettings, ModelSettings, ParallelSettings, ServeSettings
from runtime.cli import console
from runtime.cluster.ray_launcher import RayLauncher
from runtime.cluster.supervisor import GroupSupervisor
from workers.plan import WorkerLost


def ray_session() -> tuple[Path, dict[str, int]]:
    """The folder of the local Ray's session, and its daemons."""
    import ray

    node: Any = ray._private.worker._global_node
    daemons = {name: infos[0].process.pid for name, infos in node.all_processes.items()}
    return Path(node.get_session_dir_path()), daemons


def belonging_to(session: Path) -> list[str]:
    """Command lines of the processes of a session, those that renamed themselves included: they log there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if session.name in command or any(session in link.readlink().parents for link in (entry / "fd").iterdir()):
                found.append(command[:200])
    return found


def supervisor_for(folder: Path, parallel: ParallelSettings, **cluster: object) -> GroupSupervisor:
    settings = ServeSettings(
        model=ModelSettings.model_validate({"path": "well", "device": "cpu"}),
        parallel=parallel,
        cluster=ClusterSettings.model_validate({"step_timeout_s": 5, **cluster}),
        state_dir=folder,
    )
    return GroupSupervisor(settings, RayLauncher(settings.cluster, folder, factory=echo_worker.FACTORY))


async def lose_daemon(daemon: str, folder: Path, number: signal.Signals) -> dict[str, object]:
    """A local Ray loses a daemon to SIGKILL; or to SIGSTOP, and a rank dies while the daemon hangs."""
    supervisor = supervisor_for(folder, ParallelSettings(tp=2))
    group = await supervisor.start(lambda *_: None)
    await group.link.execute(echo_worker.plan(1, 1))
    first, daemons = ray_session()
    num_processes = len(belonging_to(first))
    pids = [launched.pid for launched in supervisor.launched]
    os.kill(daemons[daemon], number)
    if number == signal.SIGSTOP:
        os.kill(pids[0], signal.SIGKILL)
    begin = time.monotonic()
    reason = await asyncio.wait_for(group.lost, 20)
    noticed = time.monotonic()
    group = await supervisor.restart(reason)
    restarted = time.monotonic()
    await group.link.execute(echo_worker.plan(1, 2))
    second, _ = ray_session()
    found: dict[str, object] = {
        "parent": os.getppid(),
        "num_processes": num_processes,
        "reason": reason,
        "noticed_s": noticed - begin,
        "restarted_s": restarted - noticed,
        "is_fresh": first != second,
        "old_ranks_gone": all(map(is_gone, pids)),
        "left_of_the_old": belonging_to(first),
    }
    await supervisor.stop()
    found["left_of_the_new"] = belonging_to(second)
    return found


async def stop_beside_a_daemon_that_hangs(daemon: str, folder: Path) -> dict[str, object]:
    supervisor = supervisor_for(folder, ParallelSettings(tp=2))
    group = await supervisor.start(lambda *_: None)
    await group.link.execute(echo_worker.plan(1, 1))
    session, daemons = ray_session()
    os.kill(daemons[daemon], signal.SIGSTOP)
    return {"stop_s": [await timed_stop(supervisor) for _ in range(2)], "left": belonging_to(session)}


async def timed_stop(supervisor: GroupSupervisor) -> float:
    begin = time.monotonic()
    await supervisor.stop()
    return time.monotonic() - begin


async def leave_a_cluster_that_hangs(port: int, folder: Path) -> dict[str, object]:
    cluster = await start_cluster(port)
    supervisor = supervisor_for(folder, ParallelSettings(dp=2), ray_address=f"127.0.0.1:{port}", start_timeout_s=40)
    group = await supervisor.start(lambda *_: None)
    await group.link.execute(echo_worker.plan(1, 1, dp=2))
    children = Path(f"/proc/{cluster.pid}/task").glob("*/children")
    servers = [
        int(pid)
        for listed in children
        for pid in listed.read_text().split()
        if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    ]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGSTOP)
    found: dict[str, object] = {"stop_s": [await timed_stop(supervisor) for _ in range(2)]}
    cluster.kill()
    return found


async def start_cluster(port: int) -> asyncio.subprocess.Process:
    cluster = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fakes.ray_cluster", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert cluster.stdout is not None
    assert (await asyncio.wait_for(cluster.stdout.readline(), 60)).strip()
    return cluster


async def lose_cluster(port: int, folder: Path) -> dict[str, object]:
    """Two data-parallel ranks on a cluster of two nodes; one dies, then the whole cluster, which comes back twice."""
    from ray.util.placement_group import placement_group_table

    cluster = await start_cluster(port)
    address = f"127.0.0.1:{port}"
    supervisor = supervisor_for(folder, ParallelSettings(dp=2), ray_address=address, start_timeout_s=40)
    group = await supervisor.start(lambda *_: None)
    await group.link.execute(echo_worker.plan(1, 1, dp=2))
    tables = placement_group_table().values()
    found: dict[str, object] = {
        "num_nodes": len({node for table in tables for node in table["bundles_to_node_id"].values()})
    }
    launched = supervisor.launched
    found["logs"] = [await each.last_words() for each in launched]

    os.kill(launched[1].pid, signal.SIGKILL)
    found["lost_rank"] = await asyncio.wait_for(group.lost, 5)
    group = await supervisor.restart("a rank was killed")

    # Gone, and not yet back.
    cluster.kill()
    begin = time.monotonic()
    await asyncio.wait_for(group.lost, 20)
    found["noticed_s"] = time.monotonic() - begin
    errors = []
    for _ in range(2):
        try:
            await supervisor.restart("the cluster is gone")
        except WorkerLost as error:
            errors.append(str(error))
    found["errors"] = errors
    cluster = await start_cluster(port)
    group = await supervisor.restart("the cluster is back")
    await group.link.execute(echo_worker.plan(1, group.epoch, dp=2))

    # Gone, and another in its place before anybody asked.
    cluster.kill()
    await asyncio.wait_for(group.lost, 20)
    cluster = await start_cluster(port)
    group = await supervisor.restart("the cluster is another")
    await group.link.execute(echo_worker.plan(1, group.epoch, dp=2))
    await supervisor.stop()
    assert cluster.stdin is not None
    cluster.stdin.close()
    await cluster.wait()
    return found


async def show(case: str, which: str, folder: Path) -> None:
    match case:
        case "kill":
            found = await lose_daemon(which, folder, signal.SIGKILL)
        case "hang":
            found = await lose_daemon(which, folder, signal.SIGSTOP)
        case "stop":
            found = await stop_beside_a_daemon_that_hangs(which, folder)
        case "cluster":
            found = await lose_cluster(int(which), folder)
        case "leave":
            found = await leave_a_cluster_that_hangs(int(which), folder)
        case _:
            raise ValueError(case)
    # The clock is the machine's: whoever reads this can tell how long the end of the process takes.
    print(json.dumps({**found, "now_s": time.monotonic()}), flush=True)


if __name__ == "__main__":
    console.run(show(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
