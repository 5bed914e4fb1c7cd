"""The chunks that parts of tensors are made of, against brute force, and their way through torch's checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from meshwright.errors import CheckpointError
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Flat, Placements, Shard
from meshwright.lower.reshard import local_part
from meshwright.runtime import shards
from meshwright.runtime.chunk_files import overlap, read_parts
from meshwright.runtime.chunk_index import Index, IndexedTensor, joined, read_index, small_files
from meshwright.runtime.shards import Chunk, StoredPart, boxes_of, chunks_of, part_at
from meshwright.runtime.share import Share

MOST_ELEMENTS = 600
"""Each is looked at one by one, on every rank."""


@dataclass(frozen=True)
class Split:
    """A tensor whose dims are products of factors, and the mesh axes that cut some of them.

    ``factors[dim]`` are sizes, outermost first; ``axes[name]`` is (size, dim, factor), or (size, -1, -1) if replicated.
    Over the axis ``flat``, one of these, what the others leave is flat.
    """

    factors: tuple[tuple[int, ...], ...]
    axes: dict[str, tuple[int, int, int]]
    flat: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(dim) for dim in self.factors)

    @property
    def shards(self) -> Placements:
        return {
            name: Shard(dim, math.prod(self.factors[dim][:factor]))
            for name, (_, dim, factor) in self.axes.items()
            if dim >= 0
        }

    @property
    def placements(self) -> Placements:
        return {**self.shards, self.flat: Flat()} if self.flat else self.shards

    def ranks(self) -> Iterator[dict[str, AxisGroup]]:
        """The groups of each rank (axes of size 1 have none)."""
        sizes = {name: size for name, (size, _, _) in self.axes.items() if size > 1}
        for place in itertools.product(*map(range, sizes.values())):
            yield {name: AxisGroup(name, sizes[name], index) for name, index in zip(sizes, place, strict=True)}

    def holds(self, groups: dict[str, AxisGroup], index: tuple[int, ...]) -> bool:
        """Brute force: whether a rank holds an element, from the digits of its index in the factors' sizes."""
        for dim, sizes in enumerate(self.factors):
            digits: list[int] = []
            rest = index[dim]
            for size in reversed(sizes):
                rest, digit = divmod(rest, size)
                digits.insert(0, digit)
            for factor, size in enumerate(sizes):
                digit = digits[factor]
                for name, group in groups.items():
                    if self.axes[name][1:] == (dim, factor):
                        size //= group.size
                        if digit // size != group.index:
                            return False
                        digit %= size
        return True

    def held(self, groups: dict[str, AxisGroup], whole: Tensor) -> list[int]:
        """Brute force: the elements of a rank, in its part's order; of a flat part, a range of those."""
        indices = itertools.product(*map(range, self.shape))
        elements = [int(whole[index]) for index in indices if self.holds(groups, index)]
        if self.flat:
            group = groups[self.flat]
            each = -(-len(elements) // group.size)
            elements = elements[group.index * each : (group.index + 1) * each]
        return elements


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Up to three dims of up to three factors each, of at most ``MOST_ELEMENTS`` together."""
    room = MOST_ELEMENTS
    dims: list[list[int]] = []
    for _ in range(draw(st.integers(0, 3))):
        dims.append([])
        for _ in range(draw(st.integers(1, 3))):
            dims[-1].append(draw(st.sampled_from([size for size in (1, 2, 3, 4, 6) if size <= room])))
            room //= dims[-1][-1]
    return tuple(map(tuple, dims))


@st.composite
def splits(draw: st.DrawFn, dims: tuple[tuple[int, ...], ...] | None = None) -> Split:
    factors = dims if dims is not None else draw(shapes())
    left = {(dim, factor): size for dim, inner in enumerate(factors) for factor, size in enumerate(inner)}
    axes = {}
    for name in draw(st.permutations(["dp", "cp", "tp"])):
        size = draw(st.sampled_from([1, 2, 3]))
        places = [place for place, rest in left.items() if size > 1 and rest % size == 0]
        place = draw(st.sampled_from([(-1, -1), *places]))
        if place in left:
            left[place] //= size
        axes[name] = (size, *place)
    whole = [name for name, (size, dim, _) in axes.items() if size > 1 and dim < 0]
    return Split(factors, axes, draw(st.sampled_from(["", *whole])))


def part(split: Split, groups: dict[str, AxisGroup], whole: Tensor) -> StoredPart:
    return part_at(local_part(whole, split.placements, groups).clone(), split.shape, split.placements, groups)


@given(splits())
def test_chunks_are_what_a_rank_holds(split: Split) -> None:
    whole = torch.arange(math.prod(split.shape)).view(split.shape)
    for groups in split.ranks():
        stored_part = part(split, groups, whole)
        expected = split.held(groups, whole)
        covered = torch.zeros_like(stored_part.value, dtype=torch.int64)
        for chunk in stored_part.chunks:
            source = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                source = source.narrow(dim, offset, size)
            assert torch.equal(stored_part.view(chunk), source), "a chunk's place in the whole and in the part are one"
            replace(stored_part, value=covered).view(chunk).add_(1)
        assert bool((covered.flatten()[: len(expected)] == 1).all()), "chunks cover the part, each element once"
        assert not covered.flatten()[len(expected) :].any(), "and no padding"
        assert sorted(stored_part.value.flatten()[: len(expected)].tolist()) == sorted(expected), "as the factors say"
        assert not stored_part.value.flatten()[len(expected) :].any(), "padding is 0"


@given(st.data())
def test_any_split_is_put_together_from_any_other(data: st.DataObject) -> None:
    """What the ranks write covers the whole, each element once; the parts of other ranks overlap it as they should."""
    saved = data.draw(splits())
    loaded = data.draw(splits(saved.factors))
    whole = torch.rand(saved.shape)
    shared, limit = data.draw(st.sampled_from([(1, 24), (shards.SHARED_BYTES, shards.CHUNK_BYTES)]))
    stored: list[tuple[Chunk, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARED_BYTES", shared)
        for groups in saved.ranks():
            stored_part = part(saved, groups, whole)
            own = shards._own_chunks.__wrapped__(tuple(stored_part.chunks), stored_part.replica, 4, "x")
            stored += [(cut, stored_part.view(cut)) for chunk in own for cut in shards.cut_chunk(chunk, 4, limit)]
    assert sum(value.numel() for _, value in stored) == whole.numel(), "replicas are written once"
    assert len({chunk.offsets for chunk, _ in stored}) == len(stored)
    assert all(value.nbytes <= max(limit, 4) for _, value in stored)
    for groups in loaded.ranks():
        expected = part(loaded, groups, whole)
        loaded_part = replace(expected, value=torch.zeros_like(expected.value))
        for chunk in loaded_part.chunks:
            for source, value in stored:
                if cut := overlap(chunk, source.offsets, source.sizes):
                    begins = [offset - first for offset, first in zip(cut.offsets, source.offsets, strict=True)]
                    loaded_part.view(cut).copy_(shards.block(value, begins, cut.sizes))
        assert torch.equal(loaded_part.value, expected.value)


def test_a_fused_projection_is_three_chunks() -> None:
    groups = {"tp": AxisGroup("tp", 2, 1)}
    assert chunks_of((4, 12), {"tp": Shard(1, 3)}, groups) == [
        Chunk(offsets=(0, 2), starts=(0, 0), sizes=(4, 2)),
        Chunk(offsets=(0, 6), starts=(0, 2), sizes=(4, 2)),
        Chunk(offsets=(0, 10), starts=(0, 4), sizes=(4, 2)),
    ]
    assert chunks_of((), {}, groups) == [Chunk((), (), ())]
    assert chunks_of((0, 3), {}, groups) == []


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.data())
def test_a_range_of_elements_is_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Rows at most, and at either end what is left of a row, and so on."""
    whole = torch.arange(math.prod(shape)).view(shape)
    begin = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(begin, whole.numel()))
    elements = []
    for box in boxes_of(shape, begin, end):
        value = whole
        for dim, (start, size) in enumerate(box):
            value = value.narrow(dim, start, size)
        elements += value.flatten().tolist()
    assert elements == list(range(begin, end))
    assert len(boxes_of(shape, begin, end)) <= max(1, 2 * len(shape) - 1)


def read(directory: Path, parts: dict[str, StoredPart]) -> None:
    read_parts(directory, read_index(directory), parts)


def write(directory: Path, parts: dict[str, StoredPart]) -> None:
    index = joined([Share(parts).write(directory)])
    for name, content in small_files(index).items():
        (directory / name).write_bytes(content)


def test_saved_chunks_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    groups = {"tp": AxisGroup("tp", 2, 0)}
    half = StoredPart(torch.zeros(2), (4,), chunks_of((4,), {"tp": Shard(0)}, groups))
    with pytest.raises(CheckpointError, match="tensor x: ranks have written 2 elements of it, and it has 4"):
        write(tmp_path / "data", {"x": half})
    (chunk,) = Share({"x": half}).write(tmp_path / "data")["x"].chunks
    index = Index({"x": IndexedTensor((4,), "float32", (chunk,))})
    (tmp_path / "data" / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "data", {"x": StoredPart(torch.zeros(4), (4,), chunks_of((4,), {}, {}))})
    assert str(caught.value) == (
        f"{tmp_path}/data: tensors could not be read (x: the saved chunks do not cover the tensor)\n"
        "  -> load this or another checkpoint before training on: parameters may be half read"
    )


def test_empty_and_scalar_parameters(tmp_path: Path) -> None:
    parts = {
        "empty": StoredPart(torch.empty(0, 3), (0, 3), chunks_of((0, 3), {}, {})),
        "scalar": StoredPart(torch.tensor(2.5), (), chunks_of((), {}, {})),
        "strided": StoredPart(torch.arange(6.0).view(2, 3).t(), (3, 2), chunks_of((3, 2), {}, {})),
    }
    write(tmp_path / "data", parts)
    loaded_parts = {
        name: StoredPart(nn.Parameter(torch.zeros(part.shape)), part.shape, part.chunks) for name, part in parts.items()
    }
    read(tmp_path / "data", loaded_parts)
    assert all(torch.equal(loaded_parts[name].value, part.value) for name, part in parts.items())
