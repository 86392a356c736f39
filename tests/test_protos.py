"""The committed stubs are what the .proto files say: they are generated anew and compared."""

from __future__ import annotations

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTO = Path(__file__).parents[1] / "proto"
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
