"""The interface of optimizers that need whole parameters: they sum over the ranks that hold the parts of a
parameter."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

ShardSum = Callable[[Sequence[Tensor], Tensor], Tensor]
"""``shard_sum(parameters, values)`` returns ``values`` [k, n], summed over ranks. Each of the n columns belongs to one
of the n parameters. It is summed over the ranks that hold parts of this parameter; columns of whole parameters do not
change. All ranks that share a parameter must call it together, with the same parameters in the same order."""


@runtime_checkable
class NeedsShardSums(Protocol):
    """An optimizer that is exact under every sharding if it can sum over the ranks that hold a parameter's parts.

    ``parallelize`` looks for ``sum_shards_with`` on the optimizer that the function ``optimizer`` returned, and calls
    it once if parameters are split. In one process it is not called, and every parameter is whole.
    """

    def sum_shards_with(self, shard_sum: ShardSum) -> None:
        """Use ``shard_sum`` in every step from now on."""
