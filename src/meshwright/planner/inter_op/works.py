"""The works of single layers, and functions that adapt them: to another dp, other names, or codecs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from meshwright.cost.program import HeldBytes
from meshwright.cost.work import Communicate, Compute, Piece, StageWork
from meshwright.ir.layout import Layout
from meshwright.ir.mesh import Mesh

GATHER = "gather of "
"""In the work of layers, the names of gathers of parameters begin with these words."""


class SharedParameter(NamedTuple):
    """A parameter that several priced layers (``layers``) read: its bytes on a rank, and whether it is trained.
    ``parts`` are the numbers of parts into which ZeRO then divides its optimizer state, gradient and values."""

    num_bytes: int
    trained: bool
    layers: tuple[int, ...]
    parts: tuple[int, int, int] = (1, 1, 1)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradient on a rank; 0 if it is not trained."""
        return self.num_bytes // self.parts[1] if self.trained else 0

    def held_bytes(self, states: int, accumulates: bool) -> int:
        """The bytes of its values, of ``states`` values of the optimizer for each, and with ``accumulates`` of its
        gradient."""
        state = states * self.num_bytes // self.parts[0] if self.trained else 0
        return self.num_bytes // self.parts[2] + state + accumulates * self.gradient_bytes


class LayerFacts(NamedTuple):
    """Facts about a layer that a stage needs in addition to the layer's work.

    ``held`` has the bytes that the layer holds for the whole step, by kind. ``trained_bytes`` counts its trained
    parameters, ``largest_bytes`` the largest of them, and ``experts_bytes`` those that are divided over ep. ``casts``
    is the part of the prologue that depends on the layer's parameters: casts, and copies of gathered parameters.
    ``up_bytes`` and ``down_bytes`` are the bytes of the whole tensors that the layer sends to the next and to the
    previous layer, for one micro-batch of all ranks.
    """

    held: HeldBytes
    trained_bytes: int
    largest_bytes: int
    experts_bytes: int
    casts: Compute
    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(frozen=True, eq=False)
class LayerWorks:
    """The work of a chain's priced layers in one layout, with each layer as a separate stage.

    ``shared`` has the parameters that several layers read, by name. ``terms`` maps the terms of their gradients to
    these parameters. ``offloads``: optimizer state is kept on the host. ``mesh`` is the mesh of the pipeline in which
    each layer is a stage.
    """

    works: tuple[StageWork, ...]
    facts: tuple[LayerFacts, ...]
    shared: dict[str, SharedParameter]
    terms: dict[str, str]
    heap_factor: float
    offloads: bool
    mesh: Mesh


def derived(base: LayerWorks, base_dp: int, layout: Layout) -> LayerWorks:
    """The works of ``layout``, derived from ``base``, which has equal micro-batches per rank but another dp."""
    share = base_dp / layout.dp
    facts = tuple(
        fact._replace(
            held=msgspec.structs.replace(
                fact.held,
                prologue_bytes=round(fact.held.prologue_bytes * share),
                inputs_bytes=round(fact.held.inputs_bytes * share),
            ),
            up_bytes=round(fact.up_bytes / share),
            down_bytes=round(fact.down_bytes / share),
        )
        for fact in base.facts
    )
    works = base.works if layout.dp > 1 else tuple(map(_without_dp, base.works))
    return replace(base, works=works, facts=facts, mesh=layout.mesh())


def divided_state(works: LayerWorks, dp: int, zero: int, *, once: bool) -> LayerWorks:
    """The works of a layout without ZeRO, in which ranks hold only the parts of the state that a ZeRO stage leaves
    them. ``once``: the step has one micro-batch. Each gradient is then reduced immediately, and a rank keeps only its
    part."""
    state, gradients, values = (dp if zero >= stage else 1 for stage in (1, 1 if once else 2, 3))
    facts = tuple(
        fact._replace(
            held=msgspec.structs.replace(
                fact.held,
                optimizer_bytes=fact.held.optimizer_bytes // state,
                gradients_bytes=fact.held.gradients_bytes // gradients,
                parameters_bytes=fact.held.parameters_bytes // values,
                gathered_bytes=fact.held.gathered_bytes if zero < 3 else 0,
            ),
            trained_bytes=fact.trained_bytes // gradients,
        )
        for fact in works.facts
    )
    shared = {name: each._replace(parts=(state, gradients, values)) for name, each in works.shared.items()}
    return replace(works, facts=facts, shared=shared)


def renamed(work: StageWork, names: Mapping[str, str]) -> StageWork:
    """The work of a layer, in which collectives with the labels in ``names`` get other names."""

    def named(piece: Piece) -> Piece:
        name = None if isinstance(piece, Compute) else names.get(piece.what.partition(" #")[0])
        return piece if name is None else msgspec.structs.replace(piece, what=name)

    return every_piece(work, named)


def every_piece(work: StageWork, changed: Callable[[Piece], Piece]) -> StageWork:
    """The work with ``changed`` applied to every piece."""
    pieces = {kind: tuple(map(changed, each)) for kind, each in work.pieces.items()}
    before, after = tuple(map(changed, work.before)), tuple(map(changed, work.after))
    return msgspec.structs.replace(work, pieces=pieces, before=before, after=after)


def _without_dp(work: StageWork) -> StageWork:
    """The work of a layer if there is only one data-parallel rank, so that nothing is summed over dp."""
    pieces_of_stage = (*work.before, *work.after, *(piece for pieces in work.pieces.values() for piece in pieces))
    gone = {piece.what for piece in pieces_of_stage if isinstance(piece, Communicate) and piece.axis == "dp"}

    def left(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces if isinstance(piece, Compute) or piece.what not in gone)

    pieces = {kind: left(each) for kind, each in work.pieces.items()}
    return msgspec.structs.replace(work, pieces=pieces, before=left(work.before), after=left(work.after))


def without_host(piece: Piece) -> Piece:
    """The piece with kernels whose launch takes no time."""
    if not isinstance(piece, Compute):
        return piece
    return msgspec.structs.replace(piece, seconds=piece.device_s, host_s=0.0)


def may_hide(piece: Piece) -> bool:
    """Whether kernels can run while the piece communicates."""
    return isinstance(piece, Communicate) and not piece.blocking
