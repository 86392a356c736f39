"""New sequences and log-probabilities to protobuf and back; see wire. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

from outrider.v1 import worker_pb2 as wire
from workers.demands import (
    NO_SHAPING,
    Constraint,
    ConstraintKind,
    Fork,
    Shaping,
    TokenLogprob,
    Typical,
)
from workers.plan import NewSequence, OracleDrafts


def sequence_to_wire(sequence: NewSequence) -> wire.NewSequence:
    return wire.NewSequence(
        slot=sequence.slot,
        sequence_epoch=sequence.epoch,
        uid=sequence.uid,
        prompt=sequence.prompt,
        tables=[wire.BlockTable(pages=pages) for pages in sequence.tables],
        temperature=sequence.temperature,
        top_k=sequence.top_k,
        top_p=sequence.top_p,
        min_p=sequence.min_p,
        typical_p=sequence.typical_p,
        seed=sequence.seed,
        coupled=sequence.coupled,
        stop_token_ids=sequence.stop_token_ids,
        max_tokens=sequence.max_tokens,
        shaping=None if sequence.shaping == NO_SHAPING else _shaping_to_wire(sequence.shaping),
        constraint=None if sequence.constraint is None else constraint_to_wire(sequence.constraint),
        typical=None
        if sequence.typical is None
        else wire.RankTypical(epsilon=sequence.typical.epsilon, delta=sequence.typical.delta),
        num_logprobs=sequence.num_logprobs,
        num_prompt_logprobs=sequence.num_prompt_logprobs,
        prediction=sequence.prediction,
        looks_back=sequence.looks_back,
        fork=None if sequence.fork is None else _fork_to_wire(sequence.fork),
        oracle=None
        if sequence.oracle is None
        else wire.OracleDrafts(continuation=sequence.oracle.continuation, acceptance=sequence.oracle.acceptance),
    )


def sequence_from_wire(message: wire.NewSequence) -> NewSequence:
    """Raises ValueError for a constraint of an unknown kind."""
    return NewSequence(
        slot=message.slot,
        epoch=message.sequence_epoch,
        uid=message.uid,
        prompt=tuple(message.prompt),
        tables=tuple(tuple(table.pages) for table in message.tables),
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        typical_p=message.typical_p,
        seed=message.seed,
        coupled=message.coupled,
        stop_token_ids=tuple(message.stop_token_ids),
        max_tokens=message.max_tokens,
        shaping=_shaping_from_wire(message.shaping) if message.HasField("shaping") else NO_SHAPING,
        constraint=constraint_from_wire(message.constraint) if message.HasField("constraint") else None,
        typical=Typical(epsilon=message.typical.epsilon, delta=message.typical.delta)
        if message.HasField("typical")
        else None,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        prediction=tuple(message.prediction),
        looks_back=message.looks_back,
        fork=_fork_from_wire(message.fork) if message.HasField("fork") else None,
        oracle=OracleDrafts(continuation=tuple(message.oracle.continuation), acceptance=message.oracle.acceptance)
        if message.HasField("oracle")
        else None,
    )


def constraint_to_wire(constraint: Constraint) -> wire.RankConstraint:
    return wire.RankConstraint(kind=constraint.kind, text=constraint.text)


def constraint_from_wire(message: wire.RankConstraint) -> Constraint:
    """Raises ValueError for an unknown kind."""
    if message.kind not in get_args(ConstraintKind):
        raise ValueError(f"a constraint of the unknown kind {message.kind!r}")
    return Constraint(kind=cast("ConstraintKind", message.kind), text=message.text)


def logprobs_to_wire(tokens: Sequence[TokenLogprob]) -> wire.RankLogprobs:
    """Of one sequence. Raises ValueError where not all its tokens have as many likeliest ones."""
    if len({len(each.top) for each in tokens}) > 1:
        raise ValueError("tokens of one sequence have different numbers of likeliest ones")
    return wire.RankLogprobs(
        ids=[each.token for each in tokens],
        logprobs=[each.logprob for each in tokens],
        num_top=len(tokens[0].top) if tokens else 0,
        top_ids=[token for each in tokens for token, _ in each.top],
        top_logprobs=[logprob for each in tokens for _, logprob in each.top],
    )


def logprobs_from_wire(message: wire.RankLogprobs) -> tuple[TokenLogprob, ...]:
    """Raises ValueError where columns do not fit each other."""
    count, width = len(message.ids), message.num_top
    if not len(message.logprobs) == count or not len(message.top_ids) == len(message.top_logprobs) == count * width:
        raise ValueError(f"log-probabilities of {count} tokens with {width} others each do not fit their columns")
    tops = list(zip(message.top_ids, message.top_logprobs, strict=True))
    return tuple(
        TokenLogprob(token=token, logprob=logprob, top=tuple(tops[i * width : (i + 1) * width]))
        for i, (token, logprob) in enumerate(zip(message.ids, message.logprobs, strict=True))
    )


def _shaping_to_wire(shaping: Shaping) -> wire.Shaping:
    return wire.Shaping(
        repetition=shaping.repetition,
        frequency=shaping.frequency,
        presence=shaping.presence,
        bias_ids=[token for token, _ in shaping.bias],
        biases=[bias for _, bias in shaping.bias],
        allowed=shaping.allowed,
        banned=shaping.banned,
        bad_words=[wire.BadWord(ids=word) for word in shaping.bad_words],
        min_tokens=shaping.min_tokens,
    )


def _shaping_from_wire(message: wire.Shaping) -> Shaping:
    return Shaping(
        repetition=message.repetition,
        frequency=message.frequency,
        presence=message.presence,
        bias=tuple(zip(message.bias_ids, message.biases, strict=True)),
        allowed=tuple(message.allowed),
        banned=tuple(message.banned),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        min_tokens=message.min_tokens,
    )


def _fork_to_wire(fork: Fork) -> wire.Fork:
    pages = [(0, 0) if pair is None else pair for pair in fork.pages]
    return wire.Fork(
        slot=fork.slot,
        sequence_epoch=fork.epoch,
        pages=[wire.PageCopy(source=source, target=target) for source, target in pages],
    )


def _fork_from_wire(message: wire.Fork) -> Fork:
    return Fork(
        slot=message.slot,
        epoch=message.sequence_epoch,
        pages=tuple((pair.source, pair.target) if pair.target else None for pair in message.pages),
    )
