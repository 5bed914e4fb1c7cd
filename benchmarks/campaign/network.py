"""Faults of the network between two hosts, each a box with its launcher and rank; and of hosts as a whole."""

from __future__ import annotations

import signal
import time

from benchmarks.campaign.site import LATER, Command, Site
from meshwright.emulation.network import address_of, limit
from meshwright.runtime.roll_call import SILENT_S

RATE = 1e9
FAIL = (2, 128 + signal.SIGTERM)
"""The exit codes of a launcher that has lost the first launcher: it ends with a message, or by SIGTERM."""


def _launchers(site: Site, later_s: int = 0) -> tuple[Command, Command]:
    """Start the launchers of two hosts. ``later_s``: the seconds by which the clock since the start of the machine is
    ahead on the second."""
    nodes = {"count": 2, "ranks_per_node": 1, "addresses": [address_of(0), address_of(1)]}
    file = site.write(nodes=nodes)
    first = site.start("--on", "torchrun", verb=("launch",), file=file, box=0)
    second = site.start("--on", "torchrun", verb=("launch",), file=file, box=1, later_s=later_s)
    site.hosts = first, second
    return first, second


def _hosts(site: Site) -> tuple[Command, Command]:
    """Start the launchers of two hosts, and wait for the first step."""
    first, second = _launchers(site)
    site.until(lambda: site.step() > 0 or None, first, "the first step")
    return first, second


def _go_on(site: Site, codes: tuple[int, ...]) -> None:
    """Wait until both launchers have ended. If the run is not complete then, one host completes it alone."""
    first, second = site.hosts
    ends = [site.judge({0, LATER, *codes}, command=command) for command in (first, second)]
    site.settle()
    if 0 not in ends:
        site.finish()


def node_killed(site: Site) -> None:
    """A host is lost: its launcher and its rank are killed together. The other host goes on alone."""
    first, second = _hosts(site)
    site.await_step(high=site.steps // 3)
    site.kill_session(second)
    _go_on(site, (-signal.SIGKILL,))


def first_node_killed(site: Site) -> None:
    """The host at which launchers meet is lost. The other launcher says so and ends, and the same command goes on."""
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
    """The second host's link is cut for less than a host may be silent: TCP sends again, and no host is lost."""
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
    """One of the hosts gets SIGTERM: both save, and end with the exit code that means later."""
    first, second = _hosts(site)
    site.await_step(high=site.steps // 3)
    site.promise()
    site.draw.choice([first, second]).signal(signal.SIGTERM)
    _go_on(site, ())


def rank_of_host_killed(site: Site) -> None:
    """A rank is killed, and its launcher lives on."""
    hosts = _hosts(site)
    site.await_step(high=site.steps // 3)
    command = site.draw.choice(hosts)
    site.kill(*command.ranks())
    _go_on(site, ())


def clocks_apart(site: Site) -> None:
    """Hosts were started at different times: the second host's clock since its start is a day ahead."""
    _launchers(site, later_s=86_400)
    _go_on(site, ())
