"""The committed stubs are what the .proto files say, and the dependencies are recent enough to import them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("outrider/v1/*.proto"))
    assert sources
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    assert protoc.main(["protoc", f"-I{PROTO}", f"-I{WELL_KNOWN}", *outputs, *sources]) == 0
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    committed = {path.relative_to(PROTO): path.read_text() for path in PROTO.glob("outrider/v1/*_pb2*")}
    assert sorted(generated) == sorted(committed)
    stale = [str(path) for path, text in generated.items() if committed[path] != text]
    assert not stale, f"{stale}: run `make protos`"


def test_dependencies_start_at_the_versions_that_generated_the_stubs() -> None:
    """Stubs raise at import when the runtime is older than their generator."""
    stubs = "".join(path.read_text() for path in PROTO.glob("outrider/v1/*_pb2*.py"))
    [protobuf] = set(re.findall(r"^# Protobuf Python Version: ([\d.]+)$", stubs, re.MULTILINE))
    [grpc] = set(re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", stubs, re.MULTILINE))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", dependency).groups() for dependency in dependencies)  # type: ignore[union-attr]
    assert bounds["protobuf"] == protobuf
    assert bounds["grpcio"] == grpc
