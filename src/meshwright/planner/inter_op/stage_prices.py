"""The prices of all possible stages of a chain of layers, and the stages that are chosen from them."""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Submesh:
    """The devices of a stage. ``counts`` has the number of devices of each pool; pools at the end may be left out. A
    pool is a group of equal devices. A stage may join devices of several pools."""

    counts: tuple[int, ...]

    @property
    def devices(self) -> int:
        """The number of devices of all pools."""
        return sum(self.counts)

    @property
    def pool(self) -> int:
        """The first pool with devices of the stage."""
        return next(pool for pool, count in enumerate(self.counts) if count)

    @property
    def joins(self) -> bool:
        """Whether the stage joins devices of several pools."""
        return sum(count > 0 for count in self.counts) > 1

    @classmethod
    def of(cls, pool: int, devices: int) -> "Submesh":
        """Devices of one pool."""
        return cls((0,) * pool + (devices,))


@dataclass(frozen=True, eq=False)
class StagePrices:
    """The prices of all possible stages.

    ``seconds[i, j, k, c]`` is the time that layers i to j (both included) take for one micro-batch, forward and
    backward, on ``submeshes[k]`` in variant c; infinite: impossible. A variant is, for example, a logical shape of the
    submesh with a kind of recomputation. ``most_after[i, j, k, c]`` is the largest number of stages that may follow the
    stage. Memory limits this number: under 1F1B, a stage with a stages after it keeps the activations of a + 1
    micro-batches. ``once[i, j, k, c]`` is the time of the stage's work once per step, after its last micro-batch, such
    as the update of parameters. None: no such work.
    """

    submeshes: tuple[Submesh, ...]
    seconds: Floats
    most_after: NDArray[np.int64]
    once: Floats | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.seconds)

    def before(self, following: int) -> Floats:
        """The smallest seconds of layers i to j on submesh k, if ``following`` stages come after them: [i, j, k]."""
        least: Floats = np.where(self.most_after >= following, self.seconds, inf).min(axis=3)
        return least


@dataclass(frozen=True)
class AssignedStage:
    """Layers ``first`` to ``last`` (both included) on submesh number ``submesh``, in variant number ``variant``. These
    numbers are indices into the arrays of ``StagePrices``."""

    first: int
    last: int
    submesh: int
    variant: int
    seconds: float


@dataclass(frozen=True)
class Assignment:
    """The stages of the fastest pipeline. ``step_s`` is its objective. ``entries`` is the number of table entries that
    the search computed, over ``tables`` tables (one for each limit on the busiest stage)."""

    stages: tuple[AssignedStage, ...]
    step_s: float
    tables: int
    entries: int
