"""The optimizer's step: what it keeps for every parameter, what it moves, and in how many kernels."""

import msgspec


class OptimizerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of every element of a parameter: ``states`` numbers are kept, and ``moved`` are read or written in a step, by
    ``kernels`` passes."""

    states: int
    moved: int
    kernels: int


SGD = OptimizerCost(0, 3, 1)
"""p -= lr g."""
MOMENTUM = OptimizerCost(1, 8, 3)
"""v = a v + g, in two passes; p -= lr v."""
ADAMW = OptimizerCost(2, 21, 8)
"""Decay, both moments, the root with its correction, and the update (Loshchilov, Hutter 2019; as torch.optim runs it,
a parameter at a time)."""
ADAM = OptimizerCost(2, 19, 7)
LARS = OptimizerCost(1, 13, 6)
"""Both norms, the decayed gradient, its scaling, v = a v + s in two passes counted as one, w -= v; the sums over ranks
are not counted."""
LAMB = OptimizerCost(2, 24, 11)
"""As Adam, with both norms and the scaling of the update; the sums over ranks are not counted."""
