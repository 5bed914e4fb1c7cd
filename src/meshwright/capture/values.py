"""Records the values that a trace read from Python, compares them with the current values, and restores them."""

from collections import deque
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import CellType
from typing import Any

import torch
from torch import Tensor

MISSING: Any = object()
"""Stands for the value of an attribute that does not exist."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
MOST_COMPARED = 1000
"""A container with more items (items of nested containers included) is compared by identity and length alone."""
_DEPTH = 4


class Same:
    """A wrapper for comparison by identity: equal only to a ``Same`` of the same object. It keeps the object alive."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def state_of(value: Any, own: AbstractSet[int] = frozenset()) -> Any:
    """Return the current state of a value, for comparison. Two states are equal if the values are plain values with
    equal type and text, containers of equal items, or the same object. A write to a tensor also changes the tensor's
    state. ``own`` has the ids of the model's own tensors, for which this does not hold: every step writes to them."""
    left = MOST_COMPARED

    def state(value: Any, depth: int) -> Any:
        nonlocal left
        if isinstance(value, PLAIN):
            return type(value), repr(value)  # nan must equal nan, and 0.0 must differ from -0.0
        if isinstance(value, Tensor):
            return Same(value), None if value.is_inference() or id(value) in own else value._version
        if not isinstance(value, CONTAINERS):
            return Same(value)
        left -= len(value)
        if not depth or left < 0:
            return Same(value), len(value)
        if isinstance(value, dict):
            return type(value), [(key, state(item, depth - 1)) for key, item in value.items()]
        if isinstance(value, (set, frozenset)):
            return type(value), set(value)
        return type(value), [state(item, depth - 1) for item in value]

    now = state(value, _DEPTH)
    return now if left >= 0 else (Same(value), len(value))


Contents = list[tuple[Any, Any]]
"""Every mutable container within a value, with a copy of it."""


def contents_of(value: Any, depth: int = _DEPTH) -> Contents:
    """Return the contents of a value's containers, to the depth at which values are compared."""
    if not depth or not isinstance(value, CONTAINERS):
        return []
    contents = [(value, copy(value))] if isinstance(value, list | dict | set | deque) else []
    for item in value.values() if isinstance(value, dict) else value:
        contents += contents_of(item, depth - 1)
    return contents


def put_contents(contents: Contents) -> bool:
    """Restore the contents of containers. Return whether any container had changed."""
    changed = False
    for value, copied in contents:
        old, new = (
            list(chain.from_iterable(each.items()) if isinstance(each, dict) else each) for each in (value, copied)
        )
        if len(old) != len(new) or not all(map(is_, old, new)):
            changed = True
            value.clear()
            value.update(copied) if isinstance(value, dict | set) else value.extend(copied)
    return changed


@dataclass
class Read:
    """A value that a trace read: ``owner[name]`` if the owner is a dict (the ``__dict__`` of a module, the globals of a
    function), else the owner's attribute ``name``. ``state`` and ``contents`` describe the value when it was read.
    ``own`` is the argument of ``state_of``."""

    owner: Any = field(repr=False)
    name: str
    value: Any
    where: str = ""
    own: AbstractSet[int] = frozenset()
    state: Any = None
    contents: Contents = field(default_factory=list)

    def now(self) -> Any:
        """The current value."""
        return value_at(self.owner, self.name)

    def has_changed(self) -> bool:
        """Whether the value or its contents have changed since they were read."""
        return bool(state_of(self.now(), self.own) != self.state)

    def change(self, value: Any, contents: Contents | None = None) -> str:
        """Describe in words the change from the value that was read to ``value``, which has the given ``contents``."""
        old = self.contents[0][1] if self.contents and self.contents[0][0] is self.value else self.value
        new = contents[0][1] if contents and contents[0][0] is value else value
        words = in_words(old), in_words(new)
        if words[0] != words[1]:
            return f"{words[0]} became {words[1]}"
        if value is not self.value:
            return f"{words[0]} became another"
        return f"{words[0]} was written to" if isinstance(value, Tensor) else f"the contents of {words[0]} changed"

    def put(self, value: Any, contents: Contents) -> None:
        """Set the attribute or item to ``value`` and restore its contents. If ``value`` is MISSING, delete it."""
        now = self.now()
        if now is not value:
            if type(self.owner) is not dict:
                bases = [base for base in type(self.owner).__mro__ if self.name in vars(base)]
                if not bases and not isinstance(self.owner, type):
                    return  # a __getattr__ or __getattribute__ computes the value, so there is nothing to set
                # the class, if the value belongs to a class
                owner = next((base for base in bases if vars(base)[self.name] is now), self.owner)
                delattr(owner, self.name) if value is MISSING else setattr(owner, self.name, value)
            elif value is MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        put_contents(contents)


def value_at(owner: Any, name: str) -> Any:
    """Return an attribute, an item of a dict or the content of a cell; MISSING if it does not exist."""
    try:
        return owner.get(name, MISSING) if type(owner) is dict else getattr(owner, name, MISSING)
    except ValueError:
        if isinstance(owner, CellType):
            return MISSING
        raise


def is_fixed(value: Any) -> bool:
    """Whether no part of the value can change in place."""
    return isinstance(value, PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(is_fixed, value)))


def in_words(value: Any) -> str:
    """Describe a value by its text or by its class. The description is the same on every rank."""
    if value is MISSING:
        return "nothing"
    plain = isinstance(value, PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_fixed, value)))
    return repr(value) if plain and len(repr(value)) <= 100 else f"a {type(value).__name__}"
