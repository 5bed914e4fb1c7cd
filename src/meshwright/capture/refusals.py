"""Refuses steps whose captured form would silently compute something other than plain PyTorch."""

import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from meshwright.errors import CaptureError

PAUSE_S = 0.2
"""Seconds for which a capture waits, to see whether another thread draws from a generator."""


def own_values(constants: Mapping[Any, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse a parameter or buffer that the step reads, but not through the traced model: it would be a constant."""
    names = {value.data_ptr(): name for name, value in state.items() if value.numel() and value.device.type != "meta"}
    for value in constants.values():
        name = names.get(value.data_ptr()) if value.numel() else None
        if name is not None:
            raise CaptureError(
                f"{name} is used by other means than the model passed to loss_fn",
                where="loss_fn",
                remedy="use only the model that loss_fn is given, and no reference to its parameters kept elsewhere",
            )


def hooks(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse hooks for gradients. A parameter's hooks are called by its gradient accumulation, which a captured step
    does not use; a module's hooks are called by autograd, which runs only while the step is captured."""
    hooked = [f"parameter {name}" for name, value in parameters.items()
              if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)]  # fmt: skip
    hooked += [f"module {path or '(model)'}" for path, module in model.named_modules()
               if module._backward_hooks or module._backward_pre_hooks]  # fmt: skip
    if hooked:
        raise CaptureError(
            "it has a hook for its gradient, which would not be called",
            where=hooked[0],
            remedy="remove the hook, and do its work in the model, in loss_fn, or in an optimizer's step_pre_hook",
        )


def changed_parameters(names: list[str]) -> None:
    """Refuse parameters that the step changes in place: a step may change a parameter only through its gradient."""
    if names:
        raise CaptureError(
            "the step changes it in place (max_norm of an embedding, or an operator such as clamp_)",
            where=f"parameter {names[0]}",
            remedy="change it after the step, under torch.no_grad(); without max_norm in an embedding",
        )


def updated(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the buffers after a step, in order, detached. A step may not add a buffer or change a buffer's shape or
    dtype."""
    for name in after:
        if name not in before:
            raise CaptureError(
                "the step makes it", where=f"buffer {name}", remedy="register it in the module's __init__"
            )
    buffers = [after.get(name, value) for name, value in before.items()]
    for (name, old), new in zip(before.items(), buffers, strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise CaptureError(
                f"the step makes it {list(new.shape)} {new.dtype}, it was {list(old.shape)} {old.dtype}",
                where=f"buffer {name}",
                remedy="keep its shape and dtype: a step is captured once",
            )
    return [value.detach() for value in buffers]


class Draws:
    """Records from which generators of Python and numpy random numbers are drawn after it is made."""

    def __init__(self) -> None:
        self._before = _states()

    def moved(self) -> tuple[str, ...]:
        """Return the names of the generators from which numbers were drawn."""
        after = _states()
        return tuple(name for name, state in self._before.items() if after[name] != state)


def _states() -> dict[str, object]:
    """The state of each generator, including the second of two normal numbers, which numpy keeps for the next draw."""
    theirs = np.random.get_state(legacy=False)
    inner = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in theirs["state"].items()}
    return {"Python's random": random.getstate(), "numpy.random": (inner, theirs["has_gauss"], theirs["gauss"])}


def other_random_numbers(traces: Sequence[Collection[str]]) -> None:
    """Refuse a step that draws from Python's or numpy's generator: its numbers would be equal in every step.

    A step draws in every trace. A thread that loads data may draw at the same time, and must be allowed to. It also
    draws when no trace runs, so its generator moves without the step.
    """
    for name in traces[0]:
        if all(name in trace for trace in traces) and not _moves_alone(name):
            raise CaptureError(
                f"the step draws from {name}, and would have the same numbers for ever",
                where="model or loss_fn",
                remedy="draw with torch.rand, randn, randint or bernoulli, or put the numbers into the batch; "
                "if another thread drew them, start it after the step is captured",
            )


def _moves_alone(name: str) -> bool:
    """Whether a generator moves within ``PAUSE_S`` while this thread does nothing."""
    draws, end_s = Draws(), time.monotonic() + PAUSE_S
    while time.monotonic() < end_s:
        time.sleep(PAUSE_S / 20)
        if name in draws.moved():
            return True
    return False


def other_operators(pair: Mapping[int, fx.Graph]) -> None:
    """Check that the traces at two batch sizes run equal operators.

    Raises:
        CaptureError: the traces run different operators. The error names the first operator that differs.
    """
    (size, smaller), (double, larger) = pair.items()
    small_nodes, large_nodes = ([node for node in graph.nodes if node.op != "output"] for graph in (smaller, larger))
    for first, second in zip(small_nodes, large_nodes, strict=False):
        if first.op != second.op or (first.op == "call_function" and first.target != second.target):
            custom = first.meta.get("custom", {})
            refusal = CaptureError(
                f"the step runs other operators at batch size {double} than at {size}: "
                f"{second.target} instead of {first.target}",
                where=f"module {custom.get('module') or '(model)'}, {custom.get('source', '')}",
                remedy="make the model's control flow independent of the batch size",
            )
            refusal.module = str(custom.get("module", ""))
            raise refusal
    if len(small_nodes) != len(large_nodes):
        raise CaptureError(
            f"the step has {len(small_nodes)} operators at batch size {size} and {len(large_nodes)} at {double}",
            where="model", remedy="make the model's control flow independent of the batch size",
        )  # fmt: skip
