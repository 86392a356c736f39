"""Who owns which KV page: a free list and reference counts over page numbers. Knows no tensors, layers or requests."""

from __future__ import annotations

from collections.abc import Sequence

NULL_PAGE = 0
"""Padding rows read and write here. It belongs to no sequence and is never handed out."""


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def num_pages_together(num_tokens: int, page_size: int, *, count: int, num_shared: int) -> int:
    """Pages that `count` sequences of `num_tokens` tokens each hold together.

    num_shared: the first tokens, which all have in common; of these, full pages are held by all.
    """
    num_each = num_pages_for(num_tokens, page_size)
    return num_each + (count - 1) * (num_each - num_shared // page_size)


def num_reserved_tokens(num_tokens: int, gamma_max: int) -> int:
    """KV entries a sequence of at most `num_tokens` tokens (prompt + output) may ever write.

    A verify pass writes beyond the committed length: up to γ_max rejected drafts and the row of the newest token.
    """
    return num_tokens + gamma_max + 1


class PagePool:
    """Allocates pages 1 .. num_pages of one cache group. Page 0 is the null page and is not counted.

    A page is free, or it is held by one owner or more; `share` adds an owner, `release` drops one. Giving back what
    one does not hold is a bug of the caller and fails an assertion.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a page pool needs at least one page beside the null page, got {num_pages}")
        self.num_pages = num_pages
        # A stack: the page freed last is the likeliest to be in a cache still. Reversed so that page 1 goes first.
        self._free = list(range(num_pages, 0, -1))
        self._ref_counts = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def can_allocate(self, num_pages: int) -> bool:
        return num_pages <= len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Takes `num_pages` pages, each with one owner. Ask `can_allocate` first."""
        assert self.can_allocate(num_pages), f"{num_pages} pages wanted, {len(self._free)} free"
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one owner to each page."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is not held and cannot be shared"
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one owner of each page; a page without owners is free again."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is not held and cannot be released"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> list[str]:
        """One line per violated invariant; empty when all hold."""
        problems = []
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a page is in the free list twice")
        if not free <= set(range(1, self.num_pages + 1)):
            problems.append(f"the free list names pages outside 1..{self.num_pages}")
        if self._ref_counts[NULL_PAGE] != 0:
            problems.append("the null page has an owner")
        problems += [
            f"page {page} has {self._ref_counts[page]} owners and is {'free' if page in free else 'not free'}"
            for page in range(1, self.num_pages + 1)
            if (self._ref_counts[page] == 0) != (page in free)
        ]
        return problems
