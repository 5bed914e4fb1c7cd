"""Makes trainers of unmodified models, and compares their training with training in one process."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from meshwright.api.allowed import plan_before_start, search_allowed
from meshwright.api.gpus import check_gpus, making_trainer, smallest_change
from meshwright.api.opaque_costs import with_costs
from meshwright.api.plans import Rules, capture, check_plan, check_searched, choose, cost_of, loaded, precision_of
from meshwright.capture import opaque_capture
from meshwright.capture.opaque_capture import OpaqueChoice
from meshwright.capture.tracer import LossFunction
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.cost.optimizer import ADAMW
from meshwright.errors import LayoutError, RankError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.consistency import Sync, consistency_of
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.plan import Plan
from meshwright.ir.plan_check import check_fits
from meshwright.ir.precision import Precision
from meshwright.planner.checks import check_strict
from meshwright.planner.explicit import adapt_plan
from meshwright.planner.time_limit import check_seconds
from meshwright.runtime import joining, launch
from meshwright.runtime.loop import Progress, Silent
from meshwright.runtime.optimizer import OptimizerFactory, check_factory
from meshwright.runtime.precision import check_device
from meshwright.runtime.trainer import Trainer
from meshwright.runtime.verify import Verification, batch_in_float64, compare, eager_steps, in_float64, parallel_steps


@contextmanager
def auto_parallelize() -> Iterator[None]:
    """Modules that are made in this context have no memory. :func:`parallelize` gives each rank its part of them, block
    by block.

        with mw.auto_parallelize():
            model = MyModel()
        trainer = mw.parallelize(model, loss_fn, batch, optimizer=...)

    The modules' own ``reset_parameters`` and ``_init_weights`` draw the initial values, seeded by ``seed`` and the
    module's path. The values are the same on every rank and under every layout.
    """
    with torch.device("meta"):
        yield


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    plan: str | os.PathLike[str] | Layout | Plan = "auto",
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    precision: Precision | None = None,
    offload: bool = False,
    codec: str = "",
    float8: Float8Scaling = "",
    seconds: float | None = None,
    allow: Sequence[str] = (),
    device: torch.device | str | None = None,
    cluster: Cluster | str | None = None,
    rules: Rules | None = None,
    strict: bool = False,
    compile: bool = False,
    copies: bool = False,
    weights: str | os.PathLike[str] | None = None,
    opaque: OpaqueChoice = "",
    beside: Trainer | None = None,
) -> Trainer:
    """Make a trainer for an unmodified model.

    Args:
        model: any traceable module; it may be on the meta device. The values of rank 0 are used.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar, or (scalar, {metric: scalar}). It is captured, not called
            in every step. If it or the model reads numbers from elsewhere (a variable, an attribute) and these change,
            the step is captured again. Numbers that change in every step should therefore be in the batch.
        batch: an example of the *global* batch: a tree of tensors whose dim 0 is the batch, and of numbers.
        plan: ``"auto"`` (the fastest layout that fits, see ``plan``), a Layout, a Plan, or the path of a plan file.
        optimizer: a function that takes a list of (name, parameter), as torch.optim does: ``lambda p:
            torch.optim.AdamW(p, lr=3e-4)``. To plan with ``"auto"``, Meshwright first calls this function with
            parameters that have no memory. So it learns how much state the optimizer keeps and how much memory it
            moves.
        max_grad_norm: clip gradients to this norm over the whole model.
        seed: seed of dropout, and of the initial values of models on the meta device.
        precision: the precision of matrix products (``Layout.precision``), if the plan does not give it:
            ``"bfloat16"``, ``"float16"`` (with a dynamic loss scale), ``"float32"``. The parameters must be float32.
            None keeps the precision of the model.
        offload: whether ``"auto"`` may keep optimizer state on the host (``Layout.offload``).
        codec: ``"auto"`` lets the plan ``"auto"`` compress gradients with the best codecs, which may be lossy.
        float8: allows the plan ``"auto"`` to multiply matrices in float8 where this is faster (``Layout.float8``).
        seconds: time limit of the search ``"auto"``, which then takes the best layout so far; None: no limit. The log
            says which layouts it considers.
        device: by default this rank's CUDA device if it has a CUDA device (several: experimental), else the
            CPU.
        cluster: the cluster to plan for. Default: the calibration of this machine, or ``cpu-local`` without a
            calibration.
        rules: maps your own operators to their rules.
        strict: refuse a step with an operator that no rule splits. Otherwise such an operator runs whole on every rank,
            and the plan says so.
        compile: join operators into kernels with torch.compile's inductor, which needs a C++ compiler on a CPU, and
            Triton on a GPU. SGD, Adam, AdamW and Adagrad then use PyTorch's fused kernels. Results are
            equal except for rounding. The first use of a model takes some seconds to a minute longer; inductor caches
            its kernels.
        copies: whether "auto" leaves memory for copies of the state (see ``plan``).
        weights: initial values (see ``Trainer.load_weights``), such as a folder of Hugging Face. If the model is on the
            meta device, each rank reads the slices that it holds, and no others.
        opaque: ``"auto"``: a submodule that cannot be captured runs as it is, as one operator (see ``opaque``), and the
            plan says what that costs. By default, only marked modules do.
        beside: another trainer of the same model, with another loss. Both train the same parameters, such as a
            generator's and a discriminator's losses, each with an optimizer of its own. Both plans must store
            parameters alike.

    The same script runs under ``python`` (one rank), ``torchrun`` and ``meshwright train``. If a launcher has set its
    environment, this function starts torch.distributed. With ``Layout(replicas=...)`` and a rule other than ``sync``,
    each replica gets a process group of its own, and ``batch`` is the batch of all replicas together. A rank that is a
    server does its work inside this function, and ends with SystemExit when all replicas have left.

    Raises:
        CaptureError, DataError, LayoutError, PlanError, FileFormatError, OptimizerError, LaunchError, RankError,
        RuleError, CompileError.
    """
    check_plan(plan)
    check_searched(plan, codec=codec, float8=float8)
    check_factory(optimizer, max_grad_norm)
    check_seconds(seconds)
    if allow:
        plan = plan_before_start(plan, lambda: search_allowed(
            model, loss_fn, batch, allow, optimizer=optimizer, clips=max_grad_norm is not None, precision=precision,
            offload=offload, codec=codec, float8=float8, seconds=seconds, cluster=cluster, rules=rules, opaque=opaque,
        ))  # fmt: skip
    plan, target, place = joining.start(plan, _layout_of(plan), device)
    batch = place.part(batch)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    computed_in = from_rank_0(lambda: precision_of(plan, precision))
    check_device(computed_in, target, tells=not dist.is_initialized() or dist.get_rank() == 0)
    captured = opaque_capture.capture(
        model, loss_fn, batch, rules=rules, precision=computed_in, opaque=opaque,
        agree=lambda own: from_rank_0(lambda: own),
    )  # fmt: skip
    graph = captured.graph
    if strict:
        check_strict(graph)
    _agree(graph)
    check_gpus(target, graph, _layout_of(plan), cluster, world_size)

    kept = cost_of(optimizer, graph) if plan == "auto" else ADAMW
    clips = max_grad_norm is not None

    def planned() -> Plan:
        return choose(
            plan, with_costs(captured), world_size, cluster, target, kept, clips=clips, offload=offload, codec=codec,
            float8=float8, seconds=seconds, rules=rules, copies=copies,
        )  # fmt: skip

    chosen = _plan_of_rank_0(planned)
    if captured.opaque is not None:
        captured.opaque.forget_inputs()
    with making_trainer(target):
        trainer = Trainer(
            model, loss_fn, captured, chosen, optimizer=optimizer, max_grad_norm=max_grad_norm, seed=seed,
            device=target, replan=adapt_plan, rules=rules, compile=compile, weights=weights,
            shared=beside.parameters if beside is not None else None,
        )  # fmt: skip
    trainer.smaller = partial(smallest_change, graph, chosen, cluster, target, optimizer, clips, rules)
    if place.server >= 0:
        joining.serve_only(trainer, place)
    if place.num_replicas > 1:
        joining.join(trainer, place)
    return trainer


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    plan: str | os.PathLike[str] | Layout | Plan = "auto",
    *,
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    steps: int = 3,
    seed: int = 0,
    rules: Rules | None = None,
    strict: bool = False,
    opaque: OpaqueChoice = "",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[Verification, ...]:
    """Compare the plan on these ranks with one process of eager PyTorch: forward, backward, and ``steps`` updates.

    Both sides run copies of the model in float64, whatever the plan's precision, with dropout off. The default
    optimizer is AdamW. Every rank must call it, and gets the same rows. The ``ok`` of a row says whether the difference
    is at most 1e-9 times the largest value (or 1e-9 if that value is below 1).

    Args:
        device: where both sides run: ``"cpu"``, or ``"cuda"`` (each rank's own GPU; that of rank 0 also holds the
            reference). Many GPUs of workstations compute in float64 at a small fraction of their speed.

    Raises:
        LaunchError: there is no such device here.
        CaptureError: the step cannot be traced, or draws random numbers.
        LayoutError, PlanError, FileFormatError, OptimizerError, RankError: as ``parallelize``; LayoutError also if
            batch norm takes statistics over parts of the batch.
    """
    progress = progress or Silent()
    check_plan(plan)
    if not isinstance(consistency_of(_layout_of(plan).consistency), Sync):
        raise LayoutError(
            f"replicas joined by {_layout_of(plan).consistency} train differently from one process",
            where="verify",
            remedy="verify one replica: the same layout with replicas=1 and consistency='sync'",
        )
    factory = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    doubled = batch_in_float64(batch)
    progress.begin("capturing and planning")
    copy = in_float64(model, seed)
    if not isinstance(plan, Layout) and plan != "auto":
        launch.start(device)
        computed_in = from_rank_0(lambda: precision_of(plan, None))
        graph = capture(model, loss_fn, batch, rules=rules, precision=computed_in, opaque=opaque)
        plan = _in_float64(plan, graph, capture(copy, loss_fn, doubled, rules=rules, opaque=opaque))
    elif isinstance(plan, Layout):
        plan = msgspec.structs.replace(plan, precision=None)
    trainer = parallelize(
        copy, loss_fn, doubled, plan=plan, optimizer=factory, max_grad_norm=max_grad_norm, seed=seed, device=device,
        rules=rules, strict=strict, opaque=opaque,
    )  # fmt: skip
    _check_comparable(trainer)
    progress.begin("parallel steps", steps)
    record = parallel_steps(trainer, doubled, steps, progress)

    def against_eager() -> tuple[Verification, ...]:
        progress.begin("one process", steps)
        twin = in_float64(model, seed)
        return compare(
            record, eager_steps(twin, loss_fn, doubled, steps, factory, max_grad_norm, progress, trainer.device)
        )

    rows = from_rank_0(against_eager)
    progress.end()
    return rows


def _layout_of(plan: Any) -> Layout:
    """The layout that ``plan`` is or has. For ``"auto"`` the default layout, because the search plans no replicas."""
    if isinstance(plan, Layout):
        return plan
    return Layout() if plan == "auto" else loaded(plan)[0].layout


def _check_comparable(trainer: Trainer) -> None:
    """Raise a LayoutError if training in one process would compute something else, so that a comparison makes no
    sense."""
    statistics = trainer.plan.layout.batch_statistics
    norm = next((operator for operator in trainer.graph.operators if "batch_norm" in operator.target), None)
    if statistics != "global" and norm is not None:
        raise LayoutError(
            f"batch_statistics={statistics!r} is another computation than that of one process, which is compared",
            where=norm.name,
            remedy="verify with batch_statistics='global'",
        )
    plan = trainer.plan
    texts = [coding.codec for bucket in (*plan.buckets, *plan.gathers) for coding in bucket.codings]
    texts += [plan.border_codec] * bool(plan.border_codec)
    lossy = next((text for text in texts if codec_of(text).is_lossy), "")
    if lossy:
        raise LayoutError(
            f"codec {lossy!r} changes gradients, so that results differ from those of one process",
            where="verify",
            remedy="verify without codecs, or with codec='lossless' or 'topk(100%)'",
        )


def _in_float64(plan: Any, graph: Graph, doubled: Graph) -> Plan:
    """Adapt a plan of ``graph`` to the same model in float64, whose graph may have more or fewer casts."""

    def adapted() -> Plan:
        planned, where = loaded(plan)
        if planned.graph_fingerprint == doubled.fingerprint:
            return planned
        check_fits(planned, graph, where)
        return adapt_plan(planned, doubled)

    return _plan_of_rank_0(adapted)


def _plan_of_rank_0(make: Callable[[], Plan]) -> Plan:
    return files.decode(from_rank_0(lambda: files.encode_json(make())), Plan, where="plan of rank 0")


def _agree(graph: Graph) -> None:
    """Raise a RankError unless every rank has captured the same model."""
    dtypes = sorted({graph.tensors[name].dtype for name in graph.parameters})
    model = f"{graph.model} ({graph.num_parameters():,} parameters, {' '.join(dtypes)})"
    by_rank = from_every_rank(f"{model}, batch {graph.batch_size}, fingerprint {graph.fingerprint}")
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise RankError(
                f"rank {rank} has {other}, rank 0 has {by_rank[0]}",
                where=f"rank {rank}",
                remedy="build the same model and pass batches of the same shape on every rank",
            )
