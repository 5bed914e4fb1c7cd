"""How an optimizer that looks at whole parameters learns what the other ranks hold of them."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

ShardSum = Callable[[Sequence[Tensor], Tensor], Tensor]
"""``shard_sum(parameters, values)``: each column of ``values`` [k, n], one for each of n parameters as this rank holds
them, summed over the ranks that hold the other parts of that parameter; columns of whole parameters stay. All ranks
that share a parameter call it together, with the same parameters in the same order."""


@runtime_checkable
class NeedsShardSums(Protocol):
    """An optimizer that is exact under every sharding if it is told how to sum over the parts of a parameter.

    ``parallelize`` looks for this method on what ``optimizer=`` returned, and calls it once where parameters are split.
    In one process nobody calls it, and every parameter is whole.
    """

    def sum_shards_with(self, shard_sum: ShardSum) -> None:
        """Use ``shard_sum`` in every step from now on."""
