"""Which placements of an operator are true, by PyTorch's ``strategy_validation``.

PyTorch's validator runs an operator on the parts of two ranks and compares what comes together with the whole. It is
DTensor's oracle, and knows nothing of our rules. Calls come from PyTorch's own samples of every operator (OpInfo), from
their forward and their backward. A combination is written as the validator writes it: ``S(0), R -> S(0)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import settings
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement as TheirPlacement
from torch.utils._pytree import tree_map

from meshwright.ops.base import Call
from meshwright.ops.table import is_random
from meshwright.torch_private import FakeStore, TorchDispatchMode
from tests.distributed.lockstep import present

_PROFILE = settings.get_current_profile_name()
from torch.distributed.tensor._ops import strategy_validation as validation  # noqa: E402
from torch.testing._internal import common_methods_invocations as samples  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402

settings.load_profile(_PROFILE)  # PyTorch's tests load a profile of their own, for all tests of this process,
vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True  # and forbid to set flags of backends

aten = torch.ops.aten

RANKS = 2
EVEN = {"L": 24, "M": 12, "S": 4, "XS": 2}
"""Sizes of OpInfo's samples that two ranks divide, as the validator's command line sets them."""
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
"""The first of these that an operator takes is used."""
MOST_COMBINATIONS = 30_000
"""Calls with more combinations of input placements are only checked for what our rules allow."""
MOST_SAMPLES = 12
CRASHES = frozenset({"_segment_reduce", "segment_reduce"})
"""Operators whose samples write outside of their tensors with other sizes than OpInfo's own."""
LOOSE = 1e-4
"""The first look at a combination is looser than the validator's own 1e-5, so that it rejects nothing that holds."""

Combination = tuple[tuple[str, ...], tuple[str, ...]]
"""Placements of all inputs, and of all outputs."""


def written(combination: Combination) -> str:
    """``S(0), R -> S(0)``."""
    return " -> ".join(", ".join(side) for side in combination)


# --- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def validator() -> Iterator[DeviceMesh]:
    """Sizes of samples that two ranks divide, and a mesh of two simulated ranks."""
    before = [(module, name, getattr(module, name)) for module in (core, samples) for name in EVEN]
    for module, name, _ in before:
        setattr(module, name, EVEN[name])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with LocalTensorMode(frozenset(range(RANKS))):
            mesh = init_device_mesh("cpu", (RANKS,))
        yield mesh
    finally:
        dist.destroy_process_group()
        for module, name, value in before:
            setattr(module, name, value)


class _Calls(TorchDispatchMode):
    """Records calls of ATen operators on real tensors, with copies of what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_map(lambda leaf: _copied(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        result = function(*args, **kwargs)
        outputs = tuple(_copied(value) for value in present(result))
        if function.namespace == "aten" and outputs and not function._schema.is_mutable:
            self.calls.append(Call(function, given[0], given[1], outputs))
        return result


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format)


def names() -> list[str]:
    """The names of all operators with samples."""
    return sorted({info.name for info in samples.op_db})


def calls(name: str, most: int) -> list[Call]:
    """Calls of ATen operators that the samples of one operator make, forward and backward, at most ``most`` of each."""
    call_by_key: dict[Any, Call] = {}
    counts: dict[Any, int] = {}
    if name in validation.SKIP_OPS or name in CRASHES:
        return []
    for info in samples.op_db:
        if info.name == name:
            for call in _recorded(info):
                key, undefined = (call.target, described(call)), is_random(call.target) or is_unwritten(call.target)
                if key not in call_by_key and counts.get(call.target, 0) < most and not undefined:
                    call_by_key[key] = call
                    counts[call.target] = counts.get(call.target, 0) + 1
    return list(call_by_key.values())


def is_unwritten(target: Any) -> bool:
    """Whether the result is memory that nothing has written to: which splits are right depends on what it held before.
    PyTorch's own validator leaves these operators out, too."""
    return "empty" in str(target)


def _recorded(info: Any) -> Iterator[Call]:
    dtype = next((dtype for dtype in DTYPES if info.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return
    trains = dtype.is_floating_point and info.supports_autograd
    torch.manual_seed(0)
    for sample in _samples(info, dtype, trains):
        with _Calls() as recorded:
            try:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                if trains:
                    differentiable = [value for value in present(result) if value.requires_grad and value.numel()]
                    if differentiable:
                        torch.autograd.backward(differentiable, [torch.randn_like(value) for value in differentiable])
            except Exception:  # noqa: BLE001, S110 - samples for devices, and of sizes that the operator refuses
                pass
        yield from recorded.calls


def _samples(info: Any, dtype: torch.dtype, trains: bool) -> Iterator[Any]:
    """The first samples of an operator; a few operators cannot make them all of other sizes than OpInfo's own."""
    try:
        yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=trains), MOST_SAMPLES)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return


def described(call: Call) -> str:
    """What two calls of a kind have in common: shapes and dtypes, and whatever is no tensor."""
    return repr(
        tree_map(
            lambda leaf: f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf,
            (call.args, dict(call.kwargs)),
        )
    )


# --- what is true -----------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """The validator's verdicts on one call."""

    call: Call
    mesh: DeviceMesh
    plain: bool = False
    """Look at Shard, Replicate and Partial sums only, and trust the first look with two ways to make terms."""
    _parts: dict[tuple[int, str], tuple[Tensor, ...] | None] = field(default_factory=dict)

    @property
    def countable(self) -> bool:
        """Whether the validator looks at such a call: tensors without elements, and results of zeros, tell nothing."""
        tensors, outputs = self.call.tensors, list(self.call.outputs)
        if not tensors or any(not value.numel() for value in tensors) or any(value.is_sparse for value in tensors):
            return False
        return validation._check_ground_truth(outputs) is not None

    def options(self, index: int) -> list[str]:
        """The placements of an input that the validator tries."""
        value = self.call.tensors[index]
        placements = validation.get_1d_input_placements_for_tensor(value, include_partial=True)
        return self._normal(placements, value)

    def _normal(self, placements: Iterable[TheirPlacement], value: Tensor) -> list[str]:
        texts = list(dict.fromkeys(normal(str(placement), value) for placement in placements))
        return [text for text in texts if not self.plain or text[:2] != "P(" or text == "P(sum)"]

    def valid(self) -> list[Combination]:
        """The combinations that the validator calls valid, one placement for all outputs, as it tries them."""
        tensors, combinations = self.call.tensors, []
        options = [self.options(index) for index in range(len(tensors))]
        outputs = validation.get_1d_output_placements_for_tensor(self.call.outputs[0])
        ends = self._normal(outputs, self.call.outputs[0])
        total = 1
        for each in options:
            total *= len(each)
        if total > MOST_COMBINATIONS:
            return []
        with self._validating() as is_valid:
            for inputs in itertools.product(*options):
                if all(placement == "R" for placement in inputs):
                    continue
                results = self._results(inputs)
                if results is None:
                    continue
                for end in ends:
                    if all(
                        _joins(end, parts, whole) for parts, whole in zip(results, self.call.outputs, strict=True)
                    ) and is_valid(inputs, (end,) * len(self.call.outputs)):
                        combination = inputs, tuple(normal(end, whole) for whole in self.call.outputs)
                        combinations.append(combination)
        return list(dict.fromkeys(combinations))

    def is_valid(self, combination: Combination) -> bool | None:
        """What the validator says of a combination; None if it cannot say."""
        with self._validating() as is_valid:
            return is_valid(*combination)

    @contextmanager
    def _validating(self) -> Iterator[Any]:
        call, outputs = self.call, list(self.call.outputs)
        target: Any = call.target
        if self.plain:
            yield lambda inputs, ends: "P(sum)" not in (*inputs, *ends) or not self._fails(inputs, ends)
            return
        truth: Any = outputs if len(outputs) > 1 else outputs[0]
        mitigations = validation._prepare_aten_mitigations(target, call.args, dict(call.kwargs))

        def is_valid(inputs: Sequence[str], ends: Sequence[str]) -> bool | None:
            return validation._validate_aten_with_mitigations(
                target, call.args, dict(call.kwargs), _theirs(inputs), _theirs(ends), truth, RANKS, self.mesh,
                mitigations,
            )  # fmt: skip

        with LocalTensorMode(frozenset(range(RANKS))):
            yield is_valid

    def _fails(self, inputs: Sequence[str], ends: Sequence[str]) -> bool:
        """Whether a combination fails with other terms of partial inputs."""
        tensors = [value + 0 for value in self.call.tensors]
        results = self._results(inputs, tensors)
        return results is None or not all(map(_joins, ends, results, self.call.outputs))

    def _results(self, inputs: Sequence[str], tensors: Sequence[Tensor] | None = None) -> list[list[Tensor]] | None:
        """For each output, what each rank computes from its parts; None if the operator refuses the parts."""
        parts = [self._cut(index, placement, tensors) for index, placement in enumerate(inputs)]
        if any(part is None for part in parts):
            return None
        ranks = []
        for rank in range(RANKS):
            rank_parts = iter([part[rank] for part in parts])  # type: ignore[index]
            try:
                ranks.append(present(called(self.call, rank_parts)))
            except Exception:  # noqa: BLE001 - an operator may refuse parts in any way
                return None
        if any(len(result) != len(self.call.outputs) for result in ranks):
            return None
        return [list(each) for each in zip(*ranks, strict=True)]

    def _cut(self, index: int, placement: str, tensors: Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
        """The parts of an input, the validator's own for Partial."""
        key = index, placement
        if tensors is None and key in self._parts:
            return self._parts[key]
        value = (tensors or self.call.tensors)[index]
        theirs: Any = _theirs([placement])[0]
        parts: tuple[Tensor, ...] | None
        if placement == "R":
            parts = (value,) * RANKS
        elif placement.startswith("S("):
            dim = int(placement[2:-1])
            even = value.shape[dim] % RANKS == 0
            parts = tuple(part.contiguous() for part in value.tensor_split(RANKS, dim)) if even else None
        else:
            try:
                local = validation._create_partial_input(value, theirs, RANKS, index, int(tensors is not None))
                parts = tuple(local._local_tensors[rank] for rank in range(RANKS))
            except (RuntimeError, TypeError):
                parts = None
        if tensors is None:
            self._parts[key] = parts
        return parts

    # --- why a true combination need not be allowed ---

    def ignores(self, index: int) -> bool:
        """Whether the operator gives the same for other values of an input."""
        value = self.call.tensors[index]
        if not value.is_floating_point():
            return False
        other = [
            tensor if number != index else torch.randn_like(tensor) for number, tensor in enumerate(self.call.tensors)
        ]
        try:
            shown = present(called(self.call, iter(other)))
        except Exception:  # noqa: BLE001 - an operator may refuse values
            return False
        return all(map(_same, shown, self.call.outputs))

    def is_identity(self) -> bool:
        """Whether the operator returns the values of an input, at these sizes."""
        output = self.call.outputs[0]
        return any(
            value.numel() == output.numel() and _same(value.reshape(output.shape), output)
            for value in self.call.tensors
        )

    def holds_by_chance(self, combination: Combination) -> bool:
        """Whether a combination that holds for the sample's values does not hold for random ones."""
        torch.manual_seed(1)
        other = [_shuffled(tensor) for tensor in self.call.tensors]
        try:
            wholes = present(called(self.call, iter(other)))
        except Exception:  # noqa: BLE001 - an operator may refuse values
            return False
        results = self._results(combination[0], other)
        return results is None or not all(map(_joins, combination[1], results, wholes))


def _shuffled(value: Tensor) -> Tensor:
    """Random numbers; for integers and booleans, the tensor's own values in another order."""
    if value.is_floating_point():
        return torch.randn_like(value)
    return value if value.is_complex() else value.flatten()[torch.randperm(value.numel())].reshape(value.shape)


def called(call: Call, tensors: Iterator[Tensor]) -> Any:
    args, kwargs = tree_map(
        lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, (call.args, dict(call.kwargs))
    )
    return call.target(*args, **kwargs)


def _theirs(placements: Iterable[str]) -> tuple[TheirPlacement, ...]:
    their_placements = tuple(validation.parse_placement(placement) for placement in placements)
    assert None not in their_placements
    return their_placements  # type: ignore[return-value]


def _same(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return torch.allclose(actual, expected, atol=LOOSE, rtol=LOOSE, equal_nan=True)


def _joins(placement: str, parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the ranks' results, put together by a placement, are about the whole."""
    first, second = parts
    try:
        if placement == "R":
            return _same(first, whole) and _same(second, whole)
        if placement.startswith("S("):
            dim = int(placement[2:-1])
            return dim < whole.dim() and _same(torch.cat([first, second], dim), whole)
        if first.shape != whole.shape or second.shape != whole.shape or whole.dtype == torch.bool:
            return False
        joined = {
            "P(sum)": lambda: first + second, "P(avg)": lambda: ((first + second) / RANKS).to(whole.dtype),
            "P(min)": lambda: torch.minimum(first, second), "P(max)": lambda: torch.maximum(first, second),
        }[placement]()  # fmt: skip
    except (RuntimeError, IndexError):
        return False
    return _same(joined, whole)


def normal(placement: str, value: Tensor) -> str:
    """A Shard of a dim of size 1 is written as Replicate, as in the validator."""
    return validation.normalize_placement_str(placement, tuple(value.shape))
