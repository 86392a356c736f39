"""Fills parameters from a checkpoint by a loading table. Knows no family: names, shapes and slices are the table's.

Everything is checked against the headers before the first element is copied, so a checkpoint that does not fit leaves
every parameter as it was.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.models.checkpoint import Checkpoint
from workers.models.rules import Box, TensorRule, num_elements, table_shapes
from workers.plan import LoadError

STORED_ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element of the element types that scheme "plain" reads, by their safetensors names."""

IGNORABLE = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints carry although they follow from the configuration."""

_NAMED_PROBLEMS = 5

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read): at the start with 0, then after every tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was loaded.

    num_tensors: published tensors of which this rank kept something.
    num_skipped: published tensors left on disk: of other ranks, under a skipped prefix, or ignorable.
    bytes_read: of the files, before casting.
    num_parameters, parameter_bytes: elements and bytes of the filled parameters, padding included.
    """

    num_tensors: int
    num_skipped: int
    bytes_read: int
    num_parameters: int
    parameter_bytes: int


def load_parameters(
    checkpoint: Checkpoint,
    table: Sequence[TensorRule],
    parameters: Mapping[str, torch.Tensor],
    progress: Progress,
    *,
    skip_prefixes: tuple[str, ...] = (),
) -> LoadReport:
    """Copies what the table keeps into `parameters`, in place, cast to each parameter's dtype.

    skip_prefixes: as in `check_parameters`. Raises as it does; nothing has been copied then.
    """
    check_parameters(checkpoint, table, parameters, skip_prefixes=skip_prefixes)
    kept = [rule for rule in table if rule.pieces]
    total = sum(_bytes_kept(checkpoint, rule) for rule in kept)
    done = 0
    progress(done, total)
    with torch.no_grad():
        for rule in table:
            for block in rule.padding:
                parameters[rule.parameter][_index(block)].zero_()
        for rule in kept:
            stored = checkpoint.stored(rule.published)
            for piece in rule.pieces:
                target = parameters[rule.parameter][_index(piece.target)]
                target.copy_(stored[_index(piece.source)].reshape(target.shape))
            done += _bytes_kept(checkpoint, rule)
            progress(done, total)
    return LoadReport(
        num_tensors=len(kept),
        num_skipped=len(checkpoint.tensors) - len(kept),
        bytes_read=total,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters.values()),
    )


def check_parameters(
    checkpoint: Checkpoint,
    table: Sequence[TensorRule],
    parameters: Mapping[str, torch.Tensor],
    *,
    skip_prefixes: tuple[str, ...] = (),
) -> None:
    """Compares the files' headers and the shapes of `parameters` with the table; reads no element.

    skip_prefixes: published names that the table leaves out on purpose, such as those of a drafter that is not wanted.
    Raises LoadError that counts and names the missing, surplus, misshapen and unreadable tensors, and the parameters
    that the table does not fill exactly.
    """
    problems = [
        *_tensor_problems(checkpoint, table, skip_prefixes),
        *_parameter_problems(table, parameters),
    ]
    if problems:
        raise LoadError(_summary(checkpoint, problems))


def _tensor_problems(
    checkpoint: Checkpoint, table: Sequence[TensorRule], skip_prefixes: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """(kind, text) of every published tensor that does not fit the table."""
    expected = {rule.published for rule in table}
    for rule in table:
        info = checkpoint.tensors.get(rule.published)
        if info is None:
            yield "missing", rule.published
        elif info.shape != rule.shape:
            yield "misshapen", f"{rule.published} is {list(info.shape)}, config.json says {list(rule.shape)}"
        elif rule.scheme != "plain":
            yield "unreadable", f"{rule.published} is stored by scheme {rule.scheme}; served: plain"
        elif info.stored not in STORED_ITEMSIZE:
            yield "unreadable", f"{rule.published} is stored as {info.stored}; served: {', '.join(STORED_ITEMSIZE)}"
    for name in sorted(checkpoint.tensors.keys() - expected):
        if not name.startswith(skip_prefixes) and not IGNORABLE.search(name):
            yield "surplus", _explain_surplus(name, checkpoint)


def _explain_surplus(name: str, checkpoint: Checkpoint) -> str:
    if name == "lm_head.weight" and checkpoint.config.tied:
        return f"{name} although tie_word_embeddings is true; set it to false if the two tables differ"
    return name


def _parameter_problems(
    table: Sequence[TensorRule], parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """(kind, text) of every parameter whose shape or coverage differs from the table's."""
    shapes = table_shapes(table)
    covered: dict[str, int] = defaultdict(int)
    for rule in table:
        covered[rule.parameter] += rule.num_kept + sum(num_elements(block) for block in rule.padding)
    for name in sorted(shapes.keys() | parameters.keys()):
        if name not in shapes:
            yield "unfilled", f"parameter {name}, which no published tensor fills"
        elif name not in parameters:
            yield "unplaced", f"parameter {name}, which the model does not have"
        elif tuple(parameters[name].shape) != shapes[name]:
            yield "unfilled", f"parameter {name} is {list(parameters[name].shape)}, filled as {list(shapes[name])}"
        elif covered[name] != math.prod(shapes[name]):
            yield "unfilled", f"parameter {name}: {covered[name]} of {math.prod(shapes[name])} elements are filled"


def _summary(checkpoint: Checkpoint, problems: Sequence[tuple[str, str]]) -> str:
    """Counts of every kind, then the first few of each by name."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, text in problems:
        kinds[kind].append(text)
    lines = [f"{checkpoint.path} does not fit its config.json"]
    for kind, texts in kinds.items():
        more = f", and {len(texts) - _NAMED_PROBLEMS} more" if len(texts) > _NAMED_PROBLEMS else ""
        lines.append(f"{len(texts)} {kind}: {'; '.join(texts[:_NAMED_PROBLEMS])}{more}")
    return "\n  ".join(lines)


def _bytes_kept(checkpoint: Checkpoint, rule: TensorRule) -> int:
    return rule.num_kept * STORED_ITEMSIZE[checkpoint.tensors[rule.published].stored]


def _index(block: Box) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.stop) for span in block)
