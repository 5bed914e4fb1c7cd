"""The store at which ranks meet before they connect to each other: who has come, from where, and who is missing."""

import errno
import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.errors import LaunchError
from meshwright.runtime.launchers import Meeting

PROBE_S = 2.0
"""Seconds that a host may take to answer when it is looked for."""
_ADDRESS = 0x8915  # SIOCGIFADDR: Linux answers with an ifreq, whose address stands from byte 20 on
BACKLOG = 2048
"""Connections to a store that may wait to be accepted."""
OFF = "off"
"""The key of a meeting's store that tells that it was called off."""
CHECK = "check that the hosts share a network, that no firewall closes its ports, and GLOO_SOCKET_IFNAME"


def come(store: dist.Store, rank: int, address: str) -> None:
    """Note that this rank has come, and from which host."""
    store.set(f"here/{rank}", f"{socket.gethostname()} {address}")


def await_all(store: dist.Store, num_ranks: int, limit: timedelta, where: str) -> None:
    """Wait until all ranks have connected to the store. Raise a LaunchError that names the missing ranks."""
    keys = [f"here/{rank}" for rank in range(num_ranks)]
    try:
        store.wait(keys, limit)
    except (dist.DistError, RuntimeError) as error:
        missing = [rank for rank, key in enumerate(keys) if not _has(store, key)]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        absent = f": rank{'s'[: len(missing) > 1]} {names} did not come ({len(missing)} of {num_ranks})"
        raise _not_all(f"{num_ranks} ranks", limit, absent, where) from error


def _not_all(ranks: str, limit: timedelta, why: str, where: str) -> LaunchError:
    return LaunchError(
        f"not all {ranks} met within {limit.total_seconds():g} s{why}",
        where=where,
        remedy="look for a rank that failed to start; MASTER_ADDR and MASTER_PORT must be the same everywhere",
    )


def addresses_of(name: str, where: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a name or address, each with its family, as a socket binds to them at any port.

    Raises:
        LaunchError: the name has no address.
    """
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"the name {name!r} has no address here: {error.strerror or error}",
            where=where,
            remedy="give an IP address, or a name that every host knows (/etc/hosts, DNS)",
        ) from None
    return [(family, place) for family, _, _, _, place in addresses]


def kept_store(address: str, port: int, limit: timedelta, where: str) -> dist.TCPStore:
    """A new store that this process keeps, at a port of one address of this machine (port 0: any free port; an empty
    address: all of the machine's). A store that PyTorch opens itself listens at all addresses.

    Raises:
        LaunchError: the port is taken, or the name has no address. ``where`` names the setting of the port.
    """
    both = not address and socket.has_dualstack_ipv6()
    family, place = (socket.AF_INET6 if both else socket.AF_INET), ("",)
    if address:
        family, place = addresses_of(address, where)[0]
    try:
        listening = socket.create_server(
            (place[0], port, *place[2:]), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        problem = "another program uses it" if is_taken(error) else error.strerror or str(error)
        raise port_taken(port, problem, where) from error
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address or "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def store_of_meeting(server: dist.Store, name: str) -> dist.Store:
    """The part of a store that belongs to one meeting of launchers."""
    return dist.PrefixStore(f"meeting/{name}", server)


def called_off(server: dist.Store, name: str) -> None:
    """Tell the launchers that still wait in a meeting that it is in vain: ranks of another host have failed."""
    store_of_meeting(server, name).set(OFF, "")


def no_store(address: str, port: int, limit: timedelta, where: str, error: Exception) -> LaunchError:
    """The error that no store answers at an address: why, as far as this host can see."""
    try:
        addresses_of(address, where)
    except LaunchError as unknown:
        return unknown
    problem = _unreachable(address, port)
    if not problem:
        return _not_all("ranks", limit, f" ({str(error).splitlines()[0]})", where)
    if problem == "refused":
        return LaunchError(
            f"no store answers at port {port} of {address}; the host does",
            where=where,
            remedy="look for a rank or launcher there that failed or did not start; the port must be equal everywhere",
        )
    return LaunchError(f"{socket.gethostname()} cannot reach {address}: {problem}", where=where, remedy=CHECK)


def not_connected(store: dist.Store, rank: int, num_ranks: int, where: str, error: Exception) -> LaunchError:
    """The error that ranks have met, but cannot connect to each other: names the hosts that this one does not see."""
    here, own = _place(store, rank)
    places = {_place(store, other): other for other in range(num_ranks) if _has(store, f"here/{other}")}
    unseen = [
        f"{host} ({address}, rank {other}): {problem}"
        for (host, address), other in places.items()
        if address != own and (problem := _unreachable(address, 9)) not in ("", "refused")
    ]
    text = str(error).strip().splitlines()[0]
    if unseen:
        return LaunchError(f"{here} ({own}) cannot reach {'; '.join(unseen)}", where=where, remedy=CHECK)
    return LaunchError(f"the ranks met, but could not connect to each other: {text}", where=where, remedy=CHECK)


def not_met(meeting: Meeting, error: Exception) -> LaunchError:
    """The error that the launchers of several hosts did not meet."""
    where = f"{meeting.address}:{meeting.port}"
    if meeting.is_host and is_taken(error):
        return port_taken(meeting.port, "another program uses it", "nodes.port")
    if meeting.is_host:
        return LaunchError(
            f"not all {meeting.num_hosts} hosts came within {meeting.timeout_s:g} s",
            where=where,
            remedy="start the same command on every host; check that they reach this address and port",
        )
    return no_store(meeting.address, meeting.port, timedelta(seconds=meeting.timeout_s), where, error)


def free_port() -> int:
    """A port of this machine that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, where: str) -> None:
    """Raise a LaunchError if another program uses a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_taken(port, error.strerror or str(error), where) from None


def is_taken(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, says that a port is taken."""
    while error is not None:
        if "EADDRINUSE" in str(error) or os.strerror(errno.EADDRINUSE) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def port_taken(port: int, problem: str, where: str) -> LaunchError:
    """The error that a port of this machine cannot be used."""
    remedy = "choose another port, or none: then a free one is taken"
    return LaunchError(f"port {port} cannot be used: {problem}", where=where, remedy=remedy)


def interface_of(address: str) -> str:
    """The name of the network interface with this address of this machine, if the machine's host name has a loopback
    address or none, so that others cannot use it; else, and where the system does not tell, an empty text."""
    with suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _has(store: dist.Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the store is gone
        return False


def _place(store: dist.Store, rank: int) -> tuple[str, str]:
    host, _, address = store.get(f"here/{rank}").decode().partition(" ")
    return host, address


def _unreachable(address: str, port: int) -> str:
    """Why a port of a host does not answer; empty if it does; ``refused`` if the host is there, and the port closed."""
    begun = time.monotonic()
    try:
        with socket.create_connection((address, port), PROBE_S):
            return ""
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"it does not answer within {time.monotonic() - begun:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def address_towards(host: str) -> str:
    """The address of this machine in the network through which it reaches ``host``."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # no data is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        remedy = "give an IPv4 address, or a name that has one"
        raise LaunchError(f"{host!r} cannot be reached: {error}", where="MASTER_ADDR", remedy=remedy) from error
