"""Rounds of means over replicas: a replica's state of a current round, and the result of a round."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Parts = list[Tensor]
"""One segment of each tensor."""


class RoundMean(NamedTuple):
    """A mean: the epoch and the members of the view in which it was computed, the number of contributors, and the mean
    of each tensor."""

    epoch: int
    members: tuple[int, ...]
    num_contributors: int
    tensors: list[Tensor]


class OpenRound:
    """A round that has not finished. ``values`` are None if this replica only helps others."""

    def __init__(self, number: int, slot: int, values: Sequence[Tensor] | None) -> None:
        self.number, self.slot, self.values = number, slot, values
        self.epoch = -1
        self.members: list[int] = []
        self.kinds = Kinds((), ())
        self.contributions: dict[int, Parts | None] = {}
        self.means: dict[int, Parts] = {}
        self.count = 0
        self.left_out: dict[int, list[Tensor]] = {}
        """By epoch of the attempt: the values that this replica's messages left out."""


class Kinds(NamedTuple):
    """The lengths and the dtypes of tensors."""

    lengths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def text(self) -> str:
        """The dtypes as the text of a letter."""
        return " ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)

    def segments(self, index: int, count: int) -> list[tuple[int, int]]:
        """The elements of segment ``index`` of ``count``, of each tensor."""
        return [segment(length, index, count) for length in self.lengths]


def segment(length: int, index: int, count: int) -> tuple[int, int]:
    """The begin and the end of part ``index`` of ``count`` nearly equal parts of ``length`` elements."""
    return index * length // count, (index + 1) * length // count


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements are added up: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def parts_at(tensors: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> Parts:
    """Parts of tensors."""
    return [tensor[begin:end] for tensor, (begin, end) in zip(tensors, spans, strict=True)]


def kinds_of(lengths: Sequence[int], text: str) -> Kinds:
    """The lengths and the dtypes of a letter."""
    return Kinds(tuple(lengths), tuple(getattr(torch, name) for name in text.split()))
