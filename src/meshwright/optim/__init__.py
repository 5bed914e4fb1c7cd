"""Optimizers for large batches."""

from meshwright.optim.large_batch import LAMB, LARC, LARS
from meshwright.optim.whole import NeedsShardSums, ShardSum

__all__ = ["LAMB", "LARC", "LARS", "NeedsShardSums", "ShardSum"]
