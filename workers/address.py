"""Addresses as text. Knows no gRPC, so that a command that only names one loads none."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
