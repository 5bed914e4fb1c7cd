"""The operators of opaque regions. The graph knows the inputs and results of such a module, and none of its operators.

Backward runs the region's forward again, and then PyTorch's autograd inside of it. So both operators are functions of
their inputs: a plan may recompute them, run them for several micro-batches at a time, or in any stage.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CaptureError
from meshwright.ir.opaque import OpaqueCall, read_call
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, make_rule
from meshwright.ops.library import KEY, define

ours = torch.ops.meshwright


def results_of(call: OpaqueCall, device: torch.device | str) -> list[Tensor]:
    """Empty tensors like the results of a call."""
    return [torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=device) for each in call.results]


def _device_of(tensors: list[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def shapes(tensors: list[Tensor], text: str, *_: Any) -> list[Tensor]:
    """The results of forward on fake tensors."""
    return results_of(read_call(text), _device_of(tensors))


def gradient_shapes(tensors: list[Tensor], grads: list[Tensor], text: str, *_: Any) -> list[Tensor]:
    """The results of backward on fake tensors: gradients of the inputs that need one."""
    return [torch.empty_like(tensors[index], memory_format=torch.contiguous_format) for index in read_call(text).needs]


def _not_here(*arguments: Any) -> list[Tensor]:
    text = next(each for each in arguments if isinstance(each, str))
    raise CaptureError(
        "only the process that captured the step has its module, and this is another process",
        where=f"opaque region {read_call(text).region}", remedy="run the step by the trainer that captured it",
    )  # fmt: skip


define(f"opaque(Tensor[] tensors, str call, {KEY}) -> Tensor[]", _not_here, shapes)
define(f"opaque_backward(Tensor[] tensors, Tensor[] grads, str call, {KEY}) -> Tensor[]", _not_here, gradient_shapes)
FORWARD, BACKWARD = ours.opaque.default, ours.opaque_backward.default


class _OpaqueFunction(torch.autograd.Function):
    """A region as one forward and one backward operator."""

    @staticmethod
    def forward(context: Any, call: OpaqueCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.call = call
        context.save_for_backward(*tensors)
        results = ours.opaque(list(tensors), call.text, 0, 0)
        context.mark_non_differentiable(*(value for at, value in enumerate(results) if at not in call.given))
        return tuple(results)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, tensors = context.call, context.saved_tensors
        given = [grads[index] for index in call.given]
        input_gradients = ours.opaque_backward(list(tensors), given, call.text, 0, 0)
        by_input = dict(zip(call.needs, input_gradients, strict=True))
        return None, *(by_input.get(index) for index in range(len(tensors)))


def run(call: OpaqueCall, tensors: list[Tensor]) -> list[Tensor]:
    """Run a region as one operator; differentiable."""
    if call.needs:
        return list(_OpaqueFunction.apply(call, *tensors))
    return list(ours.opaque(tensors, call.text, 0, 0))


def _text_of(call: "Call | Local") -> str:
    return str(call.args[1 if call.target is FORWARD else 2])


def opaque_rule(call: Call) -> Rule | Unsplit:
    """``(b 4) 8, 8 3 -> (b 4) 3``: only the batch is split, and no other dim. Backward is linear in its gradients."""
    given = read_call(_text_of(call))
    if not given.rows:
        return Unsplit(given.reason)

    def operand(shape: torch.Size | tuple[int, ...], rows: int) -> str:
        sizes = [str(int(size)) for size in shape]
        if rows:
            sizes[given.batch_dim] = f"(b {rows})" if rows > 1 else "b"
        return " ".join(sizes) or "."

    count = len(given.rows)
    inputs = [operand(value.shape, rows) for value, rows in zip(call.tensors[:count], given.rows, strict=True)]
    if call.target is FORWARD:
        outputs = [operand(each.shape, each.rows) for each in given.results]
        return make_rule(call, f"{', '.join(inputs)} -> {', '.join(outputs)}")
    grads = [f"^{operand(given.results[at].shape, given.results[at].rows)}" for at in given.given]
    return make_rule(call, f"{', '.join([*inputs, *grads])} -> {', '.join(inputs[index] for index in given.needs)}")


def opaque_local(local: Local) -> Any:
    """Run the region on this rank's samples. A region that draws random numbers draws the same in backward."""
    *tensors, text, _, _ = local.args
    given = read_call(text)
    part = given.of_part(local.length("b")) if given.rows else given
    key: tuple[Any, int] = local.key(given.name) if given.random else (0, 0)
    return local.call(local.target, *tensors, part.text, *key)


RULES = {target: OperatorRule(opaque_rule, opaque_local, random=True) for target in (FORWARD, BACKWARD)}
"""``random`` keeps regions out of the prologue, because what they compute is not known."""
