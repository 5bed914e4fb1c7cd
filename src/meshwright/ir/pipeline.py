"""The names of pipeline schedules, and the pipeline ranks on which they place stages."""

from typing import Literal, get_args

import msgspec

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "message-driven"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""The schedules of a pipeline of several ranks."""
V_SHAPED: tuple[ScheduleName, ...] = ("zb-v", "dualpipe-v")
"""Schedules with two chunks per rank. The sequence of stages goes down the ranks and comes back, so that rank 0 has the
first and the last stage."""
CHUNKED: tuple[ScheduleName, ...] = ("interleaved", *V_SHAPED)
"""Schedules with several chunks per rank."""


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of a pipeline and their stages. Each rank holds ``num_chunks`` stages, which are called its chunks.

    For 3 ranks with 2 chunks:

                 interleaved    zb-v, dualpipe-v
        rank 0       0 3              0 5
        rank 1       1 4              1 4
        rank 2       2 5              2 3
    """

    num_ranks: int = 1
    schedule: str = "none"
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return self.num_ranks * self.num_chunks

    @property
    def last_rank(self) -> int:
        """The rank that holds the last stage, and so the loss."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.schedule in V_SHAPED and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in rising order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)
