"""The manifests of deploy/kubernetes as kubectl renders them, and what they say of pods. Knows no rule.

A RayCluster stands for the pods that KubeRay makes of it; what of their labels only the operator knows is added here.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import typer
import yaml
from typer.main import get_command

from configs.load import demo_checkpoint, load_settings, parse_assignment
from configs.schema import ServeSettings
from runtime.cli.main import app

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
OVERLAYS = tuple(sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml")))

BAD_USAGE = (click.UsageError, *typer.BadParameter.__bases__, typer.Exit, SystemExit)
"""What a command raises that does not take its arguments: Ray's commands are click's, ours those of typer, which has a
click of its own."""

Object = dict[str, Any]


@functools.cache
def rendered_text(overlay: str) -> str:
    """YAML of an overlay; `gpu-node+autoscale-keda` is gpu-node with that component in place of the other scaler."""
    base, _, component = overlay.partition("+")
    if not component:
        return _kustomize(KUBERNETES / "overlays" / base)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "kubernetes"
        shutil.copytree(KUBERNETES, tree)
        path = tree / "overlays" / base / "kustomization.yaml"
        path.write_text(path.read_text().replace("components/autoscale-hpa", f"components/{component}"))
        return _kustomize(path.parent)


def _kustomize(folder: Path) -> str:
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects_of(overlay: str) -> list[Object]:
    """The objects, a copy that may be changed."""
    return [one for one in yaml.load_all(rendered_text(overlay), Loader=yaml.CSafeLoader) if one]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A template of pods. owner: kind/name[/group]. count: pods that there are of it; start: `ray start` parameters of
    a Ray group; head: whether it is Ray's head."""

    owner: str
    labels: Mapping[str, str]
    spec: Object
    claims: Mapping[str, Object]
    count: int
    start: Mapping[str, str] | None = None
    is_head: bool = False

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, Object]:
        named = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        return named | {name: {"name": name, "persistentVolumeClaim": claim} for name, claim in self.claims.items()}


class Manifests:
    """The objects of one overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.pods = list(_pods(objects))
        self._servers: list[tuple[Pod, Object, ServeSettings]] | None = None

    def of_kind(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def named(self, kind: str, name: str) -> Object | None:
        return next((one for one in self.of_kind(kind) if one["metadata"]["name"] == name), None)

    def selected(self, selector: Object) -> list[Pod]:
        """Pods that a label selector (matchLabels, matchExpressions) means; all of them by an empty one."""
        return [pod for pod in self.pods if matches(selector, pod.labels)]

    def servers(self) -> list[tuple[Pod, Object, ServeSettings]]:
        """Every container that runs `outrider serve`, and the settings that it gets; without those whose command line
        cannot be read."""
        if self._servers is None:
            self._servers = list(self._find_servers())
        return self._servers

    def _find_servers(self) -> Iterator[tuple[Pod, Object, ServeSettings]]:
        for pod in self.pods:
            for container in pod.containers:
                line = [*container.get("command", []), *container.get("args", [])]
                if line[:2] == ["outrider", "serve"]:
                    with contextlib.suppress(*BAD_USAGE):
                        yield pod, container, self._settings(pod, container, parsed(line)[1])

    def _settings(self, pod: Pod, container: Object, context: click.Context) -> ServeSettings:
        """As the server reads them, but for the checkpoint, which is not here: its path is as it was given."""
        overrides = dict(parse_assignment(text) for text in context.params["assignments"] or ())
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            given: Object = {}
            for file, text in self.files_at(pod, container, context.params["config"]).items():
                (folder / file).write_text(text)
                if file.endswith(".yaml"):
                    given |= yaml.safe_load(text).get("model") or {}
            settings = load_settings(folder, {**overrides, "model.path": str(demo_checkpoint())})
        path = Path(given["path"]) if "path" in given else None
        return settings.model_copy(update={"model": settings.model.model_copy(update={"path": path})})

    def files_at(self, pod: Pod, container: Object, path: str) -> dict[str, str]:
        """What the ConfigMaps mounted at a path put there."""
        files: dict[str, str] = {}
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] != path:
                continue
            volume = pod.volumes[mount["name"]]
            maps = [volume["configMap"]] if "configMap" in volume else []
            maps += [one["configMap"] for one in volume.get("projected", {}).get("sources", []) if "configMap" in one]
            for one in maps:
                files |= (self.named("ConfigMap", one["name"]) or {}).get("data", {})
        return files


def parsed(argv: list[str]) -> tuple[str, click.Context]:
    """A command line of ours as the command itself takes it. Raises click.UsageError where it does not."""
    assert argv[0] == "outrider", argv
    root = _our_commands()
    with root.make_context("outrider", list(argv[1:])) as context:
        name, command, rest = root.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        return str(name), command.make_context(name, rest, parent=context)


@functools.cache
def _our_commands() -> Any:
    return get_command(app)


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions), "only In is used here"
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def _pods(objects: list[Object]) -> Iterator[Pod]:
    for one in objects:
        name, spec = f"{one['kind']}/{one['metadata']['name']}", one.get("spec", {})
        if one["kind"] in ("StatefulSet", "Deployment", "Job"):
            claims = {claim["metadata"]["name"]: claim["spec"] for claim in spec.get("volumeClaimTemplates", [])}
            template = spec["template"]
            yield Pod(
                owner=name,
                labels=template["metadata"]["labels"],
                spec=template["spec"],
                claims=claims,
                count=spec.get("replicas", 1),
            )
        elif one["kind"] == "RayCluster":
            head = spec["headGroupSpec"]
            yield _ray_pod(one, head, "headgroup", 1, is_head=True)
            for group in spec["workerGroupSpecs"]:
                yield _ray_pod(one, group, group["groupName"], group["replicas"], is_head=False)


def _ray_pod(cluster: Object, group: Object, name: str, count: int, *, is_head: bool) -> Pod:
    own = {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head" if is_head else "worker",
        "ray.io/group": name,
    }
    return Pod(
        owner=f"RayCluster/{cluster['metadata']['name']}/{name}",
        labels={**group["template"]["metadata"]["labels"], **own},
        spec=group["template"]["spec"],
        claims={},
        count=count,
        start=group["rayStartParams"],
        is_head=is_head,
    )
