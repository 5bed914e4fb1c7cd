"""The state that codecs keep from step to step (residuals, momenta and factors), in memory and in checkpoints.

Each rank has its own residual of a gradient, because each rank's messages leave out different parts. So a checkpoint
holds one tensor for each parameter and each rank of the codec's axis: ``codec.residual.NAME.RANK``. If a run continues
with another number of ranks, the residuals are added up: of n ranks, rank r takes the residuals of ranks r, r + n, r +
2n and so on. So no part of a gradient is lost. The momentum of 1-bit Adam, which is equal on all ranks, is saved once.

A step is not accepted if its loss or a gradient is not finite. Such a step must leave this state unchanged. Each memory
therefore has two vectors: a step reads the first and writes the second, and they swap when the step is accepted.
Warm-ups count the accepted steps of the whole training, as optimizers do.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.compress.low_rank import start_right
from meshwright.errors import LayoutError
from meshwright.ir.codec import codec_of
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Placements, flat_shape
from meshwright.ir.plan import Plan
from meshwright.ir.program import CodecState
from meshwright.optim.frozen_variance import OneBitAdam, ZeroOneAdam
from meshwright.runtime.shards import Chunk, StoredPart, part_at, replica_of
from meshwright.runtime.state import LocalParameters

_KEPT = ("residual", "momentum")
"""The segments that have one number for each element of a gradient."""


class CodecMemory:
    """The memory of all codecs on this rank. Steps with different batch shapes share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[_Key, _Memory] = {}
        self._in_step: set[_Key] = set()
        self._accepted_steps = 0

    def provide(self, state: CodecState) -> None:
        """Make the memory for a codec, unless it exists already."""
        key = state.axes, state.parameters
        if key not in self._known:
            memory = _fresh(state, self._device, self._accepted_steps)
            self._known[key] = _Memory(state, memory, torch.empty_like(memory))

    @property
    def has_state(self) -> bool:
        """Whether a codec keeps anything between steps."""
        return bool(self._known)

    def begin(self) -> None:
        """Begin a step. If the previous step was not accepted, the state is the state before it."""
        self._in_step.clear()

    def values(self, states: Iterable[CodecState]) -> dict[str, Tensor]:
        """The values of a program's codecs in this step, by name."""
        values: dict[str, Tensor] = {}
        for state in states:
            key = state.axes, state.parameters
            self._in_step.add(key)
            memory = self._known[key]
            values |= {state.before.name: memory.kept, state.value.name: memory.written}
        return values

    def accept(self) -> None:
        """Accept the step: keep the state that it has written."""
        self._accepted_steps += 1
        for key in self._in_step:
            memory = self._known[key]
            memory.kept, memory.written = memory.written, memory.kept
        self._in_step.clear()
        self._count_steps()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor, because the scale of the loss has changed by this factor."""
        for memory in self._known.values() if factor != 1.0 else ():
            for segment in _KEPT:
                if segment in memory.state.segments:
                    memory.segment(segment).mul_(factor)

    def _count_steps(self) -> None:
        for memory in self._known.values():
            if "steps" in memory.state.segments:
                memory.segment("steps").fill_(self._accepted_steps)

    def extract(self, parameters: LocalParameters) -> tuple[dict[str, Any], dict[str, StoredPart]]:
        """Return plain data, and this rank's parts of tensors by their names in a checkpoint. The plain data has the
        number of tensors of each segment (``ranks``), and the number of accepted steps (``steps``)."""
        ranks: dict[str, int] = {}
        parts: dict[str, StoredPart] = {}
        for piece in self._pieces(parameters):
            ranks[piece.name] = piece.count
            parts[f"{piece.name}.{piece.index}"] = piece.part(piece.value())
        return {"ranks": ranks, "steps": self._accepted_steps}, parts

    def make_room(self, parameters: LocalParameters, saved: dict[str, Any]) -> "CodecRoom":
        """Make the tensors into which the tensors of a checkpoint are read. ``saved`` is the plain data of
        ``extract``."""
        room = CodecRoom()
        for piece in self._pieces(parameters):
            count = saved["ranks"].get(piece.name, 0)
            if piece.adds or count == piece.count:  # factors fit only matrices with the same split
                ranks = range(piece.index, count, piece.count)
                parts = {f"{piece.name}.{rank}": piece.part(piece.value()) for rank in ranks}
                room.parts |= parts
                room.pieces.append((piece, [part.value for part in parts.values()]))
        return room

    def take(self, room: "CodecRoom", saved: dict[str, Any]) -> None:
        """Use the tensors that were read into the room. State that the checkpoint lacks begins as in a new run."""
        self._in_step.clear()
        self._accepted_steps = saved["steps"]
        for memory in self._known.values():
            memory.kept.copy_(_fresh(memory.state, self._device, self._accepted_steps))
        for piece, values in room.pieces:
            if values:
                piece.put(torch.stack(values).sum(0) if len(values) > 1 else values[0])

    def _pieces(self, parameters: LocalParameters) -> Iterator["_Piece"]:
        for memory in self._known.values():
            for segment in memory.state.segments:
                if segment in _KEPT:
                    yield from _of_gradients(parameters, memory.state, segment, memory.segment(segment))
                elif segment == "right":
                    yield from _of_factors(parameters, memory.state, memory.segment(segment))


def check_momentum(plan: Plan, optimizer: Optimizer | None, max_grad_norm: float | None) -> None:
    """Refuse settings under which the optimizer's momentum would differ from the momentum that a codec exchanges.

    Raises:
        LayoutError: a codec of the plan exchanges momenta, and one of the following holds. Gradients are clipped; the
            optimizer is not 1-bit Adam or 0/1 Adam, or has another first beta; or 1-bit Adam freezes its variance after
            the codec's warm-up.
    """
    texts = {coding.codec for bucket in plan.buckets for coding in bucket.codings}
    codecs = (codec for text in texts if (codec := codec_of(text)).shares_momentum)
    momenta = next(codecs, None)
    if max_grad_norm is not None and momenta is not None:
        raise LayoutError(
            f"codec {momenta} exchanges momenta, and max_grad_norm={max_grad_norm:g} clips gradients",
            where="trainer",
            remedy="leave out max_grad_norm, or the codec's momentum",
        )
    if momenta is None or optimizer is None:
        return
    name = type(optimizer).__name__
    if not isinstance(optimizer, OneBitAdam | ZeroOneAdam):
        raise LayoutError(
            f"codec {momenta} exchanges momenta, and the optimizer is {name}",
            where="trainer",
            remedy="take meshwright.optim.OneBitAdam or ZeroOneAdam, or leave out the codec's momentum",
        )
    for group in optimizer.param_groups:
        if group["betas"][0] != momenta.momentum:
            raise LayoutError(
                f"codec {momenta} has momentum={momenta.momentum:g}, and {name} has betas={group['betas']}",
                where="trainer",
                remedy="give the codec the first of the optimizer's betas as its momentum",
            )
        if isinstance(optimizer, OneBitAdam) and group["freeze_step"] > momenta.warmup:
            raise LayoutError(
                f"codec {momenta} has warmup={momenta.warmup}, and {name} has freeze_step={group['freeze_step']}: its "
                "variance would be that of decoded momenta",
                where="trainer",
                remedy="give the codec the optimizer's freeze_step as its warmup",
            )


NOTHING_SAVED: dict[str, Any] = {"ranks": {}, "steps": 0}
"""The plain data of a run without codecs."""


def joined(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the plain data of all ranks. Ranks of a pipeline hold different parameters."""
    result: dict[str, Any] = {"ranks": {}, "steps": 0}
    for plain in states:
        result = {"ranks": result["ranks"] | plain["ranks"], "steps": plain["steps"]}  # all ranks accept the same steps
    return result


_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""The axes and the parameters of a codec's memory."""


@dataclass
class _Memory:
    """The two vectors of a codec's memory: ``kept`` is the state after the last accepted step, and ``written`` is the
    state that the running step writes."""

    state: CodecState
    kept: Tensor
    written: Tensor

    def segment(self, name: str) -> Tensor:
        """A segment of ``kept``."""
        return self.kept[slice(*self.state.segments[name])]


@dataclass
class _Piece:
    """The numbers of a segment that belong to one gradient. ``values`` is a view of the memory. Its first elements, in
    row-major order, are this rank's part of a tensor of shape ``shape``. The tensor has index ``index`` among ``count``
    such tensors. ``adds``: runs with fewer ranks add up these tensors."""

    name: str
    values: Tensor
    shape: tuple[int, ...]
    index: int
    count: int
    adds: bool
    whole: tuple[int, ...]
    placements: Placements
    groups: dict[str, AxisGroup]
    unlike: tuple[str, ...]

    def value(self) -> Tensor:
        """A copy of the numbers, in the shape of this rank's part."""
        return self.values.reshape(-1)[: prod(self.shape)].clone().view(self.shape)

    def put(self, value: Tensor) -> None:
        """Write the numbers back."""
        flat = self.values.new_zeros(self.values.numel())
        flat[: prod(self.shape)] = value.reshape(-1)
        self.values.copy_(flat.view(self.values.shape))

    def part(self, value: Tensor) -> StoredPart:
        """``value`` as a part of a tensor in a checkpoint."""
        if not self.adds:
            replica = replica_of({}, self.groups, self.unlike)
            return StoredPart(value, self.shape, [Chunk((0,), (0,), self.shape)], replica=replica)
        return part_at(value, self.whole, self.placements, self.groups, unlike=self.unlike)


@dataclass
class CodecRoom:
    """Room for loading: the parts that are read, and, for each piece, the values that are added up."""

    parts: dict[str, StoredPart] = field(default_factory=dict)
    pieces: list[tuple[_Piece, list[Tensor]]] = field(default_factory=list)


def _of_gradients(parameters: LocalParameters, state: CodecState, segment: str, memory: Tensor) -> Iterator[_Piece]:
    table, at = memory.view(state.rows, -1), 0
    # A momentum of the sum is equal along the coded axis. It is saved once, and is not added up.
    shared = segment == "momentum" and codec_of(state.codec).shares_momentum
    unlike = state.axes[1:] if shared else state.axes
    index, count = _position(unlike, parameters.groups)
    for name, shape in zip(state.parameters, state.shapes, strict=True):
        width = prod(flat_shape(shape, state.rows)) if state.rows > 1 else prod(shape)
        stored = parameters.placements(name)
        placements = {axis: placement for axis, placement in stored.items() if axis not in state.axes}
        yield _Piece(
            _entry(segment, name), table[:, at : at + width], shape, index, count, True,
            parameters.global_shape(name), placements, parameters.groups, unlike,
        )  # fmt: skip
        at += width


def _of_factors(parameters: LocalParameters, state: CodecState, memory: Tensor) -> Iterator[_Piece]:
    codec, at = codec_of(state.codec), 0
    for name, shape in zip(state.parameters, state.shapes, strict=True):
        if (pair := codec.factored(shape)) is not None:
            size = codec.rank * pair[1]
            unlike = parameters.split_axes(name)
            index, count = _position(unlike, parameters.groups)
            yield _Piece(
                _entry("right", name), memory[at : at + size], (size,), index, count, False, (size,), {},
                parameters.groups, unlike,
            )  # fmt: skip
            at += size


def _position(axes: tuple[str, ...], groups: dict[str, AxisGroup]) -> tuple[int, int]:
    """This rank's index along several axes, and the number of ranks along them."""
    index, count = 0, 1
    for group in (groups[axis] for axis in axes if axis in groups):
        index, count = index * group.size + group.index, count * group.size
    return index, count


def _entry(segment: str, parameter: str) -> str:
    return f"codec.{segment}.{parameter}"


def _fresh(state: CodecState, device: torch.device, steps: int) -> Tensor:
    """The initial memory of a codec: zeros, and random right factors that are equal on all ranks. Right factors of zero
    would keep every product at zero. ``steps``: the number of accepted steps."""
    memory = torch.zeros(state.value.shape, dtype=getattr(torch, state.value.dtype), device=device)
    if "right" in state.segments:
        codec, seed = codec_of(state.codec), zlib.crc32(" ".join(state.parameters).encode())
        pairs = [pair for shape in state.shapes if (pair := codec.factored(shape)) is not None]
        rights = start_right(pairs, codec.rank, seed, memory.dtype)
        memory[slice(*state.segments["right"])] = torch.cat([right.reshape(-1) for right in rights]).to(device)
    if "steps" in state.segments:
        memory[slice(*state.segments["steps"])] = steps
    return memory
