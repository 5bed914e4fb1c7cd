"""The software that runs a training step: how its kernels, host and memory differ from those of other software."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.errors import Problem

Code = Literal["", "fused", "eager", "compiled"]
"""How the operations between matrix products run: ``fused``: in hand-written fused kernels; ``eager``: each in a kernel
of its own; ``compiled``: fused by torch.compile. Empty: as ``Setup`` says."""
Reported = Literal["device", "reserved", "allocated", "allocated_last"]
"""What a stack logs as the memory of a run. ``device``: all that is taken on the fullest device. ``reserved``: what the
allocator took there. ``allocated``: the bytes of live tensors at the peak there; ``allocated_last``: on the last rank,
which prints the log."""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How uncertain a prediction is: standard deviations of the natural logarithm of measured over predicted. ``step``:
    of the whole step; ``communication`` and ``host``: of the seconds of collectives and messages, and of those that the
    host adds, in addition; ``memory``: of the peak."""

    step: float = 0.12
    communication: float = 0.4
    host: float = 0.5
    memory: float = 0.1


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A stack of software, by the few numbers in which its steps differ from those of Megatron-LM in 2021, whose
    kernels the cost model describes.

    ``pace``, ``matmul``, ``attention``, ``traffic``, ``host`` and ``communication`` are factors. ``pace`` multiplies
    the time of every kernel: training runs are slower than benchmarks of their kernels, because clocks fall under load
    and ranks wait for the slowest. ``matmul`` and ``attention`` multiply the fractions of the peak that matrix products
    and fused attention reach (``Kernels``). ``traffic`` multiplies the bytes that the other kernels move. ``host``
    multiplies the host's time to launch a kernel. ``communication`` multiplies the time of collectives and messages.
    ``step_s`` is the time of a step that no micro-batch explains: reading data, logging, waiting for the loss.
    ``hidden`` is the fraction of an overlapped collective's time that is hidden; the rest slows down the kernels beside
    it. ``optimizer_bytes`` are the bytes that the update moves per parameter. ``loss_bytes`` are the bytes that the
    kernels of softmax cross-entropy in float32 move per logit, forward and backward. ``float8_bytes`` are the bytes
    that rounding an operand of a product to float8 moves per element (None: those of dynamic scaling under ZeRO 3,
    else 0).

    ``context_bytes`` are taken outside of the framework's tensors by the device's context and libraries. ``peer_bytes``
    are the buffers through which a communicator talks to one neighbour, in addition (``cost.occupancy.num_peers``). The
    default is that of NCCL: 24 channels, each with a buffer of 10 MiB to receive and one of 2 MiB to send, as its log
    of allocations says (NVIDIA/nccl, issue 1685).
    ``fragmentation`` is the fraction by which the allocator takes more than the live tensors. ``activations`` is a
    factor of the bytes that layers keep for backward. ``logit_bytes`` are the bytes per logit at the peak of the loss;
    ``score_bytes`` those per attention score that a layer writes to memory (without ``flash``). ``gradient_bytes`` are
    the bytes of a parameter's gradient. None: as ``cost.memory`` derives them from precision and ZeRO. ``bucket_bytes``
    are the bytes of gradients that are copied to buckets while they are reduced over data-parallel ranks.

    Captured plans take the factors, ``step_s``, ``context_bytes``, ``peer_bytes``, ``fragmentation``, ``heap`` and
    the spread; ``host`` only where launches are asynchronous, so not on CPUs. The other numbers stand for kernels and
    tensors that a captured program has itself: ``code``, ``optimizer_bytes``, ``loss_bytes``, ``float8_bytes``,
    ``activations``, ``logit_bytes``, ``score_bytes``, ``gradient_bytes``, ``bucket_bytes``. ``hidden`` stands for how
    much of an overlapped collective shows: the simulator finds that, but not how much the rest slows down kernels.

    ``heap`` is the number of bytes that the heap of a CPU takes from the system per live byte of saved values and
    workspace: glibc cannot use all of what is freed.

    ``runs`` is the number of runs from which the numbers were learned (0: they are from the catalog or a file).
    ``taught`` identifies the ledgers among them, so that none teaches twice.
    """

    name: str = "unknown"
    source: str = ""
    runs: int = 0
    taught: tuple[str, ...] = ()
    code: Code = ""
    pace: float = 1.0
    matmul: float = 1.0
    attention: float = 1.0
    traffic: float = 1.0
    host: float = 1.0
    communication: float = 1.0
    step_s: float = 0.0
    hidden: float = 0.6
    optimizer_bytes: float = 33.0
    loss_bytes: float = 73.0
    float8_bytes: float | None = None
    context_bytes: float = 2.0**30
    peer_bytes: float = 24 * 12 * 2.0**20
    fragmentation: float = 0.0
    activations: float = 1.0
    logit_bytes: float | None = None
    score_bytes: float | None = None
    gradient_bytes: float | None = None
    bucket_bytes: float = 2.0**28
    heap: float = 1.15
    reported: Reported = "device"
    spread: Spread = Spread()


# Numbers outside these bounds are mistakes, most often of a unit.
_BOUNDS = {
    "pace": (0.05, 20.0), "matmul": (0.1, 5.0), "attention": (0.1, 5.0), "traffic": (0.1, 10.0), "host": (0.02, 20.0),
    "communication": (0.05, 20.0), "step_s": (0.0, 100.0), "hidden": (0.0, 1.0), "optimizer_bytes": (1.0, 200.0),
    "loss_bytes": (1.0, 200.0), "float8_bytes": (0.0, 100.0), "context_bytes": (0.0, 2.0**36),
    "peer_bytes": (0.0, 2.0**34),
    "fragmentation": (0.0, 1.0), "activations": (0.1, 5.0), "logit_bytes": (0.0, 64.0), "score_bytes": (0.0, 64.0),
    "gradient_bytes": (0.0, 16.0), "bucket_bytes": (0.0, 2.0**36),
    "heap": (0.5, 4.0),
}  # fmt: skip


def software_problems(software: Software, where: str) -> Iterator[Problem]:
    """Problems of impossible values. Each problem has its key, prefixed by ``where``."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(software, name)
        if value is not None and not low <= value <= high:
            yield f"{where}.{name}", f"{value:g} is not between {low:g} and {high:g}", "correct it, or leave it out"
    for name in software.spread.__struct_fields__:
        value = getattr(software.spread, name)
        if not 0 <= value <= 3:
            yield (
                f"{where}.spread.{name}",
                f"{value:g} is not between 0 and 3",
                "0.1 stands for 10 %",
            )
