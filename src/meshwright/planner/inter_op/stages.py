"""Cut a chain of layers into stages and give every stage a submesh, by an exact dynamic program.

The objective, and the outer loop over the slowest stage, are the same as in Alpa (Zheng et al., OSDI 2022, section
5.2). In addition, devices may be of several kinds, and two bounds shorten the search without losing the optimum.
"""

from collections.abc import Sequence
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.inter_op.stage_prices import AssignedStage, Assignment, Floats, StagePrices, Submesh

FEW_COLUMNS = 4
"""Up to this number of table columns, columns are computed separately, each for all layers at once."""
GROWTH = 1.1
"""Factor by which the limit on a stage's seconds rises until stages are possible."""


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
    """Find the stages with the smallest value of ``fill`` x (seconds of all stages) + (busy seconds of the busiest
    stage).

    The first term is the time to fill and drain the pipeline. ``fill`` is 1 under 1F1B, and less under schedules with
    smaller bubbles. The second term is the time of the steady state: a stage is busy for (``microbatches`` - ``fill``)
    x (its seconds) + (its seconds once a step). All devices of all ``pools`` are used. Stages of any order fit into
    boxes if the sizes of submeshes are powers of two within a box and whole boxes beyond (Alpa, appendix A).

    Args:
        pools: the number of devices in each pool.
        fill: above 0, and at most ``microbatches``.
        boxes: the number of devices in each box of each pool. The stages of a pool then take its devices in order, and
            a stage is inside one box or has whole boxes. No stage joins pools. Without ``boxes``, the positions of
            stages in boxes are ignored.
        in_order: a stage never lies in an earlier pool than the stage before it, and no stage joins pools.
        prunes: use two bounds to skip parts of the search that cannot contain the optimum. The result is the same
            without the bounds.

    Returns:
        None if no stages use all devices within the memory limits.
    """
    search = _Search(prices, tuple(pools), microbatches - fill, prunes, tuple(boxes), in_order)

    def value(stages: tuple[AssignedStage, ...]) -> float:
        return fill * _total(stages) + search.busiest(stages)

    waits = bool(search.limits.any())  # otherwise only the sum counts
    best = search.any_stages() if prunes and waits else search.solve(inf)
    if best is None:
        return None
    step_s, limits = value(best), search.limits
    # Ranges of limits: the first and the last limit of each range, and a lower bound on the sum of seconds under these
    # limits. The sum under a limit is a lower bound for all smaller limits. No stage of the optimum takes more than
    # step_s for all its micro-batches and its work once per step. This limits its busy time.
    share = fill / microbatches
    most_s = (1 - share) * step_s + share * search.most_once_s
    high = search.place(most_s * (1 + 1e-12)) if prunes else search.place(search.busiest(best)) - 1
    spans = [(search.least_limit, min(high, len(limits) - 1), 0.0)] if waits else []
    while spans:
        low, high, least = spans.pop()
        if low > high or least + limits[low] >= step_s:
            continue
        middle = high if least == 0.0 else (low + high) // 2  # first the largest limit, for a lower bound
        assignment = search.solve(float(limits[middle]), (step_s - float(limits[low])) / fill)
        spans.append((middle + 1, high, least))
        if assignment is not None:
            spans.append((low, search.place(search.busiest(assignment)) - 1, fill * _total(assignment)))
            if value(assignment) < step_s:
                best, step_s = assignment, value(assignment)
    return Assignment(best, step_s, search.tables, search.entries)


def _total(stages: tuple[AssignedStage, ...]) -> float:
    return sum(stage.seconds for stage in stages)


class _Search:
    """The dynamic program under a limit on the busy time of a stage: ``steady`` x its seconds, plus the seconds of its
    work once per step.

    Its tables are indexed by ``[layer, used]``. An entry is the smallest time, in seconds, of all layers from ``layer``
    on, in a given number of stages on ``used`` devices. ``used`` is a flat index that counts the devices of each
    pool."""

    def __init__(
        self, prices: StagePrices, pools: tuple[int, ...], steady: float, prunes: bool, boxes: tuple[int, ...],
        in_order: bool,
    ) -> None:  # fmt: skip
        self.prices, self.pools, self.prunes = prices, pools, prunes
        self.boxes, self.in_order = boxes, in_order
        possible = np.isfinite(prices.seconds)
        once = np.zeros_like(prices.seconds) if prices.once is None else prices.once
        self.busy: Floats = np.where(possible, steady * np.where(possible, prices.seconds, 0.0) + once, inf)
        self.most_once_s = float(np.max(once[possible], initial=0.0))
        # If stages are in order, the devices of all pools form one line, and their number determines which devices are
        # used.
        self.shape = (sum(pools) + 1,) if in_order else tuple(size + 1 for size in pools)
        self.tables = self.entries = 0
        self._before: dict[int, Floats] = {}
        self._limit = inf
        self._most = int(prices.most_after.max(initial=-1))
        # Under numbers of following stages with equal places, the same stages are possible.
        numbers = np.unique(prices.most_after)
        self._places: list[int] = np.searchsorted(numbers, np.arange(prices.num_layers + 1)).tolist()
        self._late = np.tri(prices.num_layers, k=-1, dtype=bool)[:, :, None]  # the stage would end before it begins
        # With one submesh, the number of stages determines the number of used devices.
        self._alike = len(prices.submeshes) == len(pools) == 1 and not boxes and not in_order

    @cached_property
    def limits(self) -> Floats:
        """All possible busy times of a stage, in seconds, in rising order."""
        return np.unique(self.busy[np.isfinite(self.busy)])

    def busiest(self, stages: tuple[AssignedStage, ...]) -> float:
        """The busy time, in seconds, of the busiest stage."""
        return max(float(self.busy[stage.first, stage.last, stage.submesh, stage.variant]) for stage in stages)

    def place(self, seconds: float) -> int:
        """The index of ``seconds`` in ``limits``."""
        return int(np.searchsorted(self.limits, seconds))

    @property
    def least_limit(self) -> int:
        """The index of the smallest limit under which the devices provide enough device-seconds for all layers."""
        return self.place(self._floor * (1 - 1e-12)) if self.prunes else 0

    @property
    def _floor(self) -> float:
        return float(self._device_seconds[1][0] / sum(self.pools))

    def any_stages(self) -> tuple[AssignedStage, ...] | None:
        """Stages whose busiest stage has nearly the smallest possible busy time; None if no stages exist. The limit on
        the busiest stage rises until stages exist. If they exist under a limit, they exist under each larger limit, so
        the limit rises faster and faster, and is bisected then, unless tables take long under large limits."""
        rising = [max(self._floor, float(self.limits[self.limits > 0][0]))]
        while rising[-1] < inf:
            rising.append(rising[-1] * GROWTH if rising[-1] < self.limits[-1] else inf)
        low = high = 1
        while (assignment := self.solve(rising[high], first=True)) is None and rising[high] < inf:
            low = high + 1
            high = min(2 * high, len(rising) - 1) if self._alike else low
        while low < high and assignment is not None:
            middle = (low + high) // 2
            stages = self.solve(rising[middle], first=True)
            low, high = (low, middle) if stages is not None else (middle + 1, high)
            assignment = stages or assignment
        return assignment

    @cached_property
    def _used(self) -> NDArray[np.int64]:
        """The number of devices in all pools, for each flat index."""
        used: NDArray[np.int64] = np.sum(np.indices(self.shape), axis=0).ravel()
        return used

    @cached_property
    def _device_seconds(self) -> tuple[Floats, Floats]:
        """The smallest device-seconds (devices x busy seconds) of all layers before each layer, and of all layers from
        each layer on."""
        devices = np.array([submesh.devices for submesh in self.prices.submeshes])
        return self._bounds((self.busy.min(axis=3) * devices).min(axis=2))

    @cached_property
    def _sums(self) -> Floats:
        """For each layer, the smallest sum of seconds of the layers before it."""
        return self._bounds(self.prices.before(0).min(axis=2))[0]

    def _bounds(self, least: Floats) -> tuple[Floats, Floats]:
        """For each layer, the smallest sum over all cuts into stages: of the layers before it, and of the layers from
        it on. ``least[i, j]`` is a lower bound for a stage of layers i to j."""
        num = self.prices.num_layers
        ahead, behind = np.full(num + 1, inf), np.full(num + 1, inf)
        ahead[0] = behind[num] = 0.0
        for layer in range(num):
            ahead[layer + 1] = (ahead[: layer + 1] + least[: layer + 1, layer]).min()
        for layer in reversed(range(num)):
            behind[layer] = (least[layer, layer:] + behind[layer + 1 :]).min()
        return ahead, behind

    def solve(self, limit: float, most: float = inf, *, first: bool = False) -> tuple[AssignedStage, ...] | None:
        """The stages with the smallest sum of seconds, each with a busy time of at most ``limit``. None if the sum
        would exceed ``most``, or no stages exist. ``first``: return any stages, but as few stages as possible."""
        self.tables += 1
        self._before, self._limit = {}, limit
        if self._alike:
            return self._solve_alike(limit, most)
        num = self.prices.num_layers
        table = np.full((num + 1, prod(self.shape)), inf)
        table[num, 0] = 0.0
        tables = [table]
        windows = self._windows(limit)
        best, chosen = inf, -1
        for following in range(min(num, sum(self.pools), self._most + 1)):
            table = self._extended(table, following, windows)
            if self.prunes and most < inf:
                table[table > (most * (1 + 1e-12) - self._sums)[:, None]] = inf
            if not np.isfinite(table).any():
                break
            tables.append(table)
            if table[0, -1] < best:
                best, chosen = float(table[0, -1]), following
                if first:
                    break
        return self._stages(tables[: chosen + 2]) if chosen >= 0 else None

    def _solve_alike(self, limit: float, most: float) -> tuple[AssignedStage, ...] | None:
        """Like ``solve``, if all stages have the same submesh. Each table then has entries in one column only, in a
        range of layers. The infinite parts of the table are skipped."""
        num, devices = self.prices.num_layers, self.prices.submeshes[0].devices
        count, rest = divmod(self.pools[0], devices)
        if rest or count > min(num, self._most + 1):
            return None
        inside = np.ascontiguousarray(self._windows(limit)[:-1, devices::devices].T)  # [following, layer]
        if not inside.any(axis=1).all():
            return None
        lows, highs = inside.argmax(axis=1).tolist(), (num - inside[:, ::-1].argmax(axis=1)).tolist()
        gaps = (inside.sum(axis=1) < np.array(highs) - lows).tolist()
        column = np.full(num + 1, inf)
        column[num] = 0.0
        columns, first, last = [column], num, num
        for following, (low, high) in enumerate(zip(lows, highs, strict=True)):
            first = max(first, 1)
            block = self._seconds(following)[low:high, first - 1 : last, 0]
            self.entries += block.size
            least = (block + column[first : last + 1]).min(axis=1, initial=inf)
            if gaps[following]:
                least[~inside[following, low:high]] = inf
            if self.prunes and most < inf:
                least[least > most * (1 + 1e-12) - self._sums[low:high]] = inf
            ends = np.flatnonzero(least < inf)
            if not len(ends):
                return None
            first, last = low + int(ends[0]), low + int(ends[-1])
            column = np.full(num + 1, inf)
            column[low:high] = least
            columns.append(column)
        if column[0] == inf:
            return None
        stages, layer = [], 0
        for following in reversed(range(count)):
            sums = self._seconds(following)[layer, layer:, 0] + columns[following][layer + 1 :]
            last = layer + int(sums.argmin())
            stages.append(self._assigned(layer, last, 0, following))
            layer = last + 1
        return tuple(stages)

    def _windows(self, limit: float) -> NDArray[np.bool_]:
        """[layer, used]: whether the limit can hold if the layers from ``layer`` on use ``used`` devices (a flat
        index), and the layers before ``layer`` use the other devices.

        This follows from a sum: on d devices, stages with a busy time of at most ``limit`` provide at most d x
        ``limit`` device-seconds.
        """
        if not self.prunes or limit == inf:
            return np.ones((self.prices.num_layers + 1, len(self._used)), dtype=bool)
        ahead, behind = self._device_seconds
        room, rest = self._used * limit * (1 + 1e-12), (sum(self.pools) - self._used) * limit * (1 + 1e-12)
        kept: NDArray[np.bool_] = np.logical_and(room >= behind[:, None], rest >= ahead[:, None])
        return kept

    def _extended(self, table: Floats, following: int, windows: NDArray[np.bool_]) -> Floats:
        """The table for one more stage, which is placed before ``following`` stages."""
        seconds = self._seconds(following)
        result = np.full_like(table, inf)
        reached = np.asarray(np.isfinite(table).any(axis=1) | (not self.prunes))
        for number, submesh in enumerate(self.prices.submeshes):
            shifted = self._shifted(table, submesh)
            if shifted is None:
                continue
            possible = np.asarray(np.isfinite(shifted).any(axis=0))
            if self.prunes and possible.sum() <= FEW_COLUMNS:
                self._extend_columns(result, seconds[:, :, number], shifted, np.flatnonzero(possible), windows)
                continue
            for layer in range(self.prices.num_layers):
                row = seconds[layer, layer:, number]
                window = np.flatnonzero(windows[layer] & possible if self.prunes else windows[layer])
                ends = np.flatnonzero(np.isfinite(row) & reached[layer + 1 :]) if self.prunes else np.arange(len(row))
                if not len(ends) or not len(window):
                    continue
                costs = row[ends]
                rest = shifted[layer + 1 + ends]
                several = rest[:, window] if len(window) < rest.shape[1] else rest
                self.entries += several.size
                result[layer, window] = np.minimum(result[layer, window], (several + costs[:, None]).min(axis=0))
        return result

    def _extend_columns(
        self, result: Floats, seconds: Floats, shifted: Floats, columns: NDArray[np.int64], windows: NDArray[np.bool_]
    ) -> None:
        """Extend a table with entries for few numbers of used devices (``columns``), for all layers at once."""
        for column in columns:
            inside, rest = np.flatnonzero(windows[:-1, column]), shifted[1:, column]
            costs = seconds[inside]
            self.entries += int(np.count_nonzero(np.isfinite(costs[:, np.isfinite(rest)])))
            least = (costs + rest).min(axis=1)
            result[inside, column] = np.minimum(result[inside, column], least)

    def _seconds(self, following: int) -> Floats:
        """[i, j, k]: the smallest seconds of a stage within the limit that has ``following`` stages after it."""
        place = self._places[following]
        if place not in self._before:
            prices, least = self.prices, np.full(self.prices.seconds.shape[:3], inf)
            for variant in range(prices.seconds.shape[3]):
                kept = (prices.most_after[..., variant] >= following) & (self.busy[..., variant] <= self._limit)
                np.minimum(least, prices.seconds[..., variant], out=least, where=kept)
            self._before[place] = np.where(self._late, inf, least)
        return self._before[place]

    def _assigned(self, first: int, last: int, submesh: int, following: int) -> AssignedStage:
        """The stage of these layers in its fastest variant."""
        cell = first, last, submesh
        kept = (self.prices.most_after[cell] >= following) & (self.busy[cell] <= self._limit)
        variant = int(np.where(kept, self.prices.seconds[cell], inf).argmin())
        return AssignedStage(first, last, submesh, variant, float(self.prices.seconds[(*cell, variant)]))

    def _shifted(self, table: Floats, submesh: Submesh) -> Floats | None:
        """The table of the later stages, indexed by the devices that these stages and ``submesh`` use together. None if
        a pool is too small for ``submesh``."""
        if any(count > size for count, size in zip(submesh.counts, self.pools, strict=False)):
            return None
        whole = table.reshape(len(table), *self.shape)
        result = np.full_like(whole, inf)
        into, come = [slice(None)], [slice(None)]
        for count, size in zip(self._counts(submesh), self.shape, strict=False):
            into.append(slice(count, None))
            come.append(slice(None, size - count))
        result[tuple(into)] = whole[tuple(come)]
        result[:, ~self._allowed(submesh)] = inf
        return result.reshape(table.shape)

    def _counts(self, submesh: Submesh) -> tuple[int, ...]:
        """The devices of a submesh along each axis of ``shape``."""
        return (submesh.devices,) if self.in_order else submesh.counts

    def _allowed(self, submesh: Submesh) -> NDArray[np.bool_]:
        """For each number of used devices of each pool, whether a stage on ``submesh`` and the later stages may use
        them together. The stage begins at the first of these devices in its pool."""
        allowed = np.ones(self.shape, dtype=bool)
        if not self.boxes and not self.in_order:
            return allowed
        if submesh.joins:
            return ~allowed
        pool = self.pools[submesh.pool]
        used = np.indices(self.shape)[0 if self.in_order else submesh.pool]
        first = (sum(self.pools[submesh.pool :]) if self.in_order else pool) - used
        if self.in_order:
            allowed &= (first >= 0) & (first + submesh.devices <= pool)
        if self.boxes:
            box = self.boxes[submesh.pool]
            inside = first // box == (first + submesh.devices - 1) // box
            allowed &= inside | ((first % box == 0) & (submesh.devices % box == 0))
        return allowed

    def _stages(self, tables: list[Floats]) -> tuple[AssignedStage, ...]:
        """Read the stages from the tables, from the first stage to the last."""
        stages = []
        layer, used = 0, tables[0].shape[1] - 1
        for following in reversed(range(len(tables) - 1)):
            stage, used = self._stage(tables[following], following, layer, used)
            stages.append(stage)
            layer = stage.last + 1
        return tuple(stages)

    def _stage(self, later: Floats, following: int, layer: int, used: int) -> tuple[AssignedStage, int]:
        """The stage that begins at ``layer`` in the solution with the least sum, and the flat index of the devices that
        the later stages use."""
        seconds = self._seconds(following)
        counts = np.unravel_index(used, self.shape)
        best: tuple[float, int, int, int] = (inf, 0, 0, 0)
        for number, submesh in enumerate(self.prices.submeshes):
            rest = [int(count) for count in counts]
            for axis, count in enumerate(self._counts(submesh)):
                rest[axis] -= count
            if min(rest) < 0 or not self._allowed(submesh).flat[used]:
                continue
            after = int(np.ravel_multi_index(rest, self.shape))
            sums = seconds[layer, layer:, number] + later[layer + 1 :, after]
            least = int(sums.argmin())
            best = min(best, (float(sums[least]), layer + least, number, after))
        _, last, number, after = best
        return self._assigned(layer, last, number, following), after
