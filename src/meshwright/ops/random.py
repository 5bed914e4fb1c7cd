"""Random numbers with explicit keys: replicas and recomputation draw the same, shards draw differently."""

from collections.abc import Callable
from typing import Any

import torch

import meshwright.ops.library  # noqa: F401 - defines the operators below
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Value, letters, make_rule, narrowed

aten = torch.ops.aten
ours = torch.ops.meshwright


def random_rule(call: Call) -> Rule:
    """``b s -> b s``: each shard draws its own part."""
    names = " ".join(letters(call.outputs[0].dim())) or "."
    return make_rule(call, f"{', '.join([names] * len(call.tensors))} -> {', '.join([names] * len(call.outputs))}")


def creation_rule(call: Call) -> Rule:
    """``-> b s``."""
    return make_rule(call, f" -> {' '.join(letters(call.outputs[0].dim())) or '.'}")


def permutation_rule(call: Call) -> Rule:
    """A permutation is drawn as a whole."""
    return make_rule(call, " -> !n")


def _keyed(kernel: Any, *defaults: float) -> Callable[[Local], Any]:
    def emit(local: Local) -> Any:
        parameters = [*local.args[1:], *defaults[len(local.args) - 1 :]][: len(defaults)]
        return local.call(kernel, local.args[0], *map(float, parameters), *local.key())

    return emit


def _created(kernel: Any) -> Callable[[Local], Any]:
    def emit(local: Local) -> Any:
        empty = local.call(aten.empty.memory_format, local.shape(), **local.kwargs)
        return local.call(kernel, empty, 0.0, 1.0, *local.key())

    return emit


def _uniform(local: Local, like: Value) -> Value:
    """Numbers in [0, 1) in float32 at least: one in 2048 of those in float16 is 0, one in 256 of those in bfloat16."""
    wide = torch.promote_types(local.dtype(), torch.float32)
    return local.call(
        ours.uniform.default, local.call(aten.empty_like.default, like, dtype=wide), 0.0, 1.0, *local.key()
    )


def bernoulli_tensor_local(local: Local) -> Any:
    """Bernoulli whose probabilities are a tensor, the last one."""
    probabilities = local.args[1] if local.target is aten.bernoulli.Tensor else local.args[0]
    draws = _uniform(local, probabilities)
    return local.call(aten._to_copy.default, local.call(aten.lt.Tensor, draws, probabilities), dtype=local.dtype())


def exponential_local(local: Local) -> Any:
    """-log(1 - u) / rate, and never 0: that is where u is 0, and others take its logarithm."""
    logarithm = local.call(aten.log1p.default, local.call(aten.neg.default, _uniform(local, local.args[0])))
    rate = local.args[1] if len(local.args) > 1 else 1.0
    least = torch.finfo(local.dtype()).eps / 2
    draws = local.call(
        aten.div.Tensor, local.call(aten.clamp_min.default, local.call(aten.neg.default, logarithm), least), rate
    )
    return narrowed(local, draws)


def _integers(local: Local, empty: Value, low: int, high: int) -> Any:
    draws = local.call(ours.uniform.default, empty, float(low), float(high), *local.key())
    return local.call(aten._to_copy.default, local.call(aten.floor.default, draws), dtype=local.dtype())


def randint_local(local: Local) -> Any:
    low, high = (0, local.args[0]) if local.target is aten.randint.default else local.args[:2]
    options = {**local.kwargs, "dtype": torch.float64}
    return _integers(local, local.call(aten.empty.memory_format, local.shape(), **options), low, high)


def randint_like_local(local: Local) -> Any:
    low, high = (0, local.args[1]) if local.target is aten.randint_like.default else local.args[1:3]
    return _integers(local, local.call(aten.empty_like.default, local.args[0], dtype=torch.float64), low, high)


def permutation_local(local: Local) -> Any:
    options = {**local.kwargs, "dtype": torch.float64}
    empty = local.call(aten.empty.memory_format, local.shape(), **options)
    order = local.call(aten.argsort.default, local.call(ours.uniform.default, empty, 0.0, 1.0, *local.key()))
    return local.call(aten._to_copy.default, order, dtype=local.dtype())


def dropout_local(local: Local) -> Any:
    """native_dropout: (x · mask / (1 - p), mask)."""
    source, probability, train = local.args
    if train is False or probability == 0.0:
        mask = local.call(aten.ones_like.default, source, dtype=torch.bool)
        return local.call(aten.clone.default, source), mask
    draws = local.call(ours.bernoulli.default, source, 1.0 - probability, *local.key())
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    scaled = local.call(aten.mul.Tensor, local.call(aten.mul.Tensor, source, draws), scale)
    return scaled, local.call(aten._to_copy.default, draws, dtype=torch.bool)


RULES = {
    aten.bernoulli.default: OperatorRule(random_rule, bernoulli_tensor_local),
    aten.bernoulli.p: OperatorRule(random_rule, _keyed(ours.bernoulli.default, 0.5)),
    aten.bernoulli.Tensor: OperatorRule(random_rule, bernoulli_tensor_local),
    aten.exponential.default: OperatorRule(random_rule, exponential_local),
    aten.native_dropout.default: OperatorRule(random_rule, dropout_local),
    aten.normal_functional.default: OperatorRule(random_rule, _keyed(ours.normal.default, 0.0, 1.0)),
    aten.rand_like.default: OperatorRule(random_rule, lambda local: _like(local, ours.uniform.default)),
    aten.randint_like.default: OperatorRule(random_rule, randint_like_local),
    aten.randint_like.low_dtype: OperatorRule(random_rule, randint_like_local),
    aten.randn_like.default: OperatorRule(random_rule, lambda local: _like(local, ours.normal.default)),
    aten.uniform.default: OperatorRule(random_rule, _keyed(ours.uniform.default, 0.0, 1.0)),
    aten.rand.default: OperatorRule(creation_rule, _created(ours.uniform.default)),
    aten.randint.default: OperatorRule(creation_rule, randint_local),
    aten.randint.low: OperatorRule(creation_rule, randint_local),
    aten.randn.default: OperatorRule(creation_rule, _created(ours.normal.default)),
    aten.randperm.default: OperatorRule(permutation_rule, permutation_local),
}


def _like(local: Local, kernel: Any) -> Any:
    empty = local.call(aten.empty_like.default, local.args[0], dtype=local.dtype())
    return local.call(kernel, empty, 0.0, 1.0, *local.key())
