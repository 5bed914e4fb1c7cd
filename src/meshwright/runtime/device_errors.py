"""Names errors of a GPU within a step: its memory is full, it was lost, one of its kernels read out of bounds, or NCCL
could not start."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm.transport.base import OWN_ERROR
from meshwright.errors import DeviceError, DeviceMemoryError, LostRankError, MeshwrightError
from meshwright.ir.units import size
from meshwright.runtime.device import DeviceKind
from meshwright.runtime.executor import Executor
from meshwright.runtime.failures import LOOK_AT_DEVICE
from meshwright.runtime.state import LocalParameters

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB) is free")
_CUDA = re.compile(r"CUDA (?:driver )?error: ([^\n]+)")
_NCCL = re.compile(r"\b(nccl[A-Z]\w*): [^\n]*(?:\nLast error:\n([^\n]+))?")
"""NCCL's error in a DistBackendError of PyTorch: its name, and what NCCL says of it."""
_OF_NETWORK = re.compile("socket|connect", re.IGNORECASE)
_OF_HOST = re.compile("shared memory|No space left|Too many open files|allocate memory", re.IGNORECASE)
"""What NCCL says of system calls that fail because of another rank or the network, and because this host has no room
or no file descriptors left."""
_FULL = re.compile("out of memory|ALLOC_FAILED")
_OUT_OF_BOUNDS = ("device-side assert", "illegal memory access", "misaligned address")
_LOOK_AT_BATCH = (
    "often a label or a token is not below the number of classes or words: run the batch on the CPU, which names the "
    "operator"
)
_LOOK_AT_HOST = (
    "often this host has no room left in /dev/shm, which containers limit (`--shm-size=8g` or `--ipc=host`), or no "
    "file descriptors (`ulimit -n`); run with NCCL_DEBUG=INFO, which says why, on every rank"
)


class MemoryHolder(Protocol):
    """The parts of a trainer that hold memory of a device. ``smaller`` names the smallest change of the plan that needs
    so many bytes less; empty if there is none. It is None if nobody knows the plan's costs."""

    rank: int
    step_number: int
    device: torch.device
    parameters: LocalParameters
    smaller: Callable[[int], str] | None
    _optimizer: Optimizer | None
    _kind: DeviceKind

    @property
    def executor(self) -> Executor:
        """The executor of the last step."""


@contextmanager
def explained(trainer: MemoryHolder) -> Iterator[None]:
    """Raise errors of the device and of NCCL within a step as a DeviceMemoryError, which names what holds the memory,
    as a DeviceError, or as a LostRankError if another rank or the network failed."""
    try:
        yield
    except MeshwrightError:
        raise
    except torch.OutOfMemoryError as error:
        raise _full(trainer, str(error)) from error
    except RuntimeError as error:
        if asks := lacks_memory(str(error)):
            raise _full(trainer, str(error), f" for {asks}") from error
        if (named := named_error(str(error), _place(trainer))) is None:
            raise
        raise named from error


def holders(trainer: MemoryHolder) -> dict[str, int]:
    """The bytes of memory that each kind of tensor holds on the device, the largest first. A storage counts once, for
    the first kind that holds it."""
    optimizer, executor = trainer._optimizer, trainer.executor
    states = [] if optimizer is None else [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]  # fmt: skip
    stages = executor.stages.values()
    kinds: dict[str, Iterable[object]] = {
        "parameters": [trainer.parameters[name] for name in trainer.parameters],
        "optimizer state": states,
        "gradients": [
            *(memory for stage in stages for memory in (*stage.buckets.values(), *stage.totals.values())),
            *(parameter.grad for parameter in trainer.parameters.trainable.values()),
        ],
        "buffers": trainer.parameters.named_buffers.values(),
        "gathered parameters and inputs": [value for stage in stages for value in stage.step.values()],
        "values of micro-batches in flight": executor.values_in_flight,
    }
    seen: set[int] = set()
    num_bytes = {name: _bytes_of(values, seen) for name, values in kinds.items()}
    if (read := trainer._kind.memory_now) is not None:
        num_bytes["values of the operators at work"] = max(0, read() - sum(num_bytes.values()))
    return dict(sorted(((name, held) for name, held in num_bytes.items() if held), key=lambda pair: -pair[1]))


def _bytes_of(values: Iterable[object], seen: set[int]) -> int:
    total = 0
    for value in values:
        if isinstance(value, Tensor) and value.untyped_storage()._cdata not in seen:
            seen.add(value.untyped_storage()._cdata)
            total += value.untyped_storage().nbytes()
    return total


def lacks_memory(text: str) -> str:
    """What CUDA, its libraries or NCCL found no memory for, outside of PyTorch's allocator; empty if the text is of
    another error. PyTorch raises such errors as it raises those of a broken device."""
    if (match := _NCCL.search(text)) is not None:
        return "buffers of NCCL" if _FULL.search(match[2] or "") else ""
    match = _CUDA.search(text)
    is_full = match is not None and _FULL.search(match[1]) is not None
    return "memory that CUDA takes for itself, such as a context, a graph or pinned memory of the host" * is_full


def named_error(text: str, where: str) -> MeshwrightError | None:
    """The error of CUDA, or of a collective or message that NCCL did not start, with its remedy; None if the text is of
    another error."""
    if (match := _NCCL.search(text)) is None:
        other = _CUDA.search(text)
        return _failed(other[1].strip(), where) if other is not None else None
    kind, last = match[1], (match[2] or "").strip()
    reason = f"{kind}: {last}" if last else kind
    is_of_network = _OF_NETWORK.search(last) is not None and _OF_HOST.search(last) is None
    if kind == "ncclRemoteError" or (kind == "ncclSystemError" and is_of_network):
        return LostRankError(f"NCCL lost another rank or the network ({reason})", where=where, remedy=OWN_ERROR)
    if kind == "ncclSystemError":
        return DeviceError(f"NCCL failed ({reason})", where=where, remedy=_LOOK_AT_HOST)
    if kind == "ncclUnhandledCudaError":
        return _failed(reason, where)
    remedy = "run with NCCL_DEBUG=INFO, which says why, on every rank"
    return DeviceError(f"NCCL failed ({reason})", where=where, remedy=remedy)


def _full(trainer: MemoryHolder, text: str, asks: str = "") -> DeviceMemoryError:
    held = holders(trainer)
    wanted, free = _parsed(_ASKED, text), _parsed(_FREE, text)
    asks = f" for {size(wanted)} more" if wanted else asks
    change = trainer.smaller(max(1, wanted - free)) if trainer.smaller is not None else ""
    return DeviceMemoryError(
        f"its memory is full, and has no room{asks}: {_held_text(held)}",
        where=_place(trainer),
        remedy=change or "use more ranks, more micro-batches, recompute='full' or zero=1",
    )


def _held_text(held: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in held.items()) or "nothing of this trainer"


def _parsed(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return round(float(match[1]) * _UNITS[match[2]]) if match is not None else 0


def _failed(text: str, where: str) -> DeviceError:
    if any(mark in text for mark in _OUT_OF_BOUNDS):
        problem = f"a kernel read or wrote out of bounds ({text})"
        remedy = _LOOK_AT_BATCH
    else:
        problem, remedy = f"the device failed ({text})", LOOK_AT_DEVICE
    return DeviceError(problem, where=where, remedy=remedy)


def _place(trainer: MemoryHolder) -> str:
    return f"rank {trainer.rank}, {trainer.device}, step {trainer.step_number + 1}"
