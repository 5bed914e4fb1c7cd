"""The layout: the parallel sizes and options that a user chooses by hand. The planner decides everything else."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args, get_origin

import msgspec

from meshwright.errors import LayoutError, Problem, refuse
from meshwright.ir.mesh import Mesh
from meshwright.ir.pipeline import CHUNKED, V_SHAPED, Pipeline, ScheduleName
from meshwright.ir.precision import Precision

TIME = "time"
"""The axis of micro-batches. It splits the batch as a mesh axis does, but in time: no ranks communicate over it."""
DATA_AXES = ("dp", "dp_shard", "tz")
"""The axes over which the batch of a step is split before the ranks receive it, outermost first."""
FEATURE_AXES = ("tp", "ty", "tx")
"""The axes over which products split features: ``tp``, or the two axes of a grid."""

SPATIAL_AXES = ("sz", "sy", "sx")
"""The axes over which the depth, height and width of images are split."""
MIXED = "m"
"""The first letter of the axes ``m1``, ``m2``, ... of ``mixed``, over which operators split any of their factors."""

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recomputation, in the order of falling memory and rising time."""
Float8Scaling = Literal["", "tensorwise", "rowwise"]
"""The tensors, or the rows and columns, that have one scale in float8; empty: no products in float8."""
TensorGrid = tuple[int, int, int]
"""The sizes of a grid of tensor-parallel ranks: for input features, for output features, and depth."""
ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
"""ZeRO stages, in the order of falling memory and rising time."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes and options that a user chooses. A size of -1 takes all ranks that the other sizes leave."""

    dp: int = 1
    """Data-parallel size: divides the batch."""
    cp: int = 1
    """Context-parallel size: divides the sequence."""
    context: Literal["gather", "ring"] = "gather"
    """How attention gets the keys and values of other cp ranks: all at once (``gather``) or rank by rank (``ring``)."""
    ep: int = 1
    """Expert-parallel size: the number of dp ranks that divide the experts among them. It must divide dp."""
    tp: int | TensorGrid = 1
    """Tensor-parallel size: divides heads, hidden features and the vocabulary. Three sizes ``(x, y, z)`` make a grid:
    products split features over two axes, ``tx`` and ``ty``, and the z ranks along the axis ``tz`` take different
    samples. These z ranks together hold one copy of the parameters. They gather it for every use (``zero=3``, the
    default if z is above 1), or once a step (``zero`` of 1 or 2)."""
    sequence_parallel: bool = False
    """Whether tp ranks split the sequence outside of tensor-parallel blocks, as in Megatron: reduce-scatters and
    all-gathers replace all-reduces."""
    zero: Literal[-1, 0, 1, 2, 3] = 0
    """The ZeRO stage: data-parallel ranks store parts of the optimizer state (1), also of gradients (2), also of
    parameters (3), which are then gathered for every use. With -1, the planner chooses the stage of each parameter:
    the fastest that fits in memory."""
    zero_ranks: int = 0
    """The number of neighbouring dp ranks that together hold one copy of the state that ZeRO divides; 0: all dp
    ranks."""
    stage_zero: tuple[ZeroStage, ...] = ()
    """The ZeRO stage of each pipeline stage, if they differ: ``(3, 1, 0, 0)``. ``zero`` must be the largest of them."""
    offload: Literal["none", "optimizer"] = "none"
    """``optimizer``: ranks keep optimizer state in host memory between uses. If the planner searches, ``optimizer`` is
    only a permission: the planner uses host memory where device memory is too small."""
    precision: Precision | None = None
    """The precision of matrix products and convolutions; parameters, gradients and optimizer state stay in float32.
    Default: the model's own dtypes."""
    spatial: tuple[int, ...] = ()
    """The numbers of parts into which images are split: ``(height, width)`` or ``(height,)``; for volumes
    ``(depth, height, width)``. Convolutions exchange the rows at the borders of the parts."""
    mixed: tuple[int, ...] = ()
    """The number of ranks over which each operator splits the factor that costs least: samples, rows of images,
    channels, filters or features. Several sizes make several axes ``m1``, ``m2``, ...; an operator may split another
    factor over each axis."""
    pp: int = 1
    """Pipeline-parallel size: divides the model into stages, one after the other."""
    microbatches: int = 1
    """The number of equal parts of the batch that run one after the other. Their gradients are accumulated."""
    schedule: ScheduleName = "1f1b"
    """The order of the micro-batches in a pipeline."""
    in_flight: int = 0
    """The largest number of micro-batches that may be between forward and backward on a rank, under the schedule
    ``message-driven``. 0 means 2 * pp. A larger number bridges longer delays, and needs more memory."""
    chunks: int = 1
    """The number of stages (chunks) on every pipeline rank. More than 1 needs the schedule ``interleaved``; ``zb-v``
    and ``dualpipe-v`` need 2."""
    recompute: Recompute = "none"
    """The operators that backward computes again: attention (``selective``), or whole repeated blocks (``full``)."""
    batch_statistics: Literal["global", "microbatch", "rank"] = "global"
    """The samples over which batch norm takes its statistics: the whole batch (not with micro-batches), the
    micro-batch, or one rank's samples of the micro-batch, as in DistributedDataParallel. With ``rank``, ranks exchange
    no statistics in forward and backward, and the running statistics are the mean over ranks."""
    stage_sizes: tuple[dict[str, int], ...] = ()
    """Sizes of dp and tp for each pipeline rank, if they differ: ``({"dp": 2}, {"dp": 2, "tp": 2})``. Stages may have
    different numbers of ranks; the layout needs their sum. ``dp`` and ``tp`` of the layout itself do not count then;
    they are refused if no stage has them."""
    codec: str = ""
    """The codec of gradients between data-parallel ranks, such as ``qsgd(4)`` or ``topk(1%)`` (``ir/codec.py``). With
    ``auto``, each bucket gets the fastest codec, or no codec; results then differ from training without a codec. If
    empty, gradients are sent unchanged, or compressed without loss if a calibration shows that this is faster.
    ``none``: gradients are always sent unchanged."""
    parameter_codec: str = ""
    """The codec of parameters that ZeRO gathers, such as ``qsgd(8)``."""
    activation_codec: str = ""
    """The codec of activations and their gradients between pipeline stages, such as ``bf16``. No error feedback
    compensates for its errors, so gradients are biased."""
    replicas: int = 1
    """The number of replicas of the model. The other sizes describe one replica. The rule in ``consistency`` joins the
    replicas."""
    consistency: str = "sync"
    """The rule that says when a replica may continue and how the states of replicas are mixed: ``server(ssp=3)``,
    ``gossip(ring)``, ``local(16)``, ``diloco(50)``, ... (``ir/consistency.py``). With ``sync``, replicas are additional
    data-parallel ranks."""
    float8: Float8Scaling = ""
    """Allow matrix products in float8, with one scale for each tensor, or one for each row (``ops/float8.py``). The
    planner takes it for the products that it makes faster. Their operands are rounded to 3 bits of mantissa."""
    workspace_bytes: int = 0
    """Limit on the temporary memory of each operator that has several algorithms (convolutions). The fastest algorithms
    within the limit are used, if necessary on a few samples at a time. 0: no limit."""
    workspace_over: Literal["operator", "network"] = "operator"
    """``operator``: each operator has this limit. ``network``: ``workspace_bytes`` is the limit of all operators
    together, as if each operator had a workspace of its own."""
    pin: dict[str, str] = {}
    """Splits set by the user. Maps a glob of module names to ``"factor@axis"``: ``{"conv*": "batch@tp"}``. ``none``
    instead of a factor leaves the modules whole on the axis: ``{"head": "none@tp"}``."""

    def __post_init__(self) -> None:
        if isinstance(self.tp, list):
            msgspec.structs.force_setattr(self, "tp", tuple(self.tp))
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                choices = get_args(field.type) if get_origin(field.type) is Literal else ()
                remedy = f"use {' or '.join(map(repr, choices))}" if choices else str(error).replace("`", "")
                raise LayoutError(f"{field.name} is {value!r}", where="layout", remedy=remedy) from None

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """The sizes whose product is the number of ranks. At most one size is open (-1)."""
        tensor = self.tp if isinstance(self.tp, tuple) else (self.tp,)
        return (self.dp, self.cp, *tensor, self.pp, *self.spatial, *self.mixed)

    @property
    def grid(self) -> TensorGrid:
        """The sizes of ``tx``, ``ty`` and ``tz``. Without a grid, all tensor-parallel ranks count as ``ty``."""
        return self.tp if isinstance(self.tp, tuple) else (1, self.tp, 1)

    @property
    def feature_ranks(self) -> int:
        """The number of ranks over which products split features: ``tp``, or x times y of a grid."""
        return self.grid[0] * self.grid[1]

    @property
    def depth(self) -> int:
        """The number z of ranks along the axis ``tz`` of a grid; 1 without a grid."""
        return self.grid[2]

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the batch is split: dp times the depth of a grid."""
        return self.dp * self.depth

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the layout needs; negative if a size is open."""
        if self.stage_sizes:
            return sum(math.prod(own.values()) for own in self.stage_sizes)
        return math.prod(self.axis_sizes)

    @property
    def is_plain(self) -> bool:
        """Whether the layout has no axes but dp, tp (or tx and ty) and pp, and no sequence parallelism."""
        others = self.sequence_parallel or self.mixed or self.spatial
        return self.cp == self.ep == self.depth == 1 and not others

    @property
    def spatial_axes(self) -> dict[str, int]:
        """Maps the axes of ``spatial`` to their sizes: ``sz``, ``sy`` and ``sx`` split depth, height and width."""
        names = {0: (), 1: ("sy",), 2: ("sy", "sx"), 3: ("sz", "sy", "sx")}[len(self.spatial)]
        return dict(zip(names, self.spatial, strict=True))

    @property
    def mixed_axes(self) -> dict[str, int]:
        """Maps the axes ``m1``, ``m2``, ... of ``mixed`` to their sizes."""
        return {f"m{index}": size for index, size in enumerate(self.mixed, start=1)}

    def resolved(self, world_size: int) -> "Layout":
        """The layout with -1 replaced by the number of ranks that the other sizes leave. If no ZeRO stage is set, the
        stage over the depth of a grid is 3.

        Raises:
            LayoutError: the product of the sizes is not ``world_size``, or sizes or options exclude each other.
        """
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.feature_ranks, "pp": self.pp}
        refuse(LayoutError, self._impossible(sizes))
        if self.stage_sizes:
            refuse(LayoutError, self._unfit_stages(sizes, world_size))
            refuse(LayoutError, self._unfit_options(sizes, max(own.get("dp", 1) for own in self.stage_sizes)))
            return msgspec.structs.replace(self, dp=1, tp=1)
        product = math.prod(size for size in self.axis_sizes if size != -1)
        for name in [name for name, size in sizes.items() if size == -1 and world_size % product == 0]:
            sizes[name], product = world_size // product, world_size
        refuse(LayoutError, self._unfit(sizes, product, world_size))
        tp = self.tp if isinstance(self.tp, tuple) else sizes["tp"]
        zero = 3 if self.depth > 1 and self.zero == 0 else self.zero
        return msgspec.structs.replace(self, **{**sizes, "tp": tp, "zero": zero})

    def _impossible(self, sizes: dict[str, int]) -> Iterator[Problem]:
        """Problems that do not depend on the number of ranks."""
        if isinstance(self.tp, tuple):
            yield from self._unfit_grid(self.tp)
            sizes = {name: size for name, size in sizes.items() if name != "tp"}
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield "layout", f"{name}={size}", "give 1 or more, or -1 for what is left"
        free = [f"{name}=-1" for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            yield "layout", " and ".join(free), "leave only one of them open"
        for name, parts, example in (("spatial", self.spatial, "[2, 2]"), ("mixed", self.mixed, "[4] or [2, 2]")):
            if len(parts) > 3 or min(parts, default=1) < 1:
                yield "layout", f"{name}={list(parts)}", f"give up to three sizes of 1 or more: {example}"
        # The integer program that chooses splits over ``mixed`` does not support these.
        others = {"cp": sizes["cp"] != 1, "ep": self.ep != 1, "sequence_parallel": self.sequence_parallel}
        for name in [name for name, used in others.items() if used and max(self.mixed, default=1) > 1]:
            yield "layout: mixed", f"mixed with {name}", "leave one of them out"

    def _unfit_grid(self, grid: TensorGrid) -> Iterator[Problem]:
        """Problems of a grid of tensor-parallel ranks, and options that exclude it."""
        text = f"tp={list(grid)}"
        if min(grid) < 1:
            yield "layout: tp", text, "give three sizes of 1 or more, as in [2, 2, 1]; dp may be -1, for what is left"
        others = {
            "cp": self.cp != 1, "ep": self.ep != 1, "spatial": max(self.spatial, default=1) > 1,
            "mixed": max(self.mixed, default=1) > 1, "stage_sizes": bool(self.stage_sizes),
        }  # fmt: skip
        for name in [name for name, used in others.items() if used]:
            yield "layout: tp", f"{text} with {name}", f"leave {name} out, or give tp as one size"
        if self.sequence_parallel:
            remedy = "leave it out: sequences are split over tx and ty between products where that is faster"
            yield "layout: tp", f"{text} with sequence_parallel", remedy
        if self.depth > 1 and self.zero_ranks:
            remedy = f"leave zero_ranks out: the {self.depth} ranks along tz share the state"
            yield "layout: tp", f"{text} with zero_ranks={self.zero_ranks}", remedy

    def _unfit(self, sizes: dict[str, int], product: int, world_size: int) -> Iterator[Problem]:
        """Problems of sizes that exclude each other, or that need another number of ranks than ``world_size``."""
        if product != world_size:
            named = [name for name in sizes if name in ("dp", "tp") or sizes[name] != 1]
            shown = sizes | ({"tp": list(self.tp)} if isinstance(self.tp, tuple) else {})
            asked = " x ".join(f"{name}={shown[name]}" for name in named)
            for name, parts in (("spatial", self.spatial), ("mixed", self.mixed)):
                asked += f" x {name}={list(parts)}" if max(parts, default=1) > 1 else ""
            remedy = f"choose sizes whose product is {world_size}, or start {product} ranks"
            yield "layout", f"{asked} needs {product} ranks, there are {world_size}", remedy
        yield from self._unfit_options(sizes, sizes["dp"])

    def _unfit_options(self, sizes: dict[str, int], dp: int) -> Iterator[Problem]:
        """Options that exclude each other or do not fit the sizes. ``dp`` is the largest dp of any stage."""
        if self.ep < 1 or dp % self.ep:
            remedy = "experts lie over ranks that divide the batch: give a divisor of dp"
            yield "layout", f"ep={self.ep} does not divide dp={dp}", remedy
        yield from self._unfit_zero(dp, sizes["pp"] * self.chunks)
        yield from self._unfit_workspace()
        if self.context == "ring" and sizes["cp"] == 1:
            yield "layout", "context='ring' with cp=1", "give cp of 2 or more: it is the ring"
        tp = max((own.get("tp", 1) for own in self.stage_sizes), default=sizes["tp"])
        if self.sequence_parallel and tp == 1:
            yield "layout", "sequence_parallel with tp=1", "give tp of 2 or more: it divides the sequence too"
        for name in ("microbatches", "chunks"):
            if getattr(self, name) < 1:
                yield "layout", f"{name}={getattr(self, name)}", "give 1 or more"
        pp = sizes["pp"]
        if self.in_flight and (self.in_flight < 0 or self.schedule != "message-driven" or pp == 1):
            problem = f"in_flight={self.in_flight} with schedule {self.schedule!r} and pp={pp}"
            yield "layout", problem, "give 0, or 1 or more with pp of 2 or more and schedule='message-driven'"
        problem = f"chunks={self.chunks} with schedule {self.schedule!r} and pp={pp}"
        if self.chunks > 1 and (self.schedule not in CHUNKED or pp == 1):
            named = self.schedule if self.schedule in V_SHAPED else "interleaved"
            yield "layout", problem, f"several chunks need pp of 2 or more and schedule='{named}'"
        elif self.chunks != 2 and self.schedule in V_SHAPED and pp > 1:
            yield "layout", problem, f"give chunks=2: {self.schedule} has two stages on every rank"

    def _unfit_workspace(self) -> Iterator[Problem]:
        if self.workspace_bytes < 0:
            yield "layout", f"workspace_bytes={self.workspace_bytes}", "give a number of bytes, or 0 for no limit"
        if self.workspace_over == "network" and not self.workspace_bytes:
            yield "layout", "workspace_over='network' without a limit", "give workspace_bytes"

    def _unfit_zero(self, dp: int, num_stages: int) -> Iterator[Problem]:
        if self.stage_zero and len(self.stage_zero) != num_stages:
            problem = f"{len(self.stage_zero)} ZeRO stages for {num_stages} pipeline stages"
            yield "layout: stage_zero", problem, "give a ZeRO stage for every pipeline stage, or only zero"
        if self.stage_zero and self.zero != max(self.stage_zero):
            yield "layout: stage_zero", f"{self.stage_zero} with zero={self.zero}", f"give zero={max(self.stage_zero)}"
        if self.zero_ranks and not self.zero:
            yield "layout", f"zero_ranks={self.zero_ranks} with zero=0", "give zero 1, 2 or 3"
        if not self.zero or self.depth > 1:
            return
        share, nobody = self.zero_ranks or dp, "there is no rank to share with"
        if dp == 1:
            remedy = "give dp of 2 or more: its ranks share the state; or zero=0"
            yield "layout", f"zero={self.zero} with dp=1: {nobody}", remedy
        if self.zero_ranks == 1:
            yield "layout", f"zero={self.zero} with zero_ranks=1: {nobody}", "give 2 or more, or 0 for all dp ranks"
        if share < 1 or dp % share:
            yield "layout", f"zero_ranks={share} does not divide dp={dp}", "give a divisor of dp"
        if self.stage_sizes and self.zero_ranks:
            yield "layout", "zero_ranks with stage_sizes", "leave zero_ranks out: all dp ranks of a stage share"
        if self.zero == -1 and self.sequence_parallel:
            # The integer program chooses the ZeRO stages of parameters only where it chooses all splits.
            yield "layout", "zero=-1 with sequence_parallel", "give zero 0, 1, 2 or 3"
        if self.ep > 1 and self.zero_ranks:
            yield "layout", "zero_ranks with ep", "leave one of them out"

    def _unfit_stages(self, sizes: dict[str, int], world_size: int) -> Iterator[Problem]:
        place, count = "layout: stage_sizes", len(self.stage_sizes)
        if sizes["cp"] != 1 or max([self.ep, *self.spatial, *self.mixed]) > 1:
            yield place, "stage_sizes with cp, ep, spatial or mixed", "leave one of them out"
        if sizes["pp"] == 1:
            yield place, "stage_sizes with pp=1", "give pp of 2 or more, or dp and tp themselves"
        if count != sizes["pp"]:
            remedy = "give the sizes of every pipeline rank, or none"
            yield place, f"{count} stage_sizes for pp={sizes['pp']}", remedy
        for index, own in enumerate(self.stage_sizes):
            if set(own) - {"dp", "tp"} or min(own.values(), default=1) < 1:
                problem = f"{own} has an axis other than dp and tp, or a size below 1"
                yield f"{place}[{index}]", problem, "give sizes of dp and tp, each 1 or more"
        if self.num_ranks != world_size:
            counts = " + ".join(str(math.prod(own.values())) for own in self.stage_sizes)
            problem = f"stages of {counts} = {self.num_ranks} ranks, there are {world_size}"
            yield place, problem, f"give sizes whose products sum up to {world_size}, or start {self.num_ranks} ranks"

    def contradictions(self) -> Iterator[Problem]:
        """Problems of a layout given by hand: it sets a ``dp`` or ``tp`` although no stage has this size. The planner's
        search itself leaves in ``dp`` and ``tp`` the sizes of the layout from which it derived ``stage_sizes``."""
        for name in ("dp", "tp") if self.stage_sizes else ():
            size, own = getattr(self, name), [axes.get(name, 1) for axes in self.stage_sizes]
            if size not in (1, -1, *own):
                sizes = " and ".join(map(str, own))
                yield "layout", f"{name}={size}, but stage_sizes give {sizes}", f"leave out {name}, or stage_sizes"

    def zero_of(self, stage: int) -> Literal[-1, 0, 1, 2, 3]:
        """The ZeRO stage of a pipeline stage."""
        return self.stage_zero[stage] if self.stage_zero else self.zero

    def of_stage(self, index: int) -> "Layout":
        """The layout in which all stages have the sizes of pipeline rank ``index``."""
        if not self.stage_sizes:
            return self
        own = {"dp": 1, "tp": 1} | self.stage_sizes[index]
        return msgspec.structs.replace(self, stage_sizes=(), **own)

    def mesh(self) -> Mesh:
        """The mesh of the layout's axes: pp is outermost, tp is innermost.

        With expert parallelism, the data-parallel ranks lie along two axes, ``dp`` and ``ep``. If ``zero_ranks`` is
        less than dp, they lie along ``dp`` and ``dp_shard``, and the ranks along ``dp_shard`` hold one copy of the
        state that ZeRO divides. A grid has the axes ``tz``, ``ty`` and ``tx`` in place of ``tp``. If stages differ
        (``stage_sizes``), each stage has a mesh of dp and tp."""
        if self.stage_sizes:
            return Mesh.of_stages([{"dp": 1, "tp": 1} | own for own in self.stage_sizes])
        stages = {"pp": self.pp} if self.pp > 1 else {}
        shares = self.zero_ranks if self.zero_ranks < self.dp else 0
        inner = (("dp_shard", shares), ("ep", self.ep), ("cp", self.cp), *self.spatial_axes.items(),
                 *self.mixed_axes.items())  # fmt: skip
        sizes = {name: size for name, size in inner if size > 1}
        if isinstance(self.tp, tuple):
            x, y, z = self.tp
            return Mesh.of(**stages, dp=self.dp // max(1, shares), **sizes, tz=z, ty=y, tx=x)
        return Mesh.of(**stages, dp=self.dp // self.ep // max(1, shares), **sizes, tp=self.tp)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline ranks and their stages."""
        return Pipeline(self.pp, self.schedule, self.chunks)

    @property
    def zero_axis(self) -> str:
        """The mesh axis over which ZeRO divides state; empty if it divides none."""
        if not self.zero:
            return ""
        return next((name for name in ("tz", "dp_shard", "dp", "ep") if self.mesh().sizes.get(name, 1) > 1), "")


@cache
def _fields(kind: type[Layout]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a layout. They are cached: a search makes thousands of layouts, and reading the annotations would
    take most of that time."""
    return msgspec.structs.fields(kind)
