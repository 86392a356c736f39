"""What a rank says of a constraint that it is to make ready: nothing, or why it cannot be followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import demo_checkpoint
from workers.constraints.compiler import Compiler
from workers.demands import Constraint
from workers.step import Worker

GOOD = Constraint(kind="regex", text="[a-z]{1,8}")


def rank(compiler: Compiler | None) -> Worker:
    """As much of one as is asked. None: one that does not decide."""
    pools = SimpleNamespace(sizes=SimpleNamespace(num_slots=1))
    processing = None if compiler is None else SimpleNamespace(compiler=compiler)
    return Worker(SimpleNamespace(description=None, pools=pools, processing=processing))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(demo_checkpoint() / "tokenizer.json", 4096, (0,))


def test_a_rank_that_decides_has_it_ready_then(compiler: Compiler) -> None:
    assert rank(compiler).prepare(GOOD) == ""
    assert compiler.is_ready(GOOD)


@pytest.mark.parametrize(
    "bad",
    [
        Constraint(kind="regex", text="(a"),
        Constraint(kind="lark", text="start: nowhere"),
        Constraint(kind="json_schema", text='{"type": "nothing"}'),
        Constraint(kind="json_schema", text="{"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_followed_has_a_reason(compiler: Compiler, bad: Constraint) -> None:
    assert rank(compiler).prepare(bad) != ""
    assert rank(compiler).prepare(GOOD) == ""


def test_a_rank_that_does_not_decide_has_nothing_to_do() -> None:
    assert rank(None).prepare(GOOD) == rank(None).prepare(Constraint(kind="regex", text="(a")) == ""


def test_a_checkpoint_without_a_tokenizer_follows_none_and_says_so(tmp_path: Path) -> None:
    assert "tokenizer.json" in rank(Compiler(tmp_path / "tokenizer.json", 4096, (0,))).prepare(GOOD)
