"""Routing: load, prefixes, ties, and what is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduler.routing import PrefixRouter

PREFIX = tuple(range(100, 112))
"""Three blocks."""


def router(num_ranks: int = 3, capacity: int = 8) -> PrefixRouter:
    return PrefixRouter(num_ranks, block_size=4, capacity=capacity)


def test_strangers_go_where_least_is_outstanding_and_then_to_the_lowest_rank() -> None:
    assert router().route((1, 2, 3, 4), {0: 9, 1: 5, 2: 6}) == 1
    assert router().route((1, 2, 3, 4), {2: 5, 1: 5, 0: 9}) == 1


def test_a_known_prefix_outweighs_as_many_outstanding_tokens() -> None:
    """12 tokens of prefix on rank 0, which has 11, 12 and 13 more before it; of equals the less loaded is taken."""
    for lead, chosen in ((11, 0), (12, 1), (13, 1)):
        one = router(2)
        assert one.route(PREFIX, {0: 0, 1: 0}) == 0
        assert one.route((*PREFIX, 7), {0: 20 + lead, 1: 20}) == chosen


def test_only_the_shared_start_counts() -> None:
    """The second prompt has the blocks of the first behind another one; the third shares two of three."""
    one = router(2)
    assert one.route(PREFIX, {0: 0, 1: 0}) == 0
    assert one.route((1, 2, 3, 4, *PREFIX), {0: 1, 1: 0}) == 1
    assert one.route((*PREFIX[:8], 1, 2, 3, 4), {0: 7, 1: 0}) == 0
    assert one.route((*PREFIX[:8], 1, 2, 3, 5), {0: 8, 1: 0}) == 1


def test_ranks_without_room_are_not_chosen_whatever_they_know() -> None:
    one = router(2)
    assert one.route(PREFIX, {0: 0, 1: 0}) == 0
    assert one.route(PREFIX, {1: 99}) == 1
    # Both know it now.
    assert one.route(PREFIX, {0: 1, 1: 0}) == 1


OTHER = tuple(range(200, 212))
THIRD = tuple(range(300, 312))


def test_ends_of_prompts_are_forgotten_before_their_starts() -> None:
    """Of six blocks four are kept: those of the newest prompt, and the first one of the prompt before it."""
    for load, chosen in ((3, 0), (4, 1)):
        one = router(2, capacity=4)
        assert [one.route(prompt, {0: 0, 1: 99}) for prompt in (PREFIX, OTHER)] == [0, 0]
        assert one.route(PREFIX, {0: load, 1: 0}) == chosen
    assert one.route(OTHER, {0: 11, 1: 0}) == 0


def test_prompts_not_seen_for_long_are_forgotten() -> None:
    for prompt, chosen in ((PREFIX, 0), (OTHER, 1), (THIRD, 0)):
        one = router(2, capacity=6)
        assert [one.route(each, {0: 0, 1: 99}) for each in (PREFIX, OTHER, PREFIX, THIRD)] == [0] * 4
        assert one.route(prompt, {0: 11, 1: 0}) == chosen


def test_of_a_prompt_longer_than_the_memory_the_start_is_kept() -> None:
    one = router(2, capacity=2)
    assert one.route(PREFIX, {0: 0, 1: 0}) == 0
    assert one.route(PREFIX, {0: 7, 1: 0}) == 0
    assert router(2, capacity=2).route(PREFIX, {0: 7, 1: 0}) == 1


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=20).map(tuple), max_size=20),
    loads=st.lists(st.dictionaries(st.integers(0, 2), st.integers(0, 30), min_size=1), min_size=20, max_size=20),
)
def test_the_choice_is_one_of_those_offered_the_same_again_and_the_best_by_hand(
    prompts: list[tuple[int, ...]], loads: list[dict[int, int]]
) -> None:
    """With a memory that forgets nothing, the score is the longest common start, in whole blocks, less the load."""
    one, again = router(capacity=1000), router(capacity=1000)
    seen: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    for prompt, load in zip(prompts, loads, strict=False):

        def score(rank: int, prompt: tuple[int, ...] = prompt, load: dict[int, int] = load) -> tuple[int, int, int]:
            lengths = [len(prompt) // 4 * 4 >= n and n for n in range(0, len(prompt) + 1, 4)]
            shared = max(n for n in lengths if n == 0 or any(old[:n] == prompt[:n] for old in seen[rank]))
            return (shared - load[rank], -load[rank], -rank)

        chosen = one.route(prompt, load)
        assert chosen == again.route(prompt, dict(reversed(load.items()))) == max(load, key=score)
        seen[chosen].append(prompt)
