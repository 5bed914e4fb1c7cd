"""Chooses codecs for the sums of gradients that a search prices."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TypeGuard

import msgspec

from meshwright.cost.closed_form import pieces_s
from meshwright.cost.coded import coded_s
from meshwright.cost.collective import Network
from meshwright.cost.fabric import axis_group
from meshwright.cost.work import CodedElements, Communicate, Piece, StageWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import CANDIDATES
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.mesh import Mesh, members
from meshwright.ir.plan import REDUCTION
from meshwright.ir.program import CollectiveKind
from meshwright.planner.algorithms import in_a_box
from meshwright.planner.codecs import BucketCodecs, exact_codecs


class PieceCodecs:
    """Finds the codec, or no codec, with which a sum of gradients takes the least time.

    ``item_bytes`` is the size of a gradient's element. In the final plan, no bucket is summed faster than this, because
    ``bucket_size.fit_buckets`` chooses among the same codecs. Factors of dense layers (``factor_choice``) are not
    considered.
    """

    def __init__(self, cluster: Cluster, item_bytes: int) -> None:
        self.cluster, self.network, self.item_bytes = cluster, Network(cluster), item_bytes
        self._codecs: dict[Mesh, BucketCodecs] = {}
        self._known: dict[tuple[Mesh, str, str, int], CodedElements | None] = {}

    def best(self, piece: Piece, mesh: Mesh) -> Piece:
        """The piece with the codec that makes it fastest. A piece stays unchanged unless it sums gradients over
        data-parallel ranks in different boxes."""
        if not is_reduction(piece):
            return piece
        key = mesh, piece.axis, piece.collective, piece.bytes
        if key not in self._known:
            self._known[key] = self._coding(piece, mesh)
        return msgspec.structs.replace(piece, coding=self._known[key])

    def least_s(self, layers: Sequence[StageWork], mesh: Mesh) -> float:
        """A lower bound on the seconds of the layers' sums of gradients: the time of one bucket with all gradients. It
        is a bound because the time of a collective grows at most in proportion to its bytes."""
        whole: Counter[tuple[CollectiveKind, str]] = Counter()
        for work in layers:
            for piece in filter(is_reduction, (*chain.from_iterable(work.pieces.values()), *work.after)):
                whole[piece.collective, piece.axis] += piece.bytes
        joined = [self.best(Communicate(REDUCTION, kind, axis, size), mesh) for (kind, axis), size in whole.items()]
        return pieces_s(joined, mesh, self.network)

    def _coding(self, piece: Communicate, mesh: Mesh) -> CodedElements | None:
        if {*members(piece.axis)}.isdisjoint(DATA_AXES) or in_a_box(mesh, piece.axis, self.cluster):
            return None
        group = axis_group(mesh, piece.axis, piece.members)
        least_s, best = self.network.collective_s(piece.collective, piece.bytes, group), None
        codecs = self._codecs.setdefault(mesh, BucketCodecs(mesh, self.cluster, self.item_bytes))
        for text in (*exact_codecs(self.cluster), *CANDIDATES):
            algorithm = codecs.algorithm(text, piece.axis, piece.collective, piece.bytes)
            elements = CodedElements(text, algorithm, self.item_bytes)
            seconds = coded_s(self.network, piece.collective, piece.bytes, group, elements)
            if seconds < least_s:
                least_s, best = seconds, elements
        return best


def is_reduction(piece: Piece) -> TypeGuard[Communicate]:
    """Whether a piece sums gradients of parameters over ranks."""
    return isinstance(piece, Communicate) and piece.what.startswith(REDUCTION)
