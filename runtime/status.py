"""What an operator may see of the engine, as frozen values. Knows no wire format and no metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from parallel.mesh import Mesh
from runtime.link import RankPlace
from runtime.statistics import EngineStatistics
from runtime.verification.policy import PolicyState
from runtime.verification.view import SpeculationView
from workers.plan import WorkerDescription


class ServerState(Enum):
    """SERVING takes requests; the others do not, and live ones go on in all but STOPPING, where they have a last while.
    The ranks of one that is RECOVERING were lost and are started anew."""

    SERVING = "serving"
    DRAINING = "draining"
    RECOVERING = "recovering"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A moment of the engine.

    outage: why the ranks are not there; empty while they are.
    uptime_s: since the engine started.
    ranks, mesh: of the present life, or the last one. places: of its ranks in order; () between lives.
    max_waiting: requests that the queue takes.
    step: the newest one planned. epoch: the life of the group it is of.
    """

    state: ServerState
    outage: str
    uptime_s: float
    mesh: Mesh
    ranks: tuple[WorkerDescription, ...]
    places: tuple[RankPlace, ...]
    max_waiting: int
    policy: PolicyState
    step: int
    epoch: int
    statistics: EngineStatistics
    speculation: SpeculationView


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """What became of ids that were to be aborted, in the order given, each once."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityReport:
    """violations: one line each, with the place; () when all hold. ranks_checked: ranks that checked themselves."""

    violations: tuple[str, ...]
    ranks_checked: int
