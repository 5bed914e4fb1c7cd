"""Scale a learning rate from the batch size for which it was tuned to another batch size."""

import math
from typing import Literal

Scaling = Literal["none", "linear", "sqrt"]


def scaled_by(rule: Scaling, batch_size: float, base_batch_size: float) -> float:
    """The factor for a learning rate that was tuned for ``base_batch_size`` samples and is used for ``batch_size``.

    ``linear`` gives the ratio k of the two batch sizes (P. Goyal et al., "Accurate, Large Minibatch SGD: Training
    ImageNet in 1 Hour", 2017, arXiv:1706.02677, section 2.1). ``sqrt`` gives the square root of k, which keeps the
    variance of a step (A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
    arXiv:1404.5997, section 5; Y. You et al., 2020, arXiv:1904.00962, for LAMB). ``none`` gives 1.
    """
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
