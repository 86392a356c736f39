"""Finds the first stop string in text that arrives in pieces. Knows nothing of tokens or requests.

An Aho-Corasick automaton over the stop strings: its state is the longest end of the text so far that begins some stop
string, so exactly that much text is held back, and each character costs O(1).

"First" means the match that completes first; of those completing at one character, the longest, so that the text before
it is the shortest. Streaming can wait for nothing better: what follows the match is not generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Matcher of one sequence.

    matched: the stop string that was found, else None. After a match the matcher takes no more text.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """stop_strings: not empty strings; with none of them every text passes at once."""
        self.matched: str | None = None
        self._next, self._fallback, self._depth, self._found = _automaton(stop_strings)
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Adds text; returns what may be published: all but the end that may still become a stop string, or, on a
        match, everything before the match.

        may_match: whether a stop string that completes here is a match; one that completes later is, wherever it began.
        """
        assert self.matched is None, "text after a match"
        if len(self._depth) == 1:
            return text
        state = self._state
        for position, char in enumerate(text):
            while state and char not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(char, 0)
            found = self._found[state]
            if found is None:
                continue
            if may_match:
                self.matched = found
                seen = self._held + text[: position + 1]
                return seen[: len(seen) - len(found)]
            # What has passed is held no longer, but for an end of it that begins another one.
            while state and not self._next[state]:
                state = self._fallback[state]
        self._state = state
        seen = self._held + text
        published = len(seen) - self._depth[state]
        self._held = seen[published:]
        return seen[:published]

    def finish(self) -> str:
        """No more text comes: returns what was held back. A second call returns nothing."""
        held, self._held, self._state = self._held, "", 0
        return held


def _automaton(
    words: Sequence[str],
) -> tuple[list[dict[str, int]], list[int], list[int], list[str | None]]:
    """Per state: transitions, the state of its longest proper suffix, its length, the longest word that ends there."""
    transitions: list[dict[str, int]] = [{}]
    depth = [0]
    found: list[str | None] = [None]
    for word in words:
        state = 0
        for char in word:
            if char not in transitions[state]:
                transitions[state][char] = len(transitions)
                transitions.append({})
                depth.append(depth[state] + 1)
                found.append(None)
            state = transitions[state][char]
        found[state] = word
    fallback = [0] * len(transitions)
    queue = deque(transitions[0].values())
    while queue:
        state = queue.popleft()
        for char, child in transitions[state].items():
            suffix = fallback[state]
            while suffix and char not in transitions[suffix]:
                suffix = fallback[suffix]
            fallback[child] = transitions[suffix].get(char, 0)
            # A state's own word is longer than any that ends in its suffix.
            if found[child] is None:
                found[child] = found[fallback[child]]
            queue.append(child)
    return transitions, fallback, depth, found
