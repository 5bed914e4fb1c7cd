"""The optimizer's step: the state that it keeps for every parameter, the memory it moves, and its kernels."""

import msgspec


class OptimizerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of an optimizer per element of a parameter. It keeps ``states`` numbers, and reads or writes ``moved``
    numbers in a step, in ``kernels`` passes. ``fused_moved``: the numbers that PyTorch's fused kernel reads or writes,
    which trainers run on GPUs; 0 if there is none. ``divides``: its update of a part of a tensor equals that part of
    the whole tensor's update, so ranks may divide the update."""

    states: int
    moved: int
    kernels: int
    divides: bool = True
    fused_moved: int = 0

    def passes(self, *, on_cpu: bool) -> tuple[float, int]:
        """The numbers that each pass over the parameters moves per element, and the number of passes."""
        return (self.fused_moved, 1) if self.fused_moved and not on_cpu else (self.moved / self.kernels, self.kernels)


SGD = OptimizerCost(0, 3, 1, fused_moved=3)
"""p -= lr g."""
MOMENTUM = OptimizerCost(1, 8, 3, fused_moved=5)
"""v = a v + g, in two passes; p -= lr v."""
RMSPROP = OptimizerCost(1, 8, 3)
"""As many passes as momentum; no fused kernel on GPUs."""
ADAMW = OptimizerCost(2, 21, 8, fused_moved=7)
"""Passes: weight decay, both moments, the corrected root, update (Loshchilov, Hutter 2019), as in torch.optim. The
fused kernel reads and writes the parameter and both moments, and reads the gradient."""
ADAM = OptimizerCost(2, 19, 7, fused_moved=7)
LARS = OptimizerCost(1, 13, 6)
"""Passes: both norms, decayed gradient, its scaling, v = a v + s (counted as one), w -= v. Sums over ranks are left
out."""
LAMB = OptimizerCost(2, 24, 11)
"""Passes: the passes of Adam, both norms, and the scaling of the update. Sums over ranks are left out."""
