"""Limits of this process and its machine: descriptors, processes, stack, CPUs, threads, the clock."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from datetime import UTC, datetime

from runtime.doctor.finding import Finding, counted, failure, note, ok, warning
from runtime.doctor.inquiry import Inquiry

LEAST_FILES = 1024
GOOD_FILES = 4096
"""A client may hold a connection each, and Ray opens hundreds of files."""
GOOD_PROCESSES = 4096
"""Threads count as processes, and Ray's daemons and gRPC start hundreds."""
LEAST_STACK = 1 << 20

FIRST_RELEASE = datetime(2025, 1, 1, tzinfo=UTC)
"""No clock that is right says less."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_limits(inquiry: Inquiry) -> Iterator[Finding]:
    files, _ = inquiry.machine.limit(resource.RLIMIT_NOFILE)
    text = f"open files: {_limit_text(files)}"
    if _is_below(files, LEAST_FILES):
        yield failure(text, f"raise it: ulimit -n {GOOD_FILES * 16}")
    elif _is_below(files, GOOD_FILES):
        yield warning(text, f"raise it to {GOOD_FILES} or more, as with ulimit -n {GOOD_FILES * 16}")
    else:
        yield ok(text)
    processes, _ = inquiry.machine.limit(resource.RLIMIT_NPROC)
    text = f"processes and threads: {_limit_text(processes)}"
    if _is_below(processes, GOOD_PROCESSES):
        yield warning(text, f"raise it to {GOOD_PROCESSES} or more (ulimit -u, or pids limit of the container)")
    else:
        yield ok(text)
    stack, _ = inquiry.machine.limit(resource.RLIMIT_STACK)
    text = f"stack: {'unlimited' if stack == resource.RLIM_INFINITY else f'{stack >> 10} KiB'}"
    if _is_below(stack, LEAST_STACK):
        yield warning(text, "raise it to the usual 8192 KiB: ulimit -s 8192")
    else:
        yield ok(text)


def check_cpus(inquiry: Inquiry) -> Iterator[Finding]:
    """Ranks that compute on CPUs want one for each thread; the runtime and gRPC want one besides."""
    cluster, machine = inquiry.settings.cluster, inquiry.machine
    if cluster.ray_address:
        yield note("ranks run where the Ray cluster puts them; its nodes' CPUs are not looked at")
        return
    num_ranks, cpus = inquiry.mesh.size, machine.cpu_share()
    num_threads = num_ranks * cluster.worker_threads
    ranks, threads = counted(num_ranks, "rank"), counted(cluster.worker_threads, "thread")
    text = f"{cpus:g} CPUs for {ranks} of {threads}, and the runtime"
    if num_threads > cpus:
        yield warning(text, "lower parallel.tp, parallel.dp or cluster.worker_threads, or give it more CPUs")
    elif num_threads == cpus:
        yield note(f"{text}: they share one with it")
    else:
        yield ok(text)


def check_threads(inquiry: Inquiry) -> Iterator[Finding]:
    """Ranks are given their number; what is set outside is for this process, which computes next to nothing."""
    given = {name: inquiry.machine.environment[name] for name in _THREADS if name in inquiry.machine.environment}
    wrong = {name: value for name, value in given.items() if not (value.isascii() and value.isdecimal() and int(value))}
    for name, value in wrong.items():
        yield warning(f"{name} is {value!r}, no number of threads", "unset it, or give a number from 1 on")
    if not wrong:
        listed = ", ".join(f"{name}={value}" for name, value in given.items())
        yield ok(f"ranks set their own threads{f'; {listed} is set for this process' if listed else ''}")


def check_clock(inquiry: Inquiry) -> Iterator[Finding]:
    """Certificates, ages of profiles, logs and traces go by it."""
    now, is_kept = inquiry.machine.now(), inquiry.machine.is_clock_kept()
    text = f"the clock says {now.isoformat(timespec='seconds')}"
    if now < FIRST_RELEASE:
        yield failure(text, "set the clock: certificates are not valid yet by it")
    elif is_kept is False:
        yield warning(f"{text}, and nobody keeps it in step", "run chrony or another NTP client on this node")
    else:
        yield ok(text if is_kept is None else f"{text}, and is kept in step")


def _is_below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
