"""The configurations of deploy/envoy: Envoy takes each, and they say the same where they should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.envoy import ENVOY, SECTION, SHIPPED, shipped
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2

FILES = ("plain.yaml", "mtls.yaml", "operator.yaml", "sidecar.yaml")
TLS = {"transport_socket"}


def test_every_file_is_tested():
    assert {path.name for path in SHIPPED.glob("*.yaml")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_envoy_takes_it(name):
    found = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", name], cwd=SHIPPED, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    said = [line for line in found.stderr.splitlines() if "[warning]" in line or "deprecated" in line.lower()]
    assert said == []


def without(value: Any, names: set[str]) -> Any:
    """The same without those keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def test_with_tls_only_addresses_and_certificates_differ():
    plain, mtls = (without(shipped(name), {*TLS, "socket_address"}) for name in ("plain.yaml", "mtls.yaml"))
    assert plain == mtls


def test_both_ways_of_json_are_read_alike():
    """The two transcoders differ in how frames are set apart."""
    [listener] = shipped("plain.yaml")["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    name = "envoy.filters.http.grpc_json_transcoder"
    [of_all] = [one["typed_config"] for one in manager["http_filters"] if one["name"] == name]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    of_events = routes[0]["typed_per_filter_config"][name]
    names = {"stream_newline_delimited", "stream_sse_style_delimited"}
    assert without(of_all, names) == without(of_events, names)
    assert of_all["print_options"]["stream_newline_delimited"]
    assert of_events["print_options"]["stream_sse_style_delimited"]


@pytest.mark.parametrize("name", FILES)
def test_the_admin_port_is_on_loopback(name):
    assert shipped(name)["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["plain.yaml", "mtls.yaml"])
def test_operators_are_not_routed_where_clients_are(name):
    assert "Operator" not in "".join(
        line for line in (SHIPPED / name).read_text().splitlines(keepends=True) if not line.lstrip().startswith("#")
    )


def test_every_secret_is_named_by_a_file_of_its_own():
    text = (SHIPPED / "mtls.yaml").read_text()
    for path in SHIPPED.glob("secrets/*.yaml"):
        [secret] = shipped(f"secrets/{path.name}")["resources"]
        assert secret["name"] == path.stem
        assert f"path: secrets/{Path(path).name}" in text


def test_paths_in_the_document_exist():
    files = descriptor_pb2.FileDescriptorSet.FromString((SHIPPED / "outrider.pb").read_bytes()).file
    methods = [method for file in files for service in file.service for method in service.method]
    rules = [method.options.Extensions[annotations_pb2.http] for method in methods]
    paths = {getattr(rule, str(rule.WhichOneof("pattern"))) for rule in rules}
    assert paths >= {*re.findall(r"(?:\d|POST )(/(?:operator/)?v1/[a-z/]+)", SECTION)}
    assert SECTION.count("/operator/v1/") >= 5


def test_the_document_names_every_file():
    for path in [*SHIPPED.glob("*.*"), SHIPPED / "secrets"]:
        assert f"| `{path.name}{'/' if path.is_dir() else ''}` |" in SECTION


@pytest.mark.parametrize("name", ["plain.yaml", "mtls.yaml", "operator.yaml"])
def test_envoy_ends_no_answer_for_its_length(name):
    """By default it would after 15 seconds. A deadline is for Outrider to keep, which tells what it was."""
    [listener] = shipped(name)["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        assert route["route"]["timeout"] == "0s"
        assert "grpc_timeout_header_max" not in route["route"].get("max_stream_duration", {})
