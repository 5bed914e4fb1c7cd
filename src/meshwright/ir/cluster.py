"""The cluster: its devices, the nested levels that join them, and the measured times of collectives."""

import math
import os
from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from meshwright.errors import ClusterError, Problem, refuse
from meshwright.ir import catalog_files, files
from meshwright.ir.cluster_names import spell
from meshwright.ir.device import Device, Origin, device_problems, quantity_problems
from meshwright.ir.level import (
    Level,
    LevelUnit,
    count_problems,
    descend,
    level_problems,
    size_of,
    units_at,
    units_of,
    walk,
)
from meshwright.ir.software import Software, software_problems

Operation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
    "reduce", "scatter", "gather", "barrier", "send",
]  # fmt: skip

MOST_DEVICES = 1_000_000
"""The largest number of devices in a cluster. The largest real clusters have a few hundred thousand."""
NETWORK = "network"
"""The name that calibration gives to the level between boxes. It is the innermost level if each box has one rank."""


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
        yield from level_problems(self.levels, "levels", outside=())
        size = size_of(self.levels)
        if self.num_devices != size:
            product = " x ".join(str(level.fan_out) for level in self.levels)
            held = f"{product} = {size}" if self.homogeneous and len(self.levels) > 1 else f"{size}"
            problem = f"num_devices is {self.num_devices}, but the levels hold {held}"
            yield "num_devices", problem, "correct num_devices or a fan_out"
        for index, row in enumerate(self.collectives):
            yield from _timing_problems(row, f"collectives[{index}]", self.level_names)

    @staticmethod
    def load(name_or_path: str | os.PathLike[str], num_devices: int | None = None) -> "Cluster":
        """Load a cluster from a file, by its catalog name, or by the grammar DEVICE-BOX-FABRIC. ``num_devices`` sets
        its number of devices.

        - A path ends in ``.toml`` or has a directory. Any other text is a name.
        - DEVICE is one of ``device_names()`` or an alias (``h100-80gb``). BOX is a kind from ``parts.toml``, such as
          ``dgx`` (8 devices, NVLink), ``dgx2`` (16) or ``workstation`` (4, PCIe), or ``boxN`` (N devices with their
          best link). FABRIC is a kind (``edr``, ``hdr``, ``ndr``, ``ib``, ``roce``, ``efa``, ``ss``, ``eth``, ...), a
          rate in Gb/s, and the number of links per box, as in ``hdr200x8``. Without a number of links, as in
          ``ib800``, the rate is that of the whole box.
        - Names of machines (``perlmutter``, ``dgx-h100``, ``p4d.24xlarge``) stand for such a spelling
          (``parts.toml``).
        - A name with a fabric means one box unless ``num_devices`` is larger; a name without a fabric is always one
          box.

        Raises:
            ClusterError: the name is unknown (the message suggests similar names), the cluster is impossible, or it
                cannot have ``num_devices`` devices.
            FileFormatError: the file cannot be read or has a wrong key.
        """
        text = os.fspath(name_or_path)
        if not isinstance(name_or_path, str) or text.endswith(".toml") or os.path.dirname(text):
            cluster = files.load(text, Cluster)
        elif text in catalog_files.names("clusters"):
            cluster = catalog_files.read(f"clusters/{text}.toml", Cluster)
        else:
            spelled = spell(text)
            cluster = Cluster(
                name=text,
                num_devices=spelled.box.fan_out,
                open_ended=spelled.fabric is not None,
                source=spelled.source,
                device=spelled.device,
                levels=(spelled.box,) if spelled.fabric is None else (spelled.box, spelled.fabric),
            )
        return cluster if num_devices is None else cluster.resized(num_devices)

    @property
    def box_size(self) -> int:
        """The number of devices that the innermost level joins; 1 if the cluster is one device."""
        return self.levels[0].fan_out if self.levels else 1

    @property
    def level_names(self) -> tuple[str, ...]:
        """The names of all levels, outermost first, including the levels of members."""
        return tuple(dict.fromkeys(level.name for level in walk(self.levels)))

    @property
    def betas(self) -> dict[str, float]:
        """The seconds per byte of a message over each level, by the level's name. If a level has members, the first
        member counts."""
        return {level.name: level.beta_s_per_byte for level in reversed(tuple(walk(self.levels)))}

    @property
    def origins(self) -> dict[str, Origin]:
        """The sources of the constants of each level, by the level's name. If a level has members, the first member
        counts."""
        return {level.name: level.origin for level in reversed(tuple(walk(self.levels)))}

    @property
    def constants(self) -> str:
        """The sources of the constants of the device and of each level, as text: ``device catalog, box measured``."""
        parts = [("device", self.device.origin), *((level.name, level.origin) for level in walk(self.levels))]
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
        steps: tuple[LevelUnit, ...]
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
        return tuple(units_at(self.levels, level, 0))

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

    def without_graphs(self) -> "Cluster":
        """The same cluster with software that launches each kernel by itself."""
        return msgspec.structs.replace(self, software=msgspec.structs.replace(self.software, graphs=False))

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

    def _path(self, rank: int) -> list["LevelUnit"]:
        if not 0 <= rank < self.num_devices:
            raise self._refused(f"there is no rank {rank}", f"its ranks are 0 to {self.num_devices - 1}")
        return list(descend(self.levels, rank))

    def _refused(self, problem: str, remedy: str) -> ClusterError:
        return ClusterError(problem, where=f"cluster {self.name}", remedy=remedy)


def _timing_problems(row: CollectiveTiming, where: str, levels: tuple[str, ...]) -> Iterator[Problem]:
    if row.level not in levels:
        yield f"{where}.level", f"there is no level {row.level!r}", f"the levels are {', '.join(levels)}"
    yield from count_problems(where, {"ranks": row.ranks})
    yield from count_problems(where, {"bytes": row.bytes}, least=0)
    yield from quantity_problems({"time_s": row.time_s}, where)
    if row.fan_outs and math.prod(row.fan_outs) != row.ranks:
        problem = f"{' x '.join(map(str, row.fan_outs))} is not {row.ranks} ranks"
        yield f"{where}.fan_outs", problem, "say how many of the ranks meet at each level, innermost first"
