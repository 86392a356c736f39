"""Which versions are installed of this server and of what it stands on. Loads none of them."""

from __future__ import annotations

import platform
from importlib import metadata

_DISTRIBUTIONS = {"outrider": "outrider", "grpc": "grpcio", "ray": "ray", "torch": "torch"}
"""What is reported, and the name it is installed by."""


def installed_versions() -> dict[str, str]:
    """Versions of this server and of what it stands on, without loading any; what is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return versions
