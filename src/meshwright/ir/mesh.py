"""The mesh: named axes over ranks, which define every group of ranks that communicates."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from meshwright.errors import LayoutError, Problem, refuse

JOIN = "+"
"""The sign between the names of neighbouring axes that communicate as one joined axis: ``dp+tp``."""


def members(axis: str) -> tuple[str, ...]:
    """The names of the axes in a joined axis: ``dp+tp`` gives ``dp`` and ``tp``. A single axis gives its own name."""
    return tuple(axis.split(JOIN))


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named axis with coordinates 0 to ``size`` - 1."""

    name: str
    size: int


class AxisGroup(msgspec.Struct, frozen=True):
    """The ranks whose coordinates differ from this rank's coordinates only on one axis (or on joined axes).

    ``index`` is this rank's position in the group. ``algorithm`` is the algorithm of the group's collectives.

    If the stages of a pipeline differ (``Mesh.stages``), the group of ``pp`` holds all ranks. ``size`` is then the
    number of stages, ``index`` is this rank's stage, and ``firsts`` has the first rank of every stage."""

    name: str
    size: int
    index: int
    algorithm: str = "native"
    firsts: tuple[int, ...] = ()


def sizes_of(groups: Mapping[str, AxisGroup]) -> tuple[dict[str, int], dict[str, int]]:
    """Two dicts: from each axis to its size, and from each axis to this rank's index on it."""
    return {axis: group.size for axis, group in groups.items()}, {axis: group.index for axis, group in groups.items()}


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Ranks 0 to ``world_size`` - 1 laid out along axes, outermost first. Ranks along the last axis are consecutive.

        Mesh.of(pp=2, dp=2, tp=2)         tp 0  tp 1
                             pp 0  dp 0      0     1
                                   dp 1      2     3
                             pp 1  dp 0      4     5
                                   dp 1      6     7

    With expert parallelism, ``Layout.mesh`` lays the data-parallel ranks out along two axes. The inner axis ``ep``
    divides the experts. The outer axis ``dp`` then has only the size ``layout.dp / layout.ep``.

    If the stages of a pipeline differ, ``stages`` has the mesh of each of them, and ``axes`` has only ``pp``. The ranks
    of a stage are consecutive:

        Mesh.of_stages(({"dp": 1}, {"dp": 3}))        dp 0  dp 1  dp 2
                                                pp 0     0
                                                pp 1     1     2     3

    All ranks are then one group along ``pp``. Along another axis, a rank whose stage lacks the axis is a group of its
    own.

    Raises:
        LayoutError: a size is below 1, or a name is empty or used twice, or ``stages`` do not match ``axes``.
    """

    axes: tuple[Axis, ...] = ()
    stages: "tuple[Mesh, ...]" = ()

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for index, axis in enumerate(self.axes):
            if not axis.name.isidentifier():
                yield f"axes[{index}].name", f"{axis.name!r} is not a name", "use a word such as dp or tp"
            if axis.name in self.names[:index]:
                yield f"axes[{index}].name", f"two axes are called {axis.name!r}", "name each axis once"
            if axis.size < 1:
                yield f"axes[{index}].size", f"axis {axis.name!r} has size {axis.size}", "give 1 or more"
        if self.stages and self.axes != (Axis("pp", len(self.stages)),):
            problem = f"{len(self.stages)} stages on the axes {self.sizes}"
            yield "stages", problem, "give one axis, pp, whose size is the number of stages"
        if any(stage.stages or stage.has("pp") for stage in self.stages):
            yield "stages", "a stage has stages of its own", "give each stage the axes of one stage"

    @classmethod
    def of(cls, **sizes: int) -> "Mesh":
        """The mesh with these axes, outermost first: ``Mesh.of(pp=2, dp=4, tp=8)``."""
        return cls(tuple(Axis(name, size) for name, size in sizes.items()))

    @classmethod
    def of_stages(cls, stages: Sequence[Mapping[str, int]]) -> "Mesh":
        """The mesh of a pipeline whose stages differ. ``stages`` has the sizes of the axes of each stage."""
        return cls((Axis("pp", len(stages)),), tuple(cls.of(**sizes) for sizes in stages))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Maps the name of each axis to its size, outermost first."""
        return {axis.name: axis.size for axis in self.axes}

    @cached_property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._starts[-1] if self.stages else math.prod(axis.size for axis in self.axes)

    @property
    def num_stages(self) -> int:
        """The size of ``pp``; 1 without this axis."""
        return self.size("pp") if self.has("pp") else 1

    def submesh(self, stage: int) -> "Mesh":
        """The mesh of the ranks with coordinate ``stage`` on ``pp``."""
        return self.stages[stage] if self.stages else Mesh(tuple(axis for axis in self.axes if axis.name != "pp"))

    def stage_ranks(self, stage: int) -> range:
        """The ranks with coordinate ``stage`` on ``pp``, which must be the outermost axis."""
        if self.stages:
            return range(self._starts[:-1][stage], self._starts[1:][stage])
        each = self.world_size // self.num_stages
        return range(stage * each, (stage + 1) * each)

    def linked_ranks(self, rank: int, stage: int) -> tuple[int, ...]:
        """The ranks of ``stage`` that hold the same part of the batch as ``rank``, if each stage divides its batch
        evenly over its ranks. With equal stages, this is the rank with the same other coordinates."""
        own, other = self.stage_ranks(self.coordinates(rank).get("pp", 0)), self.stage_ranks(stage)
        place, count, other_count = rank - own.start, len(own), len(other)
        first, last = place * other_count // count, -(-(place + 1) * other_count // count)
        return tuple(other[first:last])

    def has(self, axis: str) -> bool:
        """Whether the mesh has this axis, or every axis of a joined axis."""
        return set(members(axis)) <= set(self.names)

    def size(self, *names: str) -> int:
        """The product of the sizes of these axes, which may be joined axes."""
        single = [member for name in names for member in members(name)]
        self._known(single)
        return math.prod(axis.size for axis in self.axes if axis.name in single)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on every axis."""
        if not 0 <= rank < self.world_size:
            raise self._refused(f"there is no rank {rank}", f"its ranks are 0 to {self.world_size - 1}")
        if self.stages:
            stage = bisect.bisect_right(self._starts, rank) - 1
            return {"pp": stage, **self.stages[stage].coordinates(rank - self._starts[stage])}
        coordinates = {}
        for axis in reversed(self.axes):
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return {name: coordinates[name] for name in self.names}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates. Every axis needs a coordinate."""
        if self.stages and 0 <= (stage := coordinates.get("pp", -1)) < len(self.stages):
            own = {name: coordinate for name, coordinate in coordinates.items() if name != "pp"}
            return self.stage_ranks(stage).start + self.stages[stage].rank_of(own)
        self._known(coordinates)
        rank = 0
        for axis in self.axes:
            if axis.name not in coordinates:
                raise self._refused(f"no coordinate on axis {axis.name!r}", "give one for every axis")
            coordinate = coordinates[axis.name]
            if not 0 <= coordinate < axis.size:
                problem = f"axis {axis.name!r} has no coordinate {coordinate}"
                raise self._refused(problem, f"its coordinates are 0 to {axis.size - 1}")
            rank = rank * axis.size + coordinate
        return rank

    def ranks_at(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """All ranks with these coordinates on these axes: ``ranks_at({"pp": 1})`` returns the ranks of stage 1."""
        if self.stages:
            places = ((rank, self.coordinates(rank)) for rank in range(self.world_size))
            return tuple(rank for rank, at in places if coordinates.items() <= at.items())
        ranks = [self.rank_of(dict.fromkeys(self.names, 0) | dict(coordinates))]
        for axis, stride in zip(self.axes, self._strides(), strict=True):
            if axis.name not in coordinates:
                ranks = [rank + index * stride for rank in ranks for index in range(axis.size)]
        return tuple(ranks)

    def group_ranks(self, axis: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks with the coordinates of ``rank`` on all axes except ``axis``, in rising order."""
        varying = members(axis) if isinstance(axis, str) else tuple(axis)
        coordinates = self.coordinates(rank)
        self._known_in_a_stage(varying)
        if self.stages:
            return self._ranks_around(varying, rank, coordinates["pp"])
        return self.ranks_at({name: coordinates[name] for name in self.names if name not in varying})

    def groups(self, axis: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks along ``axis`` (one or more axes), in order of their first ranks."""
        varying = members(axis) if isinstance(axis, str) else tuple(axis)
        self._known_in_a_stage(varying)
        if self.stages:
            return tuple(dict.fromkeys(self.group_ranks(varying, rank) for rank in range(self.world_size)))
        return tuple(self.group_ranks(varying, first) for first in self.ranks_at(dict.fromkeys(varying, 0)))

    def __str__(self) -> str:
        text = " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "of one rank"
        return text + f" of {', '.join(f'({stage})' for stage in self.stages)}" * bool(self.stages)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first rank of each stage, and the number of all ranks, if stages differ."""
        return tuple(itertools.accumulate((stage.world_size for stage in self.stages), initial=0))

    def _ranks_around(self, varying: Sequence[str], rank: int, stage: int) -> tuple[int, ...]:
        """The group of a rank along ``varying`` axes, if stages differ."""
        if "pp" in varying:
            return tuple(range(self.world_size))
        submesh, first = self.stages[stage], self.stage_ranks(stage).start
        if not submesh.has(JOIN.join(varying)):
            return (rank,)
        return tuple(first + other for other in submesh.group_ranks(varying, rank - first))

    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(inner.size for inner in self.axes[index + 1 :]) for index in range(len(self.axes)))

    def _known_in_a_stage(self, names: Sequence[str]) -> None:
        known = dict.fromkeys([*self.names, *(name for stage in self.stages for name in stage.names)])
        for name in names:
            if name not in known:
                raise self._refused(f"there is no axis {name!r}", f"its axes are {', '.join(known) or 'none'}")

    def _known(self, names: Sequence[str] | Mapping[str, int]) -> None:
        for name in names:
            if name not in self.names:
                raise self._refused(f"there is no axis {name!r}", f"its axes are {', '.join(self.names) or 'none'}")

    def _refused(self, problem: str, remedy: str) -> LayoutError:
        return LayoutError(problem, where=f"mesh {self}", remedy=remedy)
