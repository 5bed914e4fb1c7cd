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
    """A tensor of the training step.

    ``storage`` is the name of the tensor that owns the memory: this tensor, unless it is a view. ``dims`` has for each
    dim the names of its factor classes (``FactorClass``), outermost first."""

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
    """One call of an ATen operator (or of the user's own operator) in the training step.

    ``name`` is ``module.path:op#k`` for call number k of ``op`` in the module. ``arguments`` is the text of the
    arguments, in which ``t0``, ``t1``, ... stand for the tensors ``inputs``. If the call returns several results,
    ``positions`` has the indices of ``outputs`` among them. ``classes`` maps each letter of ``rule`` to its factor
    class. Capture may refine the letters of the operator's original pattern: ``letters`` maps each original letter to
    its letters in ``rule``. ``reason`` says why ``rule`` is None. ``repeat`` is the repeated block that holds the
    operator (``layers.*``). A forward operator and its backward operators have the same ``sequence`` number. If
    ``prologue`` is true, the operator depends on no parameter and no random number."""

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
    """Factors of several operators that stand for the same size, because the operators share tensors.

    ``role`` is ``batch`` if the factors belong to the batch dim of the step."""

    name: str
    size: int
    role: Literal["batch", ""] = ""


class ParameterGradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter and the tensor that holds its gradient (None if the loss does not depend on the parameter)."""

    parameter: str
    gradient: str | None


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One captured training step of the global batch, or a captured evaluation, which has no gradients.

    ``buffer_updates`` maps a buffer to the tensor with its new value. A parameter or buffer that several modules share
    has one name in the graph; ``tied`` maps its other names to this name. ``precision`` is the precision of the
    captured step (None: the model's own dtypes)."""

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
        """A dict that maps the name of a tensor to the operator that makes it."""
        return {output: operator for operator in self.operators for output in operator.outputs}

    def consumers(self) -> dict[str, list[tuple[Operator, int]]]:
        """A dict that maps the name of a tensor to the operators that read it, each with the index of its input."""
        result: dict[str, list[tuple[Operator, int]]] = {}
        for operator in self.operators:
            for position, name in enumerate(operator.inputs):
                result.setdefault(name, []).append((operator, position))
        return result


def fingerprint(graph: Graph) -> str:
    """A digest of parameters, buffers, operators, patterns, and the sizes of all factors except the batch.

    The digest is equal for every batch size of 2 or more. It ignores dtypes, but it includes casts, because casts are
    operators. For example, a model that casts to float32 before its loss has no cast when it runs in float32, and then
    has another fingerprint."""
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
