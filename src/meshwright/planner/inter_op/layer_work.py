"""The work of single layers, from which the search assembles the work of stages.

Each layer of the shortened graph becomes a stage of its own. This pipeline is planned and lowered like every other
plan, so that a layer costs here what its operators cost in a program. The work of a stage of several layers is the sum
of their work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from meshwright.cost.closed_form import pieces_s
from meshwright.cost.collective import Network
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import ZEROING, HeldBytes, stage_held, step_work
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import DATA_AXES, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import REDUCTION
from meshwright.ir.program import Lower, Program
from meshwright.ir.schedule import ActionKind
from meshwright.planner.buckets import BUCKET_BYTES
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.inter_op.chain import Chain

_B, _REDUCE = ActionKind.B.value, ActionKind.REDUCE_GRAD.value
_LATE = (_B, ActionKind.I.value, ActionKind.W.value, _REDUCE)
"""The kinds of actions in which a stage runs its last layer first."""


@dataclass(frozen=True)
class LayerWorks:
    """The work of the priced layers of a chain in one layout, for one micro-batch. ``held`` has the bytes that each
    layer holds during a step, by kind. ``shared`` maps a parameter that several layers read to its bytes on a rank, and
    to the layers. ``mesh`` has the axes of a stage."""

    works: tuple[StageWork, ...]
    held: tuple[HeldBytes, ...]
    shared: dict[str, tuple[int, tuple[int, ...]]]
    heap_factor: float
    mesh: Mesh


class LayerPrices:
    """Plans, lowers and prices the layers of a chain, once for each layout."""

    def __init__(self, chain: Chain, cluster: Cluster, lower: Lower, optimizer: OptimizerCost, clips: bool) -> None:
        self.chain, self.cluster, self.lower = chain, cluster, lower
        self.optimizer, self.clips = optimizer, clips
        self.network = Network(cluster)
        self.ask = Ask(
            explains=False, optimizer=optimizer, lower=lower, fits_buckets=False, firsts=chain.firsts, reuses=True
        )
        self._known: dict[bytes, LayerWorks] = {}
        self._families: dict[bytes, tuple[Layout, LayerWorks]] = {}
        self._once: dict[int, tuple[float, float]] = {}

    def of(self, layout: Layout) -> LayerWorks:
        """The work of all priced layers, if each is a stage of ``layout``. The schedule of the layout does not matter.

        Layouts in which a rank computes on equally large micro-batches share their price: dp2 with four micro-batches
        costs per micro-batch what dp4 costs with two.

        Raises:
            LayoutError, PlanError: the layout does not fit the model.
        """
        apart = msgspec.structs.replace(layout, pp=len(self.chain.firsts) + 1, schedule="gpipe", chunks=1)
        key = msgspec.json.encode(apart)
        if key not in self._known:
            family = msgspec.json.encode(
                msgspec.structs.replace(apart, dp=1, microbatches=apart.dp * apart.microbatches)
            )
            base = self._families.get(family) if _shares_price(apart) else None
            if base is not None and (base[0].dp > 1 or apart.dp == 1):
                self._known[key] = _derived(base[1], base[0].dp, apart)
            else:
                self._known[key] = self._priced(apart)
                self._families[family] = apart, self._known[key]
        return self._known[key]

    def _priced(self, apart: Layout) -> LayerWorks:
        plan = plan_layout(self.chain.graph, apart, world_size=apart.num_ranks, cluster=self.cluster, ask=self.ask)
        programs = self.lower(plan)
        work = step_work(programs, plan, self.cluster, optimizer=self.optimizer, clips=self.clips)
        held = tuple(stage_held(programs, plan, stage, self.cluster, self.optimizer) for stage in range(len(programs)))
        return LayerWorks(work.stages, held, _shared(programs), work.heap_factor, plan.mesh)

    def seconds(self, works: LayerWorks, kinds: Sequence[str], *, hidden: bool = True) -> list[float]:
        """The seconds of each priced layer in actions of ``kinds``, one of each. Collectives that other kernels may
        hide count if ``hidden``."""
        return [
            pieces_s(
                (piece for kind in kinds for piece in work.pieces.get(kind, ()) if hidden or not _may_hide(piece)),
                works.mesh, self.network,
            )
            for work in works.works
        ]  # fmt: skip

    def once_s(self, works: LayerWorks) -> tuple[float, float]:
        """The seconds of all layers once a step: of the sums of gradients, and of the update of parameters."""
        if id(works) not in self._once:
            (stage,) = assemble(
                [works], self.chain.priced([range(len(self.chain.layers))]), 1, self.optimizer, accumulates=True
            ).stages
            sums = (*stage.pieces[_REDUCE], *filter(_is_sum, stage.after))
            update_s = sum(piece.seconds for piece in stage.after if isinstance(piece, Compute))
            self._once[id(works)] = pieces_s(sums, works.mesh, self.network), update_s
        return self._once[id(works)]


def _shares_price(layout: Layout) -> bool:
    """Whether only the size of a rank's micro-batch matters, not how many ranks and micro-batches divide the batch. If
    the step has one micro-batch, gradients are not accumulated."""
    return layout.microbatches > 1 and not layout.zero and layout.ep == 1 and not layout.mixed


def _derived(base: LayerWorks, base_dp: int, layout: Layout) -> LayerWorks:
    """The works of a layout whose ranks have micro-batches as large as those of ``base``, which has another dp."""
    share = base_dp / layout.dp
    held = tuple(
        msgspec.structs.replace(
            each, prologue_bytes=round(each.prologue_bytes * share), inputs_bytes=round(each.inputs_bytes * share)
        )
        for each in base.held
    )
    works = base.works if layout.dp > 1 else tuple(map(_without_dp, base.works))
    return replace(base, works=works, held=held, mesh=layout.mesh())


def _without_dp(work: StageWork) -> StageWork:
    """The work of a layer if there is one data-parallel rank: nothing is summed over dp."""
    every = (*work.before, *work.after, *(piece for pieces in work.pieces.values() for piece in pieces))
    gone = {piece.what for piece in every if isinstance(piece, Communicate) and piece.axis == "dp"}

    def left(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if isinstance(piece, Compute) or piece.what not in gone)

    pieces = {kind: left(each) for kind, each in work.pieces.items()}
    return msgspec.structs.replace(work, pieces=pieces, before=left(work.before), after=left(work.after))


def _shared(programs: Sequence[Program]) -> dict[str, tuple[int, tuple[int, ...]]]:
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, program in enumerate(programs):
        for parameter in program.parameters:
            holders.setdefault(parameter.name, []).append(number)
            sizes[parameter.name] = parameter.bytes
    return {name: (sizes[name], tuple(layers)) for name, layers in holders.items() if len(layers) > 1}


def assemble(
    variants: Sequence[LayerWorks], stages: Sequence[Sequence[int]], num_ranks: int, optimizer: OptimizerCost,
    *, accumulates: bool,
) -> StepWork:  # fmt: skip
    """The work of a step whose stages consist of the given priced layers. ``variants`` has the layer works of each
    stage, and ``num_ranks`` is the number of pipeline ranks.

    ``accumulates``: gradients are summed over several micro-batches. Otherwise the gradient of a layer lives from the
    layer's backward on, when values that later layers saved are free again.
    """
    ranks_of = {
        name: tuple(sorted({stage % num_ranks for stage, layers in enumerate(stages) if set(layers) & set(holders)}))
        for name, (_, holders) in variants[0].shared.items()
    }
    known: dict[object, StageWork] = {}
    result = []
    for number, (works, layers) in enumerate(zip(variants, stages, strict=True)):
        last = number + num_ranks >= len(stages)
        joined = tuple(name for name, ranks in ranks_of.items() if len(ranks) > 1 and number % num_ranks in ranks)
        key = (id(works), tuple(layers), last, number < num_ranks, joined if last else ())
        if key not in known:
            stage = _joined(works, layers, optimizer, first_chunk=number < num_ranks, accumulates=accumulates)
            after = list(stage.after)
            if num_ranks > 1 and last:
                after = [
                    *(
                        Communicate(f"gradient of {name} of all stages", "all_reduce", "pp", works.shared[name][0],
                                    members=ranks_of[name])
                        for name in joined
                    ),
                    *(p for p in works.works[-1].after if isinstance(p, Communicate) and p.collective == "broadcast"),
                    *after,
                ]  # fmt: skip
            known[key] = msgspec.structs.replace(stage, after=tuple(after))
        result.append(known[key])
    return StepWork(tuple(result), variants[0].heap_factor)


def _joined(
    works: LayerWorks, layers: Sequence[int], optimizer: OptimizerCost, *, first_chunk: bool, accumulates: bool
) -> StageWork:
    """The work of one stage of several layers."""
    parts = [_renamed(works.works[layer], number) for number, layer in enumerate(layers)]
    held = [works.held[layer] for layer in layers]
    buckets = _Buckets()
    pieces = {kind: buckets.filled(_in_order(parts, kind)) for kind in parts[0].pieces if kind != _REDUCE}
    pieces[_REDUCE] = buckets.filled(piece for part in reversed(parts) for piece in part.pieces[_REDUCE])
    ends = buckets.filled(piece for part in reversed(parts) for piece in part.after if _is_sum(piece))
    saved, workspace = sum(part.saved_bytes for part in parts), max(part.workspace_bytes for part in parts)
    twice = _held_twice(works, layers)
    owned = sum(each.parameters_bytes for each in held)
    held_bytes = sum(each.total_bytes - each.prologue_bytes - each.inputs_bytes for each in held)
    held_bytes += max(each.prologue_bytes for each in held) - twice * (2 + optimizer.states)
    held_bytes += max(each.inputs_bytes for each in held) if first_chunk else 0
    if not accumulates:
        gradients = [_gradients_bytes(each, optimizer) for each in held]
        # A bucket is there from its first gradient on.
        total, later, before, most = sum(gradients) - twice, BUCKET_BYTES if ends or buckets.joins else 0, saved, 0
        for part, size in zip(reversed(parts), reversed(gradients), strict=True):
            later += size
            most = max(most, min(later, total) + before + part.workspace_bytes)
            before -= part.saved_bytes
        workspace = max(0, most - saved)
    update_s = sum(piece.seconds for part in parts for piece in part.after if isinstance(piece, Compute))
    return StageWork(
        pieces=pieces,
        before=_before(parts),
        after=(*ends, Compute("update", update_s * (1 - twice / owned if owned else 1))),
        sent_up_bytes=parts[-1].sent_up_bytes,
        sent_down_bytes=parts[0].sent_down_bytes,
        saved_bytes=saved,
        held_bytes=held_bytes,
        workspace_bytes=workspace,
    )


def _gradients_bytes(held: HeldBytes, optimizer: OptimizerCost) -> int:
    """The bytes of a layer's gradients. Each has as many elements as a state of the optimizer."""
    return held.optimizer_bytes // optimizer.states if optimizer.states else held.parameters_bytes


def _held_twice(works: LayerWorks, layers: Sequence[int]) -> int:
    """The bytes of parameters that a stage holds once, although several of its layers read them."""
    present = set(layers)
    return sum(size * max(0, len(present.intersection(holders)) - 1) for size, holders in works.shared.values())


def _renamed(work: StageWork, number: int) -> StageWork:
    """The work of layer ``number`` of a stage: its collectives get names that no other layer's collectives have."""

    def renamed(piece: Piece) -> Piece:
        return piece if isinstance(piece, Compute) else msgspec.structs.replace(piece, what=f"{piece.what}, {number}")

    pieces = {kind: tuple(map(renamed, each)) for kind, each in work.pieces.items()}
    before, after = tuple(map(renamed, work.before)), tuple(map(renamed, work.after))
    return msgspec.structs.replace(work, pieces=pieces, before=before, after=after)


def _in_order(parts: Sequence[StageWork], kind: str) -> tuple[Piece, ...]:
    """The pieces of all layers in the order in which a stage runs them."""
    order = reversed(parts) if kind in _LATE else parts
    pieces: list[Piece] = []
    for piece in chain.from_iterable(part.pieces[kind] for part in order):
        if pieces and isinstance(piece, Compute) and isinstance(last := pieces[-1], Compute):
            pieces[-1] = Compute(
                last.what, last.seconds + piece.seconds, last.flops + piece.flops, last.bytes + piece.bytes
            )
        else:
            pieces.append(piece)
    return tuple(pieces)


def _is_sum(piece: Piece) -> bool:
    """Whether a piece after the schedule is a sum of gradients within a stage, or waits for such a sum."""
    return isinstance(piece, Wait) or (isinstance(piece, Communicate) and piece.axis != "pp")


def _may_hide(piece: Piece) -> bool:
    return isinstance(piece, Communicate) and not piece.blocking


class _Buckets:
    """Joins the sums of gradients, and the gathers of parameters, that share a bucket in the program of a stage."""

    def __init__(self) -> None:
        self.joins = False
        self._joined: set[str] = set()

    def filled(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """The pieces with collectives joined up to ``BUCKET_BYTES``. Joined sums run where the last gradient is there,
        joined gathers where the first parameter is read; waits for the others are left out."""
        result: list[Piece | None] = []
        opened: dict[object, int] = {}
        for piece in pieces:
            if isinstance(piece, Wait):
                if piece.what not in self._joined:
                    result.append(piece)
                    opened = {key: at for key, at in opened.items() if _name_of(result[at]) != piece.what}
                continue
            sums = isinstance(piece, Communicate) and piece.what.startswith(REDUCTION)
            if not isinstance(piece, Communicate) or not (sums or _gathers_parameters(piece)):
                result.append(piece)
                continue
            key, self.joins = (piece.collective, piece.axis, piece.blocking), self.joins or sums
            last = result[opened[key]] if key in opened else None
            if not isinstance(last, Communicate) or last.bytes + piece.bytes > BUCKET_BYTES:
                opened[key] = len(result)
                result.append(piece)
            else:
                first, other = (piece, last) if sums else (last, piece)
                self._joined.add(other.what)
                joined = msgspec.structs.replace(first, bytes=last.bytes + piece.bytes)
                result[opened[key]] = None if sums else joined
                if sums:
                    opened[key] = len(result)
                    result.append(joined)
        return tuple(piece for piece in result if piece is not None)


def _name_of(piece: Piece | None) -> str:
    return piece.what if piece is not None else ""


def _gathers_parameters(piece: Communicate) -> bool:
    return piece.collective == "all_gather" and piece.axis in (*DATA_AXES, "ep")


def _before(parts: Sequence[StageWork]) -> tuple[Piece, ...]:
    """The prologue of a stage: the longest of its layers' (layers compute equal values), and the zeroing of all
    gradients."""
    zeroing = [piece for part in parts for piece in part.before if isinstance(piece, Compute) and piece.what == ZEROING]
    rest = [tuple(piece for piece in part.before if piece.what != ZEROING) for part in parts]
    longest = max(rest, key=lambda each: sum(piece.seconds for piece in each if isinstance(piece, Compute)))
    seconds = sum(piece.seconds for piece in zeroing)
    return (*longest, Compute(ZEROING, seconds)) if seconds else longest
