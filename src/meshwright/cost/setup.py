"""The setup on which every estimate is based: a model, its layout over devices, and how its step runs."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, get_args

import msgspec

from meshwright.cost.kernels import element_bytes
from meshwright.errors import LayoutError, Problem, refuse
from meshwright.ir.codec import codec_of
from meshwright.ir.device import Device
from meshwright.ir.files import did_you_mean
from meshwright.ir.layout import Recompute
from meshwright.ir.pipeline import CHUNKED, V_SHAPED, Pipeline, ScheduleName
from meshwright.ir.software import Software
from meshwright.ir.transformer import Transformer

Overlap = Literal["none", "dp", "all"]
Inner = Literal["dp", "pp"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

DTYPES: dict[str, str] = {
    "fp32": "float32",
    "tf32": "tfloat32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
}
"""Maps a precision to the dtype of its matrix products, which is a key of ``Device.peak_flops_per_s``."""


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A description of how one training step runs. It has ``dp * cp * tp * pp`` ranks. The innermost axis is tp, then
    come cp, ``inner`` (dp or pp), and the other of dp and pp.

    ``grid`` divides tensor-parallel ranks into (x, y, z) as ``Layout.tp`` does, where tp is x times y (empty: one
    axis). Products split input features over x neighbouring ranks and output features over y ranks; in every second
    product, x and y swap. z of the dp ranks together hold one copy of the parameters, which they gather layer by layer.

    ``global_batch`` is the number of sequences per step. ``micro_batch`` is the number of sequences in a micro-batch on
    one data-parallel rank. ``chunks`` is the number of model chunks per pipeline rank (interleaved; 2 with zb-v and
    dualpipe-v). ``recompute``: ``selective`` recomputes only the attention core, ``full`` recomputes whole layers. With
    ``zero`` 3, ``selective`` recomputes everything except attention and every second matrix product, as fully sharded
    frameworks do. ``flash``: attention is one fused kernel that keeps no scores. ``compiled``: the model's own
    operations are fused (torch.compile). ``overlap`` names the communication that overlaps with independent compute:
    ``none``, ``dp`` (gradients, and parameters with ZeRO) or ``all`` (also collectives inside layers and messages
    between stages). With ZeRO 3 and one stage, the communication over ``dp`` always overlaps. ``codec`` is the codec of
    gradients (empty: none).

    Raises:
        LayoutError: a size is impossible, or is not divisible as the layout needs.
    """

    model: Transformer
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    schedule: ScheduleName = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    precision: Precision = "bf16"
    flash: bool = True
    compiled: bool = False
    overlap: Overlap = "none"
    inner: Inner = "dp"
    codec: str = ""
    grid: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for key in ("dp", "tp", "pp", "cp", "ep", "chunks", "micro_batch", "global_batch"):
            if getattr(self, key) < 1:
                yield key, f"{key}={getattr(self, key)}", "give 1 or more"
        if not 0 <= self.zero <= 3:
            yield "zero", f"zero={self.zero}", "give 0, 1, 2 or 3"
        for key, known in SPELLED:
            value = getattr(self, key)
            if value not in known:
                remedy = did_you_mean(str(value), known, f"one of {', '.join(known)}")
                yield key, f"unknown {key} {value!r}", remedy
        if self.grid:
            yield from self._grid_problems()
        codec = codec_of(self.codec) if self.codec else None
        if codec is not None and (codec.exchange == "factors" or codec.rank):
            problem = f"codec {self.codec!r} by sizes: it depends on the shape of each parameter"
            yield "codec", problem, "plan the captured model with it, or take another codec"
        if codec is not None and codec.needs_whole_sum and self.zero:
            yield "codec", f"codec {self.codec!r} with zero={self.zero}", "use zero 0, or another codec"
        for divisor, by, name, size in self._divisions():
            if not size or size % by:
                yield name, f"{name} = {size} is not divisible by {divisor} = {by}", f"change {divisor} or {name}"
        layers, stages = self.model.layers, self.pp * self.chunks
        # Embedding and head may each replace a layer, on the first and on the last stage.
        if self.pp > layers or stages > layers + 2:
            problem = f"{self.pp} stages of {self.chunks} chunks need {stages} layers, the model has {layers}"
            yield "pp", problem, "take fewer stages or chunks"
        if self.chunks > 1 and self.schedule not in CHUNKED:
            problem = f"schedule {self.schedule} has one chunk a rank, not {self.chunks}"
            yield "chunks", problem, "use schedule interleaved, or chunks 1"
        if self.chunks != 2 and self.schedule in V_SHAPED:
            yield "chunks", f"schedule {self.schedule} has two chunks a rank, not {self.chunks}", "use chunks 2"
        meet = self.tp * self.cp * self.ep * self.depth > 1 or self.zero >= 2
        if self.schedule == "message-driven" and self.pp > 1 and meet:
            problem = "message-driven beside tp, cp, ep or zero 2 and 3, whose ranks communicate in every micro-batch"
            yield "schedule", problem, "use 1f1b, or leave them out"
        if self.inner == "pp" and self.cp > 1:
            yield "inner", "with cp above 1, dp lies beside it", 'give "dp", or cp = 1'

    def _grid_problems(self) -> Iterator[Problem]:
        if len(self.grid) != 3 or min(self.grid) < 1:
            yield (
                "grid",
                f"grid={list(self.grid)}",
                "give three sizes of 1 or more: input features, output features, depth",
            )
        elif math.prod(self.grid[:2]) != self.tp or self.dp % self.grid[2]:
            problem = f"grid={list(self.grid)} with tp={self.tp} and dp={self.dp}"
            yield "grid", problem, "tp is the product of the first two sizes, and the third divides dp"
        others = {
            "cp": self.cp > 1, "ep": self.ep > 1, "sequence_parallel": self.sequence_parallel,
            "experts": self.model.experts > 0, "zero": self.zero > 0 and self.grid[-1] > 1,
        }  # fmt: skip
        for name in [name for name, used in others.items() if used]:
            yield "grid", f"grid={list(self.grid)} with {name}", f"leave {name} out, or the grid"

    def _divisions(self) -> Iterator[tuple[str, int, str, int]]:
        """Yield every division that must have no remainder: name and size of the divisor, then name and size of the
        dividend."""
        model = self.model
        yield "tp", self.output_ranks, "heads", model.heads
        yield "tp", self.output_ranks, "ffn", model.ffn
        if self.input_ranks > 1:
            yield "grid", self.input_ranks, "hidden", model.hidden
        yield "dp x micro_batch", self.dp * self.micro_batch, "global_batch", self.global_batch
        yield "cp", self.cp, "sequence", model.sequence
        if self.sequence_parallel:
            yield "tp x cp (sequence parallel)", self.tp * self.cp, "sequence", model.sequence
        if self.ep > 1:
            yield "ep", self.ep, "experts", model.experts
            yield "ep", self.ep, "dp x cp", self.dp * self.cp

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def input_ranks(self) -> int:
        """The number of ranks over which the first product of a pair splits its input features."""
        return self.grid[0] if self.grid else 1

    @property
    def output_ranks(self) -> int:
        """The number of ranks over which the first product of a pair splits its output features: heads, or the inner
        width of an MLP."""
        return self.tp // self.input_ranks

    @property
    def depth(self) -> int:
        """The number of dp ranks that together hold one copy of the parameters of a grid; 1 without a grid."""
        return self.grid[2] if self.grid else 1

    @property
    def data_stride(self) -> int:
        """The distance in ranks between neighbours on dp x cp."""
        return self.tp * (self.pp if self.inner == "pp" else 1)

    @property
    def stage_stride(self) -> int:
        """The distance in ranks between neighbouring pipeline stages."""
        return self.tp * self.cp * (self.dp if self.inner == "dp" else 1)

    @property
    def microbatches(self) -> int:
        """Micro-batches of each data-parallel rank in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.model.sequence // self.cp

    @property
    def outer_parts(self) -> int:
        """The number of parts into which ranks divide everything outside the tensor-parallel operators. Sequence
        parallelism divides the sequence; a grid divides the features."""
        return self.tp if self.sequence_parallel else self.input_ranks

    @property
    def local_tokens(self) -> float:
        """Tokens of a rank outside the tensor-parallel operators, where sequence parallelism may cut the sequence. If
        features are divided, a part of the features of all tokens counts as a part of the tokens."""
        return self.tokens / self.outer_parts

    @property
    def resharded(self) -> bool:
        """Whether parameters are gathered for each use and released after it. A pipeline that shards parameters gathers
        them only once a step, because it would otherwise gather them for every micro-batch."""
        return self.zero == 3 and self.pp == 1

    def eager(self, software: Software) -> bool:
        """Whether the operations between matrix products run one by one, as in PyTorch's eager mode. If the software
        does not say: fully sharded frameworks run the model's code unchanged, while Megatron-LM has fused kernels."""
        return (
            not self.compiled
            and (software.code or ("eager" if self.zero == 3 or self.depth > 1 else "fused")) == "eager"
        )

    @property
    def alternate(self) -> bool:
        """Whether a layer keeps the outputs of attention and of every second product, and recomputes the rest."""
        return self.zero == 3 and self.recompute == "selective"

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline ranks and their stages, where each chunk is a stage."""
        return Pipeline(self.pp, self.schedule, self.chunks)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The number of layers of each pipeline rank. If the numbers cannot be equal, ranks in the middle have one
        layer more, because the first and the last rank also hold embedding and head."""
        return _stage_layers(self.model.layers, self.pp)

    @property
    def dtype(self) -> str:
        """The dtype of matrix products."""
        return DTYPES[self.precision]

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return element_bytes(self.dtype)

    @property
    def key_width(self) -> int:
        """The width of the keys on one rank; key heads are repeated if they are fewer than tp."""
        heads = self.model.kv_heads or self.model.heads
        return math.ceil(heads / self.output_ranks) * self.model.head_width


def precision_on(device: Device, asked: Precision | None = None) -> Precision:
    """The precision of matrix products on a device: ``asked``, or else bf16. GPUs that have float16 but no bfloat16,
    such as the V100, take fp16.

    Raises:
        LayoutError: bf16 is asked for, and the device has float16 but no bfloat16.
    """
    peaks = device.peak_flops_per_s
    lacks = "float16" in peaks and "bfloat16" not in peaks
    if asked == "bf16" and lacks:
        problem = f"precision 'bf16', which {device.name} does not compute in"
        raise LayoutError(problem, where="precision", remedy="use fp16, or leave the precision out")
    return asked or ("fp16" if lacks else "bf16")


@lru_cache(maxsize=1024)
def _stage_layers(layers: int, num_ranks: int) -> tuple[int, ...]:
    base, extra = divmod(layers, num_ranks)
    first = (num_ranks - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(num_ranks))


SPELLED = tuple(
    (key, get_args(kind))
    for key, kind in {
        "schedule": ScheduleName, "recompute": Recompute, "precision": Precision, "overlap": Overlap, "inner": Inner,
    }.items()
)  # fmt: skip
"""Fields that accept only a few words, each with these words."""
