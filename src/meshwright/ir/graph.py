"""The training step as data: tensors, operators with their rules, and factor classes."""

import hashlib
from math import prod
from typing import ClassVar, Literal

import msgspec

from meshwright.ir.precision import Precision
from meshwright.ir.rule import Rule

TensorKind = Literal["input", "parameter", "buffer", "constant", "activation", "gradient", "output"]
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A value of the step. ``storage`` names the tensor that owns its memory (itself, unless it is a view);
    ``dims`` names, per dim and outermost first, the factor classes it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    storage: str
    dims: tuple[tuple[str, ...], ...] = ()

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


class Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of the step. ``name`` is ``module.path:op#k``. ``arguments`` are those of the call, with ``t0``, ``t1``,
    ... for ``inputs``; ``positions`` are the places of ``outputs`` among the results, where there may be several.
    ``classes`` maps the letters of its rule to factor classes, ``letters`` those of the operator's pattern to those of
    its rule. ``reason`` says why it has no rule, where it has none; ``repeat`` is the block it repeats (``layers.*``);
    ``sequence`` pairs a forward operator with its backward ones; ``prologue`` operators depend on no parameter and no
    random number."""

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: Rule | None
    arguments: str = ""
    positions: tuple[int, ...] = ()
    classes: dict[str, str] = {}
    letters: dict[str, tuple[str, ...]] = {}
    reason: str = ""
    flops: float = 0.0
    bytes: int = 0
    module: str = ""
    source: str = ""
    backward: bool = False
    prologue: bool = False
    repeat: str = ""
    sequence: int = -1


class FactorClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Factors that are one and the same along edges. ``role`` is ``batch`` for those reached from the batch dim."""

    name: str
    size: int
    role: Literal["batch", ""] = ""


class ParameterGradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter and the tensor that holds its gradient (None where the loss does not reach it)."""

    parameter: str
    gradient: str | None


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One captured training step of the global batch (or an evaluation, which has no gradients). ``precision`` is what
    it was captured in; None: what the model itself computes in."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    model: str
    batch_size: int
    tensors: dict[str, Tensor]
    operators: tuple[Operator, ...]
    factor_classes: dict[str, FactorClass]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    loss: str
    metrics: dict[str, str] = {}
    gradients: tuple[ParameterGradient, ...] = ()
    buffer_updates: dict[str, str] = {}
    tied: dict[str, str] = {}
    precision: Precision | None = None
    fingerprint: str = ""

    def flops(self) -> float:
        """Floating-point operations of one step over the whole batch."""
        return sum(operator.flops for operator in self.operators)

    def num_parameters(self) -> int:
        """Elements of all parameters (tied ones once)."""
        return sum(self.tensors[name].num_elements for name in self.parameters)

    def producers(self) -> dict[str, Operator]:
        """By tensor name, the operator that makes it."""
        return {output: operator for operator in self.operators for output in operator.outputs}

    def consumers(self) -> dict[str, list[tuple[Operator, int]]]:
        """By tensor name, the operators that read it and at which input."""
        result: dict[str, list[tuple[Operator, int]]] = {}
        for operator in self.operators:
            for position, name in enumerate(operator.inputs):
                result.setdefault(name, []).append((operator, position))
        return result


def fingerprint(graph: Graph) -> str:
    """A digest of the model and its step, the same for every batch size from 2 on: parameters, operators, patterns, and
    the sizes of all factors that are not batch. Dtypes are not in it, but casts are, as operators: a model that casts
    (to float32 before its loss) has another one in that dtype."""
    digest = hashlib.sha256()
    for name in (*graph.parameters, *graph.buffers):
        tensor = graph.tensors[name]
        digest.update(f"{name} {tensor.shape}\n".encode())
    batch = {name for name, factor in graph.factor_classes.items() if factor.role == "batch"}
    for operator in graph.operators:
        digest.update(f"{operator.name} {operator.target}\n".encode())
        if operator.rule is not None:
            of, letters = operator.classes, operator.rule.sizes.items()
            sizes = [(letter, size) for letter, size in letters if letter in of and of[letter] not in batch]
            digest.update(f"{operator.rule.pattern} {sizes}\n".encode())
    return digest.hexdigest()[:16]
