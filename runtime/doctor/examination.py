"""All checks in one table, and how they are run: side by side, bounded, none hurt by another. Knows no terminal."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from runtime.doctor import access, cluster, devices, disk, limits, memory, model, ports, versions
from runtime.doctor.finding import Finding, Level, failure
from runtime.doctor.inquiry import Inquiry

Check = Callable[[Inquiry], Iterator[Finding]]

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "versions": (versions.check_python, versions.check_packages, versions.check_stubs),
    "ports": (ports.check_ports, ports.check_worker_ports),
    "torch": (devices.check_torch,),
    "collectives": (devices.check_collectives,),
    "ray": (cluster.check_ray,),
    "checkpoint": (model.check_checkpoint, model.check_tokenizer),
    "profile": (model.check_profile,),
    "memory": (memory.check_memory,),
    "access": (
        access.check_port_certificates,
        access.check_worker_certificates,
        access.check_identities,
        access.check_audit_log,
    ),
    "disk": (disk.check_state_dir, disk.check_temporary, disk.check_shared_memory),
    "limits": (limits.check_limits, limits.check_cpus, limits.check_threads),
    "clock": (limits.check_clock,),
}
"""By topic, in the order in which they are told."""

LIMIT_S = 150.0
"""Longest check. Those that ask children are bounded by these, and a disk or a name server may hang for ever."""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings by topic."""

    topics: Mapping[str, tuple[Finding, ...]]

    def count(self, level: Level) -> int:
        return sum(finding.level is level for findings in self.topics.values() for finding in findings)

    @property
    def is_well(self) -> bool:
        """Nothing would keep a server from working."""
        return self.count(Level.FAILURE) == 0


def examine(inquiry: Inquiry, checks: Mapping[str, tuple[Check, ...]] = CHECKS, *, limit_s: float = LIMIT_S) -> Report:
    """Runs the checks of all topics side by side. What a check raises, or its silence, is a failure of its own."""
    answers: queue.SimpleQueue[tuple[str, int, list[Finding]]] = queue.SimpleQueue()
    found: dict[tuple[str, int], list[Finding]] = {}
    for topic, of_topic in checks.items():
        for number, check in enumerate(of_topic):
            threading.Thread(
                target=lambda topic=topic, number=number, check=check: answers.put(
                    (topic, number, _findings_of(check, inquiry))
                ),
                name=f"doctor {topic}",
                daemon=True,
            ).start()
    deadline = time.monotonic() + limit_s
    num_checks = sum(map(len, checks.values()))
    while len(found) < num_checks:
        try:
            topic, number, findings = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[topic, number] = findings
    silent = [failure(f"a check said nothing within {limit_s:g} s", "look whether a disk or a name server hangs")]
    return Report(
        {
            topic: tuple(finding for number in range(len(of_topic)) for finding in found.get((topic, number), silent))
            for topic, of_topic in checks.items()
        }
    )


def _findings_of(check: Check, inquiry: Inquiry) -> list[Finding]:
    try:
        return list(check(inquiry))
    except Exception as error:  # one check that fails says nothing of the others
        name = getattr(check, "__name__", "a check")
        return [
            failure(f"{name} failed: {type(error).__name__}: {error}", "a defect of this command; please report it")
        ]
