"""Tokenizers of a few tokens, and what constraints let stand in their words. Test material only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.constraints.compiler import Compiler, Mask
from workers.constraints.matchers import Matchers
from workers.demands import Constraint, ConstraintKind
from workers.plan import NewSequence


def write_tokenizer(folder: Path, words: Sequence[str], special: Sequence[str] = ("<end>",)) -> Path:
    """A tokenizer.json whose ids are those of `words` and then of `special`. Words of two letters or more are merged of
    a word and a letter."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: id for id, word in enumerate(words)},
            merges=[(word[:-1], word[-1]) for word in words if len(word) > 1],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    assert tokenizer.get_vocab_size() == len(words) + len(special)
    return path


def compiler_of(
    folder: Path, words: Sequence[str], *, special: Sequence[str] = ("<end>",), vocab_size: int | None = None
) -> Compiler:
    """The first special token ends an output."""
    return Compiler(write_tokenizer(folder, words, special), vocab_size or len(words) + len(special), [len(words)])


def constraint(kind: ConstraintKind, what: object = "") -> Constraint:
    """what: text as it is, else written as JSON."""
    return Constraint(kind=kind, text=what if isinstance(what, str) else json.dumps(what))


def sequence(slot: int, of: Constraint | None) -> NewSequence:
    return NewSequence(
        slot=slot,
        epoch=1,
        uid=slot,
        prompt=(0,),
        tables=(),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        coupled=False,
        stop_token_ids=(),
        max_tokens=100,
        constraint=of,
    )


def entered(compiler: Compiler, of: Constraint, committed: Iterable[int] = (), *, slot: int = 1) -> Matchers:
    """Matchers of one sequence that has committed its tokens one by one."""
    matchers = Matchers(compiler)
    matchers.enter([sequence(slot, of)])
    for token in committed:
        matchers.follow(slot, [token])
    return matchers


def ids(mask: Mask | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
