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
"""Bytes of one element, by dtype."""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A value of the step. ``storage`` names the tensor that owns its memory (itself, unless it is a view).
    ``dims`` names the factor classes of each dim, outermost first."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    storage: str
    dims: tuple[tuple[str, ...], ...] = ()

    @property
    def num_elements(self) -> int:
        """The number of elements, from the shape."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the elements."""
        return self.num_elements * ITEM_BYTES[self.dtype]


class Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of the step. ``name`` is ``module.path:op#k``. ``arguments`` are the call's arguments, with ``t0``,
    ``t1``, ... for ``inputs``. ``positions`` are the indices of ``outputs`` among the results of a call that returns
    several. ``classes`` maps the letters of its rule to factor classes; ``letters`` maps the letters of the operator's
    pattern to those of its rule. ``reason`` says why ``rule`` is None. ``repeat`` is the repeated block that holds the
    operator (``layers.*``). A forward operator and its backward operators have the same ``sequence`` number.
    ``prologue`` operators depend on no parameter and no random number."""

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
    """Factors that are the same along the edges. ``role`` is ``batch`` for factors that the batch dim reaches."""

    name: str
    size: int
    role: Literal["batch", ""] = ""


class ParameterGradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter and the tensor that holds its gradient (None if the loss does not depend on the parameter)."""

    parameter: str
    gradient: str | None


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One captured training step of the global batch, or an evaluation, which has no gradients. ``buffer_updates`` maps
    a buffer to the tensor with its new value. ``tied`` maps further names of shared parameters and buffers to the name
    that stands for them. ``precision`` is the precision of the capture (None: the model's own dtypes)."""

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
        """The number of elements of all parameters; tied parameters count once."""
        return sum(self.tensors[name].num_elements for name in self.parameters)

    def producers(self) -> dict[str, Operator]:
        """The operator that makes each tensor, by tensor name."""
        return {output: operator for operator in self.operators for output in operator.outputs}

    def consumers(self) -> dict[str, list[tuple[Operator, int]]]:
        """The operators that read each tensor, by tensor name, with the index of the input."""
        result: dict[str, list[tuple[Operator, int]]] = {}
        for operator in self.operators:
            for position, name in enumerate(operator.inputs):
                result.setdefault(name, []).append((operator, position))
        return result


def fingerprint(graph: Graph) -> str:
    """A digest of the model and its step, equal for every batch size of 2 or more: parameters, operators, patterns, and
    the sizes of all factors except batch. It ignores dtypes, but includes casts, because casts are operators: a model
    with a cast (to float32 before its loss) has another fingerprint when it runs in that dtype."""
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
