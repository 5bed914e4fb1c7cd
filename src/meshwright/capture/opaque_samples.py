"""Runs a step's forward eagerly, to find the results of its opaque regions, and which of them samples may split."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.capture.batch import Leaves
from meshwright.capture.opaque import (
    OpaqueRegions,
    RegionCall,
    generator_states,
    refusal,
    restore_generators,
    same,
    same_states,
    without_tensors,
)
from meshwright.capture.opaque_rows import misfit, rows_of
from meshwright.capture.precision import eagerly_in
from meshwright.capture.tracer import LossFunction, TracedStep
from meshwright.errors import CaptureError
from meshwright.ir.opaque import OpaqueResult
from meshwright.ir.precision import Precision
from meshwright.torch_private import pytree

Key = tuple[str, int]


@dataclass
class _Observed:
    """A call of a region with real tensors."""

    region: RegionCall
    inputs: list[Tensor]
    results: list[tuple[tuple[int, ...], str]]
    given: tuple[int, ...]
    random: bool


@dataclass(frozen=True)
class SampledCall:
    """A call of a region that was run on the example batch: its results at two batch sizes, and its rows of samples.

    ``inputs`` are the tensors of the example batch. ``rows`` is empty if the call must not be split; ``reason`` then
    says why. ``given`` are the indices of the results that have a gradient."""

    region: RegionCall
    sizes: tuple[int, int]
    results: tuple[list[tuple[tuple[int, ...], str]], list[tuple[tuple[int, ...], str]]]
    given: tuple[int, ...]
    random: bool
    batch_dim: int = 0
    rows: tuple[int, ...] = ()
    result_rows: tuple[int, ...] = ()
    reason: str = ""
    inputs: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def results_at(self, size: int) -> tuple[OpaqueResult, ...]:
        """The results for a batch of ``size`` samples.

        Raises:
            CaptureError: their shapes do not grow evenly with the batch.
        """
        first, second = self.sizes
        rows = self.result_rows or (0,) * len(self.results[0])
        results = []
        for (small, dtype), (large, _), each in zip(*self.results, rows, strict=True):
            shape = []
            for a, b in zip(small, large, strict=True):
                more, rest = divmod((b - a) * (size - first), second - first)
                if rest or a + more < 0:
                    raise refusal(
                        self.region.path,
                        f"a dim of a result has size {a} for {first} samples, and {b} for {second}: its size for "
                        f"{size} is not known",
                        remedy="return tensors whose shapes follow from those of the arguments",
                    )
                shape.append(a + more)
            results.append(OpaqueResult(dtype, tuple(shape), each))
        return tuple(results)


def can_run(model: nn.Module, leaves: Leaves) -> bool:
    """Whether model and batch have values."""
    tensors_read = (*model.parameters(), *model.buffers(), *leaves.tensors.values())
    return not any(value.is_meta for value in tensors_read)


def sample(
    model: nn.Module, loss_fn: LossFunction, leaves: Leaves, regions: OpaqueRegions, training: bool,
    precision: Precision | None,
) -> dict[Key, SampledCall]:  # fmt: skip
    """Run the forward of the step on the batch, and on a batch that holds each sample twice. Generators, modes and
    buffers are restored afterwards. Calls in ``regions.samples`` are not checked again.

    Raises:
        CaptureError: the step fails in plain PyTorch; a region changes its inputs, or is called with values that differ
            from call to call; or ``batch_dim`` says that it computes each sample by itself, and it does not.
    """
    size = leaves.size
    sizes = (size, 2 * size)
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    modes = [(part, part.training) for part in model.modules()]
    states = generator_states({device} if device.type == "cuda" else frozenset())
    try:
        if model.training != training:
            model.train(training)
        first, second = (
            _Observer(model, regions).run(loss_fn, _resized(leaves, size, each, device), precision) for each in sizes
        )
        if first.keys() != second.keys():
            name, number = next(iter(first.keys() ^ second.keys()))
            raise refusal(
                name,
                f"call {number} of it depends on the batch: the step makes it for only one of the sizes {sizes}",
                remedy="mark the module around it that decides about the call",
            )
        return {key: regions.samples.get(key) or _joined(regions, first[key], second[key], sizes) for key in first}
    finally:
        restore_generators(states)
        for part, was_training in modes:
            part.training = was_training


def _resized(leaves: Leaves, size: int, wanted: int, device: torch.device) -> Any:
    def resized(value: Tensor) -> Tensor:
        value = value.detach().to(device)
        return torch.cat([value] * (wanted // size)) if value.dim() and value.shape[0] == size else value

    return leaves.with_tensors([resized(value) for value in leaves.tensors.values()])


class _Observer:
    """Runs a step, and notes each call of a region."""

    def __init__(self, model: nn.Module, regions: OpaqueRegions) -> None:
        self._model, self._regions = model, regions
        self._paths = {id(model.get_submodule(path)): path for path in regions.settings}
        self._observations: dict[Key, _Observed] = {}
        self._counts: Counter[str] = Counter()
        self._precision: Precision | None = None
        self._inside = False

    def run(self, loss_fn: LossFunction, batch: Any, precision: Precision | None) -> dict[Key, _Observed]:
        self._precision = precision
        step = TracedStep(self._model, loss_fn)
        state: dict[str, Tensor] = {f"model.{name}": value for name, value in self._model.named_parameters()}
        state |= {f"model.{name}": value.detach().clone() for name, value in self._model.named_buffers()}
        device = next((value.device.type for value in self._model.parameters()), "cpu")
        with torch.enable_grad(), self._watched(), eagerly_in(precision, device):
            try:
                torch.func.functional_call(step, state, (batch,))
            except CaptureError:
                raise
            except Exception as error:
                text = str(error).strip().splitlines()
                raise CaptureError(
                    "the step has opaque regions, and fails in plain PyTorch on the example batch: "
                    f"{type(error).__name__}: {text[0] if text else ''}",
                    where="model or loss_fn",
                    remedy="check that loss_fn(model, batch) runs, or give mw.opaque(..., outputs=) and a batch on the "
                    "meta device",
                ) from error
        return self._observations

    @contextmanager
    def _watched(self) -> Iterator[None]:
        plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = None if self._inside else self._paths.get(id(module))
            if path is None:
                return plain(module, *args, **kwargs)
            self._inside = True
            try:
                return self._observed(path, module, args, kwargs, plain)
            finally:
                self._inside = False

        with ExitStack() as stack:
            stack.enter_context(patch.object(nn.Module, "__call__", call))
            yield

    def _observed(self, path: str, module: nn.Module, args: Any, kwargs: Any, plain: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        kept = {**{f"argument {at}": value for at, value in enumerate(inputs)}, **parameters}
        versions = {name: value._version for name, value in kept.items()}
        before = {name: (value, value._version, value.detach().clone()) for name, value in buffers.items()}
        states = generator_states(frozenset(value.device for value in inputs if value.device.type == "cuda"))
        copies = [value.detach().clone() for value in inputs]
        output = plain(module, *args, **kwargs)
        written = next((name for name, value in kept.items() if value._version != versions[name]), "")
        if written:
            raise refusal(
                path,
                f"it changes its {written} in place",
                remedy="change a copy (clone), or mark the module around it that makes the tensor",
            )
        after = dict(module.named_buffers())
        changes = tuple(name for name, value in after.items() if _has_changed(value, *before[name]))
        out_leaves, out_spec = pytree.tree_flatten(output)
        tensors = [leaf for leaf in out_leaves if isinstance(leaf, Tensor)]
        results = [(tuple(value.shape), _dtype(value)) for value in (*tensors, *(after[name] for name in changes))]
        modes = {name: part.training for name, part in module.named_modules()}
        region = RegionCall(
            path, module, spec, without_tensors(leaves), out_spec, without_tensors(out_leaves),
            [*parameters, *buffers], changes, modes, self._precision,
        )  # fmt: skip
        given = tuple(at for at, value in enumerate(tensors) if value.requires_grad)
        moved = not same_states(states, generator_states(frozenset(map(torch.device, states.keys() - _HOST))))
        key = path, self._counts[path]
        self._counts[path] += 1
        self._observations[key] = _Observed(region, copies, results, given, moved)
        return output


_HOST = {"cpu", "python", "numpy"}


def _has_changed(value: Tensor, before: Tensor, version: int, copy: Tensor) -> bool:
    """Whether a buffer was replaced or written to. Some kernels (batch norm) write without a new version."""
    return value is not before or value._version != version or not torch.equal(value, copy)


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _joined(
    regions: OpaqueRegions, first: _Observed, second: _Observed, sizes: tuple[int, int]
) -> SampledCall:  # fmt: skip
    region, setting = first.region, regions.settings[first.region.path]
    _check_alike(first, second)
    dim = setting.batch_dim if type(setting.batch_dim) is int else 0
    rows, why = rows_of([value.shape for value in first.inputs], [value.shape for value in second.inputs], sizes, dim)
    result_rows, problem = rows_of(
        [shape for shape, _ in first.results], [shape for shape, _ in second.results], sizes, dim
    )
    reason = ""
    if setting.batch_dim is None:
        reason = "batch_dim=None"
    elif region.changes:
        reason = f"it changes buffer {region.changes[0]}"
    elif why or problem:
        reason = f"argument {why}" if why else f"result {problem}"
    elif not any(rows):
        reason = f"no argument has the batch as its dim {dim}"
    elif not all(result_rows):
        reason = f"result {result_rows.index(0)} does not have the batch as its dim {dim}"
    elif sizes[0] > 1:
        reason = misfit(region, first.inputs, rows, result_rows, first.given, dim, sizes[0], first.random)
    elif setting.batch_dim == "auto":
        reason = "a batch of one sample does not show whether samples are independent"
    if reason and type(setting.batch_dim) is int:
        raise refusal(
            region.path,
            f"batch_dim={dim} says that it computes each sample by itself, but {reason}",
            remedy="leave batch_dim out: the region then runs on the whole batch on every rank",
        )
    if reason:
        reason = f"opaque region, not split by samples: {reason}"
        rows, result_rows = (), ()
    else:
        rows = (*rows, *(0 for _ in region.names))
    return SampledCall(
        region, sizes, (first.results, second.results), first.given, first.random or second.random, dim,
        tuple(rows), tuple(result_rows), reason, first.inputs,
    )  # fmt: skip


def _check_alike(first: _Observed, second: _Observed) -> None:
    """Raise a CaptureError if a call depends on the batch size by more than the shapes of its tensors."""
    region, other = first.region, second.region
    pairs: Mapping[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "argument": (region.constants, other.constants), "result": (region.out_constants, other.out_constants),
    }  # fmt: skip
    for kind, (left, right) in pairs.items():
        if not same(left, right):
            change = next((f"{a!r}, then {b!r}" for a, b in zip(left, right, strict=False) if not same([a], [b])), "")
            raise refusal(
                region.path,
                f"a {kind} that is not a tensor changes from call to call: {change}",
                remedy="pass and return tensors, and plain values that are equal in all steps "
                "(a Hugging Face model: use_cache=False)",
            )
    ranks = [[len(shape) for shape, _ in each.results] for each in (first, second)]
    dtypes = [[dtype for _, dtype in each.results] for each in (first, second)]
    alike = region.out_spec == other.out_spec and region.spec == other.spec
    if not alike or ranks[0] != ranks[1] or dtypes[0] != dtypes[1]:
        raise refusal(
            region.path,
            "its arguments or results have other parts for another batch size",
            remedy="return the same number of tensors for every batch",
        )
