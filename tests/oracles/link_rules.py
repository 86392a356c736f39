"""What must hold between the objects of a deployment: who selects whom, who may reach whom, what belongs together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oracles.manifests import ROOT, Manifests, Object, Pod, matches

from configs.schema import ServeSettings

Ports = range


def _ports(entry: Object) -> Ports:
    return range(entry["port"], entry.get("endPort", entry["port"]) + 1)


def selectors(manifests: Manifests) -> Iterator[str]:
    """Services, budgets, spreads and workloads select pods that there are; targets of ports exist."""
    for one in manifests.of_kind("StatefulSet"):
        name, spec = one["metadata"]["name"], one["spec"]
        if not matches(spec["selector"], spec["template"]["metadata"]["labels"]):
            yield f"StatefulSet/{name}: does not select its own pods"
        service = manifests.named("Service", spec["serviceName"])
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"StatefulSet/{name}: {spec['serviceName']} is no headless Service"
    for one in manifests.of_kind("Service"):
        name, spec = one["metadata"]["name"], one["spec"]
        pods = manifests.selected({"matchLabels": spec["selector"]})
        if not pods:
            yield f"Service/{name}: selects no pod"
        for pod in pods:
            ports = [port for container in pod.containers for port in container.get("ports", [])]
            for port in spec["ports"]:
                if not any(port["targetPort"] in (has["name"], has["containerPort"]) for has in ports):
                    yield f"Service/{name}: {pod.owner} has no port {port['targetPort']}"
    for one in manifests.of_kind("PodDisruptionBudget"):
        name, spec = one["metadata"]["name"], one["spec"]
        pods = manifests.selected(spec["selector"])
        if not pods:
            yield f"PodDisruptionBudget/{name}: selects no pod"
        if spec.get("minAvailable", 0) >= sum(pod.count for pod in pods):
            yield f"PodDisruptionBudget/{name}: no node could ever be drained"
        if "maxUnavailable" in spec and any(pod.start is not None for pod in pods):
            yield f"PodDisruptionBudget/{name}: maxUnavailable of pods whose owner cannot be scaled"
    for pod in manifests.pods:
        for spread in pod.spec.get("topologySpreadConstraints", []):
            if not matches(spread["labelSelector"], pod.labels):
                yield f"{pod.owner}: spreads pods that are not its own"
    front = [pod for pod, _, _ in manifests.servers()]
    budgets = manifests.of_kind("PodDisruptionBudget")
    for pod in front:
        if not any(matches(one["spec"]["selector"], pod.labels) for one in budgets):
            yield f"{pod.owner}: no PodDisruptionBudget"
        if not pod.spec.get("topologySpreadConstraints"):
            yield f"{pod.owner}: no topology spread"


def services(manifests: Manifests) -> Iterator[str]:
    """Clients, operators and Prometheus have Services of their own; the protocol that they tell is the one spoken."""
    for _, _, settings in manifests.servers():
        wanted = "https" if settings.server.tls.is_on else "kubernetes.io/h2c"
        by_port: dict[int, list[Object]] = {}
        for one in manifests.of_kind("Service"):
            if len(one["spec"]["ports"]) != 1:
                yield f"Service/{one['metadata']['name']}: has ports of several kinds of callers"
            for port in one["spec"]["ports"]:
                by_port.setdefault(port["port"], []).append(one)
                if port["port"] in (settings.server.port, settings.operator.port) and port.get("appProtocol") != wanted:
                    yield f"Service/{one['metadata']['name']}: appProtocol is not {wanted}"
        for what in ("server", "operator", "metrics"):
            found = by_port.get(getattr(settings, what).port, [])
            if not found:
                yield f"no Service for {what}.port"
            unready = [one["spec"].get("publishNotReadyAddresses", False) for one in found]
            if what != "server" and not all(unready):
                yield f"the Service for {what}.port loses replicas that are not ready"
            if what == "server" and any(unready):
                yield "the Service for server.port has replicas that are not ready"


def listened(manifests: Manifests, pod: Pod) -> dict[str, Ports]:
    """What a pod listens on for other pods: its containers' ports, but for that of probes, which come from its own
    node; and ranges that settings and `ray start` name."""
    found = {
        f"{container['name']}.{port['name']}": range(port["containerPort"], port["containerPort"] + 1)
        for container in pod.containers
        for port in container.get("ports", [])
        if port["name"] != "health"
    }
    starts = [dict(pod.start)] if pod.start else []
    for container in pod.containers:
        if container.get("command") == ["ray"]:
            flags = [flag.removeprefix("--").partition("=") for flag in container["args"][1:]]
            starts.append({name: value for name, _, value in flags})
    for start in starts:
        found["ray processes"] = range(int(start["min-worker-port"]), int(start["max-worker-port"]) + 1)
        for name in ("node-manager-port", "object-manager-port", "runtime-env-agent-port"):
            found[name] = range(int(start[name]), int(start[name]) + 1)
    if pod.start and not pod.is_head:
        for _, _, settings in manifests.servers():
            cluster = settings.cluster
            found["steps"] = range(cluster.worker_port_min, cluster.worker_port_max + 1)
        for sysctl in pod.spec["securityContext"].get("sysctls", []):
            if sysctl["name"] == "net.ipv4.ip_local_port_range":
                first, last = sysctl["value"].split()
                found["collectives"] = range(int(first), int(last) + 1)
    return found


def _within(ports: Ports, entries: list[Object]) -> bool:
    return any(ports[0] in _ports(entry) and ports[-1] in _ports(entry) for entry in entries if entry.get("port"))


def may_reach(manifests: Manifests, source: Pod | Object, target: Pod, ports: Ports) -> bool:
    """Whether policies let a pod, or whoever is in a namespace with these labels, connect to all of a pod's ports."""

    def some(subject: Pod, way: str, key: str, peer: Pod | Object) -> bool:
        kind, labels = ("podSelector", peer.labels) if isinstance(peer, Pod) else ("namespaceSelector", peer)
        return any(
            _within(ports, rule.get("ports", []))
            and any(set(one) == {kind} and matches(one[kind], labels) for one in rule.get(key, []))
            for policy in manifests.of_kind("NetworkPolicy")
            if matches(policy["spec"]["podSelector"], subject.labels)
            for rule in policy["spec"].get(way, [])
        )

    is_let_out = not isinstance(source, Pod) or some(source, "egress", "to", target)
    return is_let_out and some(target, "ingress", "from", source)


def network(manifests: Manifests) -> Iterator[str]:
    """All is denied that no policy names; policies select pods, and cover every port that is listened on, no other."""
    policies = manifests.of_kind("NetworkPolicy")
    denials = [one for one in policies if one["spec"].get("podSelector") == {}]
    if [one["spec"] for one in denials] != [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]:
        yield "no policy denies everything by default"
    for one in policies:
        name, spec = one["metadata"]["name"], one["spec"]
        if not manifests.selected(spec["podSelector"]):
            yield f"NetworkPolicy/{name}: selects no pod"
        for way, key in (("ingress", "from"), ("egress", "to")):
            if bool(spec.get(way)) and way.capitalize() not in spec["policyTypes"]:
                yield f"NetworkPolicy/{name}: its {way} rules are none, by policyTypes"
            for rule in spec.get(way, []):
                if not rule.get(key) or not rule.get("ports"):
                    yield f"NetworkPolicy/{name}: {way} for anybody, or to any port"
                for peer in rule.get(key, []):
                    if set(peer) == {"podSelector"} and not manifests.selected(peer["podSelector"]):
                        yield f"NetworkPolicy/{name}: no pod is meant by its {key}"
    for pod in manifests.pods:
        mine = [one["spec"] for one in policies if matches(one["spec"]["podSelector"], pod.labels)]
        rules = [rule for spec in mine for rule in spec.get("ingress", [])]
        has = listened(manifests, pod)
        for what, ports in has.items():
            if not any(_within(ports, rule.get("ports", [])) for rule in rules):
                yield f"{pod.owner}: nobody may reach {what} ({ports[0]} to {ports[-1]})"
        if not any(_within(range(53, 54), rule.get("ports", [])) for spec in mine for rule in spec.get("egress", [])):
            yield f"{pod.owner}: may not look names up"
    yield from _flows(manifests)


def _flows(manifests: Manifests) -> Iterator[str]:
    """Who must reach whom, and who must not."""
    for front, _, settings in manifests.servers():
        callers: dict[str, Object] = {
            "gateway": {"outrider/gateway": "true"},
            "operator": {"outrider/operator": "true"},
            "scrape": {"outrider/scrape": "true"},
        }
        own = {"gateway": settings.server.port, "operator": settings.operator.port, "scrape": settings.metrics.port}
        for who, labels in callers.items():
            for other, port in own.items():
                assert isinstance(port, int)
                reaches = may_reach(manifests, labels, front, range(port, port + 1))
                if reaches != (who == other):
                    yield f"{who} {'may' if reaches else 'may not'} reach the port of {other}"
        ray = [pod for pod in manifests.pods if pod.start is not None]
        for source in (front, *ray):
            for target in (front, *ray) if ray else ():
                has = listened(manifests, target)
                for what in _needed(source, target):
                    if what in has and not may_reach(manifests, source, target, has[what]):
                        yield f"{source.owner} may not reach {what} of {target.owner}"
            for port in (settings.server.port, settings.operator.port):
                assert isinstance(port, int)
                if may_reach(manifests, source, front, range(port, port + 1)):
                    yield f"{source.owner} may reach port {port} of {front.owner}"


def _needed(source: Pod, target: Pod) -> list[str]:
    needed = ["ray processes", "node-manager-port", "object-manager-port", "ray-head.gcs-server"]
    if not (source.start and source.is_head):
        needed.append("steps")
    if source.start and not source.is_head:
        needed.append("collectives")
    return needed if target is not source or target.count > 1 else []


def ray_cluster(manifests: Manifests) -> Iterator[str]:
    """A front that joins a Ray cluster is a node of the one that there is, and its ranks find their places there."""
    locked = re.search(r"^ray==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    for pod, container, settings in manifests.servers():
        if settings.cluster.launcher != "ray" or not settings.cluster.ray_address:
            continue
        clusters = manifests.of_kind("RayCluster")
        addresses = [f"{one['metadata']['name']}-head-svc:6379" for one in clusters]
        if settings.cluster.ray_address not in addresses:
            yield f"cluster.ray_address {settings.cluster.ray_address} is none of {addresses}"
        nodes = [one for one in pod.spec.get("initContainers", []) if one.get("command") == ["ray"]]
        if not nodes or nodes[0].get("restartPolicy") != "Always":
            yield f"{pod.owner}: is no node of the Ray cluster"
            continue
        if f"--address={settings.cluster.ray_address}" not in nodes[0]["args"]:
            yield f"{pod.owner}: is a node of another Ray cluster"
        if pod.spec.get("shareProcessNamespace") is not True:
            yield f"{pod.owner}: the server does not see the daemon of its Ray node"
        for path in ("/tmp", "/dev/shm"):
            names = {m["name"] for c in (nodes[0], container) for m in c["volumeMounts"] if m["mountPath"] == path}
            if len(names) != 1:
                yield f"{pod.owner}: server and Ray node do not share {path}"
        for cluster in clusters:
            yield from _cluster_fits(cluster, pod, (nodes[0], container), settings, locked[1])
        yield from _ranges_apart(manifests, settings)
        workers = [one for one in manifests.pods if one.start is not None and not one.is_head]
        yield from _places(workers, settings)


def _cluster_fits(
    cluster: Object, pod: Pod, containers: tuple[Object, Object], settings: ServeSettings, version: str
) -> Iterator[str]:
    spec = cluster["spec"]
    if spec["rayVersion"] != version:
        yield f"rayVersion {spec['rayVersion']} is not the {version} of requirements.lock"
    auth = spec.get("authOptions", {})
    if auth.get("mode") != "token":
        yield "the Ray cluster asks for no token"
    for one in containers:
        env = {variable["name"]: variable for variable in one.get("env", [])}
        source = env.get("RAY_AUTH_TOKEN", {}).get("valueFrom", {}).get("secretKeyRef", {})
        if env.get("RAY_AUTH_MODE", {}).get("value") != "token" or source != {
            "name": auth.get("secretName"),
            "key": "auth_token",
        }:
            yield f"{pod.owner}/{one['name']}: has not the Ray cluster's token"
    if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "ranks could be placed on Ray's head"
    if spec.get("enableInTreeAutoscaling"):
        yield "Ray's autoscaler would take nodes from under ranks"


def _ranges_apart(manifests: Manifests, settings: ServeSettings) -> Iterator[str]:
    for pod in manifests.pods:
        has = list(listened(manifests, pod).items())
        for i, (what, ports) in enumerate(has):
            for other, others in has[i + 1 :]:
                is_same = len(ports) == len(others) == 1
                if not is_same and ports[0] <= others[-1] and others[0] <= ports[-1]:
                    yield f"{pod.owner}: {what} and {other} overlap"
        if pod.start and not pod.is_head and "collectives" not in dict(has):
            yield f"{pod.owner}: collectives take ports that no policy can name"
    num = settings.cluster.worker_port_max - settings.cluster.worker_port_min + 1
    if settings.cluster.worker_port_min == 0 or num < 2 * settings.parallel.tp + 1:
        yield "cluster.worker_port_min to worker_port_max do not hold the ranks of a node, of two lives"


def _places(workers: list[Pod], settings: ServeSettings) -> Iterator[str]:
    has = 0
    for pod in workers:
        container = pod.spec["containers"][0]
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert pod.start is not None
        if pod.start.get("num-gpus") != str(gpus):
            yield f"{pod.owner}: num-gpus is not its limit of {gpus}"
        if int(pod.start.get("num-cpus", 0)) < gpus * settings.cluster.worker_threads:
            yield f"{pod.owner}: num-cpus does not hold a rank per GPU"
        if gpus < settings.parallel.tp:
            yield f"{pod.owner}: {gpus} GPUs do not hold the {settings.parallel.tp} ranks that belong on one node"
        has += pod.count * gpus
    if has != settings.parallel.dp * settings.parallel.tp:
        yield f"{settings.parallel.dp * settings.parallel.tp} ranks, and {has} GPUs in the Ray cluster"


def scaling(manifests: Manifests) -> Iterator[str]:
    """Autoscalers have a target, whose replicas no manifest sets back; one at most."""
    scalers = [*manifests.of_kind("HorizontalPodAutoscaler"), *manifests.of_kind("ScaledObject")]
    if len(scalers) > 1:
        yield "several autoscalers"
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        found = manifests.named(target["kind"], target["name"])
        if found is None:
            yield f"{one['kind']}: its target {target['kind']}/{target['name']} is not there"
        elif "replicas" in found["spec"]:
            yield f"{one['kind']}: every apply would set the replicas of its target back"


def monitoring(manifests: Manifests) -> Iterator[str]:
    """ServiceMonitors find a Service and its port."""
    for one in manifests.of_kind("ServiceMonitor"):
        spec = one["spec"]
        found = [
            service
            for service in manifests.of_kind("Service")
            if matches(spec["selector"], service["metadata"].get("labels", {}))
        ]
        for endpoint in spec["endpoints"]:
            names = [port["name"] for service in found for port in service["spec"]["ports"]]
            if endpoint["port"] not in names:
                yield f"ServiceMonitor/{one['metadata']['name']}: no Service has the port {endpoint['port']}"
        if not all(service["metadata"]["name"].startswith("outrider") for service in found):
            yield "alerts go by jobs whose name begins with outrider"


def places(manifests: Manifests) -> Iterator[str]:
    """All in one namespace, which is there."""
    names = {one["metadata"]["name"] for one in manifests.of_kind("Namespace")}
    for one in manifests.objects:
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") not in names:
            yield f"{one['kind']}/{one['metadata']['name']}: is in no namespace of these"
    accounts = {one["metadata"]["name"] for one in manifests.of_kind("ServiceAccount")}
    for pod in manifests.pods:
        if pod.spec.get("serviceAccountName") not in accounts:
            yield f"{pod.owner}: its service account is not there"
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.owner}: variables OUTRIDER_* of Services would be taken for ours"


RULES = (selectors, services, network, ray_cluster, scaling, monitoring, places)
