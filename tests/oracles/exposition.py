"""The rules that Prometheus has for what a scrape says, and those for names, read off the text line by line.
Independent of the library that writes it.

https://prometheus.io/docs/instrumenting/exposition_formats/ and https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SUFFIXES = ("_bucket", "_sum", "_count")
ODD_UNITS = re.compile(
    r"_(ms|millis|milliseconds|us|micros|sec|secs|mins|minutes|hours|days|kb|mb|gb|kib|mib|gib|pct|percent)(_|$)"
)
KINDS_IN_NAMES = re.compile(r"_(gauge|counter|histogram|summary)(_|$)")

Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    help: str = ""
    kind: str = ""
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)


def problems_of(text: str, *, foreign: tuple[str, ...] = ("python_", "process_")) -> list[str]:
    """One line per rule that is broken. foreign: prefixes of names that are not ours to choose."""
    families, problems = _families(text)
    for name, family in families.items():
        problems += _form(name, family)
        if not name.startswith(foreign):
            problems += _naming(name, family)
        if family.kind == "histogram":
            problems += _buckets(name, family)
    return problems


def _families(text: str) -> tuple[dict[str, Family], list[str]]:
    families: dict[str, Family] = {}
    problems: list[str] = [] if text.endswith("\n") else ["the last line does not end"]
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, current, help_text = line.split(" ", 3)
            if current in families:
                problems.append(f"{current} has several HELP lines, or stands in several places")
            families[current] = Family(help=help_text)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name != current or families[name].kind or families[name].samples:
                problems.append(f"TYPE of {name} does not follow its HELP")
            families.setdefault(name, Family()).kind = kind
        elif (found := SAMPLE.fullmatch(line)) is None:
            problems.append(f"no sample: {line}")
        else:
            name, labels, value = found[1], found[2] or "", float(found[3])
            read = tuple((one[1], one[2]) for one in LABEL.finditer(labels))
            if sum(len(one[0]) for one in LABEL.finditer(labels)) != len(labels):
                problems.append(f"labels that cannot be read: {line}")
            if name != current and not (name.removesuffix("_created") == current or _stem(name) == current):
                problems.append(f"{name} stands among {current}")
            families.setdefault(current, Family()).samples.append((name, read, value))
    return families, problems


def _stem(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _form(name: str, family: Family) -> Iterator[str]:
    if not family.help.strip():
        yield f"{name} has no help"
    if family.kind not in ("counter", "gauge", "histogram", "summary", "untyped"):
        yield f"{name} is of no known type: {family.kind!r}"
    if family.kind == "histogram" and any(sample == name for sample, *_ in family.samples):
        yield f"{name} is no part of a histogram"
    seen = set()
    for sample, labels, _ in family.samples:
        if (sample, frozenset(labels)) in seen:
            yield f"{sample}{labels} stands twice"
        seen.add((sample, frozenset(labels)))
        names = [label for label, _ in labels]
        if len(set(names)) < len(names) or any(label.startswith("__") for label in names):
            yield f"{sample} has labels {names}"
    by_sample = defaultdict(set)
    for sample, labels, _ in family.samples:
        by_sample[sample].add(frozenset(label for label, _ in labels))
    if any(len(sets) > 1 for sets in by_sample.values()):
        yield f"{name} has samples with different labels"


def _naming(name: str, family: Family) -> Iterator[str]:
    if (family.kind == "counter") != name.endswith("_total"):
        yield f"{name} is a {family.kind}: names of counters and no others end in _total"
    if family.kind != "histogram" and name.endswith(SUFFIXES):
        yield f"{name} looks like a part of a histogram"
    if not re.fullmatch(r"(vllm:|[a-z]+_)[a-z][a-z0-9_]*[a-z0-9]", name) or "__" in name:
        yield f"{name} is not in small letters and single underscores"
    if ODD_UNITS.search(name):
        yield f"{name} is not in seconds, bytes or shares"
    if KINDS_IN_NAMES.search(name):
        yield f"{name} names its type"
    for _, labels, value in family.samples:
        if name.endswith("_info") and value != 1:
            yield f"{name} is {value}: one that only tells labels is 1"
        for label, _ in labels:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
                yield f"{name} has the label {label}"
            if label == "le" and family.kind != "histogram":
                yield f"{name} has the label of buckets"
    if re.search(r"\b(TODO|\$)", family.help) or not family.help.endswith("."):
        yield f"the help of {name} is no sentence: {family.help}"


def _buckets(name: str, family: Family) -> Iterator[str]:
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    others: dict[tuple[str, Labels], float] = {}
    for sample, labels, value in family.samples:
        rest = tuple(pair for pair in labels if pair[0] != "le")
        if sample == f"{name}_bucket":
            groups[rest].append((float(dict(labels)["le"]), value))
        else:
            others[sample, rest] = value
    for labels, group in groups.items():
        bounds, counts = [bound for bound, _ in group], [count for _, count in group]
        if bounds != sorted(set(bounds)) or bounds[-1] != math.inf:
            yield f"the bounds of {name}{labels} do not rise to +Inf: {bounds}"
        if counts != sorted(counts):
            yield f"the buckets of {name}{labels} are not cumulative: {counts}"
        count, total = others.get((f"{name}_count", labels)), others.get((f"{name}_sum", labels))
        if count != counts[-1]:
            yield f"{name}{labels} counts {count}, its last bucket {counts[-1]}"
        if total is None:
            yield f"{name}{labels} has no sum"
        elif not _sum_fits(total, bounds, counts):
            yield f"the sum of {name}{labels} is {total}, outside of what its buckets allow"


def _sum_fits(total: float, bounds: list[float], counts: list[float]) -> bool:
    """Each observation lies above the bound below its bucket and not above its own; none is negative."""
    below = 0.0
    lowest = highest = 0.0
    for bound, earlier, count in zip(bounds, [0.0, *counts], counts, strict=False):
        lowest += below * (count - earlier)
        highest += bound * (count - earlier) if count > earlier else 0.0
        below = bound
    return lowest * (1 - 1e-9) - 1e-9 <= total <= highest * (1 + 1e-9) + 1e-9
