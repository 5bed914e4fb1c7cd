"""Traces one whole training step (forward, loss, backward) of an unmodified model into ATen operators."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from meshwright.capture import refusals
from meshwright.capture.attention import SCALED_DOT_PRODUCT, CapturedAttention
from meshwright.capture.batch import Leaves, take_apart
from meshwright.capture.experts import one_operator
from meshwright.capture.outputs import fake_mode
from meshwright.capture.precision import called, check_masters, computing_in
from meshwright.capture.provenance import Provenance, user_line
from meshwright.capture.recompute import nothing_recomputed
from meshwright.capture.recorder import CallRecorder, Rewrites
from meshwright.capture.values import Contents, contents_of
from meshwright.errors import CaptureError
from meshwright.ir.precision import LOSS_SCALE, Precision, is_scaled
from meshwright.ops.base import wide_dtype
from meshwright.ops.embedding import BAGS, embedding_bag
from meshwright.ops.table import CANONICAL
from meshwright.torch_private import FakeTensorMode

LossFunction = Callable[[nn.Module, Any], Any]
InPlace = Callable[[Provenance, int], AbstractContextManager[None]]
"""Replaces the calls of opaque regions while a batch of a size is traced."""
OUR_METRICS = ("loss", "grad_norm", "loss_scale", "skipped")
"""Names of the metrics that a trainer itself reports."""


@dataclass
class Traced:
    """A graph of ATen operators with the names of its inputs and outputs. If ``mutates``, operators work in place.

    ``differentiable`` names the parameters whose gradients the graph returns. ``tied`` maps each further name of a
    shared parameter or buffer to its first name. ``drawn`` says how far the trace has moved the generators of Python
    and numpy (``refusals.Draws``).
    """

    graph: fx.Graph
    mutates: bool
    parameters: list[str]
    buffers: list[str]
    inputs: list[str]
    leaves: Leaves
    metrics: list[str]
    differentiable: list[str]
    tied: dict[str, str]
    mode: FakeTensorMode
    constants: dict[str, Tensor] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()

    @property
    def placeholders(self) -> list[fx.Node]:
        """The graph's input nodes, in order."""
        return list(self.graph.find_nodes(op="placeholder"))

    def results(self) -> tuple[list[fx.Node], dict[str, fx.Node | None], dict[str, fx.Node]]:
        """Return the outputs in three parts: the loss and the metrics; a map from each differentiable parameter to its
        gradient (None if the loss does not depend on it); a map from each buffer to its value after the step."""
        nodes: Iterator[Any] = iter(cast(list[Any], self.graph.output_node().args[0]))
        scalars = list(islice(nodes, 1 + len(self.metrics)))
        gradients = dict(zip(self.differentiable, islice(nodes, len(self.differentiable)), strict=True))
        return scalars, gradients, dict(zip(self.buffers, nodes, strict=True))


class TracedStep(nn.Module):
    """The loss of a batch, as a module that also returns the buffers after the step."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the result of ``loss_fn`` and the buffers after the step (changed in place, or new tensors)."""
        result = self.loss_fn(self.model, batch)
        return result, dict(self.model.named_buffers())


class _Watch(TorchFunctionMode):
    """Intercepts every torch function, to record source lines, to replace attention and embedding bags, and to cast
    arguments to float32."""

    def __init__(self, provenance: Provenance, attention: CapturedAttention) -> None:
        super().__init__()
        self._provenance = provenance
        self._replaced: Mapping[Any, Any] = {SCALED_DOT_PRODUCT: attention, BAGS: embedding_bag}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._provenance.see()
        return called(self._replaced.get(function, function), args, kwargs)


def trace(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    training: bool = True,
    batch_size: int | None = None,
    rewrites: Rewrites = CANONICAL,
    precision: Precision | None = None,
    in_place: InPlace | None = None,
) -> Traced:
    """Trace ``loss_fn(model, batch)`` and, when ``training``, the gradients of every parameter that needs one.

    Nothing is computed: all tensors are fake CPU tensors. ``batch_size`` replaces the size of dim 0 of the batch's
    tensors. ``precision`` is the precision of matrix products. In float16, the graph has the scale of the loss as an
    additional last input.

    Raises:
        CaptureError: the step cannot be traced. The error names the module and the source line.
        DataError: the batch holds no tensor with a dim, or arrays that are not tensors.
    """
    leaves = take_apart(batch)
    actual = leaves.size
    mode = fake_mode()
    step = TracedStep(model, loss_fn)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def fake(tensor: Tensor, resize: bool = False) -> Tensor:
        shape = list(tensor.shape)
        if resize and batch_size is not None and shape and shape[0] == actual:
            shape[0] = batch_size
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, device="cpu")

    refusals.hooks(model, parameters)
    check_masters(precision, parameters)
    wanted = [name for name, value in parameters.items() if value.requires_grad] if training else []
    provenance = Provenance(model)
    metrics: list[str] = []
    values, states = ({name: fake(value) for name, value in each.items()} for each in (parameters, buffers))
    inputs = {name: fake(value, resize=True) for name, value in leaves.tensors.items()}
    scale = {LOSS_SCALE: fake(torch.empty(()))} if is_scaled(precision) and wanted else {}

    def run() -> list[Tensor | None]:
        weights = {name: value.detach().requires_grad_(name in wanted) for name, value in values.items()}
        given = {f"model.{name}": value for name, value in (weights | states).items()}
        attention = CapturedAttention()
        with (
            _Watch(provenance, attention), attention.everywhere(), provenance.forward(), computing_in(precision),
            ExitStack() as stack,
        ):  # fmt: skip
            if in_place is not None:
                stack.enter_context(in_place(provenance, actual if batch_size is None else batch_size))
            result, after = torch.func.functional_call(step, given, (leaves.with_tensors(list(inputs.values())),))
        loss, extra = _loss_and_metrics(result)
        # micro-batches and ranks add up their terms in float32
        loss, *others = (value.to(wide_dtype(value.dtype)) for value in (loss, *extra.values()))
        metrics[:] = list(extra)
        gradients: tuple[Tensor | None, ...] = ()
        if wanted:
            if not loss.requires_grad:
                raise CaptureError(
                    "the loss depends on no parameter", where="loss_fn", remedy="return a loss computed by the model"
                )
            provenance.follow_backward(loss)
            of = [weights[name] for name in wanted]
            gradients = torch.autograd.grad(loss, of, list(scale.values()) or None, allow_unused=True)
        updates = refusals.updated(states, after)
        return [loss.detach(), *(value.detach() for value in others), *gradients, *updates]

    draws = refusals.Draws()
    modes = [(part, part.training) for part in model.modules()]
    placeholders = [*values.values(), *states.values(), *inputs.values(), *scale.values()]
    recorder = CallRecorder(placeholders, provenance.here, rewrites)
    cached_casts = torch.is_autocast_cache_enabled()
    try:
        if model.training != training:  # otherwise submodules keep the modes that the user has set
            model.train(training)
        torch.set_autocast_cache_enabled(False)
        with mode, nothing_recomputed(), one_operator(), recorder:
            results = run()
        recorder.returns(results)
    except CaptureError as error:
        error.module = error.module or provenance.module
        raise
    except Exception as error:
        raise _not_traceable(error, provenance) from error
    finally:
        torch.set_autocast_cache_enabled(cached_casts)
        for part, was_training in modes:
            part.training = was_training
    refusals.own_values(recorder.constants, {**parameters, **buffers})
    return Traced(
        recorder.graph,
        recorder.mutates,
        parameters=list(parameters),
        buffers=list(buffers),
        inputs=[*inputs, *scale],
        leaves=leaves.without_values(),
        metrics=metrics,
        differentiable=wanted,
        tied=tied_names(model),
        mode=mode,
        constants=recorder.constants,
        drawn=draws.moved(),
    )


def forward_hooks(model: nn.Module) -> Contents:
    """Return the current forward hooks of a model's modules."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    held = [getattr(part, name) for part in model.modules() for name in (*names, "_forward_hooks_always_called")]
    return contents_of(held)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a shared parameter or buffer to the name that the graph uses."""
    first: dict[int, str] = {}
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    names = ((name, first.setdefault(id(value), name)) for name, value in named)
    return {name: other for name, other in names if name != other}


def _loss_and_metrics(result: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, extra = result if pair else (result, {})
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise CaptureError(
            f"loss_fn returned {_described(loss)}", where="loss_fn",
            remedy="return a scalar floating-point loss, or (loss, {name: scalar tensor})",
        )  # fmt: skip
    for name, value in dict(extra).items():
        if name in OUR_METRICS:
            raise CaptureError(
                f"a metric is called {name!r}",
                where="loss_fn",
                remedy="rename it: the trainer has a metric of this name",
            )
        if not isinstance(value, Tensor) or value.dim():
            raise CaptureError(
                f"metric {name!r} is {_described(value)}", where="loss_fn", remedy="return scalar tensors"
            )
    return loss, extra


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        names = ["Tensor" if isinstance(item, Tensor) else type(item).__name__ for item in value]
        return f"a tuple ({', '.join(names)})"
    return type(value).__name__


def _not_traceable(error: Exception, provenance: Provenance) -> CaptureError:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = filter(None, (user_line(frame.filename, frame.lineno) for frame in frames))
    kind, text = type(error).__name__, str(error)
    first = next(iter(text.strip().splitlines()), kind)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        what, remedy = "there is not enough memory to trace the step", "free memory, or raise its limit (ulimit -v)"
        return CaptureError(what, where=next(lines, provenance.source), remedy=remedy)
    asks_values = "DataDependent" in kind or "data-dependent" in text or "_local_scalar_dense" in text
    if asks_values or "GuardOn" in kind:
        what = f"data-dependent control flow: the step asks for the value of a tensor ({first})"
        remedy = (
            "replace the branch on a tensor's value by torch.where and .item() by the tensor itself, or move it out of "
            "the model"
        )
    elif kind == "DynamicOutputShapeException":
        what = f"the shape of a tensor depends on values ({first})"
        remedy = (
            "keep every element and weigh it (torch.where, a mask that is multiplied, ignore_index) instead of taking "
            "some by a mask"
        )
    else:
        what = f"the step cannot be traced: {kind}: {first}"
        remedy = "check that loss_fn(model, batch) runs in plain PyTorch; operators must work on fake tensors"
    module = str(provenance.here()["module"])
    if module:
        remedy += f". Or let the module run as it is, as one operator: mw.opaque({attribute(module)})"
    else:
        remedy += ". Or move this part into a submodule, and let it run as it is, as one operator: mw.opaque(submodule)"
    where = f"module {module or '(model)'}, {next(lines, provenance.source)}"
    refusal = CaptureError(what, where=where, remedy=remedy)
    refusal.module = module
    return refusal


def attribute(path: str) -> str:
    """A submodule of ``model`` as Python writes it: ``h.0.attn`` is ``model.h[0].attn``."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("."))
