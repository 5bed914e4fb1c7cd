"""Batches that are given to a trainer: each rank's part, and checks against the captured batch and other ranks'
batches."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.capture.batch import Leaves
from meshwright.comm.groups import alone, from_every_rank
from meshwright.errors import DataError, RankError
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Placements, Shard, bounds, local_shape


class BatchSplit:
    """How the tensors of a batch are split over the ranks. Samples are split over the data axes. Rows are split over
    other axes if all operators that read a tensor read the same rows. ``cuts`` maps the name of a tensor to these
    splits of its rows."""

    def __init__(self, captured: Leaves, placements: Mapping[str, Placements], groups: Mapping[str, AxisGroup]) -> None:
        self.groups = groups
        self._whole = {name: tuple(value.shape) for name, value in captured.tensors.items()}
        self._every = {
            name: {axis: shard for axis, shard in placements.get(name, {}).items() if isinstance(shard, Shard)}
            for name in self._whole
        }
        self.cuts: dict[str, dict[str, Shard]] = {
            name: {axis: shard for axis, shard in every.items() if axis not in DATA_AXES}
            for name, every in self._every.items()
        }

    @property
    def slices(self) -> dict[str, tuple[slice, ...]]:
        """Maps the name of a tensor in the batch to the slices of the global tensor that this rank needs."""
        slices = {}
        for name, every in self._every.items():
            ends = [(0, size) for size in self._whole[name]]
            for axis in (axis for axis in self.groups if axis in every):
                shard, group = every[axis], self.groups[axis]
                begin, end = ends[shard.dim]
                edges = bounds((end - begin) // shard.unit, [group.size])
                ends[shard.dim] = begin + shard.unit * edges[group.index], begin + shard.unit * edges[group.index + 1]
            slices[name.removeprefix("batch.")] = tuple(slice(*pair) for pair in ends)
        return slices

    def is_cut(self, name: str, value: Tensor) -> bool:
        """Whether a local tensor holds only this rank's rows, not the rows of all ranks that share its samples."""
        cuts: Placements = {**self.cuts.get(name, {})}
        return bool(cuts) and tuple(value.shape[1:]) == local_shape(self._whole[name], cuts, *sizes_of(self.groups))[1:]

    def whole_shape(self, name: str, value: Tensor, samples: int) -> tuple[int, ...]:
        """Return the shape of a local tensor's global tensor, which has ``samples`` times as many samples."""
        shape = [value.shape[0] * samples, *value.shape[1:]]
        for shard in self.cuts[name].values() if self.is_cut(name, value) else ():
            shape[shard.dim] = self._whole[name][shard.dim]
        return tuple(shape)

    def index(self, leaves: Leaves, data_index: int) -> int:
        """A number that is equal on ranks that are given the same part of the batch."""
        cut = {axis for name, value in leaves.tensors.items() if self.is_cut(name, value) for axis in self.cuts[name]}
        for axis in sorted(cut):
            data_index = data_index * self.groups[axis].size + self.groups[axis].index
        return data_index


def check_alike(leaves: Leaves, captured: Leaves) -> None:
    """Raise a DataError if the structure of a batch, or the dtype of a leaf, differs from the captured batch."""
    if leaves.spec != captured.spec:
        raise DataError(
            f"the batch holds {', '.join(leaves.names)}, the captured one holds {', '.join(captured.names)}",
            where="batch", remedy="pass batches of one structure",
        )  # fmt: skip
    for name, value, other in zip(leaves.names, leaves.values, captured.values, strict=True):
        kind, expected = kind_of(value), kind_of(other)
        if kind != expected and (isinstance(value, Tensor) or isinstance(other, Tensor)):
            raise DataError(
                f"it is {kind}, in the captured batch it was {expected}",
                where=name,
                remedy=f"pass it as {expected}, or capture with a batch like this one",
            )


def kind_of(value: object) -> str:
    """The dtype of a tensor (such as ``float32``), or the class name of a leaf that is not a tensor."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def compare_over_ranks(leaves: Leaves, part: int) -> None:
    """Raise a RankError on every rank if batches have different shapes, or if ranks with the same ``part`` have
    different values. ``part`` is the index of this rank's part of the global batch; all ranks pass the same index if
    each has the whole batch. Every rank must call it."""
    if alone():
        return
    described = ", ".join(f"{name} {_in_words(value)}" for name, value in zip(leaves.names, leaves.values, strict=True))
    by_rank = from_every_rank((part, described, _checksum(list(leaves.tensors.values()))))
    first: dict[int, tuple[int, int]] = {}
    for rank, (index, description, checksum) in enumerate(by_rank):
        if description != by_rank[0][1]:
            raise RankError(
                f"it was given {description}, rank 0 {by_rank[0][1]}",
                where=f"batch of rank {rank}",
                remedy="pass batches of the same shapes on every rank",
            )
        other, known = first.setdefault(index, (rank, checksum))
        if checksum != known:
            raise RankError(
                f"it was given other values than rank {other}, though both are to have the same batch",
                where=f"batch of rank {rank}",
                remedy="pass the global batch on every rank; with local=True, the part that trainer.data_shard says",
            )


def _in_words(value: object) -> str:
    """Describe a leaf by text that is the same in every process: shape and dtype of a tensor, value of a number or
    string, class name of another object."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {kind_of(value)}"
    return repr(value) if isinstance(value, bool | int | float | complex | str | None) else kind_of(value)


def _checksum(tensors: list[Tensor]) -> int:
    result = 0
    for value in tensors:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        result = zlib.crc32(data.numpy().data, result)
    return result
