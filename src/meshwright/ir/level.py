"""The nested levels of links that join the devices of a cluster."""

from collections.abc import Iterator, Mapping

import msgspec

from meshwright.errors import Problem
from meshwright.ir.device import Device, Origin, device_problems, quantity_problems


class LevelMembers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
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
    members: tuple[LevelMembers, ...] = ()

    def ring_fraction(self, devices: int) -> float:
        """The fraction of the full rate that a collective over ``devices`` devices (2 or more) reaches."""
        return self.rings[min(devices - 2, len(self.rings) - 1)] if self.rings else 1.0

    def shared_beta_s_per_byte(self, senders: int) -> float:
        """The seconds per byte of each sender if ``senders`` devices of every unit send over the level at once."""
        return self.beta_s_per_byte * self.contention * max(1.0, senders / self.links)


class UnitOfRanks(msgspec.Struct, frozen=True):
    """One of the units that a level joins. It has ranks ``start`` to ``stop`` (counted from the first rank of the
    level), inner levels, and a device."""

    start: int
    stop: int
    levels: tuple[Level, ...]
    device: Device


def units_of(levels: tuple[Level, ...], device: Device) -> tuple[UnitOfRanks, ...]:
    """The units that the outermost of ``levels`` joins, in order. ``device`` is the device of units that have no device
    of their own."""
    units: list[UnitOfRanks] = []
    for count, inner, own in _parts(levels):
        size = size_of(inner)
        for _ in range(count):
            start = units[-1].stop if units else 0
            units.append(UnitOfRanks(start, start + size, inner, own or device))
    return tuple(units)


class LevelUnit(msgspec.Struct, frozen=True):
    """The unit of a level that holds a rank: its number among all units at this depth, and the device that it names."""

    level: Level
    unit: int
    device: Device | None = None


def descend(levels: tuple[Level, ...], rank: int) -> Iterator[LevelUnit]:
    """The unit of each level that holds the rank, from the outermost level inwards."""
    while levels:
        level, first = levels[-1], 0
        for count, inner, device in _parts(levels):
            size = size_of(inner)
            if rank < count * size:
                yield LevelUnit(level, first + rank // size, device)
                levels, rank = inner, rank % size
                break
            first, rank = first + count, rank - count * size


def _parts(levels: tuple[Level, ...]) -> list[tuple[int, tuple[Level, ...], Device | None]]:
    """The units that the outermost level joins, in groups of equal units.

    Each entry has the number of units, the levels inside each unit, and their device (None: the cluster's device)."""
    level = levels[-1]
    unlike = [(member.count, member.levels, member.device) for member in level.members]
    return unlike or [(level.fan_out, levels[:-1], None)]


def size_of(levels: tuple[Level, ...]) -> int:
    """The number of devices that the levels join."""
    return sum(count * size_of(inner) for count, inner, _ in _parts(levels)) if levels else 1


def walk(levels: tuple[Level, ...]) -> Iterator[Level]:
    """All levels, outermost first, including the levels of members."""
    for level in reversed(levels):
        yield level
        for member in level.members:
            yield from walk(member.levels)


def units_at(levels: tuple[Level, ...], name: str, first: int) -> Iterator[range]:
    """The ranks of each unit of the level ``name``, in order. The rank of the first device is ``first``."""
    if not levels:
        return
    if levels[-1].name == name:
        yield range(first, first + size_of(levels))
        return
    for inner in [inner for count, inner, _ in _parts(levels) for _ in range(count)]:
        yield from units_at(inner, name, first)
        first += size_of(inner)


def level_problems(levels: tuple[Level, ...], where: str, outside: tuple[str, ...]) -> Iterator[Problem]:
    """What is impossible in the levels. ``where`` is their place in the file; ``outside`` has the names of the levels
    around them."""
    names = list(outside)
    for index, level in enumerate(levels):
        place = f"{where}[{index}]"
        if not level.name or level.name in names:
            problem = f"two levels around one device are called {level.name!r}" if level.name else "the name is empty"
            yield f"{place}.name", problem, "give every level its own name"
        names.append(level.name)
        yield from count_problems(place, {"fan_out": level.fan_out, "links": level.links})
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
        yield from count_problems(inside, {"count": member.count})
        if member.device is not None:
            yield from device_problems(member.device, f"{inside}.device")
        yield from level_problems(member.levels, f"{inside}.levels", outside)
    count = sum(member.count for member in level.members)
    if level.fan_out != count:
        problem = f"fan_out is {level.fan_out}, but the members count {count}"
        yield f"{place}.fan_out", problem, "correct fan_out or a count"


def count_problems(where: str, counts: Mapping[str, int], least: int = 1) -> Iterator[Problem]:
    """The counts that are below the least possible number."""
    for name, count in counts.items():
        if count < least:
            yield f"{where}.{name}", f"{count} is less than {least}", "give a whole number"
