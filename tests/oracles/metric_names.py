"""Which metrics a scrape of a server has, and whether a query asks for such as there are. Knows no values."""

from __future__ import annotations

from oracles.promql import Aggregation, Binary, Call, Number, Query, Selector, parts

from runtime.telemetry import METRICS, HistogramRow

TARGET = ("job", "instance")
"""What a scraper adds."""

_PROCESS = ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds", "start_time_seconds")


def _known() -> dict[str, frozenset[str]]:
    """Names of samples, and their labels."""
    found = {f"process_{name}": frozenset(TARGET) for name in _PROCESS} | {"up": frozenset(TARGET)}
    for row in METRICS:
        labels = frozenset((*TARGET, "model_name", *row.labels, *(["engine"] if row.name.startswith("vllm:") else [])))
        if isinstance(row, HistogramRow):
            found |= {f"{row.name}_bucket": labels | {"le"}, f"{row.name}_sum": labels, f"{row.name}_count": labels}
        else:
            found[row.name] = labels
    return found


KNOWN = _known()
COUNTED = ("_total", "_bucket", "_sum", "_count")


def selectors_of(query: Query) -> list[Selector]:
    return [part for part in parts(query) if isinstance(part, Selector)]


def problems_of(query: Query) -> list[str]:
    """One line for everything that the query asks for and that is not there, or that makes no sense of it."""
    found = []
    for part in parts(query):
        match part:
            case Selector(name=name) if name not in KNOWN:
                found.append(f"there is no {name}")
            case Selector(name=name, matchers=matchers):
                found += [f"{name} has no label {label}" for label, *_ in matchers if label not in KNOWN[name]]
            case Call(function="rate" | "increase" as function, arguments=(Selector(name=name),)):
                if not name.endswith(COUNTED):
                    found.append(f"{function} of {name}, which is no counter")
            case Call(function="deriv", arguments=(Selector(name=name),)) if name.endswith(COUNTED):
                found.append(f"deriv of {name}, which is a counter")
            case Aggregation(by=by, arguments=(*_, inner), is_without=False):
                found += [f"grouped by {label}, which is not there" for label in by if label not in labels_of(inner)]
            case Binary(on=tuple() as on, left=left, right=right, is_ignoring=False):
                both = labels_of(left) & labels_of(right)
                found += [f"on {label}, which is not on both sides" for label in on if label not in both]
            case Call(function="histogram_quantile", arguments=(_, inner)) if "le" not in labels_of(inner):
                found.append("a quantile without the label le")
    return found


def labels_of(query: Query) -> frozenset[str]:
    """Those that the result may have."""
    match query:
        case Selector(name=name):
            return KNOWN.get(name, frozenset())
        case Call(function="absent" | "vector" | "time") | Number():
            return frozenset()
        case Call(function="histogram_quantile", arguments=(_, inner)):
            return labels_of(inner) - {"le"}
        case Call(arguments=(inner, *_)):
            return labels_of(inner)
        case Aggregation(function="topk", arguments=(_, inner)):
            return labels_of(inner)
        case Aggregation(by=by, arguments=(inner,), is_without=is_without):
            return labels_of(inner) - set(by) if is_without else frozenset(by)
        case Binary(left=left, right=right, operator=operator):
            if isinstance(left, Number):
                return labels_of(right)
            return labels_of(left) | labels_of(right) if operator == "or" else labels_of(left)
    raise AssertionError(query)
