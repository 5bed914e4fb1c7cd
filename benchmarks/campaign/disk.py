"""Faults of the disk under a run's folder: full, read-only, slow, without power. A disk is a file with an ext4."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.campaign.site import LATER, Site

SIZE_BYTES = 24 * 2**20
SHUT_DOWN, WITHOUT_FLUSH = 0x8004587D, 2
"""EXT4_IOC_SHUTDOWN, and EXT4_GOING_FLAGS_NOLOGFLUSH: what is not on the disk yet is lost, as if power had failed."""
FROZEN_S, THAWED_S = 0.25, 0.02
REFILLED_S = 0.001
PATIENCE_S = 20.0
NO_ROOM = r"[Nn]o space left"


class Disk:
    """A small disk of its own, on which the run of a site lies."""

    def __init__(self, site: Site) -> None:
        self.image, self.place = site.folder / "disk.img", site.folder / "disk"
        with self.image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(self.image)], check=True)
        self.place.mkdir()
        self.mount()
        site.run = self.place / "run"

    def mount(self) -> None:
        """Mount it. Its journal is played back where it was cut off."""
        options = "loop,errors=remount-ro,nodelalloc"
        subprocess.run(["mount", "-o", options, str(self.image), str(self.place)], check=True)

    def unmount(self) -> None:
        """Unmount it, as soon as nobody uses it. Namespaces of processes that have ended may keep it for a while: what
        is mounted meanwhile would be the same file system, in the state in which it is."""
        if not self.place.is_mount():
            return
        state = self._state()
        _await(lambda: not subprocess.run(["umount", self.place], capture_output=True, check=False).returncode)
        _await(lambda: not state.exists())

    def _state(self) -> Path:
        """What the kernel tells of the file system, as long as there is one."""
        device = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", str(self.place)], check=True, capture_output=True, text=True
        )
        return Path("/sys/fs/ext4", Path(device.stdout.strip()).name)

    def repair(self) -> None:
        """Unmount, check and mount it, as an administrator does."""
        self.unmount()
        subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True, check=False)
        self.mount()

    def fill(self, left_bytes: int = 0) -> None:
        """Write a file until nothing fits, but for so many bytes."""
        with (self.place / "filling").open("ab", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 65536):
                pass
        if left_bytes:
            os.truncate(self.place / "filling", (self.place / "filling").stat().st_size - left_bytes)

    @contextmanager
    def full(self) -> Iterator[None]:
        """A context in which the disk stays full: room that a removed checkpoint leaves is taken at once."""
        self.fill()
        ended = threading.Event()

        def fill() -> None:
            while not ended.wait(REFILLED_S):
                self.fill()

        thread = threading.Thread(target=fill, name="fills a disk")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def make_room(self) -> None:
        """Remove that file."""
        (self.place / "filling").unlink()

    def fail(self) -> None:
        """Let the file system find itself damaged: it becomes read-only at once, with all files that are open."""
        (self._state() / "trigger_fs_error").write_text("1")

    def cut_power(self) -> None:
        """Lose what was not flushed to the disk. From now on, every access is an error."""
        place = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(place, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSH))
        finally:
            os.close(place)

    def freeze(self, seconds: float) -> None:
        """Let all writes wait."""
        subprocess.run(["fsfreeze", "-f", str(self.place)], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run(["fsfreeze", "-u", str(self.place)], check=True)


def _await(holds: Callable[[], bool]) -> None:
    """Wait until it holds, for at most ``PATIENCE_S`` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("a disk is in use")
        time.sleep(0.02)


@contextmanager
def _disk(site: Site) -> Iterator[Disk]:
    disk = Disk(site)
    try:
        yield disk
        site.judge_run()
    finally:
        for process in site.starter.living():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        disk.unmount()


def disk_full_for_a_while(site: Site) -> None:
    """Others fill the disk, and make room again: training goes on meanwhile."""
    with _disk(site) as disk:
        site.start()
        site.await_step(high=site.steps // 3)
        site.promise()
        disk.fill(site.draw.choice([0, 4096, 16384]))
        time.sleep(0.2 + site.draw.random() * 0.5)
        disk.make_room()
        site.finish(codes={0, 2})


def disk_full(site: Site) -> None:
    """The disk stays full until the end, which says how much is missing. With room, the same command goes on."""
    with _disk(site) as disk:
        site.start()
        site.await_step()
        site.promise()
        with disk.full():
            site.judge({2}, NO_ROOM)
        site.settle()
        disk.make_room()
        site.finish()


def disk_full_at_the_start(site: Site) -> None:
    """There is no room when the command begins."""
    with _disk(site) as disk:
        disk.fill()
        site.start()
        site.judge({2}, NO_ROOM)
        site.settle()
        disk.make_room()
        site.finish()


def disk_read_only(site: Site) -> None:
    """The file system becomes read-only in the middle of a run."""
    with _disk(site) as disk:
        site.start()
        site.await_step()
        site.promise()
        disk.fail()
        site.judge({2}, r"[Rr]ead-only file system")
        site.settle()
        disk.repair()
        site.finish()


def power_cut(site: Site, saving: bool = False) -> None:
    """Power fails: all processes are gone, and what was not flushed to the disk."""
    with _disk(site) as disk:
        site.start()
        site.await_step()
        if saving:
            site.until(lambda: any(site.checkpoints.glob("step-*/data-*/*.distcp")) or None, what="a save")
        site.promise(flushed=True)
        disk.cut_power()
        site.kill_session(flushed=True)
        site.judge({-signal.SIGKILL})
        site.until_nothing_lives()
        disk.unmount()
        disk.mount()
        site.settle()
        site.finish()


def power_cut_while_saving(site: Site) -> None:
    """Power fails while a checkpoint is written."""
    power_cut(site, saving=True)


def disk_stalls(site: Site) -> None:
    """All writes wait for a while."""
    with _disk(site) as disk:
        site.start()
        site.await_step()
        site.promise()
        disk.freeze(0.5 + site.draw.random())
        site.finish(codes={0})


def disk_slow(site: Site) -> None:
    """Writes wait nearly all of the time."""
    with _disk(site) as disk:
        site.start()
        site.await_step()
        site.promise()
        ended = threading.Event()

        def slow() -> None:
            for _ in range(12):
                disk.freeze(FROZEN_S)
                if ended.wait(THAWED_S):
                    return

        thread = threading.Thread(target=slow, name="slows a disk")
        thread.start()
        try:
            site.judge({0, LATER})
        finally:
            ended.set()
            thread.join()
        site.finish()
