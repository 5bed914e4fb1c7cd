"""What one rank runs for one stage of a step, as data: phases of nodes with local shapes, collectives, what they free.

    prologue   once a step       what depends on no parameter; whole versions of split parameters
    forward    each micro-batch
    backward   each micro-batch  in one piece, or in two: ``input`` (what is sent) and ``weight``
    reduce     once a step       starts the reduction of gradients
    finish     once a step       waits for it; loss and metrics

A step of one stage and one micro-batch has ``prologue``, ``forward`` and ``backward``, which run as one function unless
something is computed or gathered again.

The executor reads a program too: what flows between phases, stages and micro-batches stands here only. It calls a
function for each phase, of which the phase's nodes are the description.
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
    written into the memory of another."""

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
        """Whether the memory is its own."""
        return self.name == self.storage


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A collective over ``size`` ranks of an axis. ``bytes`` are of the whole vector: what each rank holds before an
    all-reduce, a reduce-scatter or an all-to-all, and after an all-gather; of a halo, what the busiest rank gets.
    ``label`` names the tensors."""

    kind: CollectiveKind
    axis: str
    size: int
    bytes: int
    algorithm: str = ""
    label: str = ""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One call. ``operator`` is the graph's that it comes from (or ``gathers``, ``gradients``, ``outputs``, ``sends``,
    ``buffers``). ``starts`` is a collective that goes on until the node whose ``waits`` names this one; collectives
    ``inside`` of a kernel are over when it is. ``frees`` are the storages whose last reader this is."""

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
        return sum(one.flops for one in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that its kernels read and write."""
        return sum(one.bytes for one in self.kernels)


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes in the order in which they run, the values that they take from outside, and those that are read after."""

    name: str
    inputs: tuple[Value, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is there before the step: a parameter, buffer or input (``name``), as which ``value`` of this rank
    (none, where the stage does not read it). ``bytes`` are held for it: of an input those of the whole batch, of which
    the value may be a part."""

    name: str
    value: str
    bytes: int


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the graph that crosses the border to the next or previous stage, in every micro-batch. ``value`` is
    this rank's part; ``whole`` is the shape of all parts together."""

    tensor: str
    value: Value
    whole: tuple[int, ...]


class Accumulator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory in which a parameter's gradient is summed up over micro-batches. It is its own, or that of a bucket,
    which is then the storage of ``value``, from element ``offset`` on."""

    parameter: str
    value: Value
    offset: int = 0


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A micro-batch's part of a value of the whole step (``source``). Dim ``dim`` is made of ``blocks`` equal blocks,
    and every block is cut."""

    source: str
    dim: int
    blocks: int


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a value of each micro-batch becomes a value of the step: ``join`` is ``sum``, ``max``, ``min`` or ``last``,
    and ``joined`` names the result."""

    value: str
    join: str
    joined: str


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage on one rank. ``together``: its phases are one function. ``transfers`` are by the action that sends or
    receives them.

    ``buckets`` are memory in which gradients are summed up together; ``slices`` are by the name of the part.
    ``scalars`` (loss and metrics, where this stage makes them), ``gradients`` and ``buffers_after`` (buffers that a
    step updates once) name the values that a step gives; ``buffer_updates`` those that every micro-batch leaves in a
    buffer for the next. ``input_placements`` say how this rank gets the batch; ``random_key`` is the value that seeds
    the micro-batch's random numbers.
    """

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
        """The phase of this name; empty, where the program has none."""
        return next((one for one in self.phases if one.name == name), Phase(name))


class RankPrograms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank runs in a step: the programs of the stages that it holds."""

    VERSION: ClassVar[int] = 2
    version: int = 2
    rank: int
    programs: tuple[Program, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Rows of neighbours that an operator fetches for one of its inputs. ``position`` is the number of the input;
    ``rows`` says which rows of which dims they are, and over which mesh axes they come. Operators that read the same
    rows of one tensor fetch them once."""

    position: int
    rows: tuple[object, ...]


class OperatorProgram(msgspec.Struct, frozen=True, eq=False):
    """One operator on one rank, given its inputs as it wants them: its nodes in their order, and, by the name of the
    node that starts an exchange, the halos that it fetches of inputs. Programs are told apart by identity."""

    nodes: tuple[Node, ...]
    fetches: dict[str, Fetch]


class Lower(Protocol):
    """Makes programs without processes."""

    def __call__(self, plan: Plan) -> tuple[Program, ...]:
        """The programs of all stages of a plan, each on its busiest rank."""

    def operator(
        self, operator: Operator, strategy: Strategy, sizes: Mapping[str, int], interior_first: bool = False
    ) -> OperatorProgram:
        """An operator of the graph under a strategy over axes of these sizes, on the first rank of each. Calls that are
        alike share one program, in which the names are those of the first."""
