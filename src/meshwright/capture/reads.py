"""What a step reads from Python while it is traced (attributes, closures, globals): a captured step has it baked in.

For the length of a trace, ``nn.Module`` and the classes of other objects that the step uses have a ``__getattribute__``
and a ``__setattr__`` of ours: only attributes that forward or the loss function really read count. Of functions,
closures and the globals that their code names are looked up.
"""

import dis
import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.errors import CaptureError

MISSING: Any = object()
"""The value of an attribute that is not there."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
MOST_COMPARED = 1000
"""Larger containers are compared by identity and length alone."""
_OF_MODULES = frozenset([*vars(nn.Module()), *vars(nn.Module), "__class__", "parametrizations"]) - {"forward"}
"""What PyTorch itself reads of a module. Its members, hooks and mode are compared in any case."""
_OF_OBJECTS = frozenset(["__class__", "__dict__"])
_LIBRARIES = (
    *(str(PurePath(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")),
    *(str(PurePath(file).parent) for file in (torch.__file__, __file__)),
)
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


class Same:
    """Equal to the very same object alone, which it keeps alive."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def state_of(value: Any, depth: int = 4) -> Any:
    """A value as it is now, for comparison: equal for plain values of one type and text, containers of such, and the
    very same object; for a tensor, as long as nobody writes to it."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # nan equals nan, and 0.0 is not -0.0
    if isinstance(value, Tensor):
        return Same(value), None if value.is_inference() else value._version
    if not isinstance(value, CONTAINERS) or not depth or len(value) > MOST_COMPARED:
        return Same(value), len(value) if isinstance(value, CONTAINERS) else 0
    if isinstance(value, dict):
        return type(value), [(key, state_of(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), set(value)
    return type(value), [state_of(item, depth - 1) for item in value]


@dataclass
class Read:
    """A value that a trace read: ``owner[name]`` where the owner is a dict (the ``__dict__`` of a module, the globals
    of a function), else an attribute. ``state`` and ``copied`` (of a container) are as they were then."""

    owner: Any = field(repr=False)
    name: str
    value: Any
    where: str = ""
    state: Any = None
    copied: Any = None

    def now(self) -> Any:
        """The value that is there now."""
        return (
            self.owner.get(self.name, MISSING) if type(self.owner) is dict else getattr(self.owner, self.name, MISSING)
        )

    def change(self, value: Any) -> str:
        """What became of the value, in words."""
        return f"{in_words(self.value if self.copied is None else self.copied)} became {in_words(value)}"

    def put(self, value: Any, contents: Any = None) -> None:
        """Set the value, with these contents where it is a container, or take it away."""
        if type(self.owner) is not dict:
            setattr(self.owner, self.name, value)
        elif value is MISSING:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value
        if contents is not None:
            value.clear()
            value.update(contents) if isinstance(value, dict | set) else value.extend(contents)


Moved = list[tuple[Read, Any, Any]]
"""Places with the value that came there, and its contents."""


class Reads:
    """Records what the first of several traces of a step reads (``with reads: trace(...)``), and takes back what each
    of them writes."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._moved: Moved = []
        self._loss_fn = loss_fn
        self._found: dict[tuple[int, str], Read] = {}
        self._labels = {id(part): f"module {path or '(model)'}" for path, part in model.named_modules()}
        self._alive: list[Any] = []  # no other object takes the id of one that was seen
        self._noted: set[tuple[int, str]] = set()
        self._before: dict[tuple[int, str], Read] = {}
        self._classes: dict[type, None] = {nn.Module: None}
        self._originals: list[tuple[type, str, Any]] = []
        self._followed: set[int] = set()
        self._first = True

    @property
    def found(self) -> list[Read]:
        """All that was read before the step itself wrote to it."""
        return list(self._found.values())

    def __enter__(self) -> None:
        for kind in list(self._classes):
            self._patch(kind)
        if self._first:
            self._follow(self._loss_fn, "loss_fn")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for owner, name, original in reversed(self._originals):
            if original is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()
        self._first = False
        now = [(read, value, _copied(value)) for read in self._found.values() for value in [read.now()]]
        self._moved = [(read, value, copied) for read, value, copied in now if state_of(value) != read.state]
        for written in self._before.values():
            written.put(written.value)
        for read, _, _ in self._moved:
            if state_of(read.now()) != read.state:
                read.put(read.value, read.copied)
        self._before.clear()

    def check_moved(self, graph: fx.Graph, trace: Callable[[], fx.Graph]) -> dict[str, str]:
        """What the step changed though it had read it before, in words by place. It is traced once more (``trace``)
        with the new values: the next step must run what this one did (``graph``).

        Raises:
            CaptureError: it does not; names the place.
        """
        moved = self._moved
        words = {read.where: read.change(value if contents is None else contents) for read, value, contents in moved}
        if moved and not self._runs_the_same(graph, trace, moved):
            alone = (read.where for read, *new in moved if not self._runs_the_same(graph, trace, [(read, *new)]))
            where = next(alone, moved[0][0].where)
            raise CaptureError(
                f"the step reads it and changes it ({words[where]}), and with the new value it runs otherwise; a "
                "captured step would find the old one for ever",
                where=where,
                remedy="keep in a buffer (register_buffer) what lives on from step to step, or put it into the batch",
            )
        return words

    def _runs_the_same(self, graph: fx.Graph, trace: Callable[[], fx.Graph], moved: Moved) -> bool:
        for read, value, contents in moved:
            read.put(value, contents)
        try:
            graphs = graph, trace()
        except CaptureError:
            return False
        finally:
            for read, _, _ in moved:
                read.put(read.value, read.copied)
        one, two = ([(str(node.target), str(node.args), str(node.kwargs)) for node in each.nodes] for each in graphs)
        return one == two

    # --- attributes --------------------------------------------------------------------------------------------------

    def _patch(self, kind: type) -> None:
        reads: Any = kind.__getattribute__
        writes: Any = kind.__setattr__
        passed = _OF_MODULES if kind is nn.Module else _OF_OBJECTS
        noted = self._noted

        def read(owner: Any, name: str) -> Any:
            if name in passed or (id(owner), name) in noted:
                return reads(owner, name)
            try:
                value = reads(owner, name)
            except AttributeError:
                self._note(owner, name, MISSING)
                raise
            self._note(owner, name, value)
            return value

        def write(owner: Any, name: str, value: Any) -> None:
            key, space = (id(owner), name), _space(owner)
            if space is not None and name not in passed and key not in self._before:
                self._alive.append(owner)
                self._noted.add(key)
                self._before[key] = Read(space, name, space.get(name, MISSING))
            writes(owner, name, value)

        for name, replacement in (("__setattr__", write), ("__getattribute__", read))[: 2 if self._first else 1]:
            self._originals.append((kind, name, vars(kind).get(name, MISSING)))
            setattr(kind, name, replacement)

    def _note(self, owner: Any, name: str, value: Any) -> None:
        """The first read of an attribute in a trace, which has not written to it."""
        key, kind = (id(owner), name), type(owner)
        self._alive.append(owner)
        self._noted.add(key)
        if name[:2] == "__" or kind.__module__ == "meshwright.capture.tracer":
            return
        space, where = _space(owner) or {}, f"{self._labels.get(key[0]) or kind.__name__}, attribute {name}"
        of_class = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)
        if name in space:
            self._add(key, space, name, value, where)
        elif value is MISSING:
            if not any(name in space.get(members, ()) for members in ("_parameters", "_buffers", "_modules")):
                self._add(key, space, name, value, where)
        elif isinstance(value, (*PLAIN, *CONTAINERS)) and (
            of_class is value or of_class is MISSING or isinstance(of_class, MemberDescriptorType)
        ):
            self._add(key, owner, name, value, where)
        else:
            self._follow(value, where)

    def _add(self, key: tuple[int, str], owner: Any, name: str, value: Any, where: str) -> None:
        if key not in self._found:
            self._found[key] = Read(owner, name, value, where, state_of(value), _copied(value))
        self._follow(value, where)

    # --- functions and objects that the step uses --------------------------------------------------------------------

    def _follow(self, value: Any, where: str, depth: int = 4) -> None:
        """Watch what the step may read by way of a value."""
        kind = type(value)
        if isinstance(value, CONTAINERS):
            for item in (value.values() if isinstance(value, dict) else value) if depth and len(value) <= 100 else ():
                self._follow(item, where, depth - 1)
        elif isinstance(value, (*PLAIN, Tensor, type, ModuleType, Enum, BuiltinFunctionType)):
            return
        elif id(value) not in self._followed:
            self._followed.add(id(value))
            self._alive.append(value)
            if isinstance(value, MethodType):
                self._follow(value.__func__, where)
                self._follow(value.__self__, where)
            elif isinstance(value, FunctionType):
                self._look_up(value)
            elif isinstance(value, functools.partial):
                self._add(
                    (id(value), "keywords"), value, "keywords", value.keywords, f"{where}, arguments of a partial"
                )
                self._follow((value.func, value.args), where)
            elif kind.__name__ in ("SimpleNamespace", "Namespace"):
                self._add((id(value), "__dict__"), value, "__dict__", vars(value), where)
            elif not isinstance(value, nn.Module):
                self._labels[id(value)] = where
                self._follow(kind.__dict__.get("__call__"), where)
                if kind not in self._classes and _is_open(kind) and not _is_standard(kind.__module__):
                    self._classes[kind] = None
                    self._patch(kind)

    def _look_up(self, function: FunctionType) -> None:
        """Defaults, closure and globals of a function that is no library's."""
        code, called = function.__code__, f"function {function.__qualname__}"
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {name: (cell, getattr(cell, "cell_contents", MISSING)) for name, cell in cells if name != "__class__"}
        if code.co_filename.startswith(_LIBRARIES):  # a decorator's
            self._follow([value for _, value in held.values() if isinstance(value, FunctionType)], called)
            return
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self._add((id(function), name), function, name, value, f"{called}, default of an argument")
        for name, (cell, value) in held.items():
            if value is not MISSING:
                self._add((id(cell), name), cell, "cell_contents", value, f"{called}, outer variable {name}")
        for names in _globals_of(code):
            self._look_up_global(function.__globals__, names, f"{called}, global {'.'.join(names)}")

    def _look_up_global(self, space: Any, names: list[str], where: str) -> None:
        """The value of ``settings.scale``, where modules and classes are only ways to a value."""
        for name in names:
            value = space.get(name, MISSING) if type(space) is dict else getattr(space, name, MISSING)
            if isinstance(value, ModuleType) and not _is_standard(value.__name__):
                space = vars(value)
            elif isinstance(value, type) and _is_open(value) and not _is_standard(value.__module__):
                space = value
            else:
                if not isinstance(value, (ModuleType, type, BuiltinFunctionType)) and value is not MISSING:
                    self._alive.append(space)
                    self._add((id(space), name), space, name, value, where)
                return


def _space(owner: Any) -> dict[str, Any] | None:
    try:
        space: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return space


def _copied(value: Any) -> Any:
    return copy(value) if isinstance(value, list | dict | set | deque) else None


def _is_open(kind: type) -> bool:
    """Whether attributes of the class may be set."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE and not issubclass(kind, Enum)


def _is_standard(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "torch" or (package in sys.stdlib_module_names and package != "__main__")


def _globals_of(code: CodeType) -> Iterator[list[str]]:
    """The globals that a function's code reads, each with the attributes that follow."""
    names: list[str] = []
    for instruction in (*dis.get_instructions(code), None):
        if instruction is not None and names and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(instruction.argval)
            continue
        if names:
            yield names
        names = [instruction.argval] if instruction is not None and instruction.opname == "LOAD_GLOBAL" else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def is_fixed(value: Any) -> bool:
    """Whether no part of the value can change in place."""
    return isinstance(value, PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(is_fixed, value)))


def in_words(value: Any) -> str:
    """The value, or its class; the same text on every rank."""
    if value is MISSING:
        return "nothing"
    plain = isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_fixed, value)))
    return repr(value) if plain and len(repr(value)) <= 100 else f"a {type(value).__name__}"
