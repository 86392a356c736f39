"""Which role each RPC asks for. Knows no callers.

What is not named here asks for the most: an RPC that is added later is an operator's until somebody says otherwise.
"""

from __future__ import annotations

from runtime.access.identity import Role

OPEN_SERVICES = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
"""Open to whoever reaches the port: probes have no credentials, and reflection tells what is public anyway."""

GENERATING_SERVICES = ("outrider.v1.InferenceService", "vllm.grpc.engine.VllmEngine")

OPERATOR_SERVICE = "outrider.v1.OperatorService"

READING = frozenset(
    f"/{OPERATOR_SERVICE}/{name}"
    for name in ("GetVerificationPolicy", "WatchVerificationPolicy", "AdvisePolicy", "GetStatus", "ListRequests")
)
"""RPCs of the operator service that change nothing, and take no time of the ranks."""


def role_for(method: str) -> Role | None:
    """The role that a call needs; None for one that anybody may make. method: /package.Service/Name, as on the wire."""
    service = method[1:].rpartition("/")[0]
    if service in OPEN_SERVICES:
        return None
    if service in GENERATING_SERVICES:
        return Role.GENERATE
    return Role.OBSERVE if method in READING else Role.OPERATE


def may(roles: frozenset[Role], needed: Role) -> bool:
    """Whether somebody of these roles may do what asks for another. Who operates may observe."""
    return needed in roles or (needed is Role.OBSERVE and Role.OPERATE in roles)
