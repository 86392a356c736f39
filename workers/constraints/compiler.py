"""From a constraint to something that follows its output, by llguidance. Knows no sequence, no step and no tensor.

llguidance rather than xgrammar: matchers roll back, what a mask may cost is bounded and counted (so no schema holds up
the others' step), most of what is too large is an error with its reason, and the interpreter's lock is let go
meanwhile. What it takes to compile something is not bounded, and may be the process's life: see `trial`. What it gets
wrong, and how that is avoided, is said at `roll_back`, in `path` and in `soundness`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from workers.constraints.grammar import LIMITS, explain, grammar_of, in_short
from workers.constraints.soundness import check_ends
from workers.demands import Constraint

Mask = NDArray[np.uint8]
"""Which tokens may stand, a bit each, the lowest id in the lowest bit: [⌈V / 8⌉]. Bits beyond V are 0."""

MAX_CACHED = 64
"""Constraints kept ready that sequences have had. Each takes some 100 kB, and 50 MB where its lexer comes to have all
the states it may."""

MAX_AWAITED_BYTES = 2**30
"""Of constraints kept ready for sequences to come; a thousand that wait take a tenth of it."""

SIZE_BYTES = 100_000
"""Of one that was not measured."""

MAX_TRIED = 2**16
"""Constraints that are known to be good; a tenth of a kB each."""

UNTRIED = "it was not made ready before its request entered; try again"


class ConstraintError(Exception):
    """A constraint that cannot be followed; the text says why and, where it is known, at which place."""


TryOut = Callable[[Constraint], int]
"""Compiles a constraint where that harms nobody. Returns its size in bytes, raises ConstraintError."""


class Compiler:
    """One per rank that decides. May be asked from several threads.

    tokenizer_file: tokenizer.json of the checkpoint. vocab_size: of the model, which may have more rows than tokens.
    try_out: what `prepare` does before a constraint is compiled for the first time; `matcher` then compiles none that
        was never tried. None trusts every constraint.
    """

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int], try_out: TryOut | None = None
    ) -> None:
        self._file, self._vocab_size, self._eos = tokenizer_file, vocab_size, list(eos_token_ids)
        self._try_out = try_out
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        # Made ready, and no sequence has had it yet: matchers and their sizes.
        self._awaited: OrderedDict[Constraint, tuple[LLMatcher, int]] = OrderedDict()
        self._awaited_bytes = 0
        self._tried: OrderedDict[bytes, int] = OrderedDict()

    def prepare(self, constraint: Constraint) -> None:
        """Compiles what is not ready yet, and keeps it until a sequence has it. Raises ConstraintError."""
        with self._lock:
            for kept in (self._ready, self._awaited):
                if constraint in kept:
                    kept.move_to_end(constraint)
                    return
            tokenizer = self._loaded()
        size_bytes = self._tried_size(constraint)
        if size_bytes is None:
            size_bytes = self._try_out(constraint) if self._try_out is not None else SIZE_BYTES
            self._note_tried(constraint, size_bytes)
        # Beside the lock: two that ask for the same thing do it twice, and nobody waits for somebody else's.
        made = compile_matcher(tokenizer, constraint)
        with self._lock:
            self._forget_awaited(constraint)
            self._awaited[constraint] = made, size_bytes
            self._awaited_bytes += size_bytes
            while self._awaited_bytes > MAX_AWAITED_BYTES:
                self._forget_awaited(next(iter(self._awaited)))

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """One that has seen nothing yet. Raises ConstraintError.

        Those of one constraint share the lexer's states, and the error when these become too many: then a new one is
        compiled for all that come. That happens within a step, as for a constraint that is ready no more; it is known
        what it takes.
        """
        with self._lock:
            if constraint in self._awaited:
                self._keep(constraint, self._awaited[constraint][0])
                self._forget_awaited(constraint)
            found = self._ready.get(constraint)
            if found is not None:
                self._ready.move_to_end(constraint)
            tokenizer = self._loaded()
        if found is not None:
            copy = found.deep_copy()
            if mask_of(copy, self._vocab_size) is not None:
                return copy
        elif self._try_out is not None and self._tried_size(constraint) is None:
            raise ConstraintError(UNTRIED)
        made = compile_matcher(tokenizer, constraint)
        with self._lock:
            self._keep(constraint, made)
        return made.deep_copy()

    def is_ready(self, constraint: Constraint) -> bool:
        """Whether nothing has to be compiled for a sequence that has it."""
        with self._lock:
            return constraint in self._ready or constraint in self._awaited

    def eos_token_ids(self) -> list[int]:
        """The tokens that end an output, once there is a matcher."""
        assert self._tokenizer is not None
        return list(self._tokenizer.eos_tokens)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _loaded(self) -> LLTokenizer:
        self._tokenizer = self._tokenizer or load_tokenizer(self._file, self._vocab_size, self._eos)
        return self._tokenizer

    def _keep(self, constraint: Constraint, matcher: LLMatcher) -> None:
        self._ready[constraint] = matcher
        self._ready.move_to_end(constraint)
        if len(self._ready) > MAX_CACHED:
            self._ready.popitem(last=False)

    def _forget_awaited(self, constraint: Constraint) -> None:
        _, size_bytes = self._awaited.pop(constraint, (None, 0))
        self._awaited_bytes -= size_bytes

    def _tried_size(self, constraint: Constraint) -> int | None:
        with self._lock:
            return self._tried.get(_digest(constraint))

    def _note_tried(self, constraint: Constraint, size_bytes: int) -> None:
        with self._lock:
            self._tried[_digest(constraint)] = size_bytes
            if len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)


def load_tokenizer(file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Raises ConstraintError where there is none, or none of these sizes."""
    if not file.is_file():
        raise ConstraintError("this checkpoint has no tokenizer.json, without which no constraint can be followed")
    try:
        return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        raise ConstraintError(f"with this checkpoint's tokenizer no constraint can be followed: {error}") from None


def mask_of(matcher: LLMatcher, vocab_size: int) -> Mask | None:
    """What may stand where the matcher does; None where it broke."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: -(-vocab_size // 8)]
    return None if matcher.is_error() else mask


def roll_back(matcher: LLMatcher, count: int) -> bool:
    """Takes back the last tokens. False where it broke.

    llguidance keeps the last mask by its place in the grammar alone, and would give it again at that place of another
    path; so the next one is made here, where both paths are one.
    """
    if not matcher.rollback(count):
        return False
    matcher.compute_bitmask()
    return not matcher.is_error()


def compile_matcher(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """One that has told its first mask. Raises ConstraintError; what it takes is not bounded."""
    try:
        grammar = grammar_of(constraint)
        if constraint.kind == "lark":
            check_ends(constraint.text, {end: tokenizer.decode_str([end]) for end in tokenizer.eos_tokens})
    except ValueError as error:
        raise ConstraintError(in_short(str(error))) from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    told = _try(matcher, tokenizer)
    if told:
        raise ConstraintError(explain(constraint, told))
    return matcher


def _try(matcher: LLMatcher, tokenizer: LLTokenizer) -> str:
    """What must work of every matcher, a first mask and a token there and back. What is told where it does not."""
    mask = mask_of(matcher, tokenizer.vocab_size)
    if mask is None:
        return str(matcher.get_error())
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    first = next((token for token in allowed if token not in tokenizer.eos_tokens), None)
    trial = matcher.deep_copy()
    if first is not None and trial.consume_token(first):
        roll_back(trial, 1)
    return str(trial.get_error())


def _digest(constraint: Constraint) -> bytes:
    return sha256(f"{constraint.kind}\n{constraint.text}".encode()).digest()
