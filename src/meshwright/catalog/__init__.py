"""The catalog: software profiles by name, clusters with a profile, and the cluster that a driver's report means."""

import os
import re
from contextlib import suppress

import msgspec

from meshwright.errors import ClusterError, refuse
from meshwright.ir import catalog_files, files
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import catalog_parts, device_file, device_names, spell
from meshwright.ir.software import Software, software_problems

_VENDORS = {"nvidia", "tesla", "geforce", "amd", "instinct"}
_MEMORY_TOLERANCE = 0.1
"""Largest relative difference between the memory that a device reports and the memory in its file: drivers and ECC
reserve a part."""


def load_cluster(
    name_or_path: str | os.PathLike[str], num_devices: int | None = None, software: str | Software | None = None
) -> Cluster:
    """``Cluster.load``, with the software ``software`` (a profile, or a name for ``load_software``) in place of the
    cluster's own.

    Raises:
        ClusterError: as ``Cluster.load`` and ``load_software`` raise it.
        FileFormatError: the file cannot be read or has a wrong key.
    """
    return with_software(Cluster.load(name_or_path, num_devices), software)


def with_software(cluster: Cluster, software: str | Software | None) -> Cluster:
    """The cluster with a profile, or with the profile that ``load_software`` finds by name; unchanged for None."""
    if software is None:
        return cluster
    profile = software if isinstance(software, Software) else load_software(software)
    return msgspec.structs.replace(cluster, software=profile)


def software_names() -> list[str]:
    """The names of the catalog's software profiles."""
    return catalog_files.names("software")


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
    elif (name := _software_name(text)) in catalog_files.names("software"):
        profile = catalog_files.read(f"software/{name}.toml", Software)
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
    return catalog_parts().software_aliases.get(name, name)


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
    spelled = {tuple(_words(text)): name for name in device_names() for text in device_file(name).reported}
    name = spelled.get(tuple(words))
    remedy = "pass cluster=, the name or the file of a cluster: `meshwright clusters` lists names"
    if name is None:
        akin = [known for known in device_names() if known.split("-")[0] in words]
        other = f" (it has other kinds: {', '.join(akin)})" if akin else ""
        raise ClusterError(f"the catalog has no device {reported!r}{other}", where="cluster", remedy=remedy)
    entry = device_file(name)
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
    name = f"{box.name}-{fabric}"
    level = spell(name).fabric
    assert level is not None
    links = max(1, level.links * num_devices // box.num_devices)
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
