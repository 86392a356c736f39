"""What manifests say by names of other parts: metrics that autoscalers go by, alerts, certificates, identities."""

from __future__ import annotations

from pathlib import Path

import yaml
from oracles.manifests import KUBERNETES, ROOT, Manifests, objects_of
from oracles.metric_names import KNOWN, selectors_of
from oracles.promql import read

from configs.load import load_settings
from runtime.access.identities_file import load_identities
from runtime.access.identity import Role

COMPONENTS = KUBERNETES / "components"


def test_the_rules_of_the_operator_are_those_of_prometheus():
    rules = yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yaml").read_text())
    copied = yaml.safe_load((COMPONENTS / "monitoring" / "alerts.yaml").read_text())
    assert copied["spec"] == rules, "copy the groups of deploy/observability/alerts.yaml, two columns further in"


def test_the_adapter_serves_what_the_autoscaler_asks_for():
    scaler = yaml.safe_load((COMPONENTS / "autoscale-hpa" / "autoscaler.yaml").read_text())
    adapter = yaml.safe_load((COMPONENTS / "autoscale-hpa" / "prometheus-adapter.yaml").read_text())
    served = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in adapter["rules"]["custom"]}
    assert {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]} == set(served)
    assert set(served.values()) <= set(KNOWN)


def test_keda_asks_for_figures_that_there_are_of_the_pods_it_scales():
    manifests = Manifests(objects_of("gpu-node+autoscale-keda"))
    (scaled,) = manifests.of_kind("ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        for selector in selectors_of(read(trigger["metadata"]["query"])):
            assert selector.name in KNOWN
            assert [tuple(one) for one in selector.matchers] == [("namespace", "=", scaled["metadata"]["namespace"])]


def test_both_autoscalers_go_by_the_same_limits():
    (hpa,) = Manifests(objects_of("gpu-node")).of_kind("HorizontalPodAutoscaler")
    (keda,) = Manifests(objects_of("gpu-node+autoscale-keda")).of_kind("ScaledObject")
    targets = [one["pods"]["target"]["averageValue"] for one in hpa["spec"]["metrics"]]
    assert [text.replace("800m", "0.8") for text in targets] == [
        one["metadata"]["threshold"] for one in keda["spec"]["triggers"]
    ]
    assert hpa["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"]
    assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_the_example_of_identities_is_taken_and_separates_roles():
    directory = load_identities(KUBERNETES / "examples" / "identities.yaml")
    assert directory.names == {"gateway", "batch", "on-call"}
    roles = {name: identity.roles for name in directory.names if (identity := directory.named(name))}
    assert roles["gateway"] == {Role.GENERATE}
    assert not any({Role.GENERATE, Role.OPERATE} <= of for of in roles.values())


def test_the_example_certificates_bear_the_names_that_are_used():
    documents = list(yaml.safe_load_all((KUBERNETES / "examples" / "certificates.yaml").read_text()))
    names = {
        one["spec"]["secretName"]: one["spec"].get("dnsNames", []) for one in documents if "secretName" in one["spec"]
    }
    ((_, _, settings),) = Manifests(objects_of("gpu-cluster-mtls")).servers()
    assert settings.cluster.tls.server_name in names["outrider-worker-tls"]
    known = yaml.safe_load((KUBERNETES / "examples" / "identities.yaml").read_text())["identities"]
    assert known[0]["certificate"] in names["outrider-gateway"]
    # Ports that ask for certificates are reached by nobody without one: operators, too, need theirs.
    assert settings.server.tls.client_ca
    operators = [one for one in known if "operate" in one["roles"]]
    assert operators
    assert all(one["certificate"] in names["outrider-on-call"] for one in operators)


def test_links_to_ranks_have_an_authority_that_signs_nothing_else():
    documents = list(yaml.safe_load_all((KUBERNETES / "examples" / "certificates.yaml").read_text()))
    issuers = {
        one["metadata"]["name"]: one["spec"]["issuerRef"]["name"] for one in documents if "secretName" in one["spec"]
    }
    own = issuers.pop("outrider-worker-tls")
    assert own not in issuers.values()
    assert {issuers[name] for name in ("outrider-tls", "outrider-gateway", "outrider-on-call")} == {"outrider-ca"}


def test_a_pod_that_has_not_begun_is_no_target():
    # Headless and with addresses that are not ready, the Service names pods whose image is still on its way.
    (monitor,) = Manifests(objects_of("gpu-node")).of_kind("ServiceMonitor")
    drops = [one for one in monitor["spec"]["endpoints"][0]["relabelings"] if one.get("action") == "drop"]
    assert [(one["sourceLabels"], one["regex"]) for one in drops] == [(["__meta_kubernetes_pod_phase"], "Pending")]


def test_a_changed_policy_alone_changes_what_a_server_reads(tmp_path: Path):
    # The folder that a pod reads, as its volume makes it: links into a folder that is exchanged as a whole.
    manifests = Manifests(objects_of("cpu-demo"))
    ((pod, container, before),) = manifests.servers()
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (tmp_path / "..data").symlink_to(data.name)
    for name, text in manifests.files_at(pod, container, "/etc/outrider").items():
        (data / name).write_text(text)
        (tmp_path / name).symlink_to(f"..data/{name}")
    (data / "policy.yaml").write_text("speculation: {policy: 'off', revision: 2}")
    after = load_settings(tmp_path, {})
    assert (after.speculation.policy, after.speculation.revision) == ("off", 2)
    assert (after.server, after.cluster) == (before.server, before.cluster)
