"""The form of a training step that every trainer understands: a layout, its batch and precision, and model sizes."""

import itertools
import math

import msgspec

from meshwright.cost.setup import Inner, Overlap, Setup
from meshwright.cost.setup import Precision as SetupPrecision
from meshwright.errors import LayoutError
from meshwright.ir.layout import ZERO_STAGES, Layout
from meshwright.ir.plan import Plan, starred
from meshwright.ir.transformer import Transformer

PRECISIONS: dict[str | None, SetupPrecision] = {None: "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Maps the precision of a layout to that of a setup. Without a precision, a captured model computes in float32."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is trained, in terms that trainers share.

    ``global_batch`` is the number of samples per step. ``sizes`` are the sizes of a transformer (None: the model was
    captured, and its code is the user's own). ``blocks`` has the number of repeated blocks of each pipeline stage, if
    the stages are not equal. ``splits`` names the modules whose operators are split differently from
    tensor parallelism. The other fields are as in ``cost.setup.Setup``."""

    model: str
    layout: Layout
    global_batch: int
    precision: SetupPrecision = "fp32"
    sizes: Transformer | None = None
    blocks: tuple[int, ...] = ()
    splits: tuple[str, ...] = ()
    flash: bool = True
    compiled: bool = False
    overlap: Overlap = "none"
    inner: Inner = "dp"

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.layout.num_ranks

    @property
    def micro_batch(self) -> int:
        """The samples of a micro-batch on one data-parallel rank."""
        return self.global_batch // (self.layout.data_ranks * self.layout.microbatches)

    @property
    def sharding_ranks(self) -> int:
        """The data-parallel ranks that together hold one copy of the state that ZeRO divides; 1 without ZeRO."""
        return (self.layout.zero_ranks or self.layout.dp) if self.layout.zero else 1

    @classmethod
    def of_setup(cls, setup: Setup) -> "Form":
        """The form of a model that is described by its sizes."""
        tp = (setup.grid[0], setup.grid[1], setup.depth) if setup.grid else setup.tp
        layout = Layout(
            dp=setup.dp // setup.depth, tp=tp, pp=setup.pp, cp=setup.cp, ep=setup.ep, chunks=setup.chunks,
            microbatches=setup.microbatches, schedule=setup.schedule, recompute=setup.recompute,
            sequence_parallel=setup.sequence_parallel, zero=ZERO_STAGES[setup.zero if setup.dp > 1 else 0],
            codec=setup.codec,
        )  # fmt: skip
        return cls(
            model=setup.model.name, layout=layout, global_batch=setup.global_batch, precision=setup.precision,
            sizes=setup.model, flash=setup.flash, compiled=setup.compiled, overlap=setup.overlap, inner=setup.inner,
        )  # fmt: skip

    @classmethod
    def of_plan(cls, plan: Plan) -> "Form":
        """The form of a captured model. The batch of all replicas together is its batch."""
        layout = msgspec.structs.replace(plan.layout, microbatches=plan.microbatches, precision=plan.precision)
        if plan.schedule != "none":
            layout = msgspec.structs.replace(layout, schedule=plan.schedule, chunks=plan.chunks)
        return cls(
            model=plan.model, layout=layout, global_batch=plan.batch_size * layout.replicas,
            precision=PRECISIONS[plan.precision], blocks=_blocks(plan), splits=_other_splits(plan),
        )  # fmt: skip

    def setup(self) -> Setup:
        """The setup on which predictions by sizes are based.

        Raises:
            LayoutError: the model has no sizes, or the layout does not fit it.
        """
        if self.sizes is None:
            raise LayoutError(
                f"the sizes of {self.model} are not known", where="model", remedy="name a model of `meshwright models`"
            )
        layout = self.layout
        return Setup(
            model=self.sizes, dp=layout.data_ranks, tp=layout.feature_ranks, pp=layout.pp, cp=layout.cp, ep=layout.ep,
            chunks=layout.chunks, micro_batch=self.micro_batch, global_batch=self.global_batch,
            schedule=layout.schedule, recompute=layout.recompute, sequence_parallel=layout.sequence_parallel,
            zero=0 if layout.depth > 1 else layout.zero, precision=self.precision, flash=self.flash,
            compiled=self.compiled, overlap=self.overlap, inner=self.inner, codec=layout.codec,
            grid=layout.grid if isinstance(layout.tp, tuple) else (),
        )  # fmt: skip


MEGATRON_FACTORS = ("h", "x", "f", "v", "s", "none")
"""The factors that Megatron-LM's tensor parallelism splits: heads (also in groups), hidden features, vocabulary; and
the sequence between split modules."""


def _other_splits(plan: Plan) -> tuple[str, ...]:
    """The modules whose split over ``tp`` differs from Megatron-LM's tensor parallelism."""
    splits = ((starred(note.module), word) for note in plan.notes for word in note.split.split())
    modules = (
        module for module, word in splits
        if word.endswith("@tp") and word.removesuffix("@tp") not in MEGATRON_FACTORS
    )  # fmt: skip
    return tuple(dict.fromkeys(modules))


def _blocks(plan: Plan) -> tuple[int, ...]:
    """The number of repeated blocks that each stage of a plan begins with, if the plan shows it and stages differ.

    A stage that begins at ``h.3.ln_1:add#0`` begins at block 3. The last stage ends where the parameters of the blocks
    end."""
    starts = [_block_of(stage.first) for stage in plan.stages[1:]]
    if not starts or None in starts:
        return ()
    indices = [_block_of(name) for stage in plan.stages for name in stage.storage]
    last = max((index for index in indices if index is not None), default=-1) + 1
    edges = [0, *(start for start in starts if start is not None), last]
    counts = tuple(end - begin for begin, end in itertools.pairwise(edges))
    return counts if len(set(counts)) > 1 and min(counts) >= 0 else ()


def _block_of(name: str) -> int | None:
    """The index of the block in the name of an operator or parameter; None outside of blocks."""
    words = name.partition(":")[0].split(".")
    return next((int(word) for word in words if word.isdecimal()), None)


def data_ranks_of(num_ranks: int, where: str, **others: int) -> int:
    """The number of data-parallel ranks beside the other axes (name and size) of a configuration without that number.

    Raises:
        LayoutError: the other axes do not divide the ranks.
    """
    product = math.prod(others.values())
    if num_ranks < product or num_ranks % product:
        axes = " x ".join(f"{name}={size}" for name, size in others.items())
        raise LayoutError(
            f"{num_ranks} ranks do not divide into {axes}", where=where,
            remedy=f"give --ranks that is a multiple of {product}",
        )  # fmt: skip
    return num_ranks // product


def microbatches_of(global_batch: int, data_ranks: int, micro_batch: int) -> int:
    """The number of micro-batches of each data-parallel rank; micro-batches have at most ``micro_batch`` samples.

    Raises:
        LayoutError: the data-parallel ranks do not divide the batch.
    """
    if data_ranks < 1 or global_batch % data_ranks:
        raise LayoutError(
            f"a batch of {global_batch} does not divide over {data_ranks} data-parallel ranks", where="dp",
            remedy=f"take a batch that is a multiple of {data_ranks}, or fewer data-parallel ranks",
        )  # fmt: skip
    own = global_batch // data_ranks
    return own // math.gcd(own, max(1, micro_batch))
