"""Variants of the manifests of which each breaks a rule: the overlay, what is done to it, and words of the finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oracles.manifests import Object


def front(objects: list[Object]) -> Object:
    return next(one for one in objects if one["kind"] == "StatefulSet")


def spec(objects: list[Object]) -> Object:
    return front(objects)["spec"]["template"]["spec"]


def server(objects: list[Object]) -> Object:
    return spec(objects)["containers"][0]


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)


def ray(objects: list[Object]) -> Object:
    return named(objects, "RayCluster", "outrider-ray")["spec"]


def worker(objects: list[Object]) -> Object:
    return ray(objects)["workerGroupSpecs"][0]["template"]["spec"]


def config(objects: list[Object], old: str, new: str) -> None:
    data = named(objects, "ConfigMap", "outrider-serve")["data"]
    assert old in data["serve.yaml"]
    data["serve.yaml"] = data["serve.yaml"].replace(old, new)


def without(objects: list[Object], kind: str, name: str) -> None:
    objects.remove(named(objects, kind, name))


def rule(objects: list[Object], name: str, way: str = "ingress") -> Object:
    return named(objects, "NetworkPolicy", name)["spec"][way][0]


Break = Callable[[list[Object]], Any]
BROKEN: dict[str, tuple[str, Break, str]] = {
    # name: overlay, what is done to it, words of the finding
    "root": ("cpu-demo", lambda o: spec(o)["securityContext"].pop("runAsNonRoot"), "may run as root"),
    "uid 0": ("cpu-demo", lambda o: spec(o)["securityContext"].update(runAsUser=0), "may run as root"),
    "seccomp": ("cpu-demo", lambda o: spec(o)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    "capabilities": ("cpu-demo", lambda o: server(o)["securityContext"].pop("capabilities"), "capabilities"),
    "escalation": ("gpu-cluster", lambda o: worker(o)["containers"][0].pop("securityContext"), "allowPrivilege"),
    "writable root": (
        "gpu-cluster",
        lambda o: spec(o)["initContainers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
        "ray-node: readOnlyRootFilesystem",
    ),
    "API token": ("cpu-demo", lambda o: spec(o).pop("automountServiceAccountToken"), "token of the API"),
    "host network": ("gpu-cluster", lambda o: worker(o).update(hostNetwork=True), "namespace of its host"),
    "host path": (
        "gpu-cluster",
        lambda o: worker(o)["volumes"][0].update(hostPath={"path": "/models"}),
        "mounts a path of its host",
    ),
    "lax namespace": ("cpu-demo", lambda o: named(o, "Namespace", "outrider")["metadata"]["labels"].clear(), "enforce"),
    "no limits": ("cpu-demo", lambda o: server(o)["resources"].pop("limits"), "no limit of cpu"),
    "no requests": ("gpu-cluster", lambda o: worker(o)["containers"][0]["resources"].pop("requests"), "no request"),
    "request above limit": (
        "cpu-demo",
        lambda o: server(o)["resources"]["requests"].update(memory="4Gi"),
        "requests more memory",
    ),
    "half a GPU": (
        "gpu-node",
        lambda o: server(o)["resources"]["requests"].update({"nvidia.com/gpu": "2"}),
        "GPUs requested and limited differ",
    ),
    "latest": ("cpu-demo", lambda o: server(o).update(image="outrider:latest"), "not pinned"),
    "two images": ("gpu-cluster", lambda o: server(o).update(image="outrider:0.0.9"), "different images"),
    "huge shm": (
        "cpu-demo",
        lambda o: next(v for v in spec(o)["volumes"] if v["name"] == "shm")["emptyDir"].update(sizeLimit="8Gi"),
        "may take all of the memory limit",
    ),
    "small shm on disk": (
        "cpu-demo",
        lambda o: next(v for v in spec(o)["volumes"] if v["name"] == "shm")["emptyDir"].pop("medium"),
        "/dev/shm is not memory",
    ),
    "unbounded scratch": (
        "cpu-demo",
        lambda o: next(v for v in spec(o)["volumes"] if v["name"] == "tmp")["emptyDir"].clear(),
        "no sizeLimit",
    ),
    "mount without volume": ("cpu-demo", lambda o: spec(o)["volumes"].pop(), "is no volume"),
    "volume without mount": ("cpu-demo", lambda o: server(o)["volumeMounts"].pop(), "nothing mounts"),
    "no /tmp": (
        "gpu-cluster",
        lambda o: worker(o)["containers"][0]["volumeMounts"].remove({"mountPath": "/tmp", "name": "tmp"}),
        "/tmp cannot be written",
    ),
    "home on the root": ("cpu-demo", lambda o: server(o)["env"].clear(), "HOME is on the read-only root"),
    "cache on the root": (
        "gpu-node",
        lambda o: server(o)["env"].append({"name": "TRITON_CACHE_DIR", "value": "/opt/triton"}),
        "/opt/triton cannot be written",
    ),
    "volatile state": ("cpu-demo", lambda o: config(o, "/var/lib/outrider", "/tmp/state"), "does not outlive its pod"),
    "read-only state": (
        "cpu-demo",
        lambda o: next(m for m in server(o)["volumeMounts"] if m["name"] == "state").update(readOnly=True),
        "does not outlive its pod",
    ),
    "model elsewhere": ("gpu-node", lambda o: config(o, "/models/", "/checkpoints/"), "not mounted read-only"),
    "model writable": (
        "gpu-cluster",
        lambda o: next(m for m in worker(o)["containers"][0]["volumeMounts"] if m["name"] == "model").pop("readOnly"),
        "not mounted read-only",
    ),
    "no claim": ("gpu-node", lambda o: without(o, "PersistentVolumeClaim", "outrider-model"), "there is no claim"),
    "no policy map": ("cpu-demo", lambda o: without(o, "ConfigMap", "outrider-policy"), "no ConfigMap outrider-policy"),
    "subPath": ("cpu-demo", lambda o: server(o)["volumeMounts"][0].update(subPath="x"), "never changes"),
    "unknown command": ("cpu-demo", lambda o: server(o)["args"].append("--fast"), "--fast"),
    "unknown ray flag": (
        "gpu-cluster",
        lambda o: spec(o)["initContainers"][0]["args"].append("--num-cpu=1"),
        "--num-cpu",
    ),
    "unknown ray parameter": (
        "gpu-cluster",
        lambda o: ray(o)["headGroupSpec"]["rayStartParams"].update({"no-gpus": "1"}),
        "has no --no-gpus",
    ),
    "probe of a foreign port": (
        "cpu-demo",
        lambda o: server(o)["readinessProbe"]["grpc"].update(port=50061),
        "asks port 50061",
    ),
    "probe without service": (
        "cpu-demo",
        lambda o: server(o)["readinessProbe"]["grpc"].pop("service"),
        "readinessProbe does not ask outrider.v1",
    ),
    "liveness by readiness": (
        "cpu-demo",
        lambda o: server(o)["livenessProbe"]["grpc"].update(service="outrider.v1.InferenceService"),
        "livenessProbe does not ask for the process",
    ),
    "hasty liveness": ("cpu-demo", lambda o: server(o)["livenessProbe"].update(failureThreshold=1), "less patient"),
    "hasty start": ("gpu-node", lambda o: server(o)["startupProbe"].update(failureThreshold=30), "ends a start"),
    "slow start": ("cpu-demo", lambda o: config(o, "start_timeout_s: 180", "start_timeout_s: 600"), "ends a start"),
    "no liveness": ("gpu-cluster", lambda o: worker(o)["containers"][0].pop("livenessProbe"), "no livenessProbe"),
    "grpc probe of a TLS port": (
        "gpu-cluster-mtls",
        lambda o: server(o).update(readinessProbe={"grpc": {"port": 50051, "service": "outrider.v1.InferenceService"}}),
        "does not ask outrider.v1.InferenceService on server.health_port",
    ),
    "port moved": ("cpu-demo", lambda o: config(o, "port: 50051", "port: 50050"), "listens on"),
    "loopback": ("cpu-demo", lambda o: config(o, "0.0.0.0", "127.0.0.1"), "out of the Service's reach"),
    "long drain": ("cpu-demo", lambda o: config(o, "drain_s: 60", "drain_s: 600"), "less than the 625 s"),
    "short grace": ("gpu-node", lambda o: spec(o).update(terminationGracePeriodSeconds=30), "terminationGrace"),
    "no withdrawal": ("cpu-demo", lambda o: config(o, "withdraw_s: 10", "withdraw_s: 0"), "no time to look elsewhere"),
    "no preStop": ("cpu-demo", lambda o: server(o).pop("lifecycle"), "no time to look elsewhere"),
    "ranks without GPUs": ("gpu-node", lambda o: config(o, "tp: 4", "tp: 8"), "8 ranks on 4 GPUs"),
    "too much cache": ("cpu-demo", lambda o: config(o, "memory_mib: 256", "memory_mib: 25600"), "leaves too little"),
    "secret in a ConfigMap": (
        "cpu-demo",
        lambda o: named(o, "ConfigMap", "outrider-serve")["data"].update(x="auth_token: 0123456789abcdef"),
        "looks like a secret",
    ),
    "key in a ConfigMap": (
        "cpu-demo",
        lambda o: named(o, "ConfigMap", "outrider-serve")["data"].update({"tls.key": "-----BEGIN EC PRIVATE KEY-----"}),
        "looks like a secret",
    ),
    "token in a variable": (
        "gpu-cluster",
        lambda o: server(o)["env"].append({"name": "OUTRIDER_TOKEN", "value": "x"}),
        "OUTRIDER_TOKEN is of no Secret",
    ),
    "token in an argument": (
        "gpu-cluster",
        lambda o: server(o)["args"].extend(["--set", "model.served_name=secret=abcdef"]),
        "a secret in its arguments",
    ),
    "a Secret": (
        "cpu-demo",
        lambda o: o.append({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "x", "namespace": "outrider"}}),
        "stands among the manifests",
    ),
    "service selects nothing": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider")["spec"]["selector"].update({"app.kubernetes.io/component": "x"}),
        "Service/outrider: selects no pod",
    ),
    "service to no port": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider")["spec"]["ports"][0].update(targetPort="http"),
        "has no port http",
    ),
    "set selects nothing": (
        "cpu-demo",
        lambda o: front(o)["spec"]["selector"].update(matchLabels={"app": "x"}),
        "does not select its own pods",
    ),
    "no governing service": ("cpu-demo", lambda o: front(o)["spec"].update(serviceName="x"), "no headless Service"),
    "budget for nobody": (
        "cpu-demo",
        lambda o: named(o, "PodDisruptionBudget", "outrider")["spec"]["selector"].update(matchLabels={"app": "x"}),
        "no PodDisruptionBudget",
    ),
    "budget that blocks": (
        "gpu-cluster",
        lambda o: named(o, "PodDisruptionBudget", "outrider-ray")["spec"].update(minAvailable=3),
        "ever be drained",
    ),
    "no spread": ("cpu-demo", lambda o: spec(o).pop("topologySpreadConstraints"), "no topology spread"),
    "plain protocol": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider")["spec"]["ports"][0].pop("appProtocol"),
        "appProtocol is not kubernetes.io/h2c",
    ),
    "operators among clients": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider")["spec"]["ports"].append(
            {"name": "operator", "port": 50053, "targetPort": "operator", "appProtocol": "kubernetes.io/h2c"}
        ),
        "several kinds of callers",
    ),
    "clients to drained replicas": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider-replicas")["spec"].update(publishNotReadyAddresses=True),
        "replicas that are not ready",
    ),
    "drained replicas lost to operators": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider-operator")["spec"].pop("publishNotReadyAddresses"),
        "loses replicas",
    ),
    "allowed by default": ("cpu-demo", lambda o: without(o, "NetworkPolicy", "deny-all"), "denies everything"),
    "egress by default": (
        "cpu-demo",
        lambda o: named(o, "NetworkPolicy", "deny-all")["spec"].update(policyTypes=["Ingress"]),
        "denies everything",
    ),
    "no names": ("gpu-cluster", lambda o: without(o, "NetworkPolicy", "names"), "may not look names up"),
    "no gateway": (
        "cpu-demo",
        lambda o: without(o, "NetworkPolicy", "gateway-to-front"),
        "nobody may reach outrider.grpc",
    ),
    "gateway as operator": (
        "cpu-demo",
        lambda o: rule(o, "gateway-to-front")["ports"].append({"protocol": "TCP", "port": 50053}),
        "gateway may reach the port of operator",
    ),
    "anybody": ("cpu-demo", lambda o: rule(o, "gateway-to-front").pop("from"), "ingress for anybody"),
    "policy for nobody": (
        "cpu-demo",
        lambda o: named(o, "NetworkPolicy", "gateway-to-front")["spec"].update(
            podSelector={"matchLabels": {"app": "x"}}
        ),
        "selects no pod",
    ),
    "no way to the head": (
        "gpu-cluster",
        lambda o: rule(o, "ray", "egress")["ports"].pop(0),
        "gcs-server of RayCluster",
    ),
    "narrow collectives": (
        "gpu-cluster",
        lambda o: rule(o, "ranks-to-ranks")["ports"][1].update(endPort=45000),
        "collectives",
    ),
    "no steps": ("gpu-cluster", lambda o: without(o, "NetworkPolicy", "front-to-ranks"), "may not reach steps"),
    "steps moved": ("gpu-cluster", lambda o: config(o, "worker_port_max: 21099", "worker_port_max: 21200"), "steps"),
    "ranks as operators": (
        "gpu-cluster",
        lambda o: [
            rule(o, "ray", way)["ports"].append({"protocol": "TCP", "port": 50053}) for way in ("ingress", "egress")
        ],
        "may reach port 50053",
    ),
    "ports that overlap": (
        "gpu-cluster",
        lambda o: config(o, "worker_port_min: 21000", "worker_port_min: 20500"),
        "overlap",
    ),
    "collectives anywhere": (
        "gpu-cluster",
        lambda o: worker(o)["securityContext"].pop("sysctls"),
        "no policy can name",
    ),
    "few worker ports": (
        "gpu-cluster",
        lambda o: config(o, "worker_port_max: 21099", "worker_port_max: 21003"),
        "do not hold the ranks",
    ),
    "another head": ("gpu-cluster", lambda o: config(o, "outrider-ray-head-svc", "ray-head"), "cluster.ray_address"),
    "no raylet": ("gpu-cluster", lambda o: spec(o).pop("initContainers"), "no node of the Ray cluster"),
    "hidden raylet": ("gpu-cluster", lambda o: spec(o).pop("shareProcessNamespace"), "does not see the daemon"),
    "raylet elsewhere": (
        "gpu-cluster",
        lambda o: next(m for m in spec(o)["initContainers"][0]["volumeMounts"] if m["mountPath"] == "/tmp").update(
            name="cache"
        ),
        "do not share /tmp",
    ),
    "Ray without a token": ("gpu-cluster", lambda o: ray(o).pop("authOptions"), "asks for no token"),
    "front without the token": ("gpu-cluster", lambda o: server(o)["env"].pop(0), "has not the Ray cluster's token"),
    "another Ray": ("gpu-cluster", lambda o: ray(o).update(rayVersion="2.9.0"), "rayVersion 2.9.0"),
    "ranks on the head": (
        "gpu-cluster",
        lambda o: ray(o)["headGroupSpec"]["rayStartParams"].pop("num-cpus"),
        "placed on Ray's head",
    ),
    "too few nodes": (
        "gpu-cluster",
        lambda o: ray(o)["workerGroupSpecs"][0].update(replicas=1),
        "16 ranks, and 8 GPUs",
    ),
    "nodes too small": (
        "gpu-cluster",
        lambda o: [config(o, "tp: 8", "tp: 16"), config(o, "ep: 16", "ep: 1")],
        "belong on one node",
    ),
    "ranks without cores": ("gpu-cluster", lambda o: config(o, "worker_threads: 1", "worker_threads: 8"), "num-cpus"),
    "scaled thing": (
        "gpu-node",
        lambda o: named(o, "HorizontalPodAutoscaler", "outrider")["spec"]["scaleTargetRef"].update(kind="Deployment"),
        "is not there",
    ),
    "replicas set back": ("gpu-node", lambda o: front(o)["spec"].update(replicas=1), "set the replicas"),
    "unscraped": (
        "gpu-node",
        lambda o: named(o, "ServiceMonitor", "outrider")["spec"]["endpoints"][0].update(port="http"),
        "no Service has the port",
    ),
    "foreign namespace": (
        "cpu-demo",
        lambda o: named(o, "Service", "outrider")["metadata"].update(namespace="default"),
        "in no namespace of these",
    ),
    "service links": ("cpu-demo", lambda o: spec(o).pop("enableServiceLinks"), "OUTRIDER_*"),
    "certificate of nowhere": (
        "gpu-cluster-mtls",
        lambda o: worker(o)["volumes"].__setitem__(-1, {"name": "worker-tls", "emptyDir": {"sizeLimit": "1Mi"}}),
        "is of no Secret",
    ),
}
