"""The clocks of ranks whose collectives run beside their kernels, as on GPUs.

    kernels      | F    | F    |  wait | F    |
    collectives      | gather         |

The simulator has the same rules. Here, one rank stands for all ranks of a stage.
"""

from collections.abc import Iterable, Sequence

from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate, Compute, Piece, Wait

StagePiece = tuple[int, Piece]
"""A stage, and one of its pieces."""


class RankClocks:
    """The clocks of pipeline rank ``rank``: of its kernels (``now_s``), and of the collectives of each of its groups.
    A collective starts when kernels reach it and the previous collective of its group has ended."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank, self.now_s = fabric, rank, 0.0
        self._free_s: dict[tuple[str, tuple[int, ...]], float] = {}
        self._ends_s: dict[tuple[int, str], float] = {}

    def run(self, stage: int, pieces: Iterable[Piece]) -> "RankClocks":
        """Run pieces of a stage. Kernels wait for a blocking collective, and at a ``Wait`` for the collective of its
        name. A ``Wait`` for a collective that was not started here takes no time."""
        for piece in pieces:
            if isinstance(piece, Compute):
                self.now_s += piece.seconds
            elif isinstance(piece, Wait):
                self.now_s = max(self.now_s, self._ends_s.pop((stage, piece.what), 0.0))
            elif self.fabric.size(piece.axis, self.rank) > 1:
                group = piece.axis, piece.members
                start_s = max(self.now_s, self._free_s.get(group, 0.0))
                end_s = self._free_s[group] = start_s + self.fabric.collective_s(piece, self.rank)
                if piece.blocking:
                    self.now_s = end_s
                else:
                    self._ends_s[stage, piece.what] = end_s
        return self

    def of_stage(self, stage: int) -> "RankClocks":
        """The clocks, if these pieces are those of another stage."""
        streams = self.continued(self.now_s)
        streams._ends_s = {(stage, what): end_s for (_, what), end_s in streams._ends_s.items()}
        return streams

    def continued(self, now_s: float) -> "RankClocks":
        """The clocks, with kernels at ``now_s``. Collectives that no kernel has waited for may still run."""
        streams, later_s = RankClocks(self.fabric, self.rank), now_s - self.now_s
        streams.now_s = now_s
        streams._free_s = {group: end_s + later_s for group, end_s in self._free_s.items()}
        streams._ends_s = {key: end_s + later_s for key, end_s in self._ends_s.items()}
        return streams


def end_together(ranks: Sequence[tuple[RankClocks, Sequence[StagePiece]]]) -> None:
    """Run the pieces of all pipeline ranks. A collective between stages starts when all of its ranks have reached
    it."""
    waiting: dict[int, Communicate] = {}
    left, ready = [iter(pieces) for _, pieces in ranks], list(range(len(ranks)))
    while ready:
        for number in ready:
            for stage, piece in left[number]:
                if isinstance(piece, Communicate) and piece.axis == "pp" and len(ranks) > 1:
                    waiting[number] = piece
                    break
                ranks[number][0].run(stage, [piece])
        ready = []
        for number, piece in sorted(waiting.items()):
            members = piece.members or tuple(range(len(ranks)))
            there = [member for member in members if member in waiting and waiting[member].members == piece.members]
            if number == members[0] and len(there) == len(members):
                streams = [ranks[member][0] for member in members]
                end_s = max(each.now_s for each in streams) + streams[0].fabric.collective_s(piece, number)
                for member, each in zip(members, streams, strict=True):
                    each.now_s = end_s
                    del waiting[member]
                ready += members
    assert not waiting, "stages have different collectives with each other"
