"""Assemble the work of stages from the work of layers."""

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import CHUNK_BYTES, ZEROING
from meshwright.cost.work import ActionBytes, Communicate, Compute, Piece, StageWork, StepWork, Wait, launched
from meshwright.ir.mesh import Mesh
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.plan import REDUCTION
from meshwright.ir.schedule import ActionKind
from meshwright.planner.buckets import BUCKET_BYTES
from meshwright.planner.inter_op.piece_codecs import PieceCodecs, is_reduction
from meshwright.planner.inter_op.works import GATHER, LayerFacts, LayerWorks, SharedParameter, every_piece, renamed

_REDUCE = ActionKind.REDUCE_GRAD.value
_LATE = (ActionKind.B.value, ActionKind.I.value, ActionKind.W.value, _REDUCE)
"""The kinds of actions in which a stage runs its layers in reverse order."""


class JoinedPieces(NamedTuple):
    """The pieces of work of a stage that consists of several layers. ``ends`` are the sums of gradients after the
    schedule. ``update`` updates the parameters of all layers. ``bucket_bytes`` is the size of buckets of gradients; 0:
    gradients are not summed over ranks."""

    works: tuple[StageWork, ...]
    pieces: dict[str, tuple[Piece, ...]]
    before: tuple[Piece, ...]
    ends: tuple[Piece, ...]
    update: Compute
    bucket_bytes: int


Known = dict[object, JoinedPieces]
"""Cache of joined pieces. It helps because many layouts have stages with the same layers."""


def assemble(
    variants: Sequence[LayerWorks], stages: Sequence[Sequence[int]], pipeline: Pipeline, optimizer: OptimizerCost,
    *, accumulates: bool, known: Known | None = None, codecs: PieceCodecs | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> StepWork:  # fmt: skip
    """The work of a step whose stages consist of the given priced layers. ``variants`` has the layer works of each
    stage.

    ``accumulates``: gradients are summed over several micro-batches. Otherwise, the gradient of a layer lives only from
    the layer's backward on, when the saved values of later layers are already free. ``known`` has the pieces that
    earlier calls joined. ``codecs`` chooses the codecs for sums of gradients. Buckets have at most ``bucket_bytes``.
    """
    before = known if known is not None else {}
    shared = variants[0].shared
    ranks_of = {
        name: tuple(sorted({
            pipeline.rank_of(stage)
            for stage, layers in enumerate(stages)
            if not set(layers).isdisjoint(parameter.layers)
        }))
        for name, parameter in shared.items()
    }  # fmt: skip
    own = {name for name, ranks in ranks_of.items() if len(ranks) < 2}
    assembled: dict[object, StageWork] = {}
    result = []
    for number, (works, layers) in enumerate(zip(variants, stages, strict=True)):
        rank, count = pipeline.rank_of(number), pipeline.num_ranks
        first, last = number < count, number + count >= len(stages)
        key = (works, tuple(layers), first, last, rank if last else -1)
        if key not in assembled:
            same = id(works.works), tuple(layers), frozenset(own), bucket_bytes
            if same not in before:
                before[same] = _pieces_of(works, layers, own, _Buckets(works.mesh, codecs, bucket_bytes))
            stage = _joined(works, layers, before[same], optimizer, first_chunk=first, accumulates=accumulates)
            if count > 1 and last:
                ends = [
                    Communicate(
                        f"gradient of {name} of all stages", "all_reduce", "pp", shared[name].num_bytes, members=ranks
                    )
                    for name, ranks in ranks_of.items()
                    if len(ranks) > 1 and rank in ranks and shared[name].trained
                ]
                loss_pieces = [piece for piece in works.works[-1].after if _tells_loss(piece)]
                stage = msgspec.structs.replace(stage, after=(*ends, *loss_pieces, *stage.after))
            assembled[key] = stage
        result.append(assembled[key])
    return StepWork(tuple(result), variants[0].heap_factor)


def _tells_loss(piece: Piece) -> bool:
    return isinstance(piece, Communicate) and piece.collective == "broadcast"


def _pieces_of(works: LayerWorks, layers: Sequence[int], own: Container[str], buckets: "_Buckets") -> JoinedPieces:
    """The pieces of a stage of several layers. ``own`` are the shared parameters that no other stage reads."""
    parts = [_named(work, number) for number, work in enumerate(_with_one_sum(works, layers, own))]
    return JoinedPieces(
        works=works.works,
        pieces={kind: launched(buckets.filled(_in_order(parts, kind))) for kind in parts[0].pieces},
        ends=buckets.filled(piece for part in reversed(parts) for piece in part.after if is_sum(piece)),
        before=launched(_before(parts, [works.facts[layer] for layer in layers], buckets)),
        update=_update([_computing("update", part.after) for part in parts]),
        bucket_bytes=buckets.num_bytes if buckets.has_sums else 0,
    )


def _joined(
    works: LayerWorks, layers: Sequence[int], joined: JoinedPieces, optimizer: OptimizerCost, *, first_chunk: bool,
    accumulates: bool,
) -> StageWork:  # fmt: skip
    """The work of a stage of several layers, whose pieces are known."""
    facts = [works.facts[layer] for layer in layers]
    parts = [works.works[layer] for layer in layers]
    repeated = _repeated(works, layers)
    saved, workspace = sum(part.saved_bytes for part in parts), max(part.workspace_bytes for part in parts)
    trained = sum(fact.trained_bytes for fact in facts)
    trained_once = trained - sum(shared.gradient_bytes * more for shared, more in repeated)
    if not accumulates:
        workspace = _most_bytes(parts, facts, trained_once, joined.bucket_bytes) - saved
    return StageWork(
        pieces=joined.pieces,
        before=joined.before,
        after=launched((*joined.ends, _scaled(joined.update, trained_once / trained if trained else 1))),
        sent_up_bytes=parts[-1].sent_up_bytes,
        sent_down_bytes=parts[0].sent_down_bytes,
        saved_bytes=saved,
        held_bytes=_held_bytes(works, facts, repeated, optimizer, first_chunk),
        workspace_bytes=max(0, workspace),
        actions=_split_backward(parts) if accumulates and parts[0].sent_down_bytes else {},
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def _repeated(works: LayerWorks, layers: Sequence[int]) -> list[tuple[SharedParameter, int]]:
    """The parameters that several layers of a stage read, with the number of these layers beyond the first."""
    readers = [(shared, sum(layer in shared.layers for layer in layers)) for shared in works.shared.values()]
    return [(shared, count - 1) for shared, count in readers if count > 1]


def _held_bytes(
    works: LayerWorks, facts: Sequence[LayerFacts], repeated: Sequence[tuple[SharedParameter, int]],
    optimizer: OptimizerCost, first_chunk: bool,
) -> int:  # fmt: skip
    """The bytes that a stage holds for the whole step. A parameter that several layers read is counted once; the same
    holds for values of the prologue and for inputs."""
    held = [fact.held for fact in facts]
    states = sum(each.optimizer_bytes for each in held)
    if works.offloads:  # two chunks of the state are on the device
        state_bytes = sum(fact.trained_bytes for fact in facts) * optimizer.states
        states = min(state_bytes, 2 * max(CHUNK_BYTES, *(fact.largest_bytes for fact in facts)) * optimizer.states)
    total = states + max(each.prologue_bytes for each in held)
    total += max(each.inputs_bytes for each in held) if first_chunk else 0
    total += sum(
        each.parameters_bytes + each.gathered_bytes + each.gradients_bytes + each.buffers_bytes for each in held
    )
    on_device = 0 if works.offloads else optimizer.states
    accumulates = any(each.gradients_bytes for each in held)
    return total - sum(shared.held_bytes(on_device, accumulates) * more for shared, more in repeated)


def _most_bytes(parts: Sequence[StageWork], facts: Sequence[LayerFacts], total: int, bucket_bytes: int) -> int:
    """The largest number of bytes of saved values, gradients and workspace while a stage runs backward for its only
    micro-batch. ``total`` is the bytes of all gradients. A bucket exists from its first gradient on."""
    saved = sum(part.saved_bytes for part in parts)
    most, gradients = 0, bucket_bytes
    for part, fact in zip(reversed(parts), reversed(facts), strict=True):
        gradients += fact.trained_bytes
        most = max(most, min(gradients, total) + saved + part.workspace_bytes)
        saved -= part.saved_bytes
    return most


def _split_backward(parts: Sequence[StageWork]) -> dict[str, ActionBytes]:
    """The memory of the two parts of a split backward. Between them, a micro-batch keeps all that gradients of
    parameters still need, and gradients that a kernel makes together with those of its inputs, as experts do. A stage
    that sends no gradients, the first, does all of its backward in the second part."""
    saved = live = sum(part.saved_bytes for part in parts)
    most = late = 0
    for part in reversed(parts):
        memory = part.memory_of("I")
        most = max(most, live - part.saved_bytes + memory.most_bytes)
        live += memory.left_bytes - part.saved_bytes
    kept = live
    for part in reversed(parts):
        memory = part.memory_of("W")
        late = max(late, live - memory.taken_bytes + memory.most_bytes)
        live -= memory.taken_bytes
    return {"I": ActionBytes(saved, most, kept), "W": ActionBytes(kept, late, 0)}


# --- pieces ----------------------------------------------------------------------------------------------------------


def _named(work: StageWork, number: int) -> StageWork:
    """The work of layer ``number`` of a stage, with unique names for its collectives."""
    return every_piece(
        work,
        lambda piece: (
            piece if isinstance(piece, Compute) else msgspec.structs.replace(piece, what=f"{piece.what}, {number}")
        ),
    )


def _with_one_sum(works: LayerWorks, layers: Sequence[int], own: Container[str]) -> list[StageWork]:
    """The layers of a stage, with a single sum over ranks for shared parameters that only this stage reads (``own``).
    The terms of such a gradient are added first, and then summed over ranks once, in a bucket. Terms in different
    stages are summed separately."""
    result = [works.works[layer] for layer in layers]
    for name, parameter in works.shared.items():
        labels = [label for label, of in works.terms.items() if of == name and name in own]
        readers = [number for number, layer in enumerate(layers) if layer in parameter.layers and labels]
        for number in readers[1:]:
            result[number] = _without(result[number], labels)
        for number in readers[:1]:  # backward reaches this layer last
            result[number] = renamed(result[number], dict.fromkeys(labels, REDUCTION + name))
    return result


def _without(work: StageWork, labels: Container[str]) -> StageWork:
    """The work of a layer without the collectives that have these labels."""

    def left(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if piece.what.partition(" #")[0] not in labels)

    pieces = {kind: left(each) for kind, each in work.pieces.items()}
    return msgspec.structs.replace(work, pieces=pieces, after=left(work.after))


def _in_order(parts: Sequence[StageWork], kind: str) -> tuple[Piece, ...]:
    """The pieces of all layers in the order in which a stage runs them."""
    order = reversed(parts) if kind in _LATE else parts
    pieces: list[Piece] = []
    for piece in chain.from_iterable(part.pieces[kind] for part in order):
        if pieces and isinstance(piece, Compute) and isinstance(last := pieces[-1], Compute):
            pieces[-1] = last + piece
        else:
            pieces.append(piece)
    return tuple(pieces)


def is_sum(piece: Piece) -> bool:
    """Whether a piece after the schedule is a sum of gradients within a stage, or waits for such a sum."""
    return isinstance(piece, Wait) or (isinstance(piece, Communicate) and piece.axis != "pp")


def _before(parts: Sequence[StageWork], facts: Sequence[LayerFacts], buckets: "_Buckets") -> tuple[Piece, ...]:
    """The prologue of a stage: the gathers and casts of all layers' parameters, the zeroing of all gradients, and the
    other work of the layer with the longest prologue. The layers share this work, because their values are equal."""
    gathers = buckets.filled(piece for part in parts for piece in part.before if piece.what.startswith(GATHER))
    rest = [
        tuple(
            piece for piece in part.before
            if not isinstance(piece, Compute) and not piece.what.startswith(GATHER)
        )
        for part in parts
    ]  # fmt: skip
    computing = [_computing("prologue", (piece for piece in part.before if piece.what != ZEROING)) for part in parts]
    alike_s, launch_s = (
        max(0.0, *(getattr(every, of) - getattr(fact.casts, of) for every, fact in zip(computing, facts, strict=True)))
        for of in ("device_s", "launch_s")
    )
    prologue = _computing(
        "prologue", [Compute("prologue", alike_s, launch_s=launch_s), *(fact.casts for fact in facts)]
    )
    zeroing = _computing(ZEROING, (piece for part in parts for piece in part.before if piece.what == ZEROING))
    computed = tuple(piece for piece in (prologue, zeroing) if piece.seconds or piece.launch_s)
    return (*gathers, *max(rest, key=len), *computed)


def _computing(what: str, pieces: Iterable[Piece]) -> Compute:
    """All computing pieces as one piece. The time that it waits for the host is added later."""
    computing = [piece for piece in pieces if isinstance(piece, Compute)]
    launch_s = sum(piece.launch_s for piece in computing)
    return Compute(what, sum(piece.device_s for piece in computing), launch_s=launch_s)


def _update(updates: Sequence[Compute]) -> Compute:
    """One update for the parameters of all layers. Its kernels are launched once for all layers."""
    device_s = sum(update.device_s for update in updates)
    return Compute("update", device_s, launch_s=max(update.launch_s for update in updates))


def _scaled(piece: Compute, factor: float) -> Compute:
    """The update of a fraction of the parameters."""
    return Compute(piece.what, factor * piece.seconds, launch_s=piece.launch_s)


class _Buckets:
    """Joins sums of gradients, or gathers of parameters, that share a bucket in the program of a stage. ``has_sums``:
    at least one sum was joined. Each joined sum uses the best codec of ``codecs``."""

    def __init__(self, mesh: Mesh, codecs: PieceCodecs | None, num_bytes: int) -> None:
        self.has_sums, self.num_bytes = False, num_bytes
        self._mesh, self._codecs = mesh, codecs
        self._joined: set[str] = set()

    def filled(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """The pieces, with collectives joined up to ``num_bytes``. A joined sum runs where its last gradient is
        ready, and a joined gather where its first parameter is read. The waits of the joined collectives are left
        out."""
        result: list[Piece | None] = []
        opened: dict[object, int] = {}
        for piece in pieces:
            if isinstance(piece, Wait):
                if piece.what not in self._joined:
                    result.append(piece)
                    opened = {key: at for key, at in opened.items() if _name_of(result[at]) != piece.what}
                continue
            sums = is_reduction(piece)
            if not isinstance(piece, Communicate) or not (sums or piece.what.startswith(GATHER)):
                result.append(piece)
                continue
            self.has_sums = self.has_sums or sums
            key = (sums, piece.collective, piece.axis, piece.blocking)
            last = result[opened[key]] if key in opened else None
            if not isinstance(last, Communicate) or last.bytes + piece.bytes > self.num_bytes:
                opened[key] = len(result)
                result.append(piece)
                continue
            first, other = (piece, last) if sums else (last, piece)
            self._joined.add(other.what)
            joined = msgspec.structs.replace(first, bytes=last.bytes + piece.bytes)
            if sums:
                result[opened[key]] = None
                opened[key] = len(result)
                result.append(joined)
            else:
                result[opened[key]] = joined
        kept = (piece for piece in result if piece is not None)
        return tuple(kept if self._codecs is None else (self._codecs.best(piece, self._mesh) for piece in kept))


def _name_of(piece: Piece | None) -> str:
    return piece.what if piece is not None else ""
