"""Every rendered object is what the API that takes it says it may be, and no field is unknown there.

Kubernetes' own kinds by the schemas of each supported version, KubeRay's by its resource definitions, the other custom
resources by schemas kept by hand in tests/data/schemas.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils
from oracles.days import by_day
from oracles.manifests import KUBERNETES, OVERLAYS, ROOT, Manifests, Object, objects_of

VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")
"""Versions that the manifests are for, as docs/kubernetes.md says."""
DATA = ROOT / "tests" / "data"
CUSTOM: Object = yaml.safe_load((DATA / "schemas" / "custom_resources.yaml").read_text())
VARIANTS = (*OVERLAYS, "gpu-node+autoscale-keda")


def strict(schema: Any) -> Any:
    """The schema, of which every object has the properties that it names and no others."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and isinstance(schema["properties"], dict) and not is_open:
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found = {"type": ["integer", "string"]}
    return found


@functools.cache
def kuberay(kind: str) -> Any:
    """What checks an object of that kind. The definition itself is not checked first, which would take seconds."""
    file = {"RayCluster": "ray.io_rayclusters.yaml", "RayService": "ray.io_rayservices.yaml"}[kind]
    definition = yaml.load((DATA / "kuberay-crds" / file).read_text(), Loader=yaml.CSafeLoader)
    version = next(one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema: Object = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return jsonschema.Draft202012Validator(strict(schema))


def check_custom(one: Object) -> None:
    schema = CUSTOM[one["kind"]]
    assert one["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(one["spec"], strict(schema["spec"]))


def check(one: Object, version: str) -> None:
    """Raises an error that names the field."""
    if one["kind"] in ("RayCluster", "RayService"):
        assert one["apiVersion"] == "ray.io/v1"
        kuberay(one["kind"]).validate(one)
    elif one["kind"] in CUSTOM:
        check_custom(one)
    else:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """kubernetes_validate reads a megabyte of definitions for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("version", by_day({version: version for version in VERSIONS}))
@pytest.mark.parametrize("overlay", VARIANTS)
def test_every_object_is_what_its_api_takes(overlay, version):
    for one in objects_of(overlay):
        check(one, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pods_of_a_ray_cluster_are_what_kubernetes_takes(overlay):
    for pod in Manifests(objects_of(overlay)).pods:
        pod_object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec}
        kubernetes_validate.validate(pod_object, VERSIONS[0], strict=True)


BROKEN = {
    "misspelt field": ("gpu-cluster", "StatefulSet", lambda spec: spec.update(replica=1)),
    "wrong type": ("gpu-cluster", "Service", lambda spec: spec["ports"][0].update(port="50051")),
    "probe of no kind": (
        "gpu-cluster",
        "StatefulSet",
        lambda spec: spec["template"]["spec"]["containers"][0]["livenessProbe"].update(grcp={"port": 1}),
    ),
    "unknown field of Ray": ("gpu-cluster", "RayCluster", lambda spec: spec.update(workerGroups=[])),
    "unknown field of a Ray pod": (
        "gpu-cluster",
        "RayCluster",
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"].update(toleration=[]),
    ),
    "no head": ("gpu-cluster", "RayCluster", lambda spec: spec.pop("headGroupSpec")),
    "Ray parameter that is no text": (
        "gpu-cluster",
        "RayCluster",
        lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    ),
    "unknown field of a monitor": ("gpu-node", "ServiceMonitor", lambda spec: spec["endpoints"][0].update(every="1s")),
    "rule without expression": (
        "gpu-node",
        "PrometheusRule",
        lambda spec: spec["groups"][0]["rules"][0].pop("expr"),
    ),
    "trigger of no kind": (
        "gpu-node+autoscale-keda",
        "ScaledObject",
        lambda spec: spec["triggers"][0].update(metricType="Utilization"),
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_what_an_api_does_not_take_is_caught(name):
    overlay, kind, break_it = BROKEN[name]
    one = next(one for one in objects_of(overlay) if one["kind"] == kind)
    check(one, VERSIONS[-1])
    break_it(one["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check(one, VERSIONS[-1])


def test_the_supported_versions_are_those_that_are_documented():
    assert f"Kubernetes {VERSIONS[0]} to {VERSIONS[-1]}" in (ROOT / "docs" / "kubernetes.md").read_text()
    assert kubernetes_validate.latest_version().startswith(f"{VERSIONS[-1]}."), "add the new version"


def test_the_examples_are_what_their_apis_take():
    kinds = set()
    for one in yaml.safe_load_all((KUBERNETES / "examples" / "certificates.yaml").read_text()):
        check_custom(one)
        kinds.add((one["kind"], one["spec"].get("secretName")))
    # Those that the components mount, with the keys that cert-manager writes.
    assert {("Certificate", "outrider-tls"), ("Certificate", "outrider-worker-tls")} <= kinds
