"""A Slurm of this machine for tests: one controller and several nodes, without an installation, munge or accounting.

The packages of the distribution are downloaded and unpacked into a folder. All daemons are processes of this user on
the loopback interface; each node is a daemon with a name and a port of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15", "libnuma1",
)  # fmt: skip
START_S = 60.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unpacked(folder: Path) -> Path:
    """The root of the unpacked packages; they are downloaded the first time."""
    root = folder / "root"
    if not (root / "usr/bin/srun").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True, capture_output=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


class Slurm:
    """A context in which a Slurm of ``num_nodes`` nodes runs. ``environment`` is that of its commands."""

    def __init__(self, folder: Path, directory: Path, num_nodes: int = 2) -> None:
        root = unpacked(folder)
        (library,) = (root / "usr/lib").glob("*-linux-gnu*")
        self.directory, self.num_nodes = directory, num_nodes
        self.sbin = root / "usr/sbin"
        plugins, host = library / "slurm-wlm", socket.gethostname()
        port = _free_ports(num_nodes + 1)
        (directory / "state").mkdir(parents=True)
        (directory / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, port=port, user=os.environ.get("USER", "root"), plugins=plugins, directory=directory,
                nodes=num_nodes, first=port + 1, last=port + num_nodes,
            )
        )  # fmt: skip
        self.environment = os.environ | {
            "SLURM_CONF": f"{directory}/slurm.conf",
            "LD_LIBRARY_PATH": f"{library}:{plugins}",
            "PATH": f"{root}/usr/bin:{self.sbin}:{os.environ['PATH']}",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._start("slurmctld", f"{self.sbin}/slurmctld-wlm", "-D")
        for node in range(1, self.num_nodes + 1):
            self.start_node(node)
        deadline = time.monotonic() + START_S
        while self("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() != f"{self.num_nodes}":
            assert time.monotonic() < deadline, self("sinfo", check=False)
            time.sleep(0.5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self("scancel", "--user", os.environ.get("USER", "root"), "--signal=KILL", "--full", check=False)
        time.sleep(1)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def __call__(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def start_node(self, node: int) -> None:
        self._start(f"n{node}", f"{self.sbin}/slurmd-wlm", "-D", "-N", f"n{node}", "-d", f"{self.sbin}/slurmstepd-wlm")

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says of a job."""
        output = self("scontrol", "show", "job", f"{number}", "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", output))

    def go_on(self, number: int) -> None:
        """Let a job that was queued again start now: Slurm makes it wait for two minutes."""
        until(lambda: self.job(number)["JobState"] == "PENDING")
        time.sleep(5)  # a new start at once would have the credential of the one that was revoked
        self("scontrol", "update", f"JobId={number}", "StartTime=now")

    def _start(self, name: str, *words: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, cwd=self.directory, stdout=log, stderr=log, start_new_session=True
            )


def until(holds: object, wait_s: float = 120.0) -> None:
    """Wait until a function returns a true value."""
    assert callable(holds)
    deadline = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    for first in range(17000, 19000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")
