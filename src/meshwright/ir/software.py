"""The software that runs a training step: how its kernels, host and memory differ from those of other software."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.errors import Problem

Code = Literal["", "fused", "eager", "compiled"]
"""How the operations between matrix products run. ``fused``: in hand-written fused kernels. ``eager``: each operation
in its own kernel. ``compiled``: fused by torch.compile. Empty: ``cost.setup.Setup`` decides."""
Reported = Literal["device", "reserved", "allocated", "allocated_last"]
"""The quantity that a training software logs as the memory of a run. ``device``: all memory in use on the fullest
device. ``reserved``: the memory that the allocator took on the fullest device. ``allocated``: the peak memory of live
tensors on the fullest device. ``allocated_last``: the same on the last rank, which prints the log."""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The uncertainty of predictions: standard deviations of the natural logarithm of measured over predicted values.
    ``step``: for the whole step. ``communication`` and ``host``: additional uncertainty of the seconds of
    communication, and of the seconds that the host adds. ``memory``: for the peak."""

    step: float = 0.12
    communication: float = 0.4
    host: float = 0.5
    memory: float = 0.1


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A training software, described by the numbers in which its steps differ from the steps of Megatron-LM in 2021,
    whose kernels the cost model describes.

    ``pace``, ``matmul``, ``attention``, ``traffic``, ``host`` and ``communication`` are factors. ``pace`` multiplies
    the time of every kernel. Training runs are slower than benchmarks of their kernels, because clock rates fall under
    load and ranks wait for the slowest rank. ``matmul`` and ``attention`` multiply the fractions of the peak that
    matrix products and fused attention reach (``Kernels``). ``traffic`` multiplies the bytes that all other kernels
    move. ``host`` multiplies the host's time to launch a kernel. ``communication`` multiplies the time of collectives
    and messages. ``step_s`` is time per step that does not belong to micro-batches: reading data, logging, waiting for
    the loss. ``hidden`` is the fraction of an overlapped collective's time that is hidden. The remaining fraction slows
    down the kernels that run at the same time. ``optimizer_bytes`` is the number of bytes that the optimizer moves per
    parameter. ``loss_bytes`` is the number of bytes per logit that the kernels of softmax cross-entropy in float32
    move, forward and backward together. ``float8_bytes`` is the number of bytes per element that are moved to round an
    operand of a product to float8 (None: the bytes of dynamic scaling under ZeRO 3, else 0).

    ``context_bytes`` is memory that the device's context and libraries take, outside of the framework's tensors.
    ``peer_bytes`` is the size of the buffers that a communicator needs for each neighbour, in addition
    (``cost.occupancy.num_peers``). The default is NCCL's value: 24 channels, each with a buffer of 10 MiB to receive
    and a buffer of 2 MiB to send, according to its log of allocations (NVIDIA/nccl, issue 1685). ``fragmentation`` is
    the memory that the allocator takes beyond the live tensors, as a fraction of the live tensors. ``activations``
    multiplies the bytes that layers keep for backward. ``logit_bytes`` is the number of bytes per logit at the peak of
    the loss. ``score_bytes`` is the number of bytes per attention score if a layer writes scores to memory (without
    ``flash``). ``gradient_bytes`` is the number of bytes of a parameter's gradient (None: ``cost.memory`` derives it
    from precision and ZeRO). ``bucket_bytes`` is the size of the buckets to which gradients are copied while
    data-parallel ranks reduce them.

    For captured plans, only these fields count: the factors, ``step_s``, ``context_bytes``, ``peer_bytes``,
    ``fragmentation``, ``heap``, ``graphs`` and the spread. ``host`` counts only where kernel launches are asynchronous,
    so not on CPUs. The other numbers describe kernels and tensors that a captured program already contains: ``code``,
    ``optimizer_bytes``, ``loss_bytes``, ``float8_bytes``, ``activations``, ``logit_bytes``, ``score_bytes``,
    ``gradient_bytes``, ``bucket_bytes``. ``hidden`` is not needed either: the simulator finds which part of an
    overlapped collective is exposed, but not how much the collective slows down kernels.

    ``heap`` is the number of bytes that the heap of a CPU takes from the system per live byte of saved values and
    workspace. It is above 1 because glibc cannot reuse all freed memory.

    ``graphs`` says whether the software can launch a phase of a step as one graph of kernels (CUDA graphs).

    ``runs`` is the number of runs from which the numbers were learned (0: they come from the catalog or a file).
    ``taught`` identifies the ledgers of these runs, so that no ledger is used twice.
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
    graphs: bool = True
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
