"""Whether another process has ended, by a descriptor or by /proc, and which processes are of one box."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.transport.process import Process, box

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def refuse(number: int) -> Any:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture(params=["descriptor", "proc", "no such call"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How processes are watched."""
    if request.param == "proc":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    if request.param == "no such call":
        monkeypatch.delattr(os, "pidfd_open")
    return str(request.param)


def test_a_process_has_ended_before_its_parent_hears_of_it(way: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process(child.pid)
    assert bool(process.refused) == (way != "descriptor")
    assert not process.has_ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays as a zombie
    assert process.has_ended()
    child.communicate()
    assert process.has_ended()
    with pytest.raises(ProcessLookupError):
        Process(child.pid)


def test_another_process_of_the_same_number_is_not_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = Process(os.getpid())
    process._began = str(int(process._began) + 1)
    assert process.has_ended()


def test_machines_with_equal_namespaces_are_not_one_box(monkeypatch: pytest.MonkeyPatch) -> None:
    here, read = box(), Path.read_text
    assert here == box()

    def boot_id_of_another(path: Path, *given: Any) -> str:
        return "another" if path.name == "boot_id" else read(path, *given)

    monkeypatch.setattr(Path, "read_text", boot_id_of_another)
    assert box().split()[1:] == here.split()[1:]
    assert box() != here
