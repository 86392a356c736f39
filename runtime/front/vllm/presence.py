"""Whether the face that smg and other gateways speak can be served here: its stubs come with an extra of their own.

Knows the service by name only; nothing of it is imported before somebody asks.
"""

from __future__ import annotations

import functools
import importlib
import logging

from google.protobuf.runtime_version import VersionError

log = logging.getLogger(__name__)

VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
"""Full name of the service."""

_STUBS = "smg_grpc_proto.generated.vllm_engine_pb2_grpc"


@functools.cache
def why_absent() -> str:
    """Why `VLLM_ENGINE` is not served here; empty where it is."""
    try:
        importlib.import_module(_STUBS)
    except ModuleNotFoundError as error:
        if error.name == _STUBS.partition(".")[0]:
            return "smg-grpc-proto is not installed; pip install 'outrider[smg]' brings it"
        return f"smg-grpc-proto lacks {error.name}; install a newer one"
    except (ImportError, RuntimeError, VersionError) as error:  # stubs refuse runtimes that are too old for them
        log.warning("%s is not served: the installed smg-grpc-proto cannot be used: %s", VLLM_ENGINE, error)
        return f"the installed smg-grpc-proto cannot be used: {error}"
    return ""
