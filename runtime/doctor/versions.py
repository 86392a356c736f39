"""Whether Python and the packages are the ones that this product needs. Loads none of the large ones."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

from runtime.doctor.finding import Finding, failure, note, ok
from runtime.doctor.inquiry import Inquiry

DISTRIBUTION = "outrider"
STUBS = ("outrider.v1.inference_pb2_grpc", "outrider.v1.operator_pb2_grpc", "outrider.v1.worker_pb2_grpc")

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<bounds>[^;]*)(?:;\s*(?P<marker>.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[\w-]+)['"]""")
_BOUND = re.compile(r"(?P<sign>>=|<=|==|<|>)\s*(?P<version>[\w.]+)")


def check_python(inquiry: Inquiry, version: str = platform.python_version()) -> Iterator[Finding]:
    """version: of the interpreter; tests pass their own."""
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if _fits(version, wanted):
        yield ok(f"Python {version}")
    else:
        yield failure(f"Python is {version}, and {wanted} is needed", f"install Python {wanted} and this product in it")


def check_packages(
    inquiry: Inquiry,
    requirements: Sequence[str] | None = None,
    version_of: Callable[[str], str] = metadata.version,
) -> Iterator[Finding]:
    """Those that the product names, and those of an extra that the settings ask for.

    requirements: as in the product's metadata; tests pass their own.
    """
    wanted = {"otel"} if inquiry.settings.tracing.endpoint is not None else set()
    num_fine, absent = 0, set()
    for text in requirements if requirements is not None else metadata.requires(DISTRIBUTION) or ():
        name, bounds, extra = _parts_of(text)
        if extra not in (None, "smg", "otel"):
            continue
        try:
            found = version_of(name)
        except metadata.PackageNotFoundError:
            if extra is None or extra in wanted:
                whole = DISTRIBUTION if extra is None else f"{DISTRIBUTION}[{extra}]"
                yield failure(f"{name} is not installed", f"pip install '{whole}'")
            else:
                absent.add(extra)
            continue
        if _fits(found, bounds):
            num_fine += 1
        else:
            yield failure(f"{name} is {found}, and {bounds} is needed", f"pip install '{name}{bounds}'")
    yield ok(f"{num_fine} packages are there, in versions that fit")
    for extra in sorted(absent):
        face = "vllm.grpc.engine.VllmEngine is not served" if extra == "smg" else "nothing can be traced"
        yield note(f"the extra {extra} is not installed: {face}")


def check_stubs(inquiry: Inquiry) -> Iterator[Finding]:
    """Generated code refuses a gRPC or protobuf that is older than what made it."""
    for module in STUBS:
        try:
            importlib.import_module(module)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            yield failure(f"{module} cannot be loaded: {lines[0]}", "pip install --upgrade grpcio protobuf")
            return
    yield ok("grpcio and protobuf load the generated stubs")


def _parts_of(requirement: str) -> tuple[str, str, str | None]:
    """Name, bounds and extra of `name>=1,<2; extra == 'x'`."""
    match = _REQUIREMENT.match(requirement)
    assert match is not None
    extra = _EXTRA.search(match["marker"] or "")
    return match["name"], match["bounds"].strip(), extra["extra"] if extra else None


def _fits(version: str, bounds: str) -> bool:
    """By the numbers of releases; what follows them (a build, a pre-release) counts for nothing."""
    compare: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda ours, theirs: ours >= theirs,
        "<=": lambda ours, theirs: ours <= theirs,
        "==": lambda ours, theirs: ours == theirs,
        "<": lambda ours, theirs: ours < theirs,
        ">": lambda ours, theirs: ours > theirs,
    }
    return all(
        compare[bound["sign"]](_release(version), _release(bound["version"])) for bound in _BOUND.finditer(bounds)
    )


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return (*numbers, 0, 0, 0, 0)[:4]
