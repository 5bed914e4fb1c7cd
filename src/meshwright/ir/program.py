"""The program of one rank for one stage of a step, as data: phases of nodes with local shapes, collectives and frees.

    prologue   once a step       operators that depend on no parameter; whole versions of split parameters
    forward    each micro-batch
    backward   each micro-batch  in one piece, or in two: ``input`` (gradients that are sent) and ``weight``
    reduce     once a step       starts the reduction of gradients
    finish     once a step       waits for the reduction; makes loss and metrics

A step of one stage and one micro-batch has ``prologue``, ``forward`` and ``backward``, which run as one function unless
something is computed or gathered again.

The executor reads programs too: only they say which values flow between phases, stages and micro-batches. The executor
calls one function for each phase; the phase's nodes describe that function.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar, Literal, Protocol

import msgspec

from meshwright.ir.graph import ITEM_BYTES, Operator
from meshwright.ir.kernel import Kernel
from meshwright.ir.placement import Placements
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.schedule import ActionKind

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "halo"]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor on this rank. ``storage`` names the value that owns its memory: itself, unless it is a view, or was
    written into the memory of another value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def owns(self) -> bool:
        """Whether the value owns its memory."""
        return self.name == self.storage


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A collective over ``size`` ranks of an axis. ``bytes`` is the size of the whole vector on one rank: before an
    all-reduce, reduce-scatter or all-to-all, after an all-gather. For a halo, it is the most that a rank receives.
    ``label`` names the tensors."""

    kind: CollectiveKind
    axis: str
    size: int
    bytes: int
    algorithm: str = ""
    label: str = ""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One call. ``operator`` is the operator of the graph that it comes from (or ``gathers``, ``gradients``,
    ``outputs``, ``sends``, ``buffers``). ``starts`` is a collective that runs until the node whose ``waits`` names this
    node. Collectives ``inside`` of a kernel end with the kernel. ``frees`` are storages that this node reads last."""

    name: str
    target: str
    operator: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    starts: Collective | None = None
    inside: tuple[Collective, ...] = ()
    waits: str = ""
    frees: tuple[str, ...] = ()
    backward: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of its kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that its kernels read and write."""
        return sum(kernel.bytes for kernel in self.kernels)


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes in running order, the values that they take from outside, and their results that are read later."""

    name: str
    inputs: tuple[Value, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that exists before the step: the parameter, buffer or input ``name``, which is ``value`` on this rank
    (empty if the stage does not read it). ``bytes`` is its memory; for an input, that of the whole batch, of which the
    value may be a part."""

    name: str
    value: str
    bytes: int


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the graph that crosses to the next or previous stage in every micro-batch. ``value`` is this rank's
    part; ``whole`` is the shape of all parts together."""

    tensor: str
    value: Value
    whole: tuple[int, ...]


class Accumulator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory that sums a parameter's gradient over micro-batches. It is separate memory, or lies in a bucket: then
    the bucket is the storage of ``value``, and ``offset`` is the first element of the gradient."""

    parameter: str
    value: Value
    offset: int = 0


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A micro-batch's part of ``source``, a value of the whole step. Dim ``dim`` consists of ``blocks`` equal blocks,
    and every block is cut."""

    source: str
    dim: int
    blocks: int


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the values of all micro-batches become one value of the step: ``join`` is ``sum``, ``max``, ``min`` or
    ``last``, and ``joined`` names the result."""

    value: str
    join: str
    joined: str


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The program of one stage on one rank. ``together``: all its phases run as one function. ``transfers`` maps a kind
    of action to the tensors that it sends or receives.

    ``buckets`` are memory in which gradients are summed up together. ``slices`` maps the name of a part to its slice.
    ``scalars`` (loss and metrics, if this stage makes them), ``gradients`` and ``buffers_after`` (buffers that are
    updated once a step) name the values that a step returns. ``buffer_updates`` names the values that every micro-batch
    leaves in a buffer for the next. ``input_placements`` says how this rank gets the batch; ``random_key`` is the value
    that seeds the micro-batch's random numbers."""

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


class RankPrograms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The programs of all stages that one rank holds."""

    VERSION: ClassVar[int] = 2
    version: int = 2
    rank: int
    programs: tuple[Program, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Rows of neighbours that an operator fetches for one of its inputs. ``position`` is the number of the input;
    ``rows`` says which rows of which dims they are, and over which mesh axes they come. Operators that read the same
    rows of a tensor share one fetch."""

    position: int
    rows: tuple[object, ...]


class OperatorProgram(msgspec.Struct, frozen=True, eq=False):
    """One operator on one rank, whose inputs already have the placements that it needs. ``nodes`` are in running order;
    ``fetches`` are the halos of its inputs, by the name of the node that starts the exchange. Equality is identity."""

    nodes: tuple[Node, ...]
    fetches: dict[str, Fetch]


class Lower(Protocol):
    """Makes programs without starting processes."""

    def __call__(self, plan: Plan) -> tuple[Program, ...]:
        """The programs of all stages of a plan, each on its busiest rank."""

    def operator(
        self, operator: Operator, strategy: Strategy, sizes: Mapping[str, int], interior_first: bool = False
    ) -> OperatorProgram:
        """The program of an operator under a strategy over axes of these sizes, on the first rank of each axis. Equal
        operators share one program, with the names of the first operator."""
