"""Writes a checkpoint: at once, or in a thread while training continues.

    rank 0    takes its share │ writes it          collects reports ▸ index, manifest ▸ verdict
    rank 1    takes its share │ writes it ▸ report                                      reads the verdict
              └ the step waits┘ └ here steps go on, if the save does not block ──────────────────────────

Ranks report the result to each other through notes (``comm/board.py``). The thread calls no collectives: on each rank
they could run at a different point among the collectives of the steps. The verdict is None or an error, and is the same
on every rank.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.storage import WriteResult

from meshwright.comm.board import Board
from meshwright.comm.member import attend
from meshwright.errors import CheckpointError, DiskError, MeshwrightError
from meshwright.ir import files
from meshwright.runtime import manifest, shards
from meshwright.runtime.agree import told
from meshwright.runtime.manifest import Manifest, SavedFile
from meshwright.runtime.shards import Share

log = logging.getLogger("meshwright")

TRAINER = "trainer.pt"
AFTER_ERROR_S = 5.0
"""Maximum seconds to wait for a save when the program ends with an error, because the other ranks may be gone."""


@dataclass(frozen=True)
class SaveReport:
    """A rank's report to rank 0: what the rank has written, or the error that kept it from writing."""

    written: list[WriteResult] = field(default_factory=list)
    files: dict[str, SavedFile] = field(default_factory=dict)
    error: MeshwrightError | None = None


@dataclass(frozen=True)
class Save:
    """One save on one rank. It holds all data to be written, and needs nothing else of the trainer.

    Args:
        manifest: the checkpoint's manifest; its ``files`` are filled in later.
        state: the bytes of ``trainer.pt``.
        num_bytes: approximate bytes of the checkpoint on the disk.
        keep: number of checkpoints to keep in the parent directory; 0: remove none, as in ``Resumable.save``.
    """

    path: Path
    manifest: Manifest
    share: Share
    state: bytes
    num_bytes: int
    keep: int
    board: Board

    def run(self) -> MeshwrightError | None:
        """Write this rank's share, and return the verdict on the shares of all ranks: None, or the error with which the
        save failed. Raise a LostRankError if rank 0 does not answer."""
        try:
            own_report = self._write_share()
            verdict = self._conclude(own_report) if self.share.rank == 0 else None
        except BaseException:  # after Ctrl-C too: the other ranks must not wait
            stopped = CheckpointError(f"rank {self.share.rank} was stopped", where=f"{self.path}")
            self._tell(SaveReport(error=stopped), stopped)
            raise
        self._tell(own_report, verdict)
        return verdict if self.share.rank == 0 else self.board.read(self._key(0), 0)

    def forget(self) -> None:
        """Remove the verdict; called when every rank has read it."""
        if self.share.rank == 0:
            self.board.remove(self._key(0))

    def _key(self, rank: int) -> str:
        return f"{self.manifest.data}/{'report' if rank else 'verdict'} {rank}"

    def _tell(self, own_report: SaveReport, verdict: MeshwrightError | None) -> None:
        """Post this rank's note. Rank 0 posts the verdict; other ranks post their reports. If the save failed, rank 0
        first removes the files of the save."""
        if self.share.rank == 0 and verdict is not None:
            manifest.abandon(self.path, self.manifest.data)
        self.board.post(self._key(self.share.rank), own_report if self.share.rank else verdict)

    def _write_share(self) -> SaveReport:
        directory = self.path / self.manifest.data

        def write() -> SaveReport:
            written = self.share.write(directory)
            return SaveReport(written, manifest.written(directory, shards.files_of(written)))

        try:
            return told(f"{directory}", write)
        except MeshwrightError as error:
            problem = f"tensors could not be written (rank {self.share.rank}: {error.problem})"
            return SaveReport(error=type(error)(problem, where=f"{self.path}", remedy=error.remedy))

    def _conclude(self, own_report: SaveReport) -> MeshwrightError | None:
        """Collect all reports on rank 0, and complete the checkpoint. Return None, or the error that prevented it."""
        try:
            reports = [own_report]
            for rank in range(1, self.share.num_ranks):
                reports.append(self.board.read(self._key(rank), rank))
                self.board.remove(self._key(rank))
            for report in reports:
                if report.error is not None:
                    raise report.error
            told(f"{self.path}", lambda: self._commit(reports))
        except DiskError as error:
            manifest.abandon(self.path, self.manifest.data)  # first, so that their space counts as free
            return manifest.no_room(self.path, self.num_bytes) or error
        except MeshwrightError as error:
            return error
        log.info("step %d is saved in %s", self.manifest.step, self.path)
        return None

    def _commit(self, reports: list[SaveReport]) -> None:
        directory = self.path / self.manifest.data
        saved = {name: file for report in reports for name, file in report.files.items()}
        for name in saved:
            if not (directory / name).is_file():
                raise CheckpointError(
                    f"rank 0 does not see what another rank wrote ({name})",
                    where=f"{directory}",
                    remedy="save to a directory that all ranks share",
                )
        self.share.write_index(directory, [report.written for report in reports])
        files.write_atomically(directory / TRAINER, self.state)
        rest = sorted(entry.name for entry in directory.iterdir() if entry.name not in saved)
        saved |= manifest.written(directory, rest)
        manifest.commit(self.path, msgspec.structs.replace(self.manifest, files=dict(sorted(saved.items()))))
        if self.keep and (later := manifest.prune(self.path.parent, self.path.name, self.keep)):
            where, latest = self.path.parent, later[0]
            log.warning("%s holds later steps than the one just saved; load_latest takes %s", where, latest)


class Saver:
    """Runs the saves of a trainer, one at a time. Every rank calls the same methods in the same order."""

    def __init__(self) -> None:
        self._last: Save | None = None
        self._thread: threading.Thread | None = None
        self._error: MeshwrightError | None = None

    @cached_property
    def board(self) -> Board:
        """The board on which ranks report the result of a save to each other."""
        return Board(attend())

    def start(self, save: Save, *, blocking: bool) -> None:
        """Run ``save``, in a thread unless ``blocking``. If a blocking save fails, raise a CheckpointError on every
        rank. No other save may be running, and all ranks must have met after the last save."""
        if self._last is not None:
            self._last.forget()
        self._last = save
        if blocking:
            if (error := save.run()) is not None:
                raise error
            return
        save.share.stage()
        if self._thread is None:
            atexit.register(self._end)
        self._thread = threading.Thread(target=self._run, args=(save,), name="saves a checkpoint", daemon=True)
        self._thread.start()

    def fail(self, error: MeshwrightError, rank: int) -> None:
        """Keep the error of a save that does not block until ``wait``. Rank 0 logs a warning, and training
        continues."""
        self._error = error
        if rank == 0:
            after = "; training goes on, and the next save tries again" if isinstance(error, DiskError) else ""
            log.warning("%s: %s%s", error.where, error.problem, after)

    def wait(self) -> MeshwrightError | None:
        """Wait until no save is running. Return the error of the last save that did not block (only once), or None."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        return error

    def _run(self, save: Save) -> None:
        try:
            failed = told(f"{save.path}", save.run)
        except MeshwrightError as error:
            failed = error
        if failed is not None:
            self.fail(failed, save.share.rank)

    def _end(self) -> None:
        """Wait for the running save when the program ends."""
        if self._thread is not None:
            self._thread.join(None if getattr(sys, "last_value", None) is None else AFTER_ERROR_S)
