"""An operator's arguments as text, ``t0, [1, 2], dtype=torch.float32``: a graph is lowered without the traced model."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import inf, nan
from typing import Any

import torch
from torch import fx

from meshwright.errors import CaptureError

_PLAIN = (bool, int, float, str, type(None), torch.device)
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_NAMES = {"inf": inf, "nan": nan, "complex": complex, "device": torch.device, "torch": torch}


@dataclass(frozen=True)
class TensorInput:
    """Stands for tensor input number ``index`` in the arguments of a call."""

    index: int


def written(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> str:
    """Write the arguments of a call as text. Tensor inputs (``fx.Node``) are ``t0``, ``t1``, ..., in order.

    Raises:
        CaptureError: an argument is of a type that cannot be written.
    """
    count = 0

    def text(value: Any) -> str:
        nonlocal count
        if isinstance(value, fx.Node):
            count += 1
            return f"t{count - 1}"
        if isinstance(value, tuple | list):
            inner = ", ".join(map(text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if isinstance(value, _TORCH):
            return str(value)
        if isinstance(value, complex):  # the repr of an infinite part, ``infj``, is not a Python expression
            return f"complex({value.real!r}, {value.imag!r})"
        if isinstance(value, _PLAIN):
            return repr(value)
        raise CaptureError(
            f"an argument of this operator is a {type(value).__name__}",
            where=where,
            remedy="pass tensors, numbers, strings, dtypes, devices, and lists of these",
        )

    return ", ".join([*map(text, args), *(f"{name}={text(value)}" for name, value in kwargs.items())])


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple(map(_value, call.args)), {keyword.arg or "": _value(keyword.value) for keyword in call.keywords}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_value(item) for item in node.elts]
        case ast.Tuple():
            return tuple(map(_value, node.elts))
        case ast.Name():
            return TensorInput(int(node.id[1:])) if node.id[1:].isdigit() else _NAMES[node.id]
        case ast.UnaryOp():
            return -_value(node.operand)
        case ast.Attribute():
            return getattr(_value(node.value), node.attr)
        case ast.Call():
            return _value(node.func)(
                *map(_value, node.args), **{keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
            )
    raise AssertionError(ast.dump(node))


def read(text: str, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) from a text that ``written`` made, with ``tensors`` as the tensor inputs."""

    def fill(value: Any) -> Any:
        if isinstance(value, TensorInput):
            return tensors[value.index]
        if isinstance(value, tuple | list):
            return type(value)(map(fill, value))
        return value

    args, kwargs = _parsed(text)
    return tuple(map(fill, args)), {name: fill(value) for name, value in kwargs.items()}


@lru_cache(maxsize=4096)
def target_of(text: str) -> Callable[..., Any]:
    """Return the operator with a name such as ``aten.mm.default``.

    Raises:
        CaptureError: the operator is not registered in this process.
    """
    try:
        value: Any = reduce(getattr, text.split("."), torch.ops)
    except AttributeError:
        raise CaptureError(
            "the operator is not known here", where=text, remedy="import the library that registers it"
        ) from None
    assert callable(value)
    return value
