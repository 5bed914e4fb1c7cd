"""Records the Python values that a step reads while it is traced (attributes, closures, globals): capture fixes them.

During a trace, ``nn.Module`` and the classes of other objects that the step uses have our own ``__getattribute__`` and
``__setattr__``, so that an attribute counts only if forward or the loss function really reads it. For a function, the
values of its closure and of the globals that its code names are recorded.
"""

import dis
import functools
import inspect
import sys
import sysconfig
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.capture.values import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Contents,
    Read,
    contents_of,
    put_contents,
    state_of,
    value_at,
)
from meshwright.errors import CaptureError

_OF_MODULES = frozenset([*vars(nn.Module()), *vars(nn.Module), "__class__", "parametrizations"]) - {"forward"}
"""Attributes of a module that PyTorch itself reads. They are not recorded: the guard of a captured step compares a
module's members, hooks and mode in any case (``runtime/guards.py``)."""
_OF_OBJECTS = frozenset(["__class__", "__dict__"])
_LIBRARIES = (
    *(str(PurePath(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")),
    *(str(PurePath(file).parent) for file in (torch.__file__, __file__)),
)
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


Moved = list[tuple[Read, Any, Contents]]
"""Reads whose value has changed, each with the new value and the contents of its containers."""


class Reads:
    """Records the values that the first trace of a step reads, and undoes the writes of every trace. Each trace runs in
    ``with reads:``."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._moved: Moved = []
        self._loss_fn = loss_fn
        self._reads: dict[tuple[int, str], Read] = {}
        self._labels = {id(part): f"module {path or '(model)'}" for path, part in model.named_modules()}
        self._alive: list[Any] = []  # keeps the object alive, so that no other object can take its id
        self._noted: set[tuple[int, str]] = set()
        self._own = frozenset(map(id, (*model.parameters(), *model.buffers())))
        self._spaces: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}  # owner, its __dict__, a copy
        self._inside, self._outside = frozenset(map(id, model.modules())), dict[int, nn.Module]()
        self._classes: dict[type, None] = {nn.Module: None}
        self._originals: list[tuple[type, str, Any]] = []
        self._followed: set[int] = set()
        self._namespaces: dict[int, str] = {}
        self._names: set[str] = set()
        self._first = True

    @property
    def recorded(self) -> list[Read]:
        """All values that the step read before it wrote to them."""
        return list(self._reads.values())

    def __enter__(self) -> None:
        for kind in list(self._classes):
            self._patch(kind)
        for owner, space, _ in list(self._spaces.values()):
            self._spaces[id(owner)] = owner, space, dict(space)
        if self._first:
            self._follow(self._loss_fn, "loss_fn")

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._originals):
            if original is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()
        if self._first:
            self._choose_in_namespaces()
        self._moved = [
            (read, value, contents_of(value))
            for read in self._reads.values()
            if read.has_changed()
            for value in [read.now()]
        ]
        for owner, space, before in self._spaces.values():
            passed = _OF_MODULES if isinstance(owner, nn.Module) else _OF_OBJECTS
            for name in {*space, *before} - passed:
                Read(space, name, MISSING).put(before.get(name, MISSING), [])
        for read in self._reads.values():
            if read.has_changed():
                read.put(read.value, read.contents)
            else:
                put_contents(read.contents)  # restores containers that are too deep or too large to be compared
        if self._first:
            for module in self._outside.values():
                self._watch_outside(module)
        self._first = False

    def check_moved(self, graph: fx.Graph, trace: Callable[[], fx.Graph]) -> dict[str, str]:
        """Check that the step runs the same operators with the values that it has changed after reading them. If there
        are such values, ``trace`` traces the step with the new values, and the result must equal ``graph``. Return a
        map from the place of each changed value to the change in words.

        Raises:
            CaptureError: with the new values the step runs other operators. The error names the place.
        """
        moved = self._moved
        words = {read.where: read.change(value, contents) for read, value, contents in moved}
        if moved and not self._runs_the_same(graph, trace, moved):
            alone = (read.where for read, *new in moved if not self._runs_the_same(graph, trace, [(read, *new)]))
            where = next(alone, moved[0][0].where)
            raise CaptureError(
                f"the step reads it and changes it ({words[where]}), and runs differently with the new value; a "
                "captured step would always use the old value",
                where=where,
                remedy="keep a value that changes from step to step in a buffer (register_buffer), or put it into the "
                "batch; if it is a cache, call the model once before parallelize, to fill it",
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
                read.put(read.value, read.contents)
        old, new = ([(str(node.target), str(node.args), str(node.kwargs)) for node in each.nodes] for each in graphs)
        return old == new

    # --- attributes --------------------------------------------------------------------------------------------------

    def _patch(self, kind: type) -> None:
        reads: Any = kind.__getattribute__
        writes: Any = kind.__setattr__
        passed = _OF_MODULES if kind is nn.Module else _OF_OBJECTS
        noted = self._noted

        def read(owner: Any, name: str) -> Any:
            if name in passed or (id(owner), name) in noted:
                return reads(owner, name)
            self._keep_space(owner)
            try:
                value = reads(owner, name)
            except AttributeError:
                self._note(owner, name, MISSING)
                raise
            self._note(owner, name, value)
            return value

        def write(owner: Any, name: str, value: Any) -> None:
            if name not in passed:
                self._keep_space(owner)
                noted.add((id(owner), name))
            writes(owner, name, value)

        replacements: list[tuple[str, Any]] = [("__setattr__", write)] if _is_settable(kind) else []
        for name, replacement in [*replacements, *([("__getattribute__", read)] if self._first else [])]:
            self._originals.append((kind, name, vars(kind).get(name, MISSING)))
            setattr(kind, name, replacement)

    def _keep_space(self, owner: Any) -> None:
        """Copy an object's attributes before a trace first reads or writes one of them."""
        if id(owner) not in self._spaces:
            space = _space(owner)
            self._spaces[id(owner)] = owner, space, dict(space)

    def _choose_in_namespaces(self) -> None:
        """Keep only the attributes of a SimpleNamespace that the step's code names, and record missing attributes
        too."""
        for key, where in self._namespaces.items():
            _, space, before = self._spaces[key]
            for name in before.keys() - self._names if not {"vars", "__dict__"} & self._names else ():
                self._reads.pop((key, name), None)
            for name in self._names - before.keys():
                self._reads[key, name] = Read(
                    space, name, MISSING, f"{where}, attribute {name}", state=state_of(MISSING)
                )

    def _watch_outside(self, module: nn.Module) -> None:
        """Record the mode and members of a module outside of the model (a criterion, a teacher)."""
        where = f"{type(module).__name__} outside of the model"
        for name in {"training", "_parameters", "_buffers", "_modules"} & vars(module).keys():
            value = vars(module)[name]
            state = state_of(value, self._own)
            self._reads[id(module), name] = Read(vars(module), name, value, f"{where}, {name}", self._own, state)

    def _note(self, owner: Any, name: str, value: Any) -> None:
        """Record the first read of an attribute, unless the trace has written to the attribute before."""
        key, kind = (id(owner), name), type(owner)
        self._alive.append(owner)
        self._noted.add(key)
        if isinstance(owner, nn.Module) and key[0] not in self._inside:
            self._outside[key[0]] = owner
        if name[:2] == "__" or kind.__module__ == "meshwright.capture.tracer":
            return
        space, where = _space(owner), f"{self._labels.get(key[0]) or kind.__name__}, attribute {name}"
        of_class = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)
        if isinstance(of_class, (property, functools.cached_property)):
            self._follow(getattr(of_class, "fget", None) or getattr(of_class, "func", None), where)
        if name in space:
            if name in self._spaces[key[0]][2]:  # else the read has set it (a cached property); __exit__ undoes that
                self._add(key, space, name, value, where)
        elif value is MISSING:
            if not any(name in space.get(members, ()) for members in ("_parameters", "_buffers", "_modules")):
                self._add(key, space, name, value, where)
        elif isinstance(value, (*PLAIN, *CONTAINERS)) and (
            of_class is value or of_class is MISSING or isinstance(of_class, types.MemberDescriptorType)
        ):
            self._add(key, owner, name, value, where)
        else:
            self._follow(value, where)

    def _add(self, key: tuple[int, str], owner: Any, name: str, value: Any, where: str) -> None:
        if key not in self._reads:
            state = state_of(value, self._own)
            self._reads[key] = Read(owner, name, value, where, self._own, state, contents_of(value))
        self._follow(value, where)

    # --- functions and objects that the step uses --------------------------------------------------------------------

    def _follow(self, value: Any, where: str, depth: int = 4) -> None:
        """Watch the objects that the step may read through a value."""
        kind = type(value)
        if isinstance(value, CONTAINERS):
            for item in (value.values() if isinstance(value, dict) else value) if depth and len(value) <= 100 else ():
                self._follow(item, where, depth - 1)
        elif isinstance(value, (*PLAIN, Tensor, type, types.ModuleType, Enum, types.BuiltinFunctionType)):
            return
        elif id(value) not in self._followed:
            self._followed.add(id(value))
            self._alive.append(value)
            if isinstance(value, types.MethodType):
                self._follow(value.__func__, where)
                self._follow(value.__self__, where)
            elif isinstance(value, types.FunctionType):
                self._look_up(value)
            elif isinstance(value, functools.partial):
                self._add(
                    (id(value), "keywords"), value, "keywords", value.keywords, f"{where}, arguments of a partial"
                )
                self._follow((value.func, value.args), where)
            elif kind is types.SimpleNamespace:  # reads of its attributes cannot be intercepted
                self._keep_space(value)
                self._namespaces[id(value)] = where
                for name, item in vars(value).items():
                    self._add((id(value), name), vars(value), name, item, f"{where}, attribute {name}")
            elif not isinstance(value, nn.Module):
                self._labels[id(value)] = where
                self._follow(kind.__dict__.get("__call__"), where)
                known = kind in self._classes or (_is_standard(kind.__module__) and kind is not Namespace)
                if not known and _is_open(kind):
                    self._classes[kind] = None
                    self._patch(kind)

    def _look_up(self, function: types.FunctionType) -> None:
        """Record the defaults, closure and globals of a function that is not from a library."""
        code, called = function.__code__, f"function {function.__qualname__}"
        self._names.update(_names_in(code))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {name: (cell, value_at(cell, "cell_contents")) for name, cell in cells if name != "__class__"}
        if code.co_filename.startswith(_LIBRARIES):  # a decorator of a library
            self._follow([value for _, value in held.values() if isinstance(value, types.FunctionType)], called)
            return
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self._add((id(function), name), function, name, value, f"{called}, default of an argument")
        for name, (cell, value) in held.items():
            self._add((id(cell), name), cell, "cell_contents", value, f"{called}, outer variable {name}")
        for names in _globals_of(code):
            self._look_up_global(function.__globals__, names, f"{called}, global {'.'.join(names)}")

    def _look_up_global(self, space: Any, names: list[str], where: str) -> None:
        """Record the value of a global such as ``settings.scale``. Modules and classes on the way are not recorded."""
        for name in names:
            if isinstance(space, type):
                space = next((base for base in space.__mro__ if name in vars(base)), space)
                value = vars(space).get(name, MISSING)
                if hasattr(type(value), "__get__"):  # a method, which is a new object at each access
                    self._follow(getattr(value, "__func__", value), where)
                    return
            else:
                value = value_at(space, name)
            if isinstance(value, types.ModuleType) and not _is_standard(value.__name__):
                space = vars(value)
            elif isinstance(value, type) and _is_open(value) and not _is_standard(value.__module__):
                space = value
            else:
                if not isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)) and value is not MISSING:
                    self._alive.append(space)
                    self._add((id(space), name), space, name, value, where)
                return


def _space(owner: Any) -> dict[str, Any]:
    try:
        space: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return space


def _is_settable(kind: type) -> bool:
    """Whether a class has its original ``__setattr__`` again after ours is removed. The class of a C extension may have
    a hidden ``__setattr__``, which would be lost."""
    setter: Any = kind.__setattr__
    are_open = (meta is type or _is_open(meta) for meta in inspect.getmro(type(kind))[:-1])
    return isinstance(setter, types.FunctionType) or (setter is object.__setattr__ and all(are_open))


def _is_open(kind: type) -> bool:
    """Whether attributes can be set on the class itself."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE and not issubclass(kind, Enum)


def _is_standard(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "torch" or (package in sys.stdlib_module_names and package != "__main__")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the attributes and globals that code names, and strings that may be names (``getattr(settings,
    "scale")``)."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _globals_of(code: types.CodeType) -> Iterator[list[str]]:
    """Yield each global that a function's code reads, followed by the attributes that the code reads from it."""
    names: list[str] = []
    for instruction in (*dis.get_instructions(code), None):
        if instruction is not None and names and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(instruction.argval)
            continue
        if names:
            yield names
        names = [instruction.argval] if instruction is not None and instruction.opname == "LOAD_GLOBAL" else []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
