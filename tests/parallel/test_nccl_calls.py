"""Our calls fit the NCCL backend of the installed torch, as far as its stubs tell on a machine without GPUs."""

from __future__ import annotations

import ast
import inspect
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d

from parallel import rendezvous

STUBS = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text())


def stub_class(*names: str) -> ast.ClassDef:
    node: ast.Module | ast.ClassDef = STUBS
    for name in names:
        node = next(child for child in node.body if isinstance(child, ast.ClassDef) and child.name == name)
    assert isinstance(node, ast.ClassDef)
    return node


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}


def test_the_constructor_takes_what_we_give() -> None:
    parameters = [argument.arg for argument in methods(stub_class("ProcessGroupNCCL"))["__init__"].args.args]
    assert parameters == ["self", "store", "rank", "size", "options"]
    assert "_timeout" in methods(stub_class("Backend", "Options"))

    made = []

    class Options:
        _timeout = timedelta()

    class ProcessGroupNCCL:
        def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
            made.append((store, rank, size, options._timeout))

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.c10d, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
        rendezvous._nccl("store", 1, 2, "127.0.0.1", timedelta(seconds=3))
    assert made == [("store", 1, 2, timedelta(seconds=3))]


def test_every_backend_has_the_collectives_we_call() -> None:
    """They are bound on the base class, which the NCCL backend inherits."""
    for name in ("allreduce", "_allgather_base", "gather", "broadcast", "alltoall_base"):
        assert inspect.isroutine(getattr(_distributed_c10d.Backend, name))
