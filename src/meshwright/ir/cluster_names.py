"""Names of clusters: the devices of the catalog, the grammar DEVICE-BOX-FABRIC, and the names of machines."""

import functools
import re

import msgspec

from meshwright.errors import ClusterError, refuse
from meshwright.ir import catalog_files, files
from meshwright.ir.device import Device, device_problems, quantity_problems
from meshwright.ir.level import Level

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
    return catalog_files.names("devices")


def cluster_names() -> list[str]:
    """The cluster names to list: the catalog's cluster files, the named machines, and each device with its known boxes
    and fabrics. The grammar accepts more names (see ``Cluster.load``)."""
    known = [f"{name}-{tail}" for name in device_names() for tail in device_file(name).clusters]
    return sorted([*catalog_files.names("clusters"), *catalog_parts().machines, *known])


def load_device(name: str) -> Device:
    """A device of the catalog by name.

    Raises:
        ClusterError: no device has that name; the message suggests similar names.
    """
    file_name = _known_devices().get(name)
    if file_name is None:
        remedy = files.did_you_mean(name, device_names(), f"devices: {', '.join(device_names())}")
        raise ClusterError(f"unknown device {name!r}", remedy=remedy)
    return device_file(file_name).device


class Spelled(msgspec.Struct, frozen=True):
    """What a name of a cluster means: a device, the level of the box, and the level of the fabric, if the name has a
    fabric. ``source`` says how the name was read."""

    device: Device
    box: Level
    fabric: Level | None
    source: str


def spell(name: str) -> Spelled:
    """Read the name of a cluster by the grammar DEVICE-BOX-FABRIC. A machine's name stands for such a spelling.

    Raises:
        ClusterError: the name is unknown; the message suggests similar names.
    """
    parts = catalog_parts()
    spelled = parts.machines.get(name, name)
    # Device names contain hyphens themselves, so the longest matching name is taken.
    known = _known_devices()
    fitting = [device for device in known if spelled.startswith(f"{device}-")]
    if not fitting:
        raise _unknown(name, "it starts with no device of the catalog")
    prefix = max(fitting, key=len)
    device_name = known[prefix]
    box_name, *fabric_name = spelled.removeprefix(f"{prefix}-").split("-", 1)
    entry = device_file(device_name)
    return Spelled(
        device=entry.device,
        box=_box(name, box_name, device_name, entry.links, parts),
        fabric=_fabric(name, fabric_name[0], parts) if fabric_name else None,
        source=f"{'the name' if spelled == name else spelled}, read as DEVICE-BOX-FABRIC",
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
    return {alias: name for name in names for alias in (name, *device_file(name).aliases)}


@functools.cache
def catalog_parts() -> CatalogParts:
    """The content of ``parts.toml``."""
    return catalog_files.read("parts.toml", CatalogParts)


@functools.cache
def device_file(name: str) -> DeviceFile:
    """The file of a device of the catalog."""
    entry = catalog_files.read(f"devices/{name}.toml", DeviceFile)
    origin = "catalog" if entry.device.origin == "given" else entry.device.origin  # generic devices name their origin
    return msgspec.structs.replace(entry, device=msgspec.structs.replace(entry.device, origin=origin))
