"""Where one policy overtakes another as load rises."""

from __future__ import annotations

import pytest

from runtime.bench.crossovers import Crossover, crossovers, fastest


def test_the_fastest_changes_where_straight_lines_between_neighbours_meet():
    speeds = {"off": [1.0, 2.0, 4.0], "fixed:4": [3.0, 3.0, 3.0]}
    assert fastest(speeds) == ["fixed:4", "fixed:4", "off"]
    assert crossovers([0.0, 1.0, 3.0], speeds) == [Crossover(pytest.approx(2.0), before="fixed:4", after="off")]


def test_of_equals_the_first_stays_and_one_alone_overtakes_nobody():
    assert crossovers([0.0, 1.0], {"a": [1.0, 1.0], "b": [1.0, 1.0]}) == []
    assert crossovers([0.0, 1.0], {"a": [1.0, 1.0]}) == []
    assert crossovers([], {}) == []
    assert crossovers([0.0, 1.0], {"a": [1.0, 1.0], "b": [1.0, 2.0]}) == [Crossover(0.0, before="a", after="b")]
