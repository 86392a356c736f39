"""What must hold of every pod of a deployment: rules that read rendered manifests and say in words what breaks them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from oracles.manifests import BAD_USAGE, Manifests, Object, Pod, parsed

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
SUFFIXES = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
LIVENESS, READINESS = "", "outrider.v1.InferenceService"
END_S = 10
"""What ending the ranks may take after the last stream."""


def amount(text: str | int) -> float:
    """A Kubernetes quantity as a number."""
    number, suffix = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * SUFFIXES[suffix]


def security(manifests: Manifests) -> Iterator[str]:
    """What the pod security standard `restricted` asks, and a read-only root file system and no API token beside it."""
    namespaces = manifests.of_kind("Namespace")
    if [one["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") for one in namespaces] != ["restricted"]:
        yield "the namespace does not enforce the standard restricted"
    for pod in manifests.pods:
        own = pod.spec.get("securityContext", {})
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.owner}: a token of the API is mounted"
        if own.get("runAsNonRoot") is not True or not own.get("runAsUser") or not own.get("fsGroup"):
            yield f"{pod.owner}: may run as root"
        if own.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.owner}: seccompProfile"
        if any(pod.spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{pod.owner}: shares a namespace of its host"
        if any("hostPath" in volume for volume in pod.volumes.values()):
            yield f"{pod.owner}: mounts a path of its host"
        for container in pod.containers:
            context = container.get("securityContext", {})
            if context.get("allowPrivilegeEscalation") is not False:
                yield f"{pod.owner}/{container['name']}: allowPrivilegeEscalation"
            if context.get("readOnlyRootFilesystem") is not True:
                yield f"{pod.owner}/{container['name']}: readOnlyRootFilesystem"
            if context.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{pod.owner}/{container['name']}: capabilities"


def resources(manifests: Manifests) -> Iterator[str]:
    """Requests and limits of every container; whole GPUs; shared memory within the memory limit."""
    for pod in manifests.pods:
        for container in pod.containers:
            where = f"{pod.owner}/{container['name']}"
            given = container.get("resources", {})
            requests, limits = given.get("requests", {}), given.get("limits", {})
            for name in ("cpu", "memory", "ephemeral-storage"):
                if name not in requests or name not in limits:
                    yield f"{where}: no request or no limit of {name}"
                elif amount(requests[name]) > amount(limits[name]):
                    yield f"{where}: requests more {name} than its limit"
            if requests.get("nvidia.com/gpu") != limits.get("nvidia.com/gpu"):
                yield f"{where}: GPUs requested and limited differ"
            shm = _volume_at(pod, container, "/dev/shm").get("emptyDir", {})
            if amount(shm.get("sizeLimit", 0)) >= amount(limits.get("memory", 0)):
                yield f"{where}: /dev/shm may take all of the memory limit"
            if not re.search(r":[\w.-]+$", container["image"]) or container["image"].endswith(":latest"):
                yield f"{where}: image {container['image']} is not pinned to a version"
    if len({container["image"] for pod in manifests.pods for container in pod.containers}) > 1:
        yield "containers of one deployment have different images"


def volumes(manifests: Manifests) -> Iterator[str]:
    """Every mount has a volume and every volume a mount; what they refer to is there, or is a known Secret."""
    for pod in manifests.pods:
        mounted: set[str] = set()
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            paths = [mount["mountPath"] for mount in mounts]
            if len(set(paths)) < len(paths):
                yield f"{pod.owner}/{container['name']}: two volumes are mounted at one path"
            for mount in mounts:
                mounted.add(mount["name"])
                if mount["name"] not in pod.volumes:
                    yield f"{pod.owner}/{container['name']}: mounts {mount['name']}, which is no volume"
                if "subPath" in mount:
                    yield f"{pod.owner}/{container['name']}: {mount['name']} by subPath never changes"
        for name, volume in pod.volumes.items():
            if name not in mounted:
                yield f"{pod.owner}: nothing mounts {name}"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{pod.owner}: {name} has no sizeLimit"
            yield from _missing(manifests, pod, volume)


def _missing(manifests: Manifests, pod: Pod, volume: Object) -> Iterator[str]:
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim and not manifests.named("PersistentVolumeClaim", claim):
        yield f"{pod.owner}: there is no claim {claim}"
    maps = [volume["configMap"]] if "configMap" in volume else []
    maps += [one["configMap"] for one in volume.get("projected", {}).get("sources", []) if "configMap" in one]
    for one in maps:
        if not manifests.named("ConfigMap", one["name"]):
            yield f"{pod.owner}: there is no ConfigMap {one['name']}"


def written_paths(manifests: Manifests) -> Iterator[str]:
    """Under a read-only root, whatever is written has a volume: /tmp, /dev/shm, homes and caches, and the state, which
    outlives its pod. What is only read is mounted so."""
    for pod in manifests.pods:
        for container in pod.containers:
            where = f"{pod.owner}/{container['name']}"
            paths = {"/tmp", "/dev/shm"}
            paths |= {
                variable["value"]
                for variable in container.get("env", [])
                if re.search(r"^HOME$|CACHE", variable["name"]) and "value" in variable
            }
            for path in sorted(paths):
                if "emptyDir" not in _volume_at(pod, container, path, writable=True):
                    yield f"{where}: {path} cannot be written"
            if _volume_at(pod, container, "/dev/shm").get("emptyDir", {}).get("medium") != "Memory":
                yield f"{where}: /dev/shm is not memory"
            if not any(variable["name"] == "HOME" for variable in container.get("env", [])):
                yield f"{where}: HOME is on the read-only root"
    for pod, container, settings in manifests.servers():
        where = f"{pod.owner}/{container['name']}"
        if "persistentVolumeClaim" not in _volume_at(pod, container, str(settings.state_dir), writable=True):
            yield f"{where}: state_dir {settings.state_dir} does not outlive its pod"
        readers = [(pod, container)]
        if settings.cluster.launcher == "ray" and settings.cluster.ray_address:
            readers += [(ray, ray.spec["containers"][0]) for ray in manifests.pods if ray.start and not ray.is_head]
        for reader, reading in readers:
            model = settings.model.path
            if model and not _volume_at(reader, reading, str(model), writable=False):
                yield f"{reader.owner}/{reading['name']}: {model} is not mounted read-only"
            tls = settings.cluster.tls
            for path in (tls.certificate, tls.key, tls.ca):
                if path and "secret" not in _volume_at(reader, reading, str(path)):
                    yield f"{reader.owner}/{reading['name']}: {path} is of no Secret"
        own = settings.server.tls
        for path in (own.certificate, own.key, own.client_ca, settings.access.identities):
            if path and "secret" not in _volume_at(pod, container, str(path)):
                yield f"{where}: {path} is of no Secret"


def _volume_at(pod: Pod, container: Object, path: str, *, writable: bool | None = None) -> Object:
    """The volume that holds a path of a container; empty where it is on the root, or not as wanted."""
    wanted = PurePosixPath(path)
    best: Object = {}
    for mount in container.get("volumeMounts", []):
        at = PurePosixPath(mount["mountPath"])
        if wanted.is_relative_to(at) and len(at.parts) >= len(PurePosixPath(best.get("mountPath", "/")).parts):
            best = mount
    if not best or (writable is not None and bool(best.get("readOnly")) is writable):
        return {}
    return pod.volumes.get(best["name"], {})


def commands(manifests: Manifests) -> Iterator[str]:
    """Every command line is one that the command takes, and every variable of ours one that it reads."""
    from ray.scripts.scripts import cli

    for pod in manifests.pods:
        for container in pod.containers:
            where = f"{pod.owner}/{container['name']}"
            lines = [[*container.get("command", []), *container.get("args", [])]]
            hooks = [container.get("lifecycle", {}).get("preStop", {}), *(container.get(name, {}) for name in PROBES)]
            lines += [hook["exec"]["command"] for hook in hooks if "exec" in hook]
            for line in filter(None, lines):
                try:
                    if line[0] == "ray":
                        cli.commands[line[1]].make_context(line[1], list(line[2:]))
                    else:
                        parsed(line)
                except (*BAD_USAGE, KeyError, AssertionError) as error:
                    yield f"{where}: {' '.join(line)}: {error}"
        known = {option for parameter in cli.commands["start"].params for option in parameter.opts}
        for name in pod.start or ():
            if f"--{name}" not in known:
                yield f"{pod.owner}: `ray start` has no --{name}"


def probes(manifests: Manifests) -> Iterator[str]:
    """Ports of probes are the containers'; what the three ask; a start may take what the settings allow it."""
    for pod in manifests.pods:
        for container in pod.containers:
            ports = {port["containerPort"] for port in container.get("ports", [])}
            for name in PROBES:
                probe = container.get(name)
                if probe is None:
                    if not (name == "readinessProbe" and container.get("restartPolicy") == "Always"):
                        yield f"{pod.owner}/{container['name']}: no {name}"
                elif _asked(probe)[0] not in ports:
                    yield f"{pod.owner}/{container['name']}: {name} asks port {_asked(probe)[0]}, which is none of its"
    for pod, container, settings in manifests.servers():
        where = f"{pod.owner}/{container['name']}"
        wanted = {"startupProbe": READINESS, "readinessProbe": READINESS, "livenessProbe": LIVENESS}
        for name, service in wanted.items():
            if _asked(container.get(name, {})) != (settings.server.health_port, service):
                yield f"{where}: {name} does not ask {service or 'for the process'} on server.health_port"
        start = container.get("startupProbe", {})
        if start.get("periodSeconds", 10) * start.get("failureThreshold", 3) < settings.cluster.start_timeout_s + 60:
            yield f"{where}: startupProbe ends a start that cluster.start_timeout_s allows"
        live = container.get("livenessProbe", {})
        if live.get("periodSeconds", 10) * live.get("failureThreshold", 3) < 2 * settings.server.stall_s:
            yield f"{where}: livenessProbe is less patient than a busy moment"


def _asked(probe: Object) -> tuple[int, str]:
    """The port and the service that a probe asks."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    command = probe.get("exec", {}).get("command", [])
    if "--address" not in command:
        return 0, "?"
    port = int(command[command.index("--address") + 1].rpartition(":")[2])
    return port, command[command.index("--service") + 1] if "--service" in command else ""


def settings_fit(manifests: Manifests) -> Iterator[str]:
    """Ports of the settings are the containers'; the grace covers the drain; ranks have the GPUs they ask for."""
    if not manifests.servers():
        yield "no container runs `outrider serve`"
    for pod, container, settings in manifests.servers():
        where = f"{pod.owner}/{container['name']}"
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        wanted = {
            "grpc": settings.server.port,
            "operator": settings.operator.port,
            "metrics": settings.metrics.port,
            "health": settings.server.health_port,
        }
        if ports != wanted:
            yield f"{where}: listens on {wanted}, and its ports are {ports}"
        if settings.server.host != "0.0.0.0":
            yield f"{where}: server.host {settings.server.host} is out of the Service's reach"
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = sleep + settings.server.withdraw_s + settings.server.drain_s + END_S
        if pod.spec.get("terminationGracePeriodSeconds", 30) < needed:
            yield f"{where}: terminationGracePeriodSeconds is less than the {needed:g} s that an end takes"
        if settings.server.withdraw_s <= 0 or sleep <= 0:
            yield f"{where}: routers have no time to look elsewhere"
        size = settings.parallel.dp * settings.parallel.tp
        own = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        if settings.model.device == "cuda" and settings.cluster.launcher == "process" and own != size:
            yield f"{where}: {size} ranks on {own} GPUs"
        memory = amount(container["resources"].get("limits", {}).get("memory", 0))
        if settings.model.device != "cuda" and settings.cache.memory_mib * 2**20 * size > memory / 2:
            yield f"{where}: cache.memory_mib leaves too little of the memory limit"


SECRET = re.compile(
    r"-----BEGIN|\w*(?:password|passwd|secret|token|credential|api_?key)\b\"?\s*[:=]\s*\S", re.IGNORECASE
)


def secrets(manifests: Manifests) -> Iterator[str]:
    """None stands in a ConfigMap, a variable or an argument; what is secret is referred to."""
    for one in manifests.of_kind("ConfigMap"):
        for key, text in one.get("data", {}).items():
            if SECRET.search(text) or SECRET.search(f"{key}: {text}"):
                yield f"ConfigMap/{one['metadata']['name']}: {key} holds what looks like a secret"
    for one in manifests.of_kind("Secret"):
        yield f"Secret/{one['metadata']['name']} stands among the manifests"
    for pod in manifests.pods:
        for container in pod.containers:
            for variable in container.get("env", []):
                is_secret = re.search(r"TOKEN|PASSWORD|SECRET", variable["name"]) and not variable["name"].endswith(
                    "_FILE"
                )
                if is_secret and "secretKeyRef" not in variable.get("valueFrom", {}):
                    yield f"{pod.owner}/{container['name']}: {variable['name']} is of no Secret"
            if any(SECRET.search(text) for text in container.get("args", [])):
                yield f"{pod.owner}/{container['name']}: a secret in its arguments"


RULES = (security, resources, volumes, written_paths, commands, probes, settings_fit, secrets)
