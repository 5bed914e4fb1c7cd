"""A training run as data: the contents of RUN.toml."""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.layout import Layout
from meshwright.ir.learning_rate import Scaling, scaled_by
from meshwright.ir.nodes import Nodes
from meshwright.ir.plan import Plan
from meshwright.ir.run_data import Data
from meshwright.ir.run_model import Count, Fraction, Model, Positive, Rate, Section

# --- [layout], [optimizer], [schedule], [train], [sample] ------------------------------------------------------------


class RunLayout(Layout, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layout of the step, as sizes or as a plan file. By default, all ranks are data-parallel."""

    dp: int = -1
    """Data-parallel size; -1: the number of ranks that the other sizes leave."""
    plan: str = ""
    """A plan file (from ``meshwright plan --output``) in place of sizes, or ``auto``. With ``auto``, the planner
    searches for the fastest layout, unless another key of this table sets a layout. It uses ``precision``, ``offload``
    if memory requires this, products in ``float8`` where they are faster, and the best codecs of gradients with
    ``codec = "auto"``."""
    cluster: str = ""
    """The cluster for which the step is planned: a name or a file; empty: this machine."""
    seconds: float | None = None
    """The seconds after which ``plan = "auto"`` takes the best layout so far. By default, it compares all layouts."""
    strict: bool = False
    """Refuse a model with an operator that no rule splits, instead of running that operator whole on every rank."""

    @property
    def searched(self) -> bool:
        """Whether the planner searches for a layout: ``plan`` is ``auto`` and no size is set. Only precision, offload,
        float8, and a ``codec`` of ``auto`` or ``none`` may be set beside it.

        Raises:
            LayoutError: ``workspace_bytes`` is set although the planner searches.
        """
        codec = "" if self.codec in ("auto", "none") else self.codec
        asked = msgspec.structs.replace(
            self.sizes(), precision=None, offload="none", float8="", codec=codec, workspace_bytes=0,
            workspace_over="operator",
        )  # fmt: skip
        searched = self.plan == "auto" and asked == RunLayout().sizes()
        if searched and self.workspace_bytes:
            raise LayoutError(
                "workspace_bytes with plan='auto': the search does not weigh algorithms of convolutions",
                where="layout",
                remedy="search without it, then give the layout that was found beside workspace_bytes",
            )
        return searched

    @property
    def file(self) -> str:
        """The path of the plan file; empty if the table names no plan file."""
        return self.plan if self.plan != "auto" else ""

    def sizes(self) -> Layout:
        """This table as a plain ``Layout``, without the keys that only a run file has."""
        return Layout(**{name: getattr(self, name) for name in Layout.__struct_fields__})

    def chosen(self) -> Layout | str:
        """The layout argument of ``parallelize``: ``"auto"``, the path of a plan, or a layout."""
        return "auto" if self.searched else self.file or self.sizes()


class _Optimizer(Section, frozen=True, kw_only=True, tag_field="name"):
    lr: Rate = 1e-3
    """The learning rate. If a schedule changes it during the run, this is the highest. If ``schedule.scaling`` scales
    it with the batch size, this is the learning rate for ``schedule.base_batch_size``."""
    weight_decay: Rate = 0.0
    """Weight decay."""


class SGD(_Optimizer, frozen=True, kw_only=True, tag="sgd"):
    """``torch.optim.SGD``."""

    momentum: Rate = 0.0
    """Momentum."""
    dampening: Rate = 0.0
    """Dampening of the momentum."""
    nesterov: bool = False
    """Nesterov's momentum."""


class _AdamLike(_Optimizer, frozen=True, kw_only=True):
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Rate = 1e-8
    """Added to the denominator."""
    amsgrad: bool = False
    """The AMSGrad variant."""


class Adam(_AdamLike, frozen=True, kw_only=True, tag="adam"):
    """``torch.optim.Adam``."""


class AdamW(_AdamLike, frozen=True, kw_only=True, tag="adamw"):
    """``torch.optim.AdamW``."""

    weight_decay: Rate = 0.01
    """Weight decay, decoupled from the gradient."""


class RMSprop(_Optimizer, frozen=True, kw_only=True, tag="rmsprop"):
    """``torch.optim.RMSprop``."""

    alpha: Rate = 0.99
    """Decay of the running mean of the squared gradient."""
    momentum: Rate = 0.0
    """Momentum."""
    eps: Rate = 1e-8
    """Added to the denominator."""


class Adagrad(_Optimizer, frozen=True, kw_only=True, tag="adagrad"):
    """``torch.optim.Adagrad``."""

    lr_decay: Rate = 0.0
    """Decay of the learning rate."""
    eps: Rate = 1e-10
    """Added to the denominator."""


class _LayerWise(_Optimizer, frozen=True, kw_only=True):
    adapt_vectors: bool = True
    """Whether norms also scale the steps of parameters with fewer than two dims (biases, gains of norm layers)."""


class _LayerWiseMomentum(_LayerWise, frozen=True, kw_only=True):
    momentum: Rate = 0.9
    """Momentum."""
    nesterov: bool = False
    """Nesterov's momentum."""


class LARS(_LayerWiseMomentum, frozen=True, kw_only=True, tag="lars"):
    """``meshwright.optim.LARS`` (You, Gitman, Ginsburg 2017): momentum SGD with a scale for each tensor's step."""

    lr: Rate = 1.0
    """The learning rate. For each tensor, it is multiplied by a ratio of norms, times ``trust_coefficient``."""
    trust_coefficient: Rate = 0.001
    """The length of a tensor's step relative to the tensor's norm, at a learning rate of 1."""


class LARC(_LayerWiseMomentum, frozen=True, kw_only=True, tag="larc"):
    """``meshwright.optim.LARC``: like LARS with a learning rate of 1, but no tensor's learning rate is above ``lr``."""

    lr: Rate = 0.1
    """The largest learning rate of any tensor."""
    trust_coefficient: Rate = 0.02
    """The largest step of a tensor, relative to its norm."""


class LAMB(_LayerWise, frozen=True, kw_only=True, tag="lamb"):
    """``meshwright.optim.LAMB`` (You et al. 2020): Adam with a scale for each tensor's step, from the norms."""

    weight_decay: Rate = 0.01
    """Weight decay, decoupled from the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Rate = 1e-6
    """Added to the denominator."""


class _FrozenVariance(_Optimizer, frozen=True, kw_only=True):
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Rate = 1e-8
    """Added to the denominator."""


class OneBitAdam(_FrozenVariance, frozen=True, kw_only=True, tag="onebitadam"):
    """``meshwright.optim.OneBitAdam`` (Tang et al. 2021): Adam without bias correction. Its variance stays constant
    after ``freeze_step`` steps. Use it with ``layout.codec`` of the form ``onebit(momentum=0.9, warmup=1000)``, where
    ``momentum`` is the first of ``betas`` and ``warmup`` is ``freeze_step``."""

    freeze_step: Positive = 1000
    """The number of steps that update the variance: 15 to 25 % of all steps."""


class ZeroOneAdam(_FrozenVariance, frozen=True, kw_only=True, tag="zerooneadam"):
    """``meshwright.optim.ZeroOneAdam`` (Lu et al. 2023): like OneBitAdam, but the variance is updated more and more
    rarely."""

    freeze_step: Positive = 100_000
    """The number of steps after which the variance is not updated any more."""
    num_updates: Positive = 16
    """The number of updates of the variance after which the number of steps between two updates doubles."""


Optimizer = SGD | Adam | AdamW | RMSprop | Adagrad | LARS | LARC | LAMB | OneBitAdam | ZeroOneAdam


class LearningRate(Section, frozen=True, kw_only=True):
    """The change of the learning rate during a run, and its scaling with the batch size.

    A linear warm-up is followed by a decay to ``final`` times the highest learning rate."""

    name: Literal["none", "linear", "cosine"] = "none"
    """The shape of the decay; ``none``: no decay."""
    warmup_steps: Count = 0
    """The number of steps until the highest learning rate."""
    warmup_from: Literal["zero", "base"] = "zero"
    """The start of the warm-up: near 0 (``zero``) or the rate before scaling (``base``: Goyal et al. 2017, 2.2)."""
    final: Fraction = 0.1
    """The last learning rate, as a fraction of the highest."""
    scaling: Scaling = "none"
    """``linear`` multiplies ``optimizer.lr`` by the batch size divided by ``base_batch_size``. ``sqrt`` multiplies it
    by the square root of this ratio."""
    base_batch_size: Count = 0
    """The batch size for which ``optimizer.lr`` was found; required if ``scaling`` is not ``none``."""
    batch_sizes: tuple[tuple[Positive, Positive], ...] = ()
    """Pairs of a step and the global batch size from that step on: ``[[500, 32], [800, 64]]`` (Smith et al. 2018,
    arXiv:1711.00489). Before the first of these steps, it is ``data.batch_size``."""

    def factor(self, step: int, steps: int, batch_size: int = 0) -> float:
        """The factor for ``optimizer.lr`` in ``step`` (from 0) of ``steps``, for batches of ``batch_size`` samples."""
        highest = scaled_by(self.scaling, batch_size, self.base_batch_size) if self.scaling != "none" else 1.0
        if step < self.warmup_steps and self.warmup_from == "base":
            return 1 + (highest - 1) * step / self.warmup_steps
        if step < self.warmup_steps:
            return highest * (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        if self.name == "linear":
            return highest * (1 - (1 - self.final) * done)
        if self.name == "cosine":
            return highest * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))
        return highest

    def batch_size(self, step: int, first: int) -> int:
        """The global batch size in ``step`` (counted from 0) of a run that begins with the batch size ``first``."""
        return next((size for begin, size in reversed(self.batch_sizes) if step >= begin), first)


class Train(Section, frozen=True, kw_only=True):
    """The settings of the training loop: steps, seed, checkpoints and ranks."""

    steps: Positive = 1000
    """The number of training steps."""
    max_grad_norm: Rate = 0.0
    """The norm of the whole model's gradient to which gradients are clipped; 0: no clipping."""
    seed: int = 0
    """The seed of initial values, data order and dropout."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """The dtype of parameters and of floating-point data."""
    compile: bool = False
    """Whether torch.compile fuses operators into kernels. This needs a C++ compiler. Only rounding changes."""
    log_every: Positive = 10
    """Steps between log lines."""
    metrics: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = ()
    """Where the metrics of steps go besides ``metrics.jsonl``. Files lie in the folder of the run; nothing is sent."""
    evaluate_every: Count = 0
    """Steps between evaluations on held-out data; 0: only before the first step and after the last."""
    checkpoint_every: Count = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep: Positive = 2
    """The number of checkpoints to keep."""
    directory: str = ""
    """The folder of the run; empty: ``runs/`` and the name of the run file. A stopped run in this folder continues."""
    ranks: Positive | Literal["auto"] = "auto"
    """The number of processes; ``auto``: one for each core, but not more than layout and batch can use."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The network port at which ranks meet; 0: any free port."""
    grace_s: Rate = 25.0
    """Seconds in which the run saves after SIGTERM or SIGUSR1. After them, it ends without this save."""


class Sample(Section, frozen=True, kw_only=True):
    """Text that a language model of bytes generates after training."""

    prompt: str = "\n"
    """The text that the model continues."""
    length: Count = 400
    """The number of bytes to write."""
    temperature: Rate = 0.8
    """The temperature of sampling; 0: always the likeliest byte."""


class Run(Section, frozen=True, kw_only=True):
    """The contents of a RUN.toml: one field for each table."""

    model: Model
    """The model to train."""
    data: Data
    """The data to train on."""
    layout: RunLayout = RunLayout()
    """How the step is divided over the ranks."""
    optimizer: Optimizer = AdamW()
    """The optimizer."""
    schedule: LearningRate = LearningRate()
    """The change of the learning rate during the run."""
    train: Train = Train()
    """The training loop: steps, seed, checkpoints and ranks."""
    sample: Sample | None = None
    """Text to generate after training."""
    nodes: Nodes = Nodes()
    """The nodes on which ``meshwright launch`` starts the run."""

    def num_ranks(self, num_cores: int) -> int:
        """The number of processes to start on ``num_cores`` cores (or GPUs): as many as layout and batch can use.
        With a plan file, it is the number of ranks of one replica."""
        if self.layout.file:
            return files.load(Path(self.layout.file), Plan).mesh.world_size
        if self.layout.replicas > 1 and self.train.ranks == "auto":
            replica_run = msgspec.structs.replace(self, layout=msgspec.structs.replace(self.layout, replicas=1))
            return replica_run.num_ranks(max(1, num_cores // self.layout.replicas)) * self.layout.replicas
        if self.train.ranks != "auto":
            return self.train.ranks
        if self.layout.stage_sizes:
            return self.layout.num_ranks
        sizes = self.layout.axis_sizes
        fixed = math.prod(size for size in sizes if size > 0)
        if min(sizes) > 0:
            return fixed
        divides = math.gcd(self.data.batch_size, *(size for _, size in self.schedule.batch_sizes))
        for parts in range(num_cores // fixed, 1, -1):
            if self.layout.dp > 0 or divides % (parts * self.layout.depth * self.layout.microbatches) == 0:
                return parts * fixed
        return fixed

    def within(self, num_ranks: int) -> "Run":
        """This run for at most ``num_ranks`` ranks. It is the same if its layout takes no more. Otherwise it has fewer
        data-parallel ranks; or, if this does not suffice, the planner searches for its layout."""
        layout = self.layout
        if layout.replicas > 1 or self.num_ranks(num_ranks) <= num_ranks:
            return self
        fewer = msgspec.structs.replace(
            self, layout=msgspec.structs.replace(layout, dp=-1),
            train=msgspec.structs.replace(self.train, ranks="auto"),
        )  # fmt: skip
        grouped = layout.file or layout.stage_sizes or layout.ep > 1 or layout.zero_ranks
        return self.searched() if grouped or fewer.num_ranks(num_ranks) > num_ranks else fewer

    def searched(self) -> "Run":
        """This run with a layout that the planner searches for, on as many ranks as there are."""
        names = ("precision", "offload", "float8", "cluster", "seconds", "strict")
        kept = {name: getattr(self.layout, name) for name in names}
        return msgspec.structs.replace(
            self, layout=RunLayout(plan="auto", **kept), train=msgspec.structs.replace(self.train, ranks="auto")
        )

    def batch_sizes(self) -> list[int]:
        """The number of samples in the global batch of each step."""
        return [self.schedule.batch_size(step, self.data.batch_size) for step in range(self.train.steps)]

    def lr_factors(self) -> list[float]:
        """The factor that multiplies the optimizer's learning rate in each step."""
        steps = self.train.steps
        return [self.schedule.factor(step, steps, size) for step, size in enumerate(self.batch_sizes())]
