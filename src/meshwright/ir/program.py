"""The program of one rank for one stage of a step, as data: nodes with local shapes, collectives and freed memory.

    prologue   once a step       operators that depend on no parameter; gathers of parameters stored in parts
    forward    each micro-batch
    backward   each micro-batch  in one piece, or in two: ``input`` (gradients that are sent) and ``weight``
    reduce     once a step       starts the reduction of gradients
    finish     once a step       waits for the reduction; makes loss and metrics

A step with one stage and one micro-batch has only ``prologue``, ``forward`` and ``backward``. These phases run as one
function unless backward computes activations again or gathers parameters again.

The executor calls one function for each phase. The nodes of the phase describe this function. The executor reads from
the program which values pass between phases, stages and micro-batches.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import ClassVar, Literal, Protocol

import msgspec

from meshwright.ir.codec import codec_of
from meshwright.ir.graph import ITEM_BYTES, Operator
from meshwright.ir.kernel import Kernel
from meshwright.ir.placement import Placements, flat_shape
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.schedule import ActionKind

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "halo", "shift"]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tensor on this rank.

    ``storage`` is the name of the value that owns the memory. It is this value, unless this value is a view or was
    written into the memory of another value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensor's elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def owns(self) -> bool:
        """Whether the value owns its memory."""
        return self.name == self.storage


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A collective over the ``size`` ranks of an axis.

    ``bytes`` is the size of the tensor on one rank: before an all-reduce, reduce-scatter or all-to-all, and after an
    all-gather. For a halo exchange, it is the largest number of bytes that a rank receives. In a shift, each rank sends
    this many bytes to the next rank of the axis. ``label`` names the tensors
    that the collective carries. ``codec`` encodes the elements, each of ``item_bytes`` bytes, for sending. If encoded
    vectors are added up (``Codec.exchange`` is ``sums``), ``summed`` has their numbers of elements."""

    kind: CollectiveKind
    axis: str
    size: int
    bytes: int
    algorithm: str = ""
    label: str = ""
    codec: str = ""
    item_bytes: int = 0
    summed: tuple[int, ...] = ()


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, gc=False):
    """One call in a program.

    ``operator`` is the name of the graph's operator for which the call is made. For any other call, it is a word for
    the purpose: ``gathers``, ``gradients``, ``outputs``, ``sends`` or ``buffers``. ``starts`` is a collective that this
    node starts. It runs until the node whose ``waits`` is the name of this node. Until then it keeps ``copied_bytes``:
    contiguous or padded copies of inputs that it cannot send as they are. The collectives ``inside`` are parts of the
    call and end with it. ``frees`` names the storages whose last reader is this node."""

    name: str
    target: str
    operator: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    starts: Collective | None = None
    inside: tuple[Collective, ...] = ()
    waits: str = ""
    copied_bytes: int = 0
    frees: tuple[str, ...] = ()
    backward: bool = False

    @property
    def flops(self) -> float:
        """The floating-point operations of the node's kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """The bytes that the node's kernels read and write."""
        return sum(kernel.bytes for kernel in self.kernels)


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One phase of a program: its nodes in running order, its input values, and the names of its output values.
    ``moving``: why its calls cannot be captured as a graph of kernels; empty if they can (``lower/static.py``)."""

    name: str
    inputs: tuple[Value, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that exists before the step: the parameter, buffer or input ``name``.

    ``value`` is the name of the tensor's value on this rank. It is empty if the stage does not read the tensor.
    ``bytes`` is the memory of the tensor. For an input, it is the memory of the whole batch, even if the rank reads
    only a part."""

    name: str
    value: str
    bytes: int


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the graph that is sent to the next or previous stage in every micro-batch.

    ``value`` is this rank's part of the tensor. ``whole`` is the shape of all parts together, and ``placements`` say
    how the axes of the stage's mesh cut it. ``codec`` encodes the tensor for sending (empty: it is sent unchanged)."""

    tensor: str
    value: Value
    whole: tuple[int, ...]
    codec: str = ""
    placements: Placements = {}


class Accumulator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory in which the gradient of a parameter is summed over micro-batches.

    It is separate memory, or a part of a bucket. If it is in a bucket, the storage of ``value`` is the bucket, and
    ``offset`` is the index of the gradient's first element in the bucket."""

    parameter: str
    value: Value
    offset: int = 0


class CodecState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory that a codec keeps between steps on this rank (``Codec.state_lengths``), for the gradients of
    ``parameters``.

    The codec encodes the traffic over the first of ``axes``. Residuals differ between ranks along all of ``axes``,
    because the gradients are summed over the other axes later. ``shapes`` are the shapes of the gradients on this rank,
    in the order of ``parameters``. ``value`` and ``before`` are vectors that the executor provides. The step reads
    ``before``, and writes the new state to ``value``. If the step is accepted, the vectors swap. ``rows`` is the number
    of rows of equal length into which each gradient is cut. A residual holds the first row of all gradients, then the
    second row of all, and so on."""

    codec: str
    axes: tuple[str, ...]
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    value: Value
    before: Value
    rows: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes of both vectors."""
        return self.value.num_bytes + self.before.num_bytes

    @property
    def segments(self) -> dict[str, tuple[int, int]]:
        """The begin and end of each vector of ``Codec.state_lengths`` in the memory."""
        lengths = codec_of(self.codec).state_lengths(coded_shapes(self.shapes, self.rows))
        ends = list(accumulate(lengths.values()))
        return dict(zip(lengths, zip([0, *ends], ends, strict=False), strict=True))


def coded_shapes(shapes: Sequence[tuple[int, ...]], rows: int) -> list[tuple[int, ...]]:
    """The shapes in which a codec receives gradients: flat and padded if they are cut into ``rows``."""
    return list(shapes) if rows == 1 else [(rows * prod(flat_shape(shape, rows)),) for shape in shapes]


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A micro-batch's part of the value ``source``, which holds all micro-batches of the step.

    Dim ``dim`` consists of ``blocks`` equal blocks. Every block is cut into one part for each micro-batch."""

    source: str
    dim: int
    blocks: int


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the values that all micro-batches compute become one value of the step.

    ``value`` is the name of a micro-batch's value. ``join`` is ``sum``, ``max``, ``min`` or ``last`` (the value of the
    last micro-batch). ``joined`` is the name of the result."""

    value: str
    join: str
    joined: str


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The program of one stage on one rank.

    If ``together`` is true, all phases run as one function. ``transfers`` maps a kind of action to the tensors that the
    action sends or receives. ``buckets`` are the memories in which several gradients are summed together.
    ``codec_states`` are the memories of codecs, which persist from step to step. ``slices`` maps the name of a
    micro-batch's value to its slice of a whole value. ``input_placements`` maps each input to the placements in which
    the ranks receive it. ``random_key`` is the name of the value that seeds a micro-batch's random numbers.

    Three dicts name the values that a step returns: ``scalars`` (the loss and metrics that this stage makes),
    ``gradients``, and ``buffers_after`` (new values of buffers that are updated once a step). ``buffer_updates`` maps a
    buffer to the new value that each micro-batch leaves in it for the next micro-batch."""

    stage: int = 0
    num_stages: int = 1
    together: bool = False
    phases: tuple[Phase, ...] = ()
    parameters: tuple[Held, ...] = ()
    buffers: tuple[Held, ...] = ()
    inputs: tuple[Held, ...] = ()
    input_placements: dict[str, Placements] = {}
    random_key: str = ""
    slices: dict[str, Slice] = {}
    transfers: dict[ActionKind, tuple[Transfer, ...]] = {}
    accumulators: tuple[Accumulator, ...] = ()
    buckets: tuple[Value, ...] = ()
    codec_states: tuple[CodecState, ...] = ()
    joins: tuple[Join, ...] = ()
    scalars: dict[str, str] = {}
    gradients: dict[str, str] = {}
    buffer_updates: dict[str, str] = {}
    buffers_after: dict[str, str] = {}

    def crossing(self, action: ActionKind) -> tuple[Transfer, ...]:
        """The tensors that an action of this kind sends or receives."""
        return self.transfers.get(action, ())

    def phase(self, name: str) -> Phase:
        """The phase with this name; an empty phase if the program has none."""
        return next((phase for phase in self.phases if phase.name == name), Phase(name))

    def moving(self, phases: Sequence[str]) -> str:
        """The first reason why one of these phases cannot be captured as a graph, with its stage; empty if all can."""
        reasons = ((phase.name, reason) for phase in map(self.phase, phases) for reason in phase.moving)
        return next((f"stage {self.stage}, {name}: {reason}" for name, reason in reasons), "")


class RankPrograms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The programs of all stages that one rank holds."""

    VERSION: ClassVar[int] = 2
    version: int = 2
    rank: int
    programs: tuple[Program, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Rows that an operator fetches from neighbouring ranks for one of its inputs.

    ``position`` is the index of the input. ``rows`` says which rows of which dims come over which mesh axes.
    Operators that read the same rows of a tensor share one fetch."""

    position: int
    rows: tuple[object, ...]


class OperatorProgram(msgspec.Struct, frozen=True, eq=False):
    """The program of one operator on one rank, if its inputs already have the placements that it needs.

    ``nodes`` are in running order. ``fetches`` maps the name of a node that starts a halo exchange to the rows that are
    fetched. Two objects are equal only if they are the same object."""

    nodes: tuple[Node, ...]
    fetches: dict[str, Fetch]


class Lower(Protocol):
    """The interface of a lowering: makes programs without starting processes."""

    def __call__(self, plan: Plan) -> tuple[Program, ...]:
        """The programs of all stages of a plan, each for the busiest rank of its stage."""

    def variants(self, plans: Sequence[Plan], stages: Collection[int] | None = None) -> list[tuple[Program, ...]]:
        """The programs of plans that differ only in recomputation, prefetching and graphs. ``stages``: only of these
        stages; None: of all."""

    def operator(
        self, operator: Operator, strategy: Strategy, sizes: Mapping[str, int], interior_first: bool = False
    ) -> OperatorProgram:
        """The program of an operator under a strategy, on the first rank of each axis.

        ``sizes`` maps an axis to its size. Equal operators share one program, which has the names of the operator
        that was lowered first."""
