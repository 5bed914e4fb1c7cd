"""The work of single layers, from which the search assembles the work of stages (``assemble``).

Each layer of the shortened graph is treated as a stage. The pipeline of these stages is planned and lowered like every
other plan. So the cost of a layer equals the cost of its operators in a program.
"""

import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import gcd, prod

import msgspec

from meshwright.cost.closed_form import pieces_s
from meshwright.cost.collective import Network
from meshwright.cost.graphs import moving_part
from meshwright.cost.node_costs import NodeCosts, of_parameters
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import stage_held, step_work
from meshwright.cost.work import as_graphs
from meshwright.errors import LayoutError, MeshwrightError, PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import ITEM_BYTES, Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.placement import is_split
from meshwright.ir.plan import Plan
from meshwright.ir.program import Lower, Program
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import cut
from meshwright.planner.codecs import AUTO
from meshwright.planner.derive import recomputing
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.inter_op.chain import Chain
from meshwright.planner.inter_op.piece_codecs import PieceCodecs, is_reduction
from meshwright.planner.inter_op.price_workers import Group, PriceWorkers, num_workers
from meshwright.planner.inter_op.works import (
    GATHER,
    LayerFacts,
    LayerWorks,
    SharedParameter,
    derived,
    every_piece,
    may_hide,
    renamed,
    without_host,
)

WORKERS_AFTER_S = 1.0
"""Seconds of pricing after which other processes start to help. Most searches end earlier."""


class LayerPrices:
    """Plans, lowers and prices the layers of a chain, once for each layout. With ``codec="auto"``, sums of gradients
    get the best codecs (``piece_codecs``). ``float8`` allows products in float8 in all layouts (``Layout.float8``)."""

    def __init__(
        self, chain: Chain, cluster: Cluster, lower: Lower, optimizer: OptimizerCost, clips: bool, num_ranks: int,
        codec: str = "", float8: Float8Scaling = "",
    ) -> None:  # fmt: skip
        self.chain, self.cluster, self.lower = chain, cluster, lower
        self.optimizer, self.clips, self.num_ranks = optimizer, clips, num_ranks
        self.network, self.codec, self.float8 = Network(cluster), codec, float8
        self.codecs = PieceCodecs(cluster, _gradient_bytes(chain.graph)) if codec == AUTO else None
        self._coded: dict[LayerWorks, LayerWorks] = {}
        self._graphs = cluster.software.graphs and cluster.device.kind != "cpu"
        self._ask = Ask(
            explains=False, optimizer=optimizer, lower=lower, fits_buckets=False, firsts=chain.firsts,
            alike=self._alike, receives=False,
        )  # fmt: skip
        terms = cut(chain.graph, chain.firsts).terms
        self._terms = {
            term: parameter
            for parameter, of_stages in terms.items() if len(of_stages) > 1
            for names in of_stages.values() for term in names
        }  # fmt: skip
        self._known: dict[bytes, LayerWorks | MeshwrightError] = {}
        self._singles: dict[bytes, tuple[Layout, bytes]] = {}  # layout -> its pipeline of single layers, with its key
        self._kins: dict[bytes, bytes] = {}
        self.num_lowered = 0
        self._spent_s = 0.0
        self._workers: PriceWorkers | None = None
        self._ahead: dict[bytes, LayerWorks] = {}  # priced while a worker computed the price of another layout
        # For layouts that differ in dp and micro-batches only: dp x micro-batches -> (dp, works).
        self._families: dict[bytes, dict[int, tuple[int, LayerWorks]]] = {}

    def of(self, layout: Layout) -> LayerWorks:
        """The work of all priced layers, if each layer is a stage of ``layout``. The schedule of the layout does not
        matter.

        Layouts with equal micro-batches per rank share a price: per micro-batch, dp2 with four micro-batches costs the
        same as dp4 with two.

        Raises:
            LayoutError, PlanError: the layout does not fit the model.
        """
        single, key = self._single(layout)
        if key not in self._known:
            try:
                self._known[key] = self._with_codecs(self._of_family(single, key))
            except (LayoutError, PlanError) as error:
                self._known[key] = error
        works = self._known[key]
        if isinstance(works, MeshwrightError):
            raise works
        return works

    def each(self, layouts: Sequence[Layout]) -> list[LayerWorks]:
        """The works of layouts that differ only in recomputation. Layouts without a price share their plan and most of
        their lowering.

        Raises: the errors of ``of``.
        """
        missing = {key: single for single, key in map(self._single, layouts) if not self._knows(single, key)}
        if self._workers is not None:
            missing = {key: missing[key] for key in self._workers.claim(list(missing))}
        group = [(key, single) for key, single in missing.items() if key not in self._ahead]
        if len(group) > 1:
            self._price_ahead(group)
        return [self.of(layout) for layout in layouts]

    def expect(self, layouts: Iterable[Layout]) -> None:
        """Announce which layouts will probably be requested, the most urgent first, so that other processes price
        them."""
        if self._workers is None:
            number = num_workers() if self._spent_s > WORKERS_AFTER_S else 0
            if not number:
                return
            self._workers = PriceWorkers(
                lambda singles: list(map(msgspec.msgpack.encode, self._worked_out(singles))), number, self._ask
            )
        wanted: dict[tuple[bytes, int], tuple[bytes, Layout]] = {}
        for layout in layouts:
            single, key = self._single(layout)
            if not self._knows(single, key):
                parts = single.dp * single.microbatches
                shared = (self._kin(single, key), parts) if _shares_price(single) else (key, 0)
                wanted.setdefault(shared, (key, single))
        groups: dict[bytes, Group] = {}
        for key, single in wanted.values():
            if key not in self._ahead:
                plain = msgspec.json.encode(msgspec.structs.replace(single, recompute="none"))
                groups.setdefault(plain, []).append((key, single))
        self._workers.want(list(groups.values()))

    def close(self) -> None:
        """End the processes that price layouts."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def knows(self, layout: Layout) -> bool:
        """Whether ``of`` needs no lowering for this layout."""
        return self._knows(*self._single(layout))

    def _knows(self, single: Layout, key: bytes) -> bool:
        if key in self._known:
            return True
        dp = self._families.get(self._kin(single, key), {}).get(single.dp * single.microbatches, (0,))[0]
        return _shares_price(single) and (dp > 1 or single.dp == dp == 1)

    def larger(self, layout: Layout) -> tuple[LayerWorks, float]:
        """Known works for larger micro-batches, and the size of a micro-batch of ``layout`` as a fraction of such a
        micro-batch. If no works are known, the layout with half of the batch per micro-batch is priced."""
        if (known := self.known_larger(layout)) is not None:
            return known
        least = self.largest(layout)
        return self.of(least), least.dp * least.microbatches / (layout.dp * layout.microbatches)

    def known_larger(self, layout: Layout) -> tuple[LayerWorks, float] | None:
        """Like ``larger``, but None if no works are known."""
        single, key = self._single(layout)
        parts, known = single.dp * single.microbatches, self._families.get(self._kin(single, key), {})
        fewer = [number for number in known if number <= parts]
        return (self._with_codecs(known[max(fewer)][1]), max(fewer) / parts) if fewer else None

    def largest(self, layout: Layout) -> Layout:
        """The layout with the largest micro-batches from whose works the works of ``layout`` can be estimated: a
        micro-batch is half of the batch, shared by all ranks that must divide it. If prices cannot be shared, the
        result is ``layout`` itself."""
        dp = 1 if layout.ep == 1 else layout.ep if layout.dp == layout.ep else 2 * layout.ep
        half = msgspec.structs.replace(layout, dp=dp, microbatches=2)
        parts = layout.dp * layout.microbatches
        divides = parts > 2 * dp and self.chain.graph.batch_size % (2 * dp) == 0
        return half if divides and _shares_price(half) else layout

    def _single(self, layout: Layout) -> tuple[Layout, bytes]:
        """The layout in which each priced layer is a stage, and its text as a key."""
        text = msgspec.json.encode(layout)
        if text not in self._singles:
            single = msgspec.structs.replace(
                layout, pp=len(self.chain.firsts) + 1, schedule="gpipe", chunks=1, float8=layout.float8 or self.float8
            )
            self._singles[text] = single, msgspec.json.encode(single)
        return self._singles[text]

    def _kin(self, single: Layout, key: bytes) -> bytes:
        """The key of the family of layouts that differ only in dp and micro-batches. Layouts in which dp equals ep are
        a family of their own: no two ranks have the same experts, so gradients of experts are not summed."""
        if key not in self._kins:
            alone = single.ep > 1 and single.dp == single.ep
            self._kins[key] = msgspec.json.encode(
                (msgspec.structs.replace(single, dp=single.ep, microbatches=1), alone)
            )
        return self._kins[key]

    def _alike(self, single: Layout) -> Layout:
        """The layout whose strategies ``single`` uses. Layouts that differ only in dp and micro-batches use the same
        strategies: the best strategies if all ranks divide the batch. So prices do not depend on the order in which
        layouts are priced."""
        batch = self.chain.graph.batch_size
        plain = msgspec.structs.replace(single, cp=1, ep=1, context="gather").is_plain
        if not plain or single.stage_sizes or batch % (single.dp * single.microbatches):
            return single
        parts = gcd(batch, self.num_ranks // (single.feature_ranks * single.cp))
        if parts % single.ep or (parts == single.ep < single.dp):
            return single
        dp, microbatches = (parts, 1) if single.dp > single.ep else (single.ep, parts // single.ep)
        return msgspec.structs.replace(single, dp=dp, microbatches=microbatches, zero=0, recompute="none")

    def _of_family(self, single: Layout, key: bytes) -> LayerWorks:
        if not _shares_price(single):
            return self._priced(single, key)
        parts, known = single.dp * single.microbatches, self._families.setdefault(self._kin(single, key), {})
        if parts in known and (known[parts][0] > 1 or single.dp == 1):
            return derived(known[parts][1], known[parts][0], single)
        works = self._priced(single, key)
        known[parts] = single.dp, works
        return works

    def _priced(self, single: Layout, key: bytes) -> LayerWorks:
        if key in self._ahead:
            return self._ahead.pop(key)
        if self._workers is not None:
            while (group := self._workers.meanwhile(key)) is not None:
                self._price_ahead(group)
            if price := self._workers.take(key):
                return msgspec.msgpack.decode(price, type=LayerWorks)
        start = time.perf_counter()
        (works,) = self._worked_out([single])
        self._spent_s += time.perf_counter() - start
        return works

    def _price_ahead(self, group: Group) -> None:
        """Price layouts that differ only in recomputation, before they are requested."""
        start = time.perf_counter()
        with suppress(LayoutError, PlanError):  # the error is raised again when the layout is requested
            works = self._worked_out([single for _, single in group])
            self._ahead |= zip((key for key, _ in group), works, strict=True)
        self._spent_s += time.perf_counter() - start

    def _worked_out(self, singles: Sequence[Layout]) -> list[LayerWorks]:
        """The works of layouts that differ only in recomputation."""
        first, *others = singles
        self.num_lowered += len(singles)
        plan = plan_layout(self.chain.graph, first, world_size=first.num_ranks, cluster=self.cluster, ask=self._ask)
        plans = [plan, *(recomputing(plan, self.chain.graph, other.recompute) for other in others)]
        programs = self.lower.variants(plans)
        return [self._works_of(each, lowered) for each, lowered in zip(plans, programs, strict=True)]

    def _works_of(self, plan: Plan, programs: Sequence[Program]) -> LayerWorks:
        work = step_work(
            programs, plan, self.cluster, optimizer=self.optimizer, clips=self.clips, num_ranks=self.num_ranks
        )
        if self._graphs and not moving_part(programs, ("F", "B")):
            work = msgspec.structs.replace(work, stages=tuple(map(as_graphs, work.stages)))
        gathers = {bucket.label: GATHER + bucket.label for bucket in plan.gathers}
        costs = NodeCosts(plan.mesh, self.cluster, num_ranks=self.num_ranks)
        trained = {name for program in programs for name in program.gradients}
        facts = []
        for stage, program in enumerate(programs):
            sizes = {parameter.name: parameter.bytes for parameter in program.parameters if parameter.name in trained}
            storage = plan.stages[stage].storage
            experts = sum(size for name, size in sizes.items() if is_split(storage[name].get("ep")))
            held = stage_held(programs, plan, stage, self.cluster, self.optimizer)
            casts = costs.of(of_parameters(program))
            sent = (_whole_bytes(program, kind) for kind in (ActionKind.SEND_F, ActionKind.SEND_B))
            largest = max(sizes.values(), default=0)
            facts.append(LayerFacts(held, sum(sizes.values()), largest, experts, costs.piece("casts", casts), *sent))
        return LayerWorks(
            works=tuple(renamed(stage, gathers) for stage in work.stages),
            facts=tuple(facts),
            shared=_shared(programs, trained),
            terms=self._terms,
            heap_factor=work.heap_factor,
            offloads=plan.offload == "optimizer" and self.cluster.device.kind != "cpu",
            mesh=plan.mesh,
        )

    def _with_codecs(self, works: LayerWorks) -> LayerWorks:
        """The works, with the best codecs for the sums of gradients of single layers. The codecs depend on dp, so
        layouts that share prices cannot share them."""
        if self.codecs is None:
            return works
        if works not in self._coded:
            best, mesh = self.codecs.best, works.mesh
            coded = tuple(every_piece(work, lambda piece: best(piece, mesh)) for work in works.works)
            self._coded[works] = replace(works, works=coded)
        return self._coded[works]

    def seconds(
        self, works: LayerWorks, kinds: Sequence[str], *, hidden: bool = True, sums: bool = True
    ) -> list[float]:
        """For each priced layer, the seconds of the given ``kinds`` of actions, each run once. With ``hidden=False``,
        the result is a lower bound: collectives that other kernels may hide do not count. Waits for the host do not
        count either, because the layers of a stage wait less together. With ``sums=False``, sums of gradients do not
        count."""
        times = []
        for work in works.works:
            pieces = [piece for kind in kinds for piece in work.pieces.get(kind, ())]
            if not sums:
                pieces = [piece for piece in pieces if not is_reduction(piece)]
            if not hidden:
                pieces = [without_host(piece) for piece in pieces if not may_hide(piece)]
            times.append(pieces_s(pieces, works.mesh, self.network))
        return times


def _gradient_bytes(graph: Graph) -> int:
    """The bytes per element of the model's gradients. If there are several dtypes, the largest."""
    names = (entry.gradient for entry in graph.gradients if entry.gradient is not None)
    return max((ITEM_BYTES[graph.tensors[name].dtype] for name in names), default=4)


def _shares_price(layout: Layout) -> bool:
    """Whether only the size of a rank's micro-batch matters for the price, not the numbers of ranks and micro-batches.
    This is false for steps with one micro-batch, because their gradients are not accumulated."""
    return layout.microbatches > 1 and not layout.zero and not layout.mixed


def _whole_bytes(program: Program, kind: ActionKind) -> int:
    return sum(prod(sent.whole) * ITEM_BYTES[sent.value.dtype] for sent in program.crossing(kind))


def _shared(programs: Sequence[Program], trained: Container[str]) -> dict[str, SharedParameter]:
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, program in enumerate(programs):
        for parameter in program.parameters:
            holders.setdefault(parameter.name, []).append(number)
            sizes[parameter.name] = parameter.bytes
    return {
        name: SharedParameter(sizes[name], name in trained, tuple(layers))
        for name, layers in holders.items() if len(layers) > 1
    }  # fmt: skip
