"""Deployments shared by the whole-house tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flow.house import House, open_house


@pytest.fixture(scope="session")
def reference_house() -> Iterator[House]:
    with open_house(model__numerics="reference", metrics__port=0) as house:
        yield house


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    with open_house(speculation__allow_typical=True) as house:
        yield house
