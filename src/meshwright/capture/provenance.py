"""The origin of a traced node: module path, source line, and the forward operator of a backward operator."""

import bisect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.torch_private import sequence_number

_PACKAGE = PurePath(__file__).parent.parent
_NOT_USERS = (str(PurePath(torch.__file__).parent), str(_PACKAGE / "capture"), str(_PACKAGE / "ops"))


def user_line(filename: str, line: int | None) -> str | None:
    """Return a line as ``model.py:12``, with up to two folders before it; None if the file is PyTorch's or ours."""
    name = _user_file(filename)
    return None if name is None else f"{name}:{line}"


@lru_cache(maxsize=1024)
def _user_file(filename: str) -> str | None:
    return None if filename.startswith(_NOT_USERS) else "/".join(PurePath(filename).parts[-3:])


_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class Provenance:
    """Tracks the origin of the running code, which every recorded node stores."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules(remove_duplicate=True)}
        self._stack: list[str] = [""]
        self._starts: list[int] = [0]
        self._owners: list[str] = [""]
        self.source = ""
        self._backward: dict[str, Any] = {}

    def here(self) -> dict[str, Any]:
        """Return the running module, source line and sequence number. In backward, return the module and sequence
        number of the forward operator."""
        if self._backward:
            return self._backward
        number = sequence_number() - 1
        return {"module": self.module, "source": self.source, "sequence": number}

    @property
    def module(self) -> str:
        """The path of the running module."""
        return self._stack[-1]

    def _move(self) -> None:
        self._starts.append(sequence_number())
        self._owners.append(self.module)

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._paths.get(id(module), self.module))
        self._move()

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._move()

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Count what runs in this block as a part of a module that is not called itself."""
        self._enter(module, None)
        try:
            yield
        finally:
            self._leave(module, None, None)

    def see(self) -> None:
        """Record the user's source line that called the running torch function."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            line = user_line(frame.f_code.co_filename, frame.f_lineno)
            if line is not None:
                self.source = line
                break
            frame = frame.f_back

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Track the modules of a forward pass."""
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        self._move()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def follow_backward(self, loss: torch.Tensor) -> None:
        """Make every autograd node announce, before it runs, which forward operator it belongs to."""
        pending, seen = [loss.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            owner = self._owners[max(0, bisect.bisect_right(self._starts, number) - 1)]
            node.register_prehook(self._announce(owner, number))
            pending.extend(child for child, _ in node.next_functions)

    def _announce(self, owner: str, number: int) -> Any:
        def hook(gradients: Any) -> None:
            self._backward = {"module": owner, "sequence": number, "backward": True}

        return hook


def repeated(modules: list[str]) -> dict[str, str]:
    """Map repeated module paths to their pattern: ``layers.3.mlp`` to ``layers.*.mlp`` if two or more exist."""
    patterns: dict[str, set[str]] = {}
    for module in set(modules):
        pattern = _INDEX.sub("*", module)
        if pattern != module:
            patterns.setdefault(pattern, set()).add(module)
    return {module: pattern for pattern, members in patterns.items() if len(members) > 1 for module in members}
