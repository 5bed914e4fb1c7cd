"""The optimizer's step: the state that it keeps for every parameter, the memory it moves, and its kernels."""

import msgspec


class OptimizerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For every element of a parameter, an optimizer keeps ``states`` numbers, and reads or writes ``moved`` numbers in
    a step, in ``kernels`` passes. ``divides``: it updates parts of a tensor as it updates whole tensors, so that ranks
    may divide the update to save time."""

    states: int
    moved: int
    kernels: int
    divides: bool = True


SGD = OptimizerCost(0, 3, 1)
"""p -= lr g."""
MOMENTUM = OptimizerCost(1, 8, 3)
"""v = a v + g, in two passes; p -= lr v."""
ADAMW = OptimizerCost(2, 21, 8)
"""Passes: decay, both moments, the corrected root, update (Loshchilov, Hutter 2019), as in torch.optim."""
ADAM = OptimizerCost(2, 19, 7)
LARS = OptimizerCost(1, 13, 6)
"""Passes: both norms, decayed gradient, its scaling, v = a v + s (counted as one), w -= v. Sums over ranks are left
out."""
LAMB = OptimizerCost(2, 24, 11)
"""Passes: those of Adam, both norms and the scaling of the update. Sums over ranks are left out."""
