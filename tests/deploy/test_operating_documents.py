"""What the documents tell operators: figures that the product's arithmetic confirms, commands, alerts."""

from __future__ import annotations

import functools
import re
import shlex

import pytest
import yaml
from oracles.days import by_day, on_turn
from oracles.manifests import BAD_USAGE, KUBERNETES, OVERLAYS, ROOT, Manifests, objects_of, parsed
from oracles.sizing import Sizes, sizes_of

from configs.load import demo_checkpoint
from configs.schema import ServeSettings
from state.accounting import _bytes, accounting_rows
from state.pages import num_pages_for, num_reserved_tokens

DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
PUBLISHED = ROOT / "tests" / "data" / "qwen3-next-80b"
MODELS = {
    "cpu-demo": (demo_checkpoint(), "float32"),
    "gpu-node": (PUBLISHED, "bfloat16"),
    "gpu-cluster": (PUBLISHED, "bfloat16"),
}


def settings_of(overlay: str) -> ServeSettings:
    ((_, _, settings),) = Manifests(objects_of(overlay)).servers()
    return settings


@functools.cache
def sizes(overlay: str) -> Sizes:
    folder, dtype = MODELS[overlay]
    return sizes_of(folder, settings_of(overlay), dtype)


def column(settings: ServeSettings, found: Sizes) -> list[str]:
    """A column of the table of sizes."""
    parallel, memory, layout = settings.parallel, found.memory, found.layout
    longest = settings.cache.max_model_len or 4096
    model = found.total_parameters
    return [
        f"dp {parallel.dp}, tp {parallel.tp}, ep {parallel.ep}",
        f"{model / 1e6:.2f} M" if model < 1e9 else f"{model / 1e9:.1f} G",
        _bytes(found.parameter_bytes),
        ", ".join(_bytes(layout.kv_bytes_per_token(group)) for group in layout.cache_groups),
        _bytes(memory.slot.state),
        _bytes(memory.slot.total),
        _bytes(memory.record_bytes),
        _bytes(memory.budget_bytes),
        str(memory.sizes.num_slots),
        str(memory.sizes.num_pages[0]),
        f"{memory.num_sequences_of(longest)[0]} of {longest}",
    ]


@pytest.mark.parametrize("overlay", by_day({name: name for name in MODELS}))
def test_the_sizes_of_a_deployment_are_those_that_the_product_computes(overlay):
    table = DOCUMENT.partition("<!-- sizes: a test computes them -->\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    names = [cell.strip("`") for cell in rows[0][1:]]
    assert names == list(MODELS)
    index = 1 + names.index(overlay)
    assert [row[index] for row in rows[2:]] == column(settings_of(overlay), sizes(overlay))


@on_turn(0, of=4)
def test_what_the_text_says_of_one_sequence_is_so():
    memory = sizes("gpu-node").memory
    page, slot = sum(memory.page_bytes), memory.slot.total
    pages = memory.pages_per_longest * page
    share = f"{100 * pages / (pages + slot):.0f} %"
    assert f"{memory.pages_per_longest} pages of {_bytes(page)} and a slot: " in DOCUMENT
    assert f"a slot: {(pages + slot) / 2**20:.0f} MiB, of which {share} is KV" in DOCUMENT
    short = num_pages_for(num_reserved_tokens(512, memory.sizes.gamma_max), memory.sizes.page_size) * page + slot
    assert f"one of 512 tokens, {short / 2**20:.0f} MiB" in DOCUMENT
    assert 0.7 < (memory.slot.state + memory.slot.draft_laws) / short < 0.8
    rank = sizes("gpu-node").parameter_bytes + memory.budget_bytes
    assert f"takes {rank / 2**30:.0f} GiB of an 80 GB GPU" in DOCUMENT


def test_the_sum_of_throughput_is_right():
    alpha, gamma = 0.9, 3
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert f"32 · {expected:.2f} / 0.2817 = {32 * expected / 0.2817:.0f}" in DOCUMENT


@pytest.mark.parametrize("overlay", by_day({name: name for name in MODELS}))
def test_the_example_model_fits_its_machine(overlay):
    settings, found = settings_of(overlay), sizes(overlay)
    assert found.parameter_bytes + found.memory.budget_bytes < 0.8 * 80e9
    longest, running = settings.cache.max_model_len or 4096, settings.cache.max_running
    rows = accounting_rows(found.layout, found.memory, max_model_len=longest, max_running=running)
    assert [what for what, _ in rows if "warning" in what] == []


def commands() -> list[str]:
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(outrider [a-z][^`]*)`", DOCUMENT + runbook())
    return [line.removeprefix("$ ").split("   #")[0] for line in lines] + inline


def runbook() -> str:
    text = (ROOT / "docs" / "operations.md").read_text()
    return "".join(re.findall(r"^### Outrider\w+\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))


def test_commands_of_ours_are_such_as_there_are():
    ours = [line for line in commands() if line.startswith("outrider ")]
    assert len(ours) > 12
    stand_ins = {"FOLDER": "demo", "N": "4", "...": "127.0.0.1:50053", "ID": "x"}
    for line in ours:
        words = [stand_ins.get(word, word) for word in shlex.split(line)]
        try:
            _, context = parsed(words)
            if rest := [*context._protected_args, *context.args]:
                assert rest[0] in context.command.commands, line
        except BAD_USAGE as error:
            pytest.fail(f"{line}: {error}")


def test_files_and_objects_that_commands_name_are_there():
    names = {(one["kind"].lower(), one["metadata"]["name"]) for overlay in OVERLAYS for one in objects_of(overlay)}
    for line in commands():
        if not line.startswith("kubectl"):
            continue
        for path in re.findall(r"deploy/[\w./-]+", line):
            assert (ROOT / path).exists(), line
        for kind, name in re.findall(r"\b(statefulset|service|raycluster)/([\w-]+)", line):
            assert (kind, name) in names, line


def test_replicas_are_called_by_names_that_they_have():
    # A pod has a name of its own in the Service of its StatefulSet alone, and operators reach one port alone.
    ((front, _, settings),) = Manifests(objects_of("cpu-demo")).servers()
    (owner,) = Manifests(objects_of("cpu-demo")).of_kind("StatefulSet")
    assert front.owner == f"StatefulSet/{owner['metadata']['name']}"
    found = re.findall(r"--address outrider-\d\.([\w-]+)\.outrider\.svc:(\d+)", DOCUMENT)
    assert set(found) == {(owner["spec"]["serviceName"], str(settings.operator.port))}


def test_every_alert_has_a_section_that_says_what_to_do():
    text = (ROOT / "docs" / "operations.md").read_text()
    rules = yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    sections = re.findall(r"^### (Outrider\w+)\n\n(.+)$", text, re.MULTILINE)
    assert [name for name, _ in sections] == alerts
    assert [name for name, body in sections if len(body) < 100] == []


def test_secrets_that_manifests_refer_to_are_explained():
    found: set[str] = set()
    for overlay in OVERLAYS:
        for pod in Manifests(objects_of(overlay)).pods:
            found |= {volume["secret"]["secretName"] for volume in pod.volumes.values() if "secret" in volume}
            for container in pod.containers:
                sources = [variable.get("valueFrom", {}) for variable in container.get("env", [])]
                found |= {source["secretKeyRef"]["name"] for source in sources if "secretKeyRef" in source}
    examples = (KUBERNETES / "examples" / "certificates.yaml").read_text()
    assert found == {"outrider-tls", "outrider-identities", "outrider-worker-tls", "outrider-ray-token"}
    assert [name for name in found if name not in DOCUMENT + examples] == []
