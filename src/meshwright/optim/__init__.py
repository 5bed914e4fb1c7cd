"""Optimizers for large batches, and for gradients that are sent in few bits."""

from meshwright.optim.frozen_variance import OneBitAdam, ZeroOneAdam
from meshwright.optim.large_batch import LAMB, LARC, LARS
from meshwright.optim.masters import MasterWeights
from meshwright.optim.whole import NeedsShardSums, ShardSum

__all__ = ["LAMB", "LARC", "LARS", "MasterWeights", "NeedsShardSums", "OneBitAdam", "ShardSum", "ZeroOneAdam"]
