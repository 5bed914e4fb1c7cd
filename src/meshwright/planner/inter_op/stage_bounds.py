"""Lower bounds on the seconds of stages, wherever they lie, also before their layers are priced."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.closed_form import collective_s, pieces_s
from meshwright.cost.collective import Network
from meshwright.cost.work import Communicate, Compute, Piece
from meshwright.ir.layout import Layout
from meshwright.ir.schedule import ActionKind
from meshwright.planner.candidates import Space
from meshwright.planner.inter_op.assemble import is_sum
from meshwright.planner.inter_op.option import REFUSALS
from meshwright.planner.inter_op.pipelines import LEAST, Pipelines
from meshwright.planner.inter_op.stage_homes import StageHomes
from meshwright.planner.inter_op.works import LayerWorks

IMPOSSIBLE_S = 1e15
"""The lower bound, in seconds, for a layer in a division of ranks that the model does not allow."""

_Floats = NDArray[np.float64]


class PlacedStage(NamedTuple):
    """A stage: its layers ``first`` to ``last`` (both included), its ranks, and their division."""

    first: int
    last: int
    ranks: range
    dp: int
    tp: int


class PipelineBound(NamedTuple):
    """Lower bounds for all pipelines that begin with the same stages: the seconds of a step (``step_s``), and the
    seconds for which the later stages wait for these stages (``filled_s``)."""

    step_s: float = 0.0
    filled_s: float = 0.0


class LayerBounds(NamedTuple):
    """Lower bounds on seconds. [i] is the sum over all layers before i: of a micro-batch on the device (``before``) and
    of its launches on the host, of the update, and of the sums of gradients without their latency ``latency_s``. ``up``
    and ``down`` are the bytes that a rank sends after a layer, and before it."""

    before: _Floats
    launches: _Floats
    update: _Floats
    sums: _Floats
    latency_s: float
    up: _Floats
    down: _Floats


class StageBounds:
    """Lower bounds for the stages of pipelines, with the least recomputation that ``space`` allows.

    As long as a division of ranks is not priced, it counts as fast as if it communicated nothing and computed as
    efficiently as the nearest known division.
    """

    def __init__(self, homes: StageHomes, space: Space) -> None:
        self.homes, self.space = homes, space
        self.chain, self.world_size = homes.of_all.chain, homes.world_size
        self.network = Network(homes.cluster)
        self._known: dict[object, LayerBounds] = {}
        self._links: dict[int, set[tuple[float, float]]] = {}

    def clear(self) -> None:
        """Forget all bounds, because more divisions are priced."""
        self._known.clear()

    def followed(
        self, before: PipelineBound, bounds: LayerBounds, stage: PlacedStage, microbatches: int, fill: float, zero: int,
        *, uniform: bool, sums: bool = True,
    ) -> PipelineBound:  # fmt: skip
        """The bound if one more stage follows: T >= m s_k + max(o_k, f (s_0 + ... + s_{k-1})), with the ``fill`` f, the
        seconds s of a stage for one of m micro-batches, and its seconds o once a step.

        ``zero`` is the largest ZeRO stage that the pipelines may have. If ``sums`` is not set, sums of gradients do not
        count: ZeRO replaces them by other collectives, which may be faster where times are measured.
        """
        seconds, once = self._stage_s(bounds, stage, uniform=uniform), self._once_s(bounds, stage, zero, sums=sums)
        step_s = max(before.step_s, microbatches * seconds + max(once, before.filled_s))
        return PipelineBound(
            step_s, before.filled_s + fill * (seconds + self._hidden_s(bounds, stage, uniform=uniform))
        )

    def _stage_s(self, bounds: LayerBounds, stage: PlacedStage, *, uniform: bool) -> float:
        """A lower bound on the seconds of a stage for one micro-batch. On a CPU, its messages take its time."""
        seconds = max(float(each[stage.last + 1] - each[stage.first]) for each in (bounds.before, bounds.launches))
        if not self.homes.of_all.overlaps:
            seconds += self._send_s(bounds.up[stage.last], stage.ranks, stage.ranks.stop, uniform=uniform)
            seconds += self._send_s(bounds.down[stage.first], stage.ranks, stage.ranks.start, uniform=uniform)
        return seconds

    def _hidden_s(self, bounds: LayerBounds, stage: PlacedStage, *, uniform: bool) -> float:
        """The seconds of the message after a stage, if the stage computes meanwhile."""
        overlaps = self.homes.of_all.overlaps
        return self._send_s(bounds.up[stage.last], stage.ranks, stage.ranks.stop, uniform=uniform) if overlaps else 0.0

    def uniform(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether messages may be those between equal stages on equal devices, which the cost model prices by the
        distance of their ranks, wherever these lie."""
        return self.homes.cluster.homogeneous and len(set(sizes)) == 1

    def _send_s(self, num_bytes: float, ranks: range, border: int, *, uniform: bool) -> float:
        """The least seconds of a message of these ranks over the border between the ranks before and from ``border``
        on; if ``uniform``, also of a message over the distance of equal stages, which may be measured."""
        if not num_bytes or not 0 < border < self.world_size:
            return 0.0
        seconds = min(alpha_s + num_bytes * beta for alpha_s, beta in self._joining(border))
        return min(seconds, self.network.send_s(num_bytes, len(ranks))) if uniform else seconds

    def _joining(self, border: int) -> set[tuple[float, float]]:
        """Latency and seconds per byte of all levels that join a rank before ``border`` and a rank from it on."""
        if border not in self._links:
            pairs = itertools.product(range(border), range(border, self.world_size))
            levels = [self.homes.cluster.level_of(*pair) for pair in pairs]
            self._links[border] = {
                (level.alpha_s, level.shared_beta_s_per_byte(1) / level.ring_fraction(2)) for level in levels
            }
        return self._links[border]

    def _once_s(self, bounds: LayerBounds, stage: PlacedStage, zero: int, *, sums: bool) -> float:
        """A lower bound on the seconds of a stage after its last micro-batch: the update and, with ``sums``, sums of
        gradients, if no kernels hide them."""
        update, summing = (float(each[stage.last + 1] - each[stage.first]) for each in (bounds.update, bounds.sums))
        return update / (stage.dp if zero else 1) + (summing + bounds.latency_s if sums and summing else 0.0)

    def of(
        self, ranks: range, dp: int, tp: int, microbatches: int, kinds: tuple[str, ...], zero: int = 0
    ) -> LayerBounds:
        """The bounds for stages on these ranks, divided over ``dp`` and ``tp``, in actions of ``kinds``."""
        home = self.homes.of(ranks)
        key = (id(home), dp, tp, microbatches, kinds, zero)
        if key not in self._known:
            plain = self.space.least(Layout(dp=dp, tp=tp, pp=2, microbatches=microbatches))
            own = msgspec.structs.replace(plain, zero=zero)
            try:
                self._known[key] = self._bounded(home, own, kinds)
            except REFUSALS:  # known to be impossible; or nothing is known, because the batch is not divided
                impossible = home.prices.knows(plain)
                self._known[key] = _constant_bounds(len(self.chain.layers), IMPOSSIBLE_S if impossible else 0.0)
        return self._known[key]

    def _bounded(self, home: Pipelines, own: Layout, kinds: tuple[str, ...]) -> LayerBounds:
        """Lower bounds for layers on the ranks of ``home``, divided as ``own`` says."""
        prices, numbers = home.prices, self.chain.numbers
        plain = msgspec.structs.replace(own, zero=0)
        known = prices.knows(plain)
        nearest = (prices.of(plain), 1.0) if known else prices.known_larger(plain)
        if nearest is not None:
            works, part = nearest
            each = np.array(prices.seconds(works, kinds, hidden=not home.overlaps, sums=False)) * part
        else:
            works, part = self._single(home, own)
            each = np.array([_computing_s(work.pieces, kinds) for work in works.works]) * part / own.feature_ranks
        update = np.array([
            sum(piece.device_s for piece in work.after if isinstance(piece, Compute)) for work in works.works
        ]) * _of_own_parameters(works)  # fmt: skip
        update *= 1 / own.feature_ranks if nearest is None else 1
        launches = np.array([_launches_s(work.pieces, kinds) for work in works.works])
        accumulates = LEAST if own.microbatches == 1 and not known else 1.0
        hidden = home.overlaps or prices.codecs is not None or not prices.knows(own)
        sums, latency_s = (np.zeros(len(update)), 0.0) if hidden else self._sums(home, prices.of(own))
        before, launches, update, sums = (
            np.append(0.0, np.cumsum(of_layers[numbers]))
            for of_layers in (accumulates * each, accumulates * launches, update, sums)
        )
        of_rank = part / works.mesh.sizes.get("dp", 1) / own.feature_ranks
        facts = [works.facts[number] for number in numbers]
        up, down = (
            np.array(sizes) * of_rank
            for sizes in ([fact.up_bytes for fact in facts], [fact.down_bytes for fact in facts])
        )
        return LayerBounds(before, launches, update, sums, latency_s, up, down)

    def _sums(self, home: Pipelines, works: LayerWorks) -> tuple[_Floats, float]:
        """The seconds of the sums of gradients of each layer without latencies, and the least latency. Several layers
        share a bucket, and so its latency. Layers that share a parameter are left out, because its gradient may be
        summed with another layer."""
        seconds, latencies = np.zeros(len(works.works)), [0.0]
        for number, work in enumerate(works.works):
            pieces = [*work.pieces.get(ActionKind.REDUCE_GRAD.value, ()), *filter(is_sum, work.after)]
            every = [piece for piece in pieces if isinstance(piece, Communicate)]
            empty = [msgspec.structs.replace(piece, bytes=0) for piece in every]
            least_s, whole_s = (pieces_s(each, works.mesh, home.prices.network) for each in (empty, every))
            shares = any(number in shared.layers for shared in works.shared.values())
            seconds[number] = 0.0 if shares else max(0.0, whole_s - least_s)
            latencies += [collective_s(piece, works.mesh, home.prices.network) for piece in empty]
        return seconds, min(latencies[1:], default=0.0)

    def _single(self, home: Pipelines, own: Layout) -> tuple[LayerWorks, float]:
        """Works on a single rank, and the size of a micro-batch of ``own`` on a rank as a fraction of theirs."""
        parts = own.microbatches * own.dp
        least = 1 if self.chain.graph.batch_size % 2 else 2
        alone = msgspec.structs.replace(own, dp=1, tp=1, zero=0, microbatches=max(least, parts))
        works, part = home.prices.larger(alone)
        return works, part * alone.microbatches / parts


def _constant_bounds(num_layers: int, layer_s: float) -> LayerBounds:
    """LayerBounds of layers that take ``layer_s`` seconds each."""
    zeros, before = np.zeros(num_layers + 1), np.arange(num_layers + 1, dtype=np.float64)
    before *= layer_s
    return LayerBounds(before, zeros, zeros, zeros, 0.0, zeros, zeros)


def _of_own_parameters(works: LayerWorks) -> _Floats:
    """The fraction of each layer's trained bytes that no other layer reads."""
    own = np.array([fact.trained_bytes for fact in works.facts], dtype=float)
    whole = np.maximum(own, 1.0)
    for shared in works.shared.values():
        own[list(shared.layers)] -= shared.gradient_bytes
    part: _Floats = np.maximum(own, 0.0) / whole
    return part


def _computing_s(pieces: Mapping[str, Sequence[Piece]], kinds: Sequence[str]) -> float:
    """The seconds of kernels, without communication and launches."""
    return sum(piece.device_s for kind in kinds for piece in pieces.get(kind, ()) if isinstance(piece, Compute))


def _launches_s(pieces: Mapping[str, Sequence[Piece]], kinds: Sequence[str]) -> float:
    """The seconds in which the host launches kernels. They do not depend on the size of the micro-batch."""
    return sum(piece.launch_s for kind in kinds for piece in pieces.get(kind, ()) if isinstance(piece, Compute))
