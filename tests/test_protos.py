"""Committed stubs and descriptors are what the .proto files say, and the dependencies are recent enough for them."""

from __future__ import annotations

import re
import sysconfig
import tomllib
from pathlib import Path

import grpc_tools
import pytest
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
INCLUDED = [f"-I{folder}" for folder in (PROTO, sysconfig.get_path("purelib"), WELL_KNOWN)]
DESCRIPTORS = ROOT / "deploy" / "envoy" / "outrider.pb"


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("outrider/v1/*.proto"))
    assert sources
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    assert protoc.main(["protoc", *INCLUDED, *outputs, *sources]) == 0
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    committed = {path.relative_to(PROTO): path.read_text() for path in PROTO.glob("outrider/v1/*_pb2*")}
    assert sorted(generated) == sorted(committed)
    stale = [str(path) for path, text in generated.items() if committed[path] != text]
    assert not stale, f"{stale}: run `make protos`"


def test_committed_descriptors_are_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "made.pb"
    sources = re.search(r"^GATEWAY_PROTOS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sources
    options = ("--include_imports", f"--descriptor_set_out={made}")
    assert protoc.main(["protoc", *INCLUDED, *options, *sources[1].split()]) == 0
    assert made.read_bytes() == DESCRIPTORS.read_bytes(), "run `make protos`"


@pytest.mark.parametrize(("service", "prefix"), [("InferenceService", "/v1/"), ("OperatorService", "/operator/v1/")])
def test_every_method_of_the_public_services_has_an_http_path_of_its_own(service: str, prefix: str) -> None:
    """The prefix tells proxies which service a path belongs to."""
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    [found] = [one for file in files for one in file.service if one.name == service]
    rules = [method.options.Extensions[annotations_pb2.http] for method in found.method]
    kinds = [rule.WhichOneof("pattern") for rule in rules]
    assert None not in kinds
    paths = [(kind, getattr(rule, kind)) for rule, kind in zip(rules, kinds, strict=True)]
    assert all(path.startswith(prefix) for _, path in paths)
    assert len(set(paths)) == len(paths)
    assert all(rule.body == ("" if kind == "get" else "*") for rule, kind in zip(rules, kinds, strict=True))


def test_dependencies_start_at_the_versions_that_generated_the_stubs() -> None:
    """Stubs raise at import when the runtime is older than their generator."""
    stubs = "".join(path.read_text() for path in PROTO.glob("outrider/v1/*_pb2*.py"))
    [protobuf] = set(re.findall(r"^# Protobuf Python Version: ([\d.]+)$", stubs, re.MULTILINE))
    [grpc] = set(re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", stubs, re.MULTILINE))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", dependency).groups() for dependency in dependencies)  # type: ignore[union-attr]
    assert bounds["protobuf"] == protobuf
    assert bounds["grpcio"] == grpc
