"""The catalog: devices and clusters by name, and the grammar DEVICE-BOX-FABRIC for clusters without a file."""

import functools
import os
import re
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TypeVar

import msgspec

from meshwright.errors import ClusterError, refuse
from meshwright.ir import files
from meshwright.ir.cluster import Cluster, Level
from meshwright.ir.device import Device, device_problems, quantity_problems
from meshwright.ir.software import Software, software_problems

_T = TypeVar("_T", bound=msgspec.Struct)
_VENDORS = {"nvidia", "tesla", "geforce", "amd", "instinct"}
_MEMORY_TOLERANCE = 0.1
"""Largest relative difference between the memory that a device reports and the memory in its file: drivers and ECC
reserve a part."""
_EXAMPLE = "a100-80gb-dgx-hdr200x8"


class BoxLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link between two devices of a box, with the cost of one message in one direction. ``rings``: see ``Level``."""

    alpha_s: float
    beta_s_per_byte: float
    rings: tuple[float, ...] = ()
    source: str


class DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``devices/NAME.toml``: the device, its possible links in a box, other names for it, the names that its driver
    reports (without the vendor), and the BOX-FABRIC parts of its known ``clusters``."""

    device: Device
    links: dict[str, BoxLink]
    aliases: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse(ClusterError, device_problems(self.device, "device"))
        for name, link in self.links.items():
            quantities = {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
            refuse(ClusterError, quantity_problems(quantities, f"links.{name}"))


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of box: its number of devices (0: the number is part of a name such as ``box4``) and its possible links,
    the best first."""

    devices: int = 0
    links: tuple[str, ...]


class FabricEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of network between boxes. Without ``rates_gbit_per_s`` any rate is allowed. Without ``adapter_gbit_per_s``
    a box has one link, unless the name of the fabric gives another number."""

    alpha_s: float
    fraction: float
    rates_gbit_per_s: tuple[int, ...] = ()
    adapter_gbit_per_s: int = 0
    source: str


class CatalogParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``parts.toml``: the boxes and fabrics of the grammar, aliases for boxes, fabrics and software, and names of
    machines (``dgx-1``) with their spelling in the grammar."""

    boxes: dict[str, Box]
    fabrics: dict[str, FabricEntry]
    box_aliases: dict[str, str]
    fabric_aliases: dict[str, str]
    software_aliases: dict[str, str]
    machines: dict[str, str]


def device_names() -> list[str]:
    """The names of the catalog's devices."""
    return _names("devices")


def cluster_names() -> list[str]:
    """The cluster names to list: the catalog's cluster files, the named machines, and each device with its known boxes
    and fabrics. The grammar accepts more names (see ``load_cluster``)."""
    known = [f"{name}-{tail}" for name in device_names() for tail in _device_file(name).clusters]
    return sorted([*_names("clusters"), *_parts().machines, *known])


def load_device(name: str) -> Device:
    """A device of the catalog by name.

    Raises:
        ClusterError: no device has that name; the message suggests similar names.
    """
    file_name = _known_devices().get(name)
    if file_name is None:
        remedy = files.did_you_mean(name, device_names(), f"devices: {', '.join(device_names())}")
        raise ClusterError(f"unknown device {name!r}", remedy=remedy)
    return _device_file(file_name).device


def load_cluster(
    name_or_path: str | os.PathLike[str], num_devices: int | None = None, software: str | Software | None = None
) -> Cluster:
    """Load a cluster from a file, by its catalog name, or by the grammar DEVICE-BOX-FABRIC. ``num_devices`` sets its
    number of devices. ``software`` (a profile, or a name for ``load_software``) replaces its profile.

    - A path ends in ``.toml`` or has a directory. Any other text is a name.
    - DEVICE is one of ``device_names()`` or an alias (``h100-80gb``). BOX is a kind from ``parts.toml``, such as
      ``dgx`` (8 devices, NVLink), ``dgx2`` (16) or ``workstation`` (4, PCIe), or ``boxN`` (N devices with their best
      link). FABRIC is a kind (``edr``, ``hdr``, ``ndr``, ``ib``, ``roce``, ``efa``, ``ss``, ``eth``, ...), a rate in
      Gb/s, and the number of links per box, as in ``hdr200x8``. Without a number of links, as in ``ib800``, the rate is
      that of the whole box.
    - Names of machines (``perlmutter``, ``dgx-h100``, ``p4d.24xlarge``) stand for such a spelling (``parts.toml``).
    - A name with a fabric means one box unless ``num_devices`` is larger; a name without a fabric is always one box.

    Raises:
        ClusterError: the name is unknown (the message suggests similar names), the cluster is impossible, or it cannot
            have ``num_devices`` devices.
        FileFormatError: the file cannot be read or has a wrong key.
    """
    text = os.fspath(name_or_path)
    if not isinstance(name_or_path, str) or text.endswith(".toml") or os.path.dirname(text):
        cluster = files.load(text, Cluster)
    elif text in _names("clusters"):
        cluster = _read(f"clusters/{text}.toml", Cluster)
    else:
        cluster = _from_grammar(text, _parts().machines.get(text, text))
    cluster = with_software(cluster, software)
    return cluster if num_devices is None else cluster.resized(num_devices)


def with_software(cluster: Cluster, software: str | Software | None) -> Cluster:
    """The cluster with a profile, or with the profile that ``load_software`` finds by name; unchanged for None."""
    if software is None:
        return cluster
    profile = software if isinstance(software, Software) else load_software(software)
    return msgspec.structs.replace(cluster, software=profile)


def software_names() -> list[str]:
    """The names of the catalog's software profiles."""
    return _names("software")


def load_software(name_or_path: str | os.PathLike[str]) -> Software:
    """A software profile by its name in the catalog, by an alias (``parts.toml``), or from a file. The file is a
    ``.toml`` file with the fields of ``Software``, or a cluster file with a table ``[software]``.

    Raises:
        ClusterError: the name is unknown (the message suggests similar names), or a number is impossible.
        FileFormatError: the file cannot be read or has a wrong key.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.path.dirname(text):
        profile = _software_in(text)
    elif (name := _software_name(text)) in _names("software"):
        profile = _read(f"software/{name}.toml", Software)
    else:
        known = ", ".join(software_names())
        remedy = files.did_you_mean(text, software_names(), f"profiles: {known}; a file's name ends in .toml")
        raise ClusterError(f"unknown software {text!r}", where="software", remedy=remedy)
    refuse(ClusterError, software_problems(profile, text))
    return profile


def _software_name(text: str) -> str:
    """The catalog name of a profile, from a name or an alias. Upper and lower case, spaces and underscores do not
    matter."""
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    return _parts().software_aliases.get(name, name)


def _software_in(path: str) -> Software:
    """The profile in a file: the file itself, or the ``[software]`` of a cluster file."""
    data = files.read_bytes(path)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # files.load gives the error
        keys = msgspec.toml.decode(data)
        if "device" in keys and "software" not in keys:
            raise ClusterError(
                "the cluster file says nothing of its software", where=path, remedy="give a profile, or add [software]"
            )
        if "device" in keys:
            return files.load(path, Cluster).software
    return files.load(path, Software)


def reported_cluster(
    reported: str, memory_bytes: int, processors: int, num_devices: int, num_boxes: int = 1
) -> Cluster:
    """A cluster of a device whose driver reports the name ``reported``, such as ``NVIDIA A100-SXM4-80GB``,
    ``memory_bytes`` and a number of processors.

    A single box of PCIe cards has ``num_devices`` devices, any other single box its usual number. Several boxes have
    ``num_devices`` devices each. The first fabric with which the catalog lists the device joins them; a box with fewer
    devices than usual has as much smaller a part of the fabric's links.

    Raises:
        ClusterError: the catalog does not have the device, or has it with another memory size or number of processors
            (for example if only a part of a device is visible), or no fabric for several of its boxes.
    """
    words = _words(reported)
    spelled = {tuple(_words(text)): name for name in device_names() for text in _device_file(name).reported}
    name = spelled.get(tuple(words))
    remedy = "pass cluster=, the name or the file of a cluster: `meshwright clusters` lists names"
    if name is None:
        akin = [known for known in device_names() if known.split("-")[0] in words]
        other = f" (it has other kinds: {', '.join(akin)})" if akin else ""
        raise ClusterError(f"the catalog has no device {reported!r}{other}", where="cluster", remedy=remedy)
    entry = _device_file(name)
    if abs(memory_bytes / entry.device.memory_bytes - 1) > _MEMORY_TOLERANCE:
        raise ClusterError(
            f"{reported} reports {memory_bytes / 2**30:.1f} GiB of memory, the catalog's {name} has "
            f"{entry.device.memory_bytes / 2**30:.1f} GiB",
            where="cluster",
            remedy=remedy,
        )
    known = entry.device.kernels.processors if entry.device.kernels is not None else processors
    if known != processors:
        raise ClusterError(
            f"{reported} reports {processors} processors, the catalog's {name} has {known}", where="cluster",
            remedy=remedy,
        )  # fmt: skip
    switched = "pcie" not in words and {"mesh", "nvlink"} & set(entry.links)
    cluster = load_cluster(f"{name}-{'dgx' if switched else f'pcie{num_devices}'}")
    if num_boxes > 1:
        fabric = next((tail.partition("-")[2] for tail in entry.clusters if "-" in tail), "")
        if not switched or not fabric:
            kind = f"{name} on PCIe" if not switched else name
            raise ClusterError(
                f"there are {num_boxes} boxes, and the catalog knows no usual fabric between boxes of {kind}",
                where="cluster",
                remedy=f"name the fabric, as in cluster='{cluster.name}-eth25', or pass the file of a cluster",
            )
        cluster = _joined(cluster, fabric, num_devices, num_boxes)
    return msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, memory_bytes=memory_bytes))


def _joined(box: Cluster, fabric: str, num_devices: int, num_boxes: int) -> Cluster:
    """Several boxes with ``num_devices`` devices each, joined by the fabric of the grammar that is the usual fabric of
    the whole ``box``."""
    level = _fabric(box.name, fabric, _parts())
    links = max(1, level.links * num_devices // box.num_devices)
    name = f"{box.name}-{fabric}"
    if num_devices != box.num_devices:
        name = f"{box.name.rpartition('-')[0]}-box{num_devices}-{fabric.rpartition('x')[0]}x{links}"
    levels = (
        msgspec.structs.replace(box.levels[0], fan_out=num_devices),
        msgspec.structs.replace(level, fan_out=num_boxes, links=links),
    )
    return msgspec.structs.replace(
        box, name=name, num_devices=num_devices * num_boxes, open_ended=True, levels=levels,
        source=f"the usual fabric of {box.name}, {fabric}",
    )  # fmt: skip


def _words(reported: str) -> list[str]:
    """The sorted words of a device's name, without the vendor's: equal for ``80GB PCIe`` and ``PCIE-80GB``."""
    return sorted(set(re.split(r"[\s-]+", reported.lower())) - _VENDORS)


def _from_grammar(name: str, spelled: str) -> Cluster:
    """The cluster ``name``, read from its spelling DEVICE-BOX-FABRIC."""
    # Device names contain hyphens themselves, so the longest matching name is taken.
    known = _known_devices()
    fitting = [device for device in known if spelled.startswith(f"{device}-")]
    if not fitting:
        raise _unknown(name, "it starts with no device of the catalog")
    prefix = max(fitting, key=len)
    device_name = known[prefix]
    box_name, *fabric_name = spelled.removeprefix(f"{prefix}-").split("-", 1)
    parts = _parts()
    entry = _device_file(device_name)
    box = _box(name, box_name, device_name, entry.links, parts)
    levels = (box, *(_fabric(name, text, parts) for text in fabric_name))
    return Cluster(
        name=name,
        num_devices=box.fan_out,
        open_ended=bool(fabric_name),
        source=f"{'the name' if spelled == name else spelled}, read as DEVICE-BOX-FABRIC",
        device=entry.device,
        levels=levels,
    )


def _box(name: str, text: str, device: str, links: dict[str, BoxLink], parts: CatalogParts) -> Level:
    text = parts.box_aliases.get(text, text)
    match = re.fullmatch(r"([a-z]+)([1-9]\d*)", text)
    kind = parts.boxes.get(text) or (parts.boxes.get(match[1]) if match else None)
    devices = kind.devices if kind and text in parts.boxes else int(match[2]) if match else 0
    if kind is None or not devices or (text not in parts.boxes and kind.devices):
        known = [box if entry.devices else f"{box}N" for box, entry in parts.boxes.items()]
        raise _unknown(name, f"{text!r} is not a box ({', '.join(known)})")
    available = [link for link in kind.links if link in links]
    if not available:
        ways = f"{' or '.join(kind.links)}, and {device} has {', '.join(links)}"
        raise _unknown(name, f"a {text} joins devices by {ways}")
    fields = msgspec.structs.asdict(links[available[0]])
    fields["source"] = f"{available[0]}; {fields['source']}"
    return Level(name="box", fan_out=devices, origin="catalog", **fields)


def _fabric(name: str, text: str, parts: CatalogParts) -> Level:
    match = re.fullmatch(r"([a-z]+)([1-9]\d*)(?:x([1-9]\d*))?", text)
    kind = parts.fabrics.get(parts.fabric_aliases.get(match[1], match[1])) if match else None
    if match is None or kind is None:
        known = ", ".join(parts.fabrics)
        raise _unknown(name, f"{text!r} is not a fabric (one of {known} with a rate in Gb/s, such as hdr200x8)")
    rate, links = int(match[2]), int(match[3] or 1)
    if not match[3] and kind.adapter_gbit_per_s and rate % kind.adapter_gbit_per_s == 0:
        rate, links = kind.adapter_gbit_per_s, rate // kind.adapter_gbit_per_s
    if kind.rates_gbit_per_s and rate not in kind.rates_gbit_per_s:
        rates = " or ".join(map(str, kind.rates_gbit_per_s))
        raise _unknown(name, f"a link of {match[1]} has {rates} Gb/s, not {rate}")
    return Level(
        name="pod",
        fan_out=1,
        alpha_s=kind.alpha_s,
        beta_s_per_byte=8 / (rate * 1e9 * kind.fraction),
        links=links,
        source=kind.source,
        origin="catalog",
    )


def _unknown(name: str, why: str) -> ClusterError:
    listed = cluster_names()
    one_box = {known.rpartition("-")[0] for known in listed} - set(device_names())
    near = sorted({*listed, *(box for box in one_box if "-" in box)})
    akin = [known for known in near if known.startswith(name.partition("-")[0])]
    grammar = (
        f"a name is DEVICE-BOX-FABRIC, such as {_EXAMPLE}, with DEVICE one of {', '.join(device_names())}; a file's "
        "name ends in .toml"
    )
    return ClusterError(f"unknown cluster {name!r}: {why}", remedy=files.did_you_mean(name, akin or near, grammar))


@functools.cache
def _known_devices() -> dict[str, str]:
    """Map each name of a device, aliases included, to the name of its file."""
    names = device_names()
    return {alias: name for name in names for alias in (name, *_device_file(name).aliases)}


@functools.cache
def _parts() -> CatalogParts:
    return _read("parts.toml", CatalogParts)


@functools.cache
def _device_file(name: str) -> DeviceFile:
    entry = _read(f"devices/{name}.toml", DeviceFile)
    origin = "catalog" if entry.device.origin == "given" else entry.device.origin  # generic devices name their origin
    return msgspec.structs.replace(entry, device=msgspec.structs.replace(entry.device, origin=origin))


def _read(name: str, kind: type[_T]) -> _T:
    return files.decode(_root().joinpath(*name.split("/")).read_bytes(), kind, where=f"catalog/{name}", toml=True)


def _names(folder: str) -> list[str]:
    entries = (entry.name for entry in _root().joinpath(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml"))


def _root() -> Traversable:
    return resources.files(__name__)
