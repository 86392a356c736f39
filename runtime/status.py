"""What an operator may see of a server, as frozen values. Knows no wire format and no metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from parallel.mesh import Mesh
from runtime.link import RankPlace
from runtime.statistics import EngineStatistics
from runtime.verification.policy import PolicyState
from runtime.verification.view import SpeculationView
from workers.plan import WorkerDescription


class ServerState(Enum):
    """SERVING, STALLED and WITHDRAWING take requests, and only the first is what health says; the others take none, and
    live ones go on in all but STOPPING, where they have a last while. In one that is STALLED a step has been running
    for long; one that is WITHDRAWING was told to stop, and routers are still to hear of it. The ranks of one that is
    RECOVERING were lost and are started anew."""

    SERVING = "serving"
    STALLED = "stalled"
    WITHDRAWING = "withdrawing"
    DRAINING = "draining"
    RECOVERING = "recovering"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """count: times that the ranks were lost, or given up. seconds: without them, those of the present outage too."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A moment of the engine.

    outage: why the ranks are not there; empty while they are. losses: since the engine started.
    uptime_s: since the engine started.
    ranks, mesh: of the present life, or the last one. places: of its ranks in order; () between lives.
    max_waiting: requests that the queue takes.
    step: the newest one planned. epoch: the life of the group it is of.
    """

    state: ServerState
    outage: str
    losses: Losses
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
class Reloads:
    """What became of the configuration since the start. applied, refused: times that a new one came into force, or
    could not be used. problem: why the newest could not; empty where it could. held_back: settings that it has changed
    and that are as they were, until a restart or a higher revision."""

    applied: int = 0
    refused: int = 0
    problem: str = ""
    held_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesStatus:
    """Files that are read again when they change, such as certificates. what: their name. changes, refusals: times that
    they brought something new into use, or something that could not be used. is_refused: that is so now, and what was
    read before stays in use. expires_at: when a certificate that is in use does, in Unix time; None for others."""

    what: str
    changes: int
    refusals: int
    is_refused: bool
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStatus:
    """A moment of the front.

    errors: calls that ended with one, by its name in the error tree, every name of it among them.
    open_calls: those that generate. open_streams: their sequences.
    versions: of this server and of what it stands on, by name. reloads: of its configuration.
    files: of each port's certificates, and of identities, where there are any.
    """

    errors: Mapping[str, int] = field(default_factory=dict)
    open_calls: int = 0
    open_streams: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    reloads: Reloads = Reloads()
    files: tuple[FilesStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Engine and front at one moment. engine: None while the ranks of its first life start."""

    engine: EngineStatus | None
    front: FrontStatus


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
