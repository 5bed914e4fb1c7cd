"""Random numbers with explicit keys: every element has the same number under every layout, and under recomputation."""

from collections.abc import Callable
from typing import Any

import torch

import meshwright.ops.philox  # noqa: F401 - defines the operators below
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, arguments, make_rule, narrowed
from meshwright.ops.patterns import letters, operand

aten = torch.ops.aten
ours = torch.ops.meshwright


def random_rule(call: Call) -> Rule:
    """``b s -> b s``, or ``-> b s``: each shard draws its own part."""
    names = operand(letters(call.outputs[0].dim()))
    return make_rule(call, f"{', '.join([names] * len(call.tensors))} -> {', '.join([names] * len(call.outputs))}")


def permutation_rule(call: Call) -> Rule:
    """A permutation cannot be split: every rank draws the whole permutation."""
    return make_rule(call, " -> !n")


def _keyed(kernel: Any, *defaults: float) -> Callable[[Local], Any]:
    def emit(local: Local) -> Any:
        parameters = [*local.args[1:], *defaults[len(local.args) - 1 :]][: len(defaults)]
        return local.call(kernel, local.args[0], *map(float, parameters), *local.draw())

    return emit


def _drawn(kernel: Any) -> Callable[[Local], Any]:
    """Return a local rewrite that draws from the standard distribution (0 to 1, or mean 0 and deviation 1)."""
    return lambda local: local.call(kernel, _empty(local), 0.0, 1.0, *local.draw())


def _empty(local: Local, **options: Any) -> Value:
    """Allocate this rank's part of the output."""
    if "_like" in str(local.target):
        return local.call(aten.empty_like.default, local.args[0], **{"dtype": local.dtype(), **options})
    return local.call(aten.empty.memory_format, local.shape(), **{**local.kwargs, **options})


def _uniform(local: Local, like: Value) -> Value:
    """Draw from [0, 1) in float32 or wider: in float16 one number in 2048 would be 0, in bfloat16 one in 256."""
    wide = torch.promote_types(local.dtype(), torch.float32)
    return local.call(
        ours.uniform.default, local.call(aten.empty_like.default, like, dtype=wide), 0.0, 1.0, *local.draw()
    )


def bernoulli_tensor_local(local: Local) -> Any:
    """Draw Bernoulli numbers whose probabilities are a tensor."""
    probabilities = local.args[1] if local.target is aten.bernoulli.Tensor else local.args[0]
    draws = _uniform(local, probabilities)
    return local.call(aten._to_copy.default, local.call(aten.lt.Tensor, draws, probabilities), dtype=local.dtype())


def exponential_local(local: Local) -> Any:
    """Draw -log(1 - u) / rate for a uniform u. A result of 0 is raised above 0, because callers take its logarithm."""
    logarithm = local.call(aten.log1p.default, local.call(aten.neg.default, _uniform(local, local.args[0])))
    rate = local.args[1] if len(local.args) > 1 else 1.0
    least = torch.finfo(local.dtype()).eps / 2
    draws = local.call(
        aten.div.Tensor, local.call(aten.clamp_min.default, local.call(aten.neg.default, logarithm), least), rate
    )
    return narrowed(local, draws)


def integers_local(local: Local) -> Any:
    """Draw integers from ``low`` (0 by default) up to, but not including, ``high``."""
    given = arguments(local)
    low, high = given.get("low", 0), given["high"]
    empty = _empty(local, dtype=torch.float64)
    draws = local.call(ours.uniform.default, empty, float(low), float(high), *local.draw())
    return local.call(aten._to_copy.default, local.call(aten.floor.default, draws), dtype=local.dtype())


def permutation_local(local: Local) -> Any:
    """Draw a permutation: the order that sorts random numbers."""
    empty = _empty(local, dtype=torch.float64)
    order = local.call(aten.argsort.default, local.call(ours.uniform.default, empty, 0.0, 1.0, *local.draw()))
    return local.call(aten._to_copy.default, order, dtype=local.dtype())


def dropout_local(local: Local) -> Any:
    """Run ``aten.native_dropout`` on one rank: return x · mask / (1 - p) and the mask."""
    source, probability, train = local.args
    if train is False or probability == 0.0:
        mask = local.call(aten.ones_like.default, source, dtype=torch.bool)
        return local.call(aten.clone.default, source), mask
    draws = local.call(ours.bernoulli.default, source, 1.0 - probability, *local.draw())
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    scaled = local.call(aten.mul.Tensor, local.call(aten.mul.Tensor, source, draws), scale)
    return scaled, local.call(aten._to_copy.default, draws, dtype=torch.bool)


_BERNOULLI = OperatorRule(random_rule, bernoulli_tensor_local)
_UNIFORM = OperatorRule(random_rule, _drawn(ours.uniform.default))
_NORMAL = OperatorRule(random_rule, _drawn(ours.normal.default))
_INTEGERS = OperatorRule(random_rule, integers_local)

RULES = {
    **dict.fromkeys([aten.bernoulli.default, aten.bernoulli.Tensor], _BERNOULLI),
    aten.bernoulli.p: OperatorRule(random_rule, _keyed(ours.bernoulli.default, 0.5)),
    aten.exponential.default: OperatorRule(random_rule, exponential_local),
    aten.native_dropout.default: OperatorRule(random_rule, dropout_local),
    aten.normal_functional.default: OperatorRule(random_rule, _keyed(ours.normal.default, 0.0, 1.0)),
    aten.uniform.default: OperatorRule(random_rule, _keyed(ours.uniform.default, 0.0, 1.0)),
    **dict.fromkeys([aten.rand.default, aten.rand_like.default], _UNIFORM),
    **dict.fromkeys([aten.randn.default, aten.randn_like.default], _NORMAL),
    **dict.fromkeys([aten.randint.default, aten.randint.low], _INTEGERS),
    **dict.fromkeys([aten.randint_like.default, aten.randint_like.low_dtype], _INTEGERS),
    aten.randperm.default: OperatorRule(permutation_rule, permutation_local),
}
