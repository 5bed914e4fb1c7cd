"""Writes a checkpoint: at once, or in a thread while training continues.

    rank 0    takes its share │ copies it │ writes it          collects reports ▸ indices, manifest ▸ verdict
    rank 1    takes its share │ copies it │ writes it ▸ report                                        reads the verdict
              └ the step waits┘           └ an update may change the parameters from here on ──────────────────────────

Ranks report the result to each other through notes (``comm/board.py``). The thread calls no collectives: on each rank
they could run at a different point among the collectives of the steps. The verdict is None or an error, and is the same
on every rank. All that can fail in a save is told in its report, so that ranks need not meet before it.
"""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from meshwright.comm.board import Board
from meshwright.comm.groups import from_rank_0
from meshwright.comm.member import attend
from meshwright.consistency.packing import from_bytes, to_bytes
from meshwright.errors import CheckpointError, DiskError, MeshwrightError
from meshwright.runtime import manifest
from meshwright.runtime.agree import convert_errors, differing
from meshwright.runtime.checkpoint import plain
from meshwright.runtime.chunk_index import IndexedTensor, joined, small_files
from meshwright.runtime.device import CopyStream, DeviceKind
from meshwright.runtime.manifest import TRAINER, Manifest, SavedFile
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.share import NotFiniteError, Share
from meshwright.runtime.share_copy import HostMemory, ShareCopy

log = logging.getLogger("meshwright")

OTHER_BYTES = 16 * 2**10
"""Approximate bytes on the disk that a checkpoint takes in addition to its tensors and ``trainer.pt``."""
AFTER_ERROR_S = 5.0
"""Maximum seconds to wait for a save when the program ends with an error, because the other ranks may be gone."""


@dataclass(frozen=True)
class SaveReport:
    """A rank's report to rank 0: what the rank has written, or the error that kept it from writing.

    Attributes:
        where: the path, as the rank was given it.
        position: the loader's position, as text.
        state: the rank's own part of ``trainer.pt``, if ranks hold different parts.
    """

    where: str
    position: str = ""
    tensors: dict[str, IndexedTensor] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    state: bytes = b""
    error: MeshwrightError | None = None


@dataclass(frozen=True)
class Save:
    """One save on one rank. It holds all data to be written, and needs nothing else of the trainer.

    Args:
        data: the name of the data directory.
        describe: makes the manifest. Its ``data`` and ``files`` are filled in later.
        share: this rank's tensors.
        state: makes this rank's contents of ``trainer.pt``.
        position: the loader's position, as text, which must be the same on all ranks.
        join: makes one state of those of all ranks; None: they are all equal.
        earlier: the ``data`` of the save before; empty if there was none.
        failed: the error that kept this rank from taking its share.
        before: called on rank 0 before the checkpoint counts as complete.
        keep: number of checkpoints to keep in the parent directory; 0: remove none, as in ``Resumable.save``.
    """

    path: AnyPath
    data: str
    describe: Callable[[], Manifest]
    share: Share
    state: Callable[[], dict[str, Any]]
    position: str
    join: Callable[[list[dict[str, Any]]], dict[str, Any]] | None
    keep: int
    board: Board
    earlier: str
    failed: MeshwrightError | None = None
    before: Callable[[], object] = lambda: None

    def run(self) -> MeshwrightError | None:
        """Write this rank's share, and return the verdict on the shares of all ranks: None, or the error with which the
        save failed. Raise a LostRankError if rank 0 does not answer."""
        try:
            packed, own_report = self._write_share()
            verdict = self._conclude(packed, own_report) if self.share.rank == 0 else None
        except BaseException:  # after Ctrl-C too: the other ranks must not wait
            stopped = CheckpointError(f"rank {self.share.rank} was stopped", where=f"{self.path}")
            self._tell(SaveReport(f"{self.path}", error=stopped), stopped)
            raise
        finally:
            self.share.release()
        self._tell(own_report, verdict)
        if self.share.rank == 0:
            return verdict
        verdict = self.board.read(self._key(0), 0)
        if verdict is not None:  # rank 0 cannot remove it if it was given another path
            manifest.abandon(self.path, self.data)
        return verdict

    def _key(self, rank: int) -> str:
        return _key(self.data, rank)

    def _tell(self, own_report: SaveReport, verdict: MeshwrightError | None) -> None:
        """Post this rank's note. Rank 0 posts the verdict; other ranks post their reports. If the save failed, rank 0
        first removes the files of the save."""
        if self.share.rank == 0 and verdict is not None:
            manifest.abandon(self.path, self.data)
        self.board.post(self._key(self.share.rank), own_report if self.share.rank else verdict)

    def _write_share(self) -> tuple[bytes, SaveReport]:
        """Return the contents of ``trainer.pt``, and the report."""
        directory, where, packed = self.path / self.data, f"{self.path}", b""
        try:
            if self.failed is not None:
                raise self.failed
            packed = convert_errors(where, lambda: to_bytes(self._plain(self.state())))
            self.share.complete()
            self.share.release()
            convert_errors(where, lambda: manifest.begin(self.path, self.share.num_bytes + len(packed) + OTHER_BYTES))
        except MeshwrightError as error:
            return packed, SaveReport(where, self.position, error=error)
        own_state = packed if self.join is not None else b""

        def write() -> SaveReport:
            tensors = self.share.write(directory)
            names = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
            files = {name: SavedFile(num_bytes=(directory / name).stat().st_size) for name in sorted(names)}
            return SaveReport(where, self.position, tensors, files, own_state)

        try:
            return packed, convert_errors(f"{directory}", write)
        except NotFiniteError as error:
            return packed, SaveReport(where, self.position, error=error)
        except MeshwrightError as error:
            problem = f"tensors could not be written (rank {self.share.rank}: {error.problem})"
            told_error = type(error)(problem, where=where, remedy=error.remedy)
            return packed, SaveReport(where, self.position, error=told_error)

    def _plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state. Raise a CheckpointError that names the first part that is not plain data."""
        try:
            return plain("the trainer", state)
        except CheckpointError:
            for name in ("optimizer", "loader"):
                plain(f"the {name}", state[name])
            for name, value in state["extra"].items():
                plain(f"extra {name!r}", value)
            raise

    def _conclude(self, packed: bytes, own_report: SaveReport) -> MeshwrightError | None:
        """Collect all reports on rank 0, and complete the checkpoint. Return None, or the error that prevented it."""
        try:
            reports = [own_report]
            for rank in range(1, self.share.num_ranks):
                reports.append(self.board.read(self._key(rank), rank))
                self.board.remove(self._key(rank))
            self.board.remove(_key(self.earlier, 0))  # ranks have read it: they report after the save before has ended
            problem = differing("the path", [report.where for report in reports], "checkpoint")
            if problem is not None:
                raise problem
            for report in reports:
                if report.error is not None:
                    raise report.error
            problem = differing("the loader's position", [report.position for report in reports], f"{self.path}")
            if problem is not None:
                raise problem
            convert_errors(f"{self.path}", lambda: self._commit(packed, reports))
        except DiskError as error:
            manifest.abandon(self.path, self.data)  # first, so that their space counts as free
            return manifest.no_room(self.path, self.share.num_bytes + len(packed) + OTHER_BYTES) or error
        except MeshwrightError as error:
            return error
        return None

    def _commit(self, packed: bytes, reports: list[SaveReport]) -> None:
        directory = self.path / self.data
        saved = {name: file for report in reports for name, file in report.files.items()}
        for name in saved:
            if not (directory / name).is_file():
                raise CheckpointError(
                    f"rank 0 does not see a file that another rank wrote ({name})",
                    where=f"{directory}",
                    remedy="save to a directory that all ranks share",
                )
        if self.join is not None:
            packed = to_bytes(self.join([from_bytes(report.state) for report in reports]))
        index = joined(report.tensors for report in reports)
        described = self.describe()
        self.before()
        manifest.complete(self.path, described, self.data, saved, small_files(index) | {TRAINER: packed})
        log.info("step %d is saved in %s", described.step, self.path)
        if self.keep and (later := manifest.prune(self.path.parent, self.path.name, self.keep)):
            where, latest = self.path.parent, later[0]
            log.warning("%s holds later steps than the one just saved; load_latest takes %s", where, latest)


def _key(data: str, rank: int) -> str:
    return f"{data}/{'report' if rank else 'verdict'} {rank}"


class Saver:
    """Runs the saves of a trainer, one at a time. Every rank calls the same methods in the same order."""

    def __init__(self, kind: DeviceKind) -> None:
        self.kind = kind
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._ended = threading.Event()
        self._ended.set()
        self._error: MeshwrightError | None = None
        self._copying: ShareCopy | None = None
        self._memory: HostMemory = {}
        self._count = 0
        self.before: Callable[[], object] = lambda: None
        """What rank 0 does before a checkpoint counts as complete, in the thread that saves."""

    @cached_property
    def board(self) -> Board:
        """The board on which ranks report the result of a save to each other."""
        return Board(attend())

    @cached_property
    def copies(self) -> CopyStream | None:
        """The stream of the device for copies to the host; None if they share their memory."""
        return self.kind.copies()

    @cached_property
    def _token(self) -> str:
        return from_rank_0(lambda: secrets.token_hex(16))

    def new_data(self) -> tuple[str, str]:
        """The names of the data directories of the next save and of the save before it, the same on all ranks. Ranks
        meet for the first save only."""
        self._count += 1
        names = [manifest.new_name(f"{self._token} {count}") for count in (self._count, self._count - 1)]
        return names[0], names[1] if self._count > 1 else ""

    def start(self, save: Save, *, blocking: bool) -> None:
        """Run ``save``, in a thread unless ``blocking``. If a blocking save fails, raise a CheckpointError on every
        rank. No other save may be running."""
        if save.failed is None and (self.copies is not None or not blocking):
            self._copying = save.share.copy(self.kind, self.copies, self._memory)
        if blocking:
            if (error := save.run()) is not None:
                raise error
            return
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._jobs,), name="saves checkpoints", daemon=True)
            thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            atexit.register(_wait_at_end, self._jobs, thread)
        self._ended.clear()
        self._jobs.put(partial(self._run, save))

    @property
    def num_staged_bytes(self) -> int:
        """The bytes of memory in which saves keep their copies, also between saves."""
        return sum(value.nbytes for value in [*self._memory.values()])

    def hold_update(self) -> None:
        """Called before parameters are updated: the update waits until a running save has copied them."""
        if self._copying is not None:
            self._copying.hold()
            self._copying = None

    def fail(self, error: MeshwrightError, rank: int) -> None:
        """Keep the error of a save that does not block until ``wait``. Rank 0 logs a warning, and training
        continues."""
        self._error = error
        if rank == 0:
            after = "; training goes on, and the next save tries again" if isinstance(error, DiskError) else ""
            log.warning("%s: %s%s", error.where, error.problem, after)

    def wait(self) -> MeshwrightError | None:
        """Wait until no save is running. Return the error of the last save that did not block (only once), or None."""
        self._ended.wait()
        error, self._error = self._error, None
        return error

    def _run(self, save: Save) -> None:
        try:
            try:
                failed = convert_errors(f"{save.path}", save.run)
            except MeshwrightError as error:
                failed = error
            if failed is not None:
                self.fail(failed, save.share.rank)
        finally:
            self._ended.set()


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run jobs in a thread of their own: a save that starts a thread would wait for it."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _wait_at_end(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    """Wait for the running save, and for the end of its thread, when the program ends. A thread that still frees
    tensors while Python ends would abort the process."""
    jobs.put(None)
    thread.join(None if getattr(sys, "last_value", None) is None else AFTER_ERROR_S)
