"""Faults of the network between two hosts, each a box with its launcher and rank; and of hosts as a whole."""

from __future__ import annotations

import signal
import time

from benchmarks.campaign.site import LATER, Command, Site
from meshwright.emulation.network import address_of, limit
from meshwright.runtime.roll_call import SILENT_S

RATE = 1e9
FAIL = (2, 128 + signal.SIGTERM)
"""A launcher whose leader is gone ends with a message."""


def _hosts(site: Site) -> tuple[Command, Command]:
    """Start the launchers of two hosts."""
    nodes = {"count": 2, "ranks_per_node": 1, "addresses": [address_of(0), address_of(1)]}
    file = site.write(nodes=nodes, train={"steps": site.steps})
    first = site.start("--on", "torchrun", verb=("launch",), file=file, box=0)
    second = site.start("--on", "torchrun", verb=("launch",), file=file, box=1)
    site.hosts = first, second
    site.until(lambda: site.step() > 0 or None, first, "the first step")
    return first, second


def _go_on(site: Site, codes: tuple[int, ...]) -> None:
    """Wait for the ends of both launchers. Then one host goes on alone until the run is complete."""
    first, second = site.hosts
    ends = [site.judge({0, LATER, *codes}, command=command) for command in (first, second)]
    site.settle()
    if 0 not in ends:
        site.finish()


def node_killed(site: Site) -> None:
    """A host is gone: its launcher and its rank are killed together. The other one goes on alone."""
    first, second = _hosts(site)
    site.await_step(high=site.steps // 3)
    site.kill_session(second)
    _go_on(site, (-signal.SIGKILL,))


def first_node_killed(site: Site) -> None:
    """The host at which launchers meet is gone. The other one says so and ends, and the same command goes on."""
    first, second = _hosts(site)
    site.await_step(high=site.steps // 3)
    site.kill_session(first)
    _go_on(site, (-signal.SIGKILL, *FAIL))


def link_cut(site: Site) -> None:
    """The second host's link is cut for longer than a host may be silent."""
    _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.in_box(-1, "ip link set port1 down")
    time.sleep(SILENT_S + 1.0)
    site.in_box(-1, "ip link set port1 up")
    _go_on(site, FAIL)


def link_cut_for_a_moment(site: Site) -> None:
    """The second host's link is cut for less than a host may be silent: TCP sends again, and nobody is lost."""
    _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.in_box(-1, "ip link set port1 down")
    time.sleep(0.3 + site.draw.random())
    site.in_box(-1, "ip link set port1 up")
    _go_on(site, ())


def link_slowed(site: Site) -> None:
    """The second host's link gets 1 % of its rate."""
    _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.in_box(-1, limit("port1", RATE / 100))
    _go_on(site, ())


def packets_rejected(site: Site) -> None:
    """The second host's own rules reject all packets to the first, for longer than a host may be silent."""
    _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.in_box(1, f"ip route add prohibit {address_of(0)}/32")
    time.sleep(SILENT_S + 1.0)
    site.in_box(1, f"ip route del prohibit {address_of(0)}/32")
    _go_on(site, FAIL)


def host_told_to_end(site: Site) -> None:
    """One of the hosts is warned: both save, and end with the code for later."""
    first, second = _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.draw.choice([first, second]).signal(signal.SIGTERM)
    _go_on(site, ())


def rank_of_host_killed(site: Site) -> None:
    """A rank is killed, and its host stays."""
    hosts = _hosts(site)
    site.await_step(high=site.steps // 3)
    command = site.draw.choice(hosts)
    site.kill(*command.ranks())
    _go_on(site, ())


def clocks_apart(site: Site) -> None:
    """Hosts have started at different times: the clock since the start of the machine is a day ahead on one."""
    nodes = {"count": 2, "ranks_per_node": 1, "addresses": [address_of(0), address_of(1)]}
    file = site.write(nodes=nodes)
    first = site.start("--on", "torchrun", verb=("launch",), file=file, box=0)
    second = site.start("--on", "torchrun", verb=("launch",), file=file, box=1, later_s=86_400)
    site.hosts = first, second
    _go_on(site, ())
