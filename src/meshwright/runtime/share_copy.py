"""Copies of what a save writes, made while training goes on.

    host      save │ forward, backward of the next step ... │ hold ▸ update │
    copies         │ copy everything that updates write     │               │ checks, checksums, disk ...

Only an update of the parameters writes to most of what is saved. So the copies are made beside the next step's forward
and backward, and only the update behind them waits for them: on a CPU, the step's thread waits for the saving thread;
on a CUDA device, the stream of the kernels waits for the stream of the copies, into pinned memory, and no host waits.
The memory of the copies is kept for the next save.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.device import CopyStream, DeviceKind, within
from meshwright.runtime.shards import Chunk, StoredPart

HostMemory = dict[tuple[str, tuple[int, ...]], Tensor]
"""Memory of the host for the copies, by name and place of the chunk. The next save uses it again."""


@dataclass(frozen=True)
class Wanted:
    """A chunk to be copied."""

    name: str
    part: StoredPart
    chunk: Chunk


@dataclass
class ShareCopy:
    """The copies of one save.

    Args:
        parts: this rank's parts, by name.
        now: names of parts that are copied before the save returns, because more than updates write to them.
        kind: the device on which they lie.
        copies: the stream of the device for copies; None if host and device have the same memory.
        memory: the memory of earlier saves.
    """

    parts: Mapping[str, StoredPart]
    now: Collection[str]
    kind: DeviceKind
    copies: CopyStream | None
    memory: HostMemory
    _copied: list[tuple[Wanted, Tensor]] = field(default_factory=list)
    _versions: dict[str, int] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Start the copies. On a CPU, only those are made that cannot wait, and nothing else is planned."""
        if self.copies is not None:
            self.copies.wait_for_kernels()
        with within(self.copies):
            self._copy(self.now if self.copies is None else self.parts)
        self._versions = {name: part.value._version for name, part in self.parts.items()}

    def finish(self) -> None:
        """Complete the copies, in the thread that saves.

        Raises:
            CheckpointError: a tensor was written to meanwhile, and not by an update.
        """
        if self.copies is not None:
            self.copies.synchronize()
            return
        self._copy([name for name in self.parts if name not in self.now])
        for name, part in self.parts.items():
            if name not in self.now and part.value._version != self._versions[name]:
                raise CheckpointError(
                    "it was changed while it was copied for a save, and is not saved",
                    where=f"tensor {name}",
                    remedy="call trainer.wait_for_save() before changing it between steps, or save with blocking=True",
                )

    def release(self) -> None:
        """Let updates go on, also after a failure."""
        self._done.set()

    def hold(self) -> None:
        """Make the next update wait for the copies."""
        if self.copies is not None:
            self.copies.hold_kernels()
        else:
            self._done.wait()

    def values(self) -> Iterator[tuple[Wanted, Tensor]]:
        """The chunks and their copies."""
        return iter(self._copied)

    def _copy(self, names: Iterable[str]) -> None:
        for name in names:
            part = self.parts[name]
            for chunk in part.own_chunks(name):
                source, place = part.view(chunk), (name, chunk.offsets)
                known = self.memory.get(place)
                if known is None or known.shape != source.shape or known.dtype != source.dtype:
                    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
                    known = self.memory[place] = self.kind.pinned(like)
                if self.copies is not None:
                    self.copies.keep(part.value)
                self._copied.append((Wanted(name, part, chunk), known.copy_(source, non_blocking=True)))


def to_host(state: Mapping[str, Any], kind: DeviceKind, copies: CopyStream | None) -> Any:
    """A state in which tensors of the device are copies on the host, which are complete when ``copies`` are. All of one
    dtype are copied at once, so that the host waits for none of them."""
    if copies is None:
        return state
    by_dtype: dict[torch.dtype, list[Tensor]] = {}

    def note(value: Tensor) -> Tensor:
        by_dtype.setdefault(value.dtype, []).append(value)
        return value

    _mapped(state, note, kind)
    hosts: dict[torch.dtype, Tensor] = {}
    copies.wait_for_kernels()
    with within(copies):
        for dtype, values in by_dtype.items():
            joined = torch.cat([value.detach().reshape(-1) for value in values])
            hosts[dtype] = kind.pinned(torch.empty(joined.shape, dtype=dtype, device="meta"))
            hosts[dtype].copy_(joined, non_blocking=True)
            copies.keep(joined)
    taken = dict.fromkeys(by_dtype, 0)

    def copy_of(value: Tensor) -> Tensor:
        begin = taken[value.dtype]
        taken[value.dtype] += value.numel()
        return hosts[value.dtype][begin : begin + value.numel()].view(value.shape)

    return _mapped(state, copy_of, kind)


def _mapped(value: Any, change: Any, kind: DeviceKind) -> Any:
    """A tree of dicts, lists and tuples in which each tensor of the device is changed."""
    if isinstance(value, Tensor):
        return change(value) if value.device.type == kind.device.type else value
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change, kind) for item in value)
    return value
