"""All kinds of faults by name: the function that inflicts the fault, and the runs that it may hit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.campaign import damage, disk, machine, mistakes, network, processes
from benchmarks.campaign.site import Site
from meshwright.emulation.network import why_not

LAYOUTS = ("dp2", "tp2", "pp2", "zero2")
ANY = ("dp2", "tp2", "pp2", "zero2", "one")


class Kind(NamedTuple):
    """A kind of fault.

    ``inflict``: inflicts the fault and judges the commands of the run. ``runs``: the configurations from which the run
    is drawn. ``hosts``: the number of boxes, each a host. ``root``: whether only root can inflict it. ``lacks``:
    returns what this machine lacks for it, besides root; empty if nothing."""

    inflict: Callable[[Site], None]
    runs: tuple[str, ...] = LAYOUTS
    hosts: int = 1
    root: bool = False
    lacks: Callable[[], str] = lambda: ""


def _group() -> str:
    return "" if os.access(machine.MEMORY_GROUPS / "cgroup.procs", os.W_OK) else "no control groups of memory (v1)"


def _hosts(inflict: Callable[[Site], None]) -> Kind:
    return Kind(inflict, ("free",), hosts=2, root=True)


KINDS: dict[str, Kind] = {
    # processes
    "rank-killed": Kind(processes.rank_killed),
    "ranks-killed": Kind(processes.ranks_killed),
    "rank-killed-twice": Kind(processes.rank_killed_twice),
    "rank-killed-starting": Kind(processes.rank_killed_while_starting),
    "rank-killed-planning": Kind(processes.rank_killed_while_planning),
    "rank-killed-loading": Kind(processes.rank_killed_while_loading),
    "rank-killed-saving": Kind(processes.rank_killed_while_saving),
    "launcher-killed": Kind(processes.launcher_killed, ANY),
    "launcher-killed-starting": Kind(processes.launcher_killed_while_starting, ANY),
    "launcher-killed-saving": Kind(processes.launcher_killed_while_saving, ANY),
    "everything-killed": Kind(processes.everything_killed, ANY),
    "preempted": Kind(processes.told_to_end, ANY),
    "preempted-starting": Kind(processes.told_to_end_while_starting, ANY),
    "preempted-rank": Kind(processes.rank_told_to_end),
    "preempted-twice": Kind(processes.told_to_end_twice),
    "interrupted": Kind(processes.interrupted, ANY),
    "rank-stopped": Kind(processes.rank_stopped_for_a_while),
    "rank-stopped-for-good": Kind(processes.rank_stopped_for_good),
    "launcher-stopped": Kind(processes.launcher_stopped_for_a_while),
    "everything-stopped": Kind(processes.everything_stopped_for_a_while),
    "replica-killed": Kind(processes.replica_killed, ("local",)),
    "server-killed": Kind(processes.server_killed, ("server",)),
    # hosts and their network
    "node-killed": _hosts(network.node_killed),
    "first-node-killed": _hosts(network.first_node_killed),
    "host-rank-killed": _hosts(network.rank_of_host_killed),
    "host-preempted": _hosts(network.host_told_to_end),
    "link-cut": _hosts(network.link_cut),
    "link-cut-briefly": _hosts(network.link_cut_for_a_moment),
    "link-slow": _hosts(network.link_slowed),
    "packets-rejected": _hosts(network.packets_rejected),
    "clocks-apart": _hosts(network.clocks_apart),
    # the disk
    "disk-full-briefly": Kind(disk.disk_full_for_a_while, ANY, root=True),
    "disk-full": Kind(disk.disk_full, ANY, root=True),
    "disk-full-at-start": Kind(disk.disk_full_at_the_start, ANY, root=True),
    "disk-read-only": Kind(disk.disk_read_only, ANY, root=True),
    "disk-stalls": Kind(disk.disk_stalls, ANY, root=True),
    "disk-slow": Kind(disk.disk_slow, ANY, root=True),
    "power-cut": Kind(disk.power_cut, ANY, root=True),
    "power-cut-saving": Kind(disk.power_cut_while_saving, ANY, root=True),
    # files
    "bit-flip-tensors": Kind(damage.bit_flip_in_tensors, ANY),
    "bit-flip-small-files": Kind(damage.bit_flip_in_small_files, ANY),
    "bit-flip-manifest": Kind(damage.bit_flip_in_manifest, ANY),
    "torn-write": Kind(damage.torn_write, ANY),
    "missing-shard": Kind(damage.missing_shard, ANY),
    "all-damaged": Kind(damage.all_damaged, ANY),
    "damaged-plan": Kind(damage.damaged_plan),
    "torn-metrics": Kind(damage.torn_metrics, ANY),
    "damaged-run-toml": Kind(damage.damaged_run_file, ANY),
    "another-model": Kind(damage.another_model, ANY),
    "another-precision": Kind(damage.another_precision, ANY),
    "newer-version": Kind(damage.newer_version, ANY),
    "wrong-permissions": Kind(damage.wrong_permissions, ANY),
    "permissions-lost": Kind(damage.permissions_lost, ANY),
    "foreign-files": Kind(damage.foreign_files, ANY),
    "stale-lock": Kind(damage.killed_launcher_with_lock, ANY),
    # the machine
    "rank-without-memory": Kind(machine.rank_without_memory),
    "launcher-without-memory": Kind(machine.launcher_without_memory, ANY),
    "oom-planning": Kind(machine.killed_for_memory_while_planning, root=True, lacks=_group),
    "oom": Kind(machine.killed_for_memory, root=True, lacks=_group),
    "few-open-files": Kind(machine.few_open_files, ANY),
    "small-files-only": Kind(machine.small_files_only, ANY),
    "no-tmp": Kind(machine.no_folder_for_temporary_files, ANY),
    "port-taken": Kind(machine.port_taken),
    "two-runs": Kind(machine.two_runs, ANY),
    "clock-jumps": Kind(machine.clock_jumps, ANY, lacks=machine.can_set_clocks),
    "no-launcher-variables": Kind(machine.launcher_without_variables),
    "too-many-ranks": Kind(machine.too_many_ranks),
    "damaged-command": Kind(machine.damaged_command, ANY),
    # model and data
    "model-exception": Kind(mistakes.exception_in_the_model, ANY),
    "nan": Kind(mistakes.nan_in_the_loss, ("tensors",)),
    "data-changed": Kind(mistakes.data_changed, ("tensors",)),
    "sample-vanishes": Kind(mistakes.sample_vanishes, ("images",)),
    "sample-damaged": Kind(mistakes.sample_damaged, ("images",)),
}


def missing() -> dict[str, str]:
    """Map the kinds that this machine cannot inflict to the reasons."""
    boxes = why_not()
    reasons = {}
    for name, kind in KINDS.items():
        lacks = kind.lacks() or (kind.root and os.geteuid() != 0 and "needs root") or (kind.hosts > 1 and boxes)
        if lacks:
            reasons[name] = lacks
    return reasons
