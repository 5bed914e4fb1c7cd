"""Values as bytes, for notes and objects between ranks. Nothing is pickled: reading bytes runs no code that they name.

    text, number, True, None       themselves in MessagePack
    everything else                an array: a tag, then the content

A class is written by its name. A reader makes objects of plain data only: structs, named tuples, dataclasses and enums
of Meshwright, and errors of Meshwright. Structs are decoded by their schema. Any other name is refused, and so is a
module that this process does not know.
"""

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.errors import MeshwrightError, RankError

OURS = "meshwright."
"""The package whose structs, dataclasses and enums are read. Its modules are imported where they are not yet."""
LIST, TUPLE, SET, FROZEN, DICT, SIZE = range(6)
TENSOR, ARRAY, TORCH, STRUCT, NAMED, RECORD, MEMBER, ERROR, PATH, LARGE, TEXT, COMPLEX = range(6, 18)
_INTEGERS = range(-(2**63), 2**63)
_CONTAINERS: dict[int, Callable[[list[Any]], Any]] = {
    LIST: list, TUPLE: tuple, SET: set, FROZEN: frozenset, SIZE: torch.Size,
}  # fmt: skip
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_WRONG = (
    MeshwrightError, msgspec.MsgspecError, ImportError, ValueError, TypeError, LookupError, AttributeError,
    RuntimeError,
)  # fmt: skip
"""What damaged or hostile bytes raise where they are read."""
REMEDY = "all ranks must run the same version of Meshwright; let nothing else connect to the ranks"


def to_bytes(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        RankError: it is not plain data.
    """
    return msgspec.msgpack.encode(_encoded(value))


def from_bytes(data: Any) -> Any:
    """The value that ``to_bytes`` wrote.

    Raises:
        RankError: the bytes are something else, or name a class that is not plain data of ours.
    """
    try:
        return _decoded(msgspec.msgpack.decode(data))
    except RankError:
        raise
    except _WRONG as error:
        raise _refused(f"{type(error).__name__}: {error}") from error


def _refused(problem: str) -> RankError:
    return RankError(f"what another rank sent cannot be read: {problem}", where="note", remedy=REMEDY)


# --- to bytes --------------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    """The value in terms of MessagePack: numbers, texts, bytes and arrays."""
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is bytearray:
        return bytes(value)
    if kind is int:
        return value if value in _INTEGERS else [LARGE, str(value)]
    if kind is str:
        return value if value.isascii() or _is_unicode(value) else [TEXT, value.encode(errors="surrogatepass")]
    if isinstance(value, list):
        return [LIST, *map(_encoded, value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [NAMED, _name(kind), *map(_encoded, value)]
    for tag, container in ((SIZE, torch.Size), (TUPLE, tuple), (SET, set), (FROZEN, frozenset)):
        if isinstance(value, container):
            return [tag, *map(_encoded, value)]
    if isinstance(value, dict):
        return [DICT, *(_encoded(part) for item in value.items() for part in item)]
    return _encoded_object(value, kind)


def _encoded_object(value: Any, kind: type[Any]) -> Any:
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        content = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return [TENSOR, str(value.dtype), list(value.shape), content]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return [ARRAY, value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, _TORCH):
        return [TORCH, str(value)]
    if isinstance(value, msgspec.Struct):
        return [STRUCT, _name(kind), msgspec.msgpack.encode(value, enc_hook=_to_text)]
    if isinstance(value, MeshwrightError):
        known = next(base for base in kind.__mro__ if base.__module__.startswith(OURS))
        return [ERROR, _name(known), value.problem, value.where, value.remedy]
    if isinstance(value, enum.Enum):
        return [MEMBER, _name(kind), value.name]
    if dataclasses.is_dataclass(kind):
        return [RECORD, _name(kind), *(_encoded(getattr(value, name)) for name in _field_names(kind))]
    if isinstance(value, Path):
        return [PATH, str(value)]
    if isinstance(value, complex):
        return [COMPLEX, value.real, value.imag]
    for plain in (bool, int, float, str):  # subclasses, such as numpy.float64
        if isinstance(value, plain):
            return _encoded(plain(value))
    if isinstance(value, np.generic):
        return _encoded(value.item())
    raise RankError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks",
        where="note",
        remedy="send numbers, texts, tensors, lists, dicts, or structs of Meshwright",
    )


def _is_unicode(value: str) -> bool:
    """Whether the text has no lone surrogates, as names of files may have."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _to_text(value: Any) -> Any:
    """The file form of a value in a struct, as in ``ir/files.py``."""
    if hasattr(value, "to_text"):
        return value.to_text()
    raise TypeError(f"{type(value).__name__} has no file form")


# --- from bytes ------------------------------------------------------------------------------------------------------


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict | msgspec.msgpack.Ext):
            raise _refused(f"a {type(value).__name__} in place of a value")
        return value
    tag, content = value[0], value[1:]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([_decoded(part) for part in content])
    if tag == DICT:
        return {_decoded(key): _decoded(part) for key, part in zip(content[::2], content[1::2], strict=True)}
    return _OBJECTS[tag](*content)


def _tensor(dtype: str, shape: list[int], content: bytes) -> Tensor:
    size, kind = _num_elements(shape), _of_torch(dtype, torch.dtype)
    if size * kind.itemsize != len(content):
        raise _refused(f"{len(content)} bytes for a tensor of {dtype}{shape}")
    flat = torch.empty(size, dtype=kind)
    if content:
        flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return flat.view(shape)


def _array(dtype: str, shape: list[int], content: bytes) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise _refused(f"an array of {dtype!r}")
    return np.frombuffer(bytearray(content), kind).reshape(shape)


def _num_elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise _refused(f"a tensor of shape {shape}")
        count *= size
    return count


def _of_torch(name: str, *kinds: type[Any]) -> Any:
    package, _, attribute = name.partition(".")
    value = getattr(torch, attribute, None)
    if package != "torch" or not isinstance(value, kinds or _TORCH):
        raise _refused(f"{name!r} is no dtype or layout of torch")
    return value


def _struct(name: str, content: bytes) -> Any:
    return _decoder(_class(name, msgspec.Struct)).decode(content)


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_text)


def _from_text(kind: type[Any], value: Any) -> Any:
    if not hasattr(kind, "from_text") or not isinstance(value, str):
        raise TypeError(f"{kind.__name__} has no file form")
    return kind.from_text(value)


def _named(name: str, *content: Any) -> Any:
    kind = _class(name, tuple)
    if len(content) != len(kind._fields):
        raise _refused(f"{len(content)} values for {name}")
    return tuple.__new__(kind, map(_decoded, content))


def _record(name: str, *content: Any) -> Any:
    kind: Any = _class(name, object)
    if not hasattr(kind, "__dataclass_fields__"):
        raise _refused(f"{name} is not plain data")
    return kind(**dict(zip(_field_names(kind), map(_decoded, content), strict=True)))


def _member(name: str, member: str) -> Any:
    return _class(name, enum.Enum)[member]


def _error(name: str, problem: str, where: str, remedy: str) -> MeshwrightError:
    return _class(name, MeshwrightError)(*map(_text, (problem,)), where=_text(where), remedy=_text(remedy))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(f"{type(value).__name__} in place of a text")
    return value


def _class(name: str, base: type[Any]) -> Any:
    """The class of this name, if it is plain data and derived from ``base``. Only modules of Meshwright are imported
    for it. A named tuple may come from any module that this process has imported: making one runs no code."""
    module, _, qualified = name.partition(":")
    is_ours = module.startswith(OURS) and not module.endswith("__main__")
    if base is not tuple and not is_ours:
        raise _refused(f"{name} is not plain data of Meshwright")
    candidate: Any = import_module(module) if is_ours else sys.modules.get(module)
    for part in qualified.split("."):
        candidate = vars(candidate).get(part) if candidate is not None else None
    is_own = isinstance(candidate, type) and candidate.__module__ == module and issubclass(candidate, base)
    if not is_own or (base is tuple and not hasattr(candidate, "_fields")):
        raise _refused(f"{name} is not plain data that is known here")
    return candidate


_OBJECTS: dict[int, Callable[..., Any]] = {
    TENSOR: _tensor, ARRAY: _array, TORCH: _of_torch, STRUCT: _struct, NAMED: _named, RECORD: _record,
    MEMBER: _member, ERROR: _error, PATH: Path, LARGE: int, COMPLEX: complex,
    TEXT: lambda content: content.decode(errors="surrogatepass"),
}  # fmt: skip
