"""Errors on their way from a rank to the runtime: those of the contract keep their kind, and every text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import wire
from workers.plan import CollectiveFailed, LoadError, RanksDisagree, StalePlan


@pytest.mark.parametrize("kind", [StalePlan, LoadError, CollectiveFailed, RanksDisagree])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_errors_of_the_contract_keep_their_kind_and_text(kind: type[Exception], text: str) -> None:
    error = wire.error_from_text(wire.error_to_text(kind(text)))
    assert type(error) is kind
    assert str(error) == text


def test_a_text_that_utf8_cannot_hold_still_arrives() -> None:
    assert str(wire.error_from_text(wire.error_to_text(LoadError("file \udcff")))) == "file \\udcff"
