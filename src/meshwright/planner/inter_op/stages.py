"""Cut a chain of layers into stages and give every stage a submesh, by an exact dynamic program.

The objective and the outer loop over the slowest stage are those of Alpa (Zheng et al., OSDI 2022, section 5.2). In
addition, devices may be of several kinds, and two bounds make the search shorter without losing the optimum.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEW_COLUMNS = 4
"""Number of table columns that are computed one by one, each for all layers at once."""
GROWTH = 1.1
"""Factor by which the limit on a stage's seconds rises until stages are possible."""


@dataclass(frozen=True)
class Submesh:
    """The devices of a stage: ``devices`` devices of one pool. A pool is a group of like devices."""

    pool: int
    devices: int


@dataclass(frozen=True, eq=False)
class StagePrices:
    """The price of every possible stage.

    ``seconds[i, j, k, c]`` is the time that layers i to j (both included) take for one micro-batch, forward and
    backward, on ``submeshes[k]`` in variant c; infinite: impossible. A variant is, for example, a logical shape of the
    submesh with a kind of recomputation. ``most_after[i, j, k, c]`` is the largest number of stages that may follow the
    stage. Memory limits this number: under 1F1B, a stage with a stages after it keeps the activations of a + 1
    micro-batches.
    """

    submeshes: tuple[Submesh, ...]
    seconds: Floats
    most_after: NDArray[np.int64]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.seconds)

    def before(self, following: int) -> Floats:
        """The least seconds of layers i to j on submesh k with ``following`` stages after them: [i, j, k]."""
        least: Floats = np.where(self.most_after >= following, self.seconds, inf).min(axis=3)
        return least


@dataclass(frozen=True)
class AssignedStage:
    """Layers ``first`` to ``last`` (both included) on submesh number ``submesh``, in variant number ``variant``. The
    numbers are indices into the arrays of ``StagePrices``."""

    first: int
    last: int
    submesh: int
    variant: int
    seconds: float


@dataclass(frozen=True)
class Assignment:
    """The stages of the fastest pipeline. ``step_s`` is its objective. ``entries`` is the number of table entries that
    the search computed, over ``tables`` tables (one for each limit on the slowest stage)."""

    stages: tuple[AssignedStage, ...]
    step_s: float
    tables: int
    entries: int


def assign_stages(
    prices: StagePrices,
    pools: Sequence[int],
    microbatches: int,
    *,
    fill: float = 1.0,
    prunes: bool = True,
    boxes: Sequence[int] = (),
    in_order: bool = False,
) -> Assignment | None:
    """The stages with the least ``fill`` x (seconds of all stages) + (``microbatches`` - ``fill``) x (slowest stage).

    The first term is the time to fill and drain the pipeline. ``fill`` is 1 under 1F1B, and less under schedules with
    smaller bubbles. The second term is the time of the steady state. All devices of all ``pools`` are used. Stages of
    any order fit into boxes if the sizes of submeshes are powers of two within a box and whole boxes beyond (Alpa,
    appendix A).

    Args:
        pools: the number of devices in each pool.
        fill: above 0, and at most ``microbatches``.
        boxes: the number of devices in each box of each pool. The stages of a pool then take its devices in order, and
            a stage lies in one box or has whole boxes. Without ``boxes``, this does not matter.
        in_order: no stage lies in an earlier pool than a stage before it.
        prunes: leave out parts of the search in which two bounds exclude an optimum. The result is the same without the
            bounds.

    Returns:
        None if no stages use all devices within the memory limits.
    """
    search = _Search(prices, tuple(pools), prunes, tuple(boxes), in_order)
    steady = microbatches - fill

    def value(stages: tuple[AssignedStage, ...]) -> float:
        return fill * _total(stages) + steady * _slowest(stages)

    best = search.any_stages() if prunes and steady > 0 else search.solve(inf)
    if best is None:
        return None
    step_s, limits = value(best), search.limits
    # Spans of limits: the first and the last limit of each, and a lower bound of its sums of seconds. The sum under a
    # limit is a lower bound for all smaller limits. No stage of the optimum takes more than step_s / microbatches.
    high = search.place(step_s / microbatches * (1 + 1e-12)) if prunes else search.place(_slowest(best)) - 1
    spans = [(search.least_limit, min(high, len(limits) - 1), 0.0)] if steady > 0 else []
    while spans:
        low, high, least = spans.pop()
        if low > high or least + steady * limits[low] >= step_s:
            continue
        middle = high if least == 0.0 else (low + high) // 2  # at first the largest limit, for a lower bound
        found = search.solve(float(limits[middle]), (step_s - steady * limits[low]) / fill)
        spans.append((middle + 1, high, least))
        if found is not None:
            spans.append((low, search.place(_slowest(found)) - 1, fill * _total(found)))
            if value(found) < step_s:
                best, step_s = found, value(found)
    return Assignment(best, step_s, search.tables, search.entries)


def _total(stages: tuple[AssignedStage, ...]) -> float:
    return sum(stage.seconds for stage in stages)


def _slowest(stages: tuple[AssignedStage, ...]) -> float:
    return max(stage.seconds for stage in stages)


class _Search:
    """The dynamic program under a limit on the seconds of a stage.

    Its tables have ``[layer, used]``: the least seconds of the layers from ``layer`` to the end, in a given number of
    stages on ``used`` devices. ``used`` counts the devices of each pool, as one flat index."""

    def __init__(
        self, prices: StagePrices, pools: tuple[int, ...], prunes: bool, boxes: tuple[int, ...], in_order: bool
    ) -> None:
        self.prices, self.pools, self.prunes = prices, pools, prunes
        self.boxes, self.in_order = boxes, in_order
        # In order, the devices of all pools are one line: how many are used says which.
        self.shape = (sum(pools) + 1,) if in_order else tuple(size + 1 for size in pools)
        self.tables = self.entries = 0
        self._before: dict[int, Floats] = {}
        self._most = int(prices.most_after.max(initial=-1))

    @cached_property
    def limits(self) -> Floats:
        """All seconds that a stage may take, rising."""
        seconds = self.prices.seconds
        return np.unique(seconds[np.isfinite(seconds)])

    def place(self, seconds: float) -> int:
        """The index of ``seconds`` in ``limits``."""
        return int(np.searchsorted(self.limits, seconds))

    @property
    def least_limit(self) -> int:
        """The index of the smallest limit for which the devices have enough device-seconds for all layers."""
        return self.place(self._floor * (1 - 1e-12)) if self.prunes else 0

    @property
    def _floor(self) -> float:
        return float(self._device_seconds[1][0] / sum(self.pools))

    def any_stages(self) -> tuple[AssignedStage, ...] | None:
        """Some stages whose slowest stage is nearly as fast as possible; None if there are no stages."""
        limit, found = max(self._floor, float(self.limits[0])) if len(self.limits) else inf, None
        while found is None and limit < inf:
            limit = limit * GROWTH if limit < self.limits[-1] else inf
            found = self.solve(limit, first=True)
        return found

    @cached_property
    def _used(self) -> NDArray[np.int64]:
        """The number of devices of all pools, by flat index."""
        used: NDArray[np.int64] = np.sum(np.indices(self.shape), axis=0).ravel()
        return used

    @cached_property
    def _device_seconds(self) -> tuple[Floats, Floats]:
        """The least device-seconds (devices x seconds) of the layers before each layer, and of all layers from this
        layer on."""
        devices = np.array([submesh.devices for submesh in self.prices.submeshes])
        return self._bounds((self._seconds(0) * devices).min(axis=2))

    @cached_property
    def _sums(self) -> Floats:
        """The least sum of seconds of the layers before each layer."""
        return self._bounds(self._seconds(0).min(axis=2))[0]

    def _bounds(self, least: Floats) -> tuple[Floats, Floats]:
        """The least sums, over all cuts into stages, of the layers before each layer and of all layers from this layer
        on. ``least[i, j]`` is a lower bound of a stage of layers i to j."""
        num = self.prices.num_layers
        ahead, behind = np.full(num + 1, inf), np.full(num + 1, inf)
        ahead[0] = behind[num] = 0.0
        for layer in range(num):
            ahead[layer + 1] = (ahead[: layer + 1] + least[: layer + 1, layer]).min()
        for layer in reversed(range(num)):
            behind[layer] = (least[layer, layer:] + behind[layer + 1 :]).min()
        return ahead, behind

    def solve(self, limit: float, most: float = inf, *, first: bool = False) -> tuple[AssignedStage, ...] | None:
        """The stages with the least sum of seconds, each of at most ``limit`` seconds; None if there are none with a
        sum of at most ``most``. ``first``: any stages, with as few stages as possible."""
        self.tables += 1
        num = self.prices.num_layers
        table = np.full((num + 1, prod(self.shape)), inf)
        table[num, 0] = 0.0
        tables = [table]
        windows = self._windows(limit)
        best, chosen = inf, -1
        for following in range(min(num, sum(self.pools), self._most + 1)):
            table = self._extended(table, following, limit, windows)
            if self.prunes and most < inf:
                table[table > (most * (1 + 1e-12) - self._sums)[:, None]] = inf
            if not np.isfinite(table).any():
                break
            tables.append(table)
            if table[0, -1] < best:
                best, chosen = float(table[0, -1]), following
                if first:
                    break
        return self._stages(tables[: chosen + 2], limit) if chosen >= 0 else None

    def _windows(self, limit: float) -> NDArray[np.bool_]:
        """[layer, used]: whether the layers from ``layer`` on, and the layers before ``layer``, can both keep the limit
        if the former use ``used`` devices (a flat index).

        Stages that each take at most ``limit`` on d devices together have at most d x ``limit`` device-seconds.
        """
        if not self.prunes or limit == inf:
            return np.ones((self.prices.num_layers + 1, len(self._used)), dtype=bool)
        ahead, behind = self._device_seconds
        room, rest = self._used * limit * (1 + 1e-12), (sum(self.pools) - self._used) * limit * (1 + 1e-12)
        kept: NDArray[np.bool_] = np.logical_and(room >= behind[:, None], rest >= ahead[:, None])
        return kept

    def _extended(self, table: Floats, following: int, limit: float, windows: NDArray[np.bool_]) -> Floats:
        """The table with one more stage in front of ``following`` stages."""
        seconds = self._seconds(following)
        result = np.full_like(table, inf)
        reached = np.asarray(np.isfinite(table).any(axis=1) | (not self.prunes))
        for number, submesh in enumerate(self.prices.submeshes):
            shifted = self._shifted(table, submesh)
            if shifted is None:
                continue
            possible = np.asarray(np.isfinite(shifted).any(axis=0))
            if self.prunes and possible.sum() <= FEW_COLUMNS:
                columns = np.flatnonzero(possible)
                self._extend_columns(result, seconds[:, :, number], shifted, columns, limit, windows)
                continue
            for layer in range(self.prices.num_layers):
                row = seconds[layer, layer:, number]
                window = np.flatnonzero(windows[layer] & possible if self.prunes else windows[layer])
                ends = np.flatnonzero((row <= limit) & reached[layer + 1 :]) if self.prunes else np.arange(len(row))
                if not len(ends) or not len(window):
                    continue
                costs = np.where(row[ends] <= limit, row[ends], inf)
                rest = shifted[layer + 1 + ends]
                several = rest[:, window] if len(window) < rest.shape[1] else rest
                self.entries += several.size
                result[layer, window] = np.minimum(result[layer, window], (several + costs[:, None]).min(axis=0))
        return result

    def _extend_columns(
        self, result: Floats, seconds: Floats, shifted: Floats, columns: NDArray[np.int64], limit: float,
        windows: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Extend a table that has entries for few numbers of used devices (``columns``): all layers at once."""
        costs = np.where((seconds <= limit) & np.tri(len(seconds), dtype=bool).T, seconds, inf)
        for column in columns:
            inside, rest = np.flatnonzero(windows[:-1, column]), shifted[1:, column]
            self.entries += int(np.count_nonzero(np.isfinite(costs[inside][:, np.isfinite(rest)])))
            least = (costs[inside] + rest).min(axis=1)
            result[inside, column] = np.minimum(result[inside, column], least)

    def _seconds(self, following: int) -> Floats:
        if following not in self._before:
            self._before[following] = self.prices.before(following)
        return self._before[following]

    def _shifted(self, table: Floats, submesh: Submesh) -> Floats | None:
        """The table of the later stages, indexed by the devices that the later stages and ``submesh`` use together.
        None if the pool of ``submesh`` is too small."""
        if submesh.devices > self.pools[submesh.pool]:
            return None
        whole = table.reshape(len(table), *self.shape)
        result = np.full_like(whole, inf)
        axis = self._place(submesh) + 1
        into = [slice(None)] * whole.ndim
        come = list(into)
        into[axis], come[axis] = slice(submesh.devices, None), slice(None, whole.shape[axis] - submesh.devices)
        result[tuple(into)] = whole[tuple(come)]
        result[:, ~self._allowed(submesh)] = inf
        return result.reshape(table.shape)

    def _allowed(self, submesh: Submesh) -> NDArray[np.bool_]:
        """For each number of used devices of each pool, whether a stage on ``submesh`` and the stages after it may use
        them: the stage begins at the first of these devices of its pool."""
        used, pool = np.indices(self.shape)[self._place(submesh)], self.pools[submesh.pool]
        allowed = np.ones(self.shape, dtype=bool)
        first = (sum(self.pools[submesh.pool :]) if self.in_order else pool) - used
        if self.in_order:
            allowed &= (first >= 0) & (first + submesh.devices <= pool)
        if self.boxes:
            box = self.boxes[submesh.pool]
            inside = first // box == (first + submesh.devices - 1) // box
            allowed &= inside | ((first % box == 0) & (submesh.devices % box == 0))
        return allowed

    def _place(self, submesh: Submesh) -> int:
        """The position of a submesh's pool in ``shape``."""
        return 0 if self.in_order else submesh.pool

    def _stages(self, tables: list[Floats], limit: float) -> tuple[AssignedStage, ...]:
        """Read the stages from the tables, from the first stage to the last."""
        stages = []
        layer, used = 0, tables[0].shape[1] - 1
        for following in reversed(range(len(tables) - 1)):
            stage, used = self._stage(tables[following], following, layer, used, limit)
            stages.append(stage)
            layer = stage.last + 1
        return tuple(stages)

    def _stage(self, later: Floats, following: int, layer: int, used: int, limit: float) -> tuple[AssignedStage, int]:
        """The stage that begins at ``layer`` in the solution with the least sum, and the flat index of the devices that
        the later stages use."""
        seconds = self._seconds(following)
        counts = np.unravel_index(used, self.shape)
        allowed = [self._allowed(submesh) for submesh in self.prices.submeshes]
        best: tuple[float, int, int, int] = (inf, 0, 0, 0)
        for (number, submesh), last in itertools.product(
            enumerate(self.prices.submeshes), range(layer, self.prices.num_layers)
        ):
            rest = list(counts)
            if not allowed[number].flat[used]:
                continue
            place = self._place(submesh)
            if rest[place] < submesh.devices or seconds[layer, last, number] > limit:
                continue
            rest[place] -= submesh.devices
            after = int(np.ravel_multi_index(rest, self.shape))
            best = min(best, (float(seconds[layer, last, number] + later[last + 1, after]), last, number, after))
        _, last, number, after = best
        fits = self.prices.most_after[layer, last, number] >= following
        variant = int(np.where(fits, self.prices.seconds[layer, last, number], inf).argmin())
        return AssignedStage(layer, last, number, variant, float(seconds[layer, last, number])), after
