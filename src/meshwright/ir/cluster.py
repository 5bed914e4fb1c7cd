"""The cluster: its devices, the nested levels that join them, and the measured times of collectives."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import msgspec

from meshwright.errors import ClusterError, Problem, refuse
from meshwright.ir.device import Device, Origin, device_problems, quantity_problems
from meshwright.ir.software import Software, software_problems

Operation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
    "reduce", "scatter", "gather", "barrier", "send",
]  # fmt: skip

MOST_DEVICES = 1_000_000
"""The largest number of devices in a cluster. The largest real clusters have a few hundred thousand."""
NETWORK = "network"
"""The name that calibration gives to the level between boxes. It is the innermost level if each box has one rank."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``count`` equal units of a level whose units are not all equal.

    ``levels`` are the levels inside each of these units, innermost first. ``device`` is the device in these units; if
    it is None, they have the cluster's device."""

    count: int = 1
    device: Device | None = None
    levels: "tuple[Level, ...]" = ()


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One level of the topology. It joins ``fan_out`` units of the level below; the innermost level joins devices.

    ``alpha_s`` and ``beta_s_per_byte`` describe one message between two units, over one link in one direction.
    Each unit has ``links`` equal links into the level. The devices of the unit share these links. ``rings`` is for an
    innermost level without a switch. Its entries are the fractions of the full rate that collectives over 2, 3, ...
    devices reach. The last entry holds for all larger numbers of devices. Without entries, all collectives reach the
    full rate. ``contention`` (at least 1) multiplies ``beta_s_per_byte`` if all units send at once, for example through
    an oversubscribed switch. ``origin`` says where alpha and beta come from. ``members`` describes the units if they
    are not all equal. A level with ``members`` must be the first in its ``levels``, because its members describe
    everything below it."""

    name: str
    fan_out: int
    alpha_s: float
    beta_s_per_byte: float
    links: int = 1
    contention: float = 1.0
    rings: tuple[float, ...] = ()
    source: str = ""
    origin: Origin = "given"
    members: tuple[Member, ...] = ()

    def ring_fraction(self, devices: int) -> float:
        """The fraction of the full rate that a collective over ``devices`` devices (2 or more) reaches."""
        return self.rings[min(devices - 2, len(self.rings) - 1)] if self.rings else 1.0

    def shared_beta_s_per_byte(self, senders: int) -> float:
        """The seconds per byte of each sender if ``senders`` devices of every unit send over the level at once."""
        return self.beta_s_per_byte * self.contention * max(1.0, senders / self.links)


class CollectiveTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The measured time of a collective over ``ranks`` ranks joined by ``level``.

    ``algorithm`` is the name of the algorithm or library. ``bytes`` is the size of the whole vector on one rank, not
    the traffic on a link. If several levels join the ranks, ``fan_outs`` has the number of units joined at each level,
    innermost first: (2, 4) means 2 ranks in each of 4 boxes."""

    operation: Operation
    algorithm: str
    level: str
    ranks: int
    bytes: int
    time_s: float
    fan_outs: tuple[int, ...] = ()


class CodecTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured times of a codec: seconds per byte of elements, for encoding and for decoding."""

    codec: str
    encode_s_per_byte: float
    decode_s_per_byte: float


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and where the values of a cluster file were measured.

    The file is valid for this ``machine`` and this version of ``torch``. ``time_s`` is the time of the measurement, in
    seconds since 1970. ``spread`` is the fraction by which the elapsed time of calls exceeds their processor time. It
    is 0 on a machine without other load. ``drift`` is the standard deviation of the time of the same call during the
    calibration, as a fraction of its mean. Predictions may be wrong by this fraction."""

    machine: str
    torch: str
    time_s: float
    spread: float
    drift: float = 0.0


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Devices and the nested levels that join them, innermost first.

    Devices of one innermost unit have consecutive ranks. ``num_devices`` must equal the number of devices that the
    levels join. If ``open_ended`` is true, the outermost level may join any number of units. Such a cluster describes
    a kind of machine, not one installation. ``software`` is the training software that runs on it.

    Raises:
        ClusterError: a number is impossible, or names or sizes contradict each other.
    """

    VERSION: ClassVar[int] = 1
    version: int = msgspec.field(default_factory=lambda: 1)  # omit_defaults would drop a plain default from the file
    name: str
    num_devices: int
    open_ended: bool = False
    source: str = ""
    device: Device
    levels: tuple[Level, ...] = ()
    collectives: tuple[CollectiveTiming, ...] = ()
    codecs: tuple[CodecTiming, ...] = ()
    calibration: Calibration | None = None
    software: Software = Software()

    def __post_init__(self) -> None:
        refuse(ClusterError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        yield from device_problems(self.device, "device")
        yield from software_problems(self.software, "software")
        if self.num_devices > MOST_DEVICES:
            problem = f"{self.num_devices} devices are more than {MOST_DEVICES:,}, the most that are planned for"
            yield f"cluster {self.name}", problem, "ask for fewer devices or ranks"
        yield from _level_problems(self.levels, "levels", outside=())
        size = _size(self.levels)
        if self.num_devices != size:
            product = " x ".join(str(level.fan_out) for level in self.levels)
            held = f"{product} = {size}" if self.homogeneous and len(self.levels) > 1 else f"{size}"
            problem = f"num_devices is {self.num_devices}, but the levels hold {held}"
            yield "num_devices", problem, "correct num_devices or a fan_out"
        for index, row in enumerate(self.collectives):
            yield from _timing_problems(row, f"collectives[{index}]", self.level_names)

    @staticmethod
    def load(name_or_path: str | os.PathLike[str], num_devices: int | None = None) -> "Cluster":
        """Load a cluster from a file or by its name (see ``meshwright.catalog.load_cluster`` for the names)."""
        # The only import of a higher layer: the catalog knows the names, and itself imports this module.
        from meshwright.catalog import load_cluster

        return load_cluster(name_or_path, num_devices)

    @property
    def box_size(self) -> int:
        """The number of devices that the innermost level joins; 1 if the cluster is one device."""
        return self.levels[0].fan_out if self.levels else 1

    @property
    def level_names(self) -> tuple[str, ...]:
        """The names of all levels, outermost first, including the levels of members."""
        return tuple(dict.fromkeys(level.name for level in _walk(self.levels)))

    @property
    def betas(self) -> dict[str, float]:
        """The seconds per byte of a message over each level, by the level's name. If a level has members, the first
        member counts."""
        return {level.name: level.beta_s_per_byte for level in reversed(tuple(_walk(self.levels)))}

    @property
    def origins(self) -> dict[str, Origin]:
        """The sources of the constants of each level, by the level's name. If a level has members, the first member
        counts."""
        return {level.name: level.origin for level in reversed(tuple(_walk(self.levels)))}

    @property
    def constants(self) -> str:
        """The sources of the constants of the device and of each level, as text: ``device catalog, box measured``."""
        parts = [("device", self.device.origin), *((level.name, level.origin) for level in _walk(self.levels))]
        return ", ".join(dict.fromkeys(f"{name} {origin}" for name, origin in parts))

    @property
    def homogeneous(self) -> bool:
        """Whether all devices are equal, and all units of each level are equal."""
        return not any(level.members for level in self.levels)

    def device_of(self, rank: int) -> Device:
        """The device that holds ``rank``."""
        device = self.device
        for step in self._path(rank):
            device = step.device or device
        return device

    def level_of(self, *ranks: int) -> Level:
        """The innermost level that joins all these ranks (two or more different ranks)."""
        paths = [self._path(rank) for rank in ranks]
        steps: tuple[_Step, ...]
        for steps in zip(*paths, strict=False):
            if len({step.unit for step in steps}) > 1:
                return steps[0].level
        same = " and ".join(f"rank {rank}" for rank in ranks)
        raise self._refused(f"no level joins {same}: they are one device", "ask for two or more different ranks")

    def units(self, level: str) -> tuple[range, ...]:
        """The ranks of each unit of the level, in order. For the level ``box``, these are the ranks of each box."""
        if level not in self.level_names:
            known = ", ".join(self.level_names) or "none: it is one device"
            raise self._refused(f"there is no level {level!r}", f"its levels are {known}")
        return tuple(_units(self.levels, level, 0))

    def unit_below(self, level: str, rank: int) -> range:
        """The ranks of the unit below ``level`` that holds ``rank``. For the level ``network``, this unit is a box."""
        levels, first = self.levels, 0
        while levels:
            unit = next(unit for unit in units_of(levels, self.device) if rank - first < unit.stop)
            if levels[-1].name == level:
                return range(first + unit.start, first + unit.stop)
            levels, first = unit.levels, first + unit.start
        raise self._refused(f"there is no level {level!r} around rank {rank}", f"its levels are {self.level_names}")

    def ranks_per(self, level: str) -> int:
        """The number of ranks in one unit of the level. For the level ``box``, this is the number of ranks in a box."""
        sizes = sorted({len(unit) for unit in self.units(level)})
        if len(sizes) > 1:
            held = " or ".join(map(str, sizes))
            raise self._refused(f"units of level {level!r} hold {held} ranks", "ask units() for the ranks of each")
        return sizes[0]

    def resized(self, num_devices: int) -> "Cluster":
        """The same kind of cluster with ``num_devices`` devices, in whole units of each level or in part of one unit.

        Raises:
            ClusterError: ``num_devices`` is too large for a cluster that is not ``open_ended``, or does not fill whole
                units, or the units of a level differ.
        """
        if num_devices == self.num_devices:
            return self
        if not self.homogeneous:
            remedy = f"use all {self.num_devices}, or describe the part in a file of its own"
            raise self._refused(f"its unlike members cannot be cut down to {num_devices} devices", remedy)
        growing = self.open_ended and bool(self.levels)
        if num_devices < 1 or (num_devices > self.num_devices and not growing):
            remedy = "ask for 1 or more" if growing else f"ask for 1 to {self.num_devices}"
            raise self._refused(f"it cannot have {num_devices} devices", remedy)
        levels, left = [], num_devices
        for level in self.levels[:-1]:
            take = min(left, level.fan_out)
            if left % take:
                whole = num_devices // left * level.fan_out
                problem = f"{num_devices} devices do not fill whole units of level {level.name!r}, which hold {whole}"
                raise self._refused(problem, f"ask for a multiple of {whole}, or for a part of one")
            levels.append(msgspec.structs.replace(level, fan_out=take))
            left //= take
        levels.append(msgspec.structs.replace(self.levels[-1], fan_out=left))
        return msgspec.structs.replace(self, num_devices=num_devices, levels=tuple(levels))

    def _path(self, rank: int) -> list["_Step"]:
        if not 0 <= rank < self.num_devices:
            raise self._refused(f"there is no rank {rank}", f"its ranks are 0 to {self.num_devices - 1}")
        return list(_descend(self.levels, rank))

    def _refused(self, problem: str, remedy: str) -> ClusterError:
        return ClusterError(problem, where=f"cluster {self.name}", remedy=remedy)


class Unit(msgspec.Struct, frozen=True):
    """One of the units that a level joins. It has ranks ``start`` to ``stop`` (counted from the first rank of the
    level), inner levels, and a device."""

    start: int
    stop: int
    levels: tuple[Level, ...]
    device: Device


def units_of(levels: tuple[Level, ...], device: Device) -> tuple[Unit, ...]:
    """The units that the outermost of ``levels`` joins, in order. ``device`` is the device of units that have no device
    of their own."""
    units: list[Unit] = []
    for count, inner, own in _parts(levels):
        size = _size(inner)
        for _ in range(count):
            start = units[-1].stop if units else 0
            units.append(Unit(start, start + size, inner, own or device))
    return tuple(units)


class _Step(msgspec.Struct, frozen=True):
    level: Level
    unit: int
    device: Device | None = None


def _descend(levels: tuple[Level, ...], rank: int) -> Iterator[_Step]:
    # From the outermost level inwards: the unit of each level that holds the rank.
    while levels:
        level, first = levels[-1], 0
        for count, inner, device in _parts(levels):
            size = _size(inner)
            if rank < count * size:
                yield _Step(level, first + rank // size, device)
                levels, rank = inner, rank % size
                break
            first, rank = first + count, rank - count * size


def _parts(levels: tuple[Level, ...]) -> list[tuple[int, tuple[Level, ...], Device | None]]:
    """The units that the outermost level joins, in groups of equal units.

    Each entry has the number of units, the levels inside each unit, and their device (None: the cluster's device)."""
    level = levels[-1]
    unlike = [(member.count, member.levels, member.device) for member in level.members]
    return unlike or [(level.fan_out, levels[:-1], None)]


def _size(levels: tuple[Level, ...]) -> int:
    return sum(count * _size(inner) for count, inner, _ in _parts(levels)) if levels else 1


def _walk(levels: tuple[Level, ...]) -> Iterator[Level]:
    for level in reversed(levels):
        yield level
        for member in level.members:
            yield from _walk(member.levels)


def _units(levels: tuple[Level, ...], name: str, first: int) -> Iterator[range]:
    if not levels:
        return
    if levels[-1].name == name:
        yield range(first, first + _size(levels))
        return
    for inner in [inner for count, inner, _ in _parts(levels) for _ in range(count)]:
        yield from _units(inner, name, first)
        first += _size(inner)


def _count_problems(where: str, counts: Mapping[str, int], least: int = 1) -> Iterator[Problem]:
    for name, count in counts.items():
        if count < least:
            yield f"{where}.{name}", f"{count} is less than {least}", "give a whole number"


def _level_problems(levels: tuple[Level, ...], where: str, outside: tuple[str, ...]) -> Iterator[Problem]:
    names = list(outside)
    for index, level in enumerate(levels):
        place = f"{where}[{index}]"
        if not level.name or level.name in names:
            problem = f"two levels around one device are called {level.name!r}" if level.name else "the name is empty"
            yield f"{place}.name", problem, "give every level its own name"
        names.append(level.name)
        yield from _count_problems(place, {"fan_out": level.fan_out, "links": level.links})
        quantities = {name: getattr(level, name) for name in ("alpha_s", "beta_s_per_byte", "contention")}
        yield from quantity_problems(quantities, place)
        if level.members:
            yield from _member_problems(level, index, place, outside + tuple(above.name for above in levels))


def _member_problems(level: Level, index: int, place: str, outside: tuple[str, ...]) -> Iterator[Problem]:
    if index:
        remedy = "move the lower levels into each member's levels"
        yield f"{place}.members", "a level with members has levels below it", remedy
    for number, member in enumerate(level.members):
        inside = f"{place}.members[{number}]"
        yield from _count_problems(inside, {"count": member.count})
        if member.device is not None:
            yield from device_problems(member.device, f"{inside}.device")
        yield from _level_problems(member.levels, f"{inside}.levels", outside)
    count = sum(member.count for member in level.members)
    if level.fan_out != count:
        problem = f"fan_out is {level.fan_out}, but the members count {count}"
        yield f"{place}.fan_out", problem, "correct fan_out or a count"


def _timing_problems(row: CollectiveTiming, where: str, levels: tuple[str, ...]) -> Iterator[Problem]:
    if row.level not in levels:
        yield f"{where}.level", f"there is no level {row.level!r}", f"the levels are {', '.join(levels)}"
    yield from _count_problems(where, {"ranks": row.ranks})
    yield from _count_problems(where, {"bytes": row.bytes}, least=0)
    yield from quantity_problems({"time_s": row.time_s}, where)
    if row.fan_outs and math.prod(row.fan_outs) != row.ranks:
        problem = f"{' x '.join(map(str, row.fan_outs))} is not {row.ranks} ranks"
        yield f"{where}.fan_outs", problem, "say how many of the ranks meet at each level, innermost first"
