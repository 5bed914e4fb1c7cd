"""Marks modules as opaque regions, and runs the calls of a region: forward, and backward by PyTorch's autograd."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.capture.precision import eagerly_in
from meshwright.errors import CaptureError
from meshwright.ir.opaque import OpaqueCall, OpaqueResult, read_call
from meshwright.ir.precision import Precision
from meshwright.ops import opaque as operators
from meshwright.ops.library import mix
from meshwright.torch_private import FakeTensor, pytree

if TYPE_CHECKING:
    from meshwright.capture.opaque_samples import SampledCall

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
BatchDim = int | None | Literal["auto"]
_MARK = "_meshwright_opaque"


@dataclass(frozen=True)
class Opaque:
    """How a module is opaque: the arguments of :func:`opaque`. ``chosen`` is the error of capture, if capture itself
    made the module opaque."""

    batch_dim: BatchDim = "auto"
    outputs: Callable[..., Any] | None = None
    chosen: str = ""


def opaque(module: M, *, batch_dim: BatchDim = "auto", outputs: Callable[..., Any] | None = None) -> M:
    """Mark a submodule of a model as an opaque region, and return it. Its code is not captured; PyTorch runs it.

    The region is one operator of the graph. Each rank runs it whole, or on its part of the batch. It sees only its
    arguments (tensors, and plain values that are equal in all steps), its parameters and its buffers.

    Args:
        batch_dim: ``0`` (or another dim) says that the region computes each sample by itself, and that this dim of its
            tensors is the batch. The claim is checked on the example batch. ``"auto"``: the check decides. ``None``:
            the region is never split.
        outputs: ``outputs(*args, **kwargs)`` returns tensors with the shapes and dtypes of the region's results. It is
            called with tensors on the meta device, and needed only for models or batches on the meta device.

    Raises:
        CaptureError: the argument is not a module, or ``batch_dim`` is not a dim.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(
            f"it is a {type(module).__name__}", where="mw.opaque", remedy="pass a submodule: mw.opaque(model.encoder)"
        )
    if not (batch_dim is None or batch_dim == "auto" or (type(batch_dim) is int and batch_dim >= 0)):
        raise CaptureError(
            f"batch_dim={batch_dim!r}", where="mw.opaque", remedy="write 0 or another dim, 'auto', or None"
        )
    object.__setattr__(module, _MARK, Opaque(batch_dim, outputs))
    return module


def marked(model: nn.Module) -> dict[str, Opaque]:
    """The marked modules of a model, by path. Modules inside a marked module do not count.

    Raises:
        CaptureError: the model itself is marked.
    """
    settings: dict[str, Opaque] = {}
    for path, module in model.named_modules():
        setting = vars(module).get(_MARK)
        if setting is not None and not is_within(path, settings):
            settings[path] = setting
    if "" in settings:
        raise CaptureError(
            "the whole model is marked as opaque, and nothing is left to plan", where="mw.opaque",
            remedy="mark only the submodule that cannot be captured: mw.opaque(model.part)",
        )  # fmt: skip
    return settings


def refusal(path: str, problem: str, *, remedy: str) -> CaptureError:
    """The error of a region that cannot be one operator."""
    error = CaptureError(problem, where=f"opaque region {path}", remedy=remedy)
    error.module = path
    return error


def is_within(path: str, regions: Mapping[str, object]) -> bool:
    """Whether a module is one of the regions, or inside one."""
    return any(path == region or path.startswith(f"{region}.") for region in regions)


@dataclass
class RegionCall:
    """One call of a region: the module, and the parts of the call that are not tensors.

    ``names`` are the module's parameters and buffers, in the order of the operator's inputs. ``changes`` are the
    buffers that the call changes. ``modes`` maps each submodule to whether it is in training mode.
    """

    path: str
    module: nn.Module
    spec: pytree.TreeSpec
    constants: list[Any]
    out_spec: pytree.TreeSpec
    out_constants: list[Any]
    names: list[str]
    changes: tuple[str, ...]
    modes: dict[str, bool]
    precision: Precision | None = None

    def run(self, tensors: Sequence[Tensor], then: Callable[[list[Tensor]], T], *, trains: bool = True) -> T:
        """Run the module with gradients on, and return ``then(results)``. The results are those of the module, then the
        new values of the buffers that it changes.

        During ``then``, the module still has these tensors as its parameters: backward may run parts of it again
        (``torch.utils.checkpoint``, reversible layers)."""
        count = len(tensors) - len(self.names)
        given, state = tensors[:count], dict(zip(self.names, tensors[count:], strict=True))
        state |= {name: state[name].clone() for name in self.changes}
        versions = {name: state[name]._version for name in self.names if name not in self.changes}

        def results(output: Any, buffers: Mapping[str, Tensor]) -> list[Tensor]:
            self._check({name: (buffers.get(name, state[name]), state[name], versions[name]) for name in versions})
            leaves = self._leaves_of(output)
            return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *(buffers[name] for name in self.changes)]

        def forward(module: nn.Module) -> T:
            args, kwargs = pytree.tree_unflatten(_filled(self.constants, given), self.spec)
            with eagerly_in(self.precision, tensors[0].device.type if tensors else "cpu"):
                output = module(*args, **kwargs)
            return then(results(output, dict(module.named_buffers())))

        modes = self.modes if trains else dict.fromkeys(self.modes, False)
        named = {f"module.{name}": value for name, value in state.items()}
        with torch.enable_grad(), _in_modes(self.module, modes):
            result: T = torch.func.functional_call(_Region(self.module), named, (forward,))
        return result

    def _leaves_of(self, output: Any) -> list[Any]:
        leaves, spec = pytree.tree_flatten(output)
        if spec != self.out_spec or not same(without_tensors(leaves), self.out_constants):
            raise refusal(
                self.path,
                f"its results are {_words(leaves)}; in the captured step, they have another structure or "
                f"other values ({', '.join(map(repr, self.out_constants)) or 'tensors only'})",
                remedy="return only tensors, and values that are equal in every call",
            )
        return leaves

    def _check(self, kept: Mapping[str, tuple[Tensor, Tensor, int]]) -> None:
        """Raise a CaptureError if a parameter or buffer changed that did not change in the captured step. ``kept`` has
        the tensor after and before the call, and the version before."""
        for name, (after, before, version) in kept.items():
            if after is not before or before._version != version:
                raise refusal(
                    self.path,
                    f"it changed {name}, which it did not change when the step was captured",
                    remedy="capture the step with an example batch on which it changes the buffer",
                )


class _Region(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[nn.Module], T]) -> T:
        """Call a function of the module."""
        return run(self.module)


@dataclass
class OpaqueRegions:
    """The regions of a captured step; runs the operators ``meshwright.opaque`` and ``meshwright.opaque_backward``.

    ``samples`` are the calls that were run on the example batch, ``calls`` those of the captured step."""

    settings: Mapping[str, Opaque]
    precision: Precision | None = None
    samples: "dict[tuple[str, int], SampledCall]" = field(default_factory=dict)
    calls: dict[tuple[str, int], RegionCall] = field(default_factory=dict)

    def forget_inputs(self) -> None:
        """Free the tensors of the example batch, once the calls are measured."""
        for sampled in self.samples.values():
            sampled.inputs.clear()

    @property
    def names(self) -> list[str]:
        """The paths of the regions that the step calls."""
        return list(dict.fromkeys(path for path, _ in self.calls))

    @property
    def kernels(self) -> dict[Any, Callable[..., Any]]:
        """Maps both operators to the functions that run them."""
        return {operators.FORWARD: self.forward, operators.BACKWARD: self.backward} if self.calls else {}

    def forward(self, tensors: list[Tensor], text: str, key: int, salt: int) -> list[Tensor]:
        """Run a call. Fake tensors give fake results; the module then does not run."""
        call = read_call(text)
        if any(isinstance(value, FakeTensor) for value in tensors):
            return operators.shapes(tensors, text)
        region = self.calls[call.region, call.number]
        with _numbers(call, tensors, key, salt):
            results = region.run(_leaves(tensors, call.needs), list)
        _check_results(call, results)
        return _own_memory(results, tensors)

    def backward(self, tensors: list[Tensor], grads: list[Tensor], text: str, key: int, salt: int) -> list[Tensor]:
        """Run a call again, and return the gradients of the inputs ``call.needs``, given those of its results."""
        call = read_call(text)
        if any(isinstance(value, FakeTensor) for value in tensors):
            return operators.gradient_shapes(tensors, grads, text)
        region = self.calls[call.region, call.number]
        leaves = _leaves(tensors, call.needs)
        with _numbers(call, tensors, key, salt):
            input_gradients = region.run(leaves, lambda results: gradients(results, leaves, call, grads))
        return _own_memory(input_gradients, (*tensors, *grads))


def gradients(results: list[Tensor], leaves: list[Tensor], call: OpaqueCall, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the inputs ``call.needs`` from those of the results ``call.given``.

    Autograd adds them to the leaves, as in eager training: functions whose backward calls ``torch.autograd.backward``
    (reentrant checkpoints, reversible layers) add gradients of parameters in no other way."""
    pairs = [(results[at], grad) for at, grad in zip(call.given, grads, strict=True) if results[at].requires_grad]
    if pairs:
        ends, given = zip(*pairs, strict=True)
        torch.autograd.backward(ends, given)
    leaf_gradients = [leaf.grad for leaf in (leaves[index] for index in call.needs)]
    zeros = (torch.zeros_like(leaves[index], memory_format=torch.contiguous_format) for index in call.needs)
    return [zero if grad is None else grad for grad, zero in zip(leaf_gradients, zeros, strict=True)]


def _leaves(tensors: Sequence[Tensor], needs: Sequence[int]) -> list[Tensor]:
    wanted = set(needs)
    return [value.detach().requires_grad_(index in wanted) for index, value in enumerate(tensors)]


def _own_memory(results: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, detached and contiguous. Each has memory of its own, as the graph expects of an operator."""
    taken = {value.untyped_storage().data_ptr() for value in inputs}
    owned = []
    for value in results:
        value = value.detach().contiguous()
        if value.untyped_storage().data_ptr() in taken:
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        owned.append(value)
    return owned


def _check_results(call: OpaqueCall, results: list[Tensor]) -> None:
    """Raise a CaptureError unless the results have the shapes and dtypes of the captured call."""
    returned = [described(value) for value in results]
    expected = [words_of(result) for result in call.results]
    if returned != expected:
        raise refusal(
            call.region,
            f"it returned {', '.join(returned)}; the captured step has {', '.join(expected)}",
            remedy="return tensors whose shapes follow from those of the arguments, such as padded ones with a mask",
        )


def described(value: Tensor) -> str:
    """The shape and dtype of a tensor in words."""
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def words_of(result: OpaqueResult) -> str:
    """The shape and dtype of a result in words."""
    return f"{list(result.shape)} {result.dtype}"


# --- random numbers and modes -----------------------------------------------------------------------------------------


@contextmanager
def _numbers(call: OpaqueCall, tensors: Sequence[Tensor], key: int, salt: int) -> Iterator[None]:
    """Seed all generators for a call, and restore them afterwards. Raise a CaptureError if a region draws random
    numbers, and drew none when the step was captured."""
    devices = {value.device for value in tensors if value.device.type == "cuda"}
    before = generator_states(devices)
    if call.random:
        seed = mix(key, salt)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            restore_generators(before)
        return
    yield
    if not same_states(before, generator_states(devices)):
        restore_generators(before)
        raise refusal(
            call.region,
            "it draws random numbers, and drew none when the step was captured: backward would draw others",
            remedy="capture the step with an example batch on which it draws random numbers",
        )


def generator_states(devices: "set[torch.device] | frozenset[torch.device]" = frozenset()) -> dict[str, Any]:
    """The states of the generators of PyTorch (on the CPU and on ``devices``), Python and numpy."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    return states | {str(device): torch.cuda.get_rng_state(device) for device in devices}


def same_states(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether no generator has moved."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        if isinstance(a, tuple):
            return len(a) == len(b) and all(map(equal, a, b))
        return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)

    return all(equal(state, right[name]) for name, state in left.items())


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set all generators to the states that ``generator_states`` returned."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "python":
            random.setstate(state)
        elif name == "numpy":
            np.random.set_state(state)
        else:
            torch.cuda.set_rng_state(state, torch.device(name))


@contextmanager
def _in_modes(module: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Set the modes (training or not) of a module's submodules, and restore them afterwards."""
    changed = [(part, part.training) for path, part in module.named_modules() if part.training != modes[path]]
    for part, training in changed:
        part.training = not training
    try:
        yield
    finally:
        for part, training in changed:
            part.training = training


# --- trees of arguments -----------------------------------------------------------------------------------------------


class _AnyTensor:
    def __repr__(self) -> str:
        return "a tensor"


TENSOR = _AnyTensor()
"""Stands for a tensor among the leaves of arguments or results."""


def without_tensors(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with ``TENSOR`` in place of tensors."""
    return [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether leaves that are not tensors are equal."""
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(a is b or (type(a) is type(b) and repr(a) == repr(b)) for a, b in pairs)


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if leaf is TENSOR else leaf for leaf in leaves]


def _words(leaves: Sequence[Any]) -> str:
    words = [described(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return ", ".join(words) or "nothing"
