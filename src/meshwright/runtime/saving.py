"""Writing a checkpoint, at once or in a thread beside the steps.

    rank 0    takes its share │ writes it          collects reports ▸ index, manifest ▸ verdict
    rank 1    takes its share │ writes it ▸ report                                      reads the verdict
              └ the step waits┘ └ here steps go on, if the save does not block ──────────────────────────

Ranks tell each other what became of it through notes (``comm/board.py``): a thread calls no collective, whose order
among those of the steps would be left to chance. The verdict is the same on every rank.
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
"""How long a program that ends with an error waits for a save: the other ranks may be gone."""


@dataclass(frozen=True)
class Report:
    """What a rank has written, or why it could not."""

    written: list[WriteResult] = field(default_factory=list)
    files: dict[str, SavedFile] = field(default_factory=dict)
    error: MeshwrightError | None = None


@dataclass(frozen=True)
class Save:
    """One save, as it is on one rank: all that is written is held here, and nothing else is asked of the trainer.

    Args:
        manifest: what will be the checkpoint's, without its files.
        state: the bytes of ``trainer.pt``.
        num_bytes: about what the checkpoint takes on the disk.
        keep: how many checkpoints stay in the directory around it; 0: all, it is no such directory.
    """

    path: Path
    manifest: Manifest
    share: Share
    state: bytes
    num_bytes: int
    keep: int
    board: Board

    def run(self) -> MeshwrightError | None:
        """Write, and wait for the verdict on what all ranks wrote: None, or why the checkpoint is not there. A
        LostRankError if rank 0 does not answer."""
        try:
            mine = self._write_share()
            verdict = self._conclude(mine) if self.share.rank == 0 else None
        except BaseException:  # Ctrl-C: the others must not wait
            stopped = CheckpointError(f"rank {self.share.rank} was stopped", where=f"{self.path}")
            self._tell(Report(error=stopped), stopped)
            raise
        self._tell(mine, verdict)
        return verdict if self.share.rank == 0 else self.board.read(self._key(0), 0)

    def forget(self) -> None:
        """Take the last note away, when every rank has read it."""
        if self.share.rank == 0:
            self.board.remove(self._key(0))

    def _key(self, rank: int) -> str:
        return f"{self.manifest.data}/{'report' if rank else 'verdict'} {rank}"

    def _tell(self, mine: Report, verdict: MeshwrightError | None) -> None:
        """Leave this rank's note: rank 0's is the verdict, after it has removed what is left of a failed save."""
        if self.share.rank == 0 and verdict is not None:
            manifest.abandon(self.path, self.manifest.data)
        self.board.post(self._key(self.share.rank), mine if self.share.rank else verdict)

    def _write_share(self) -> Report:
        directory = self.path / self.manifest.data

        def write() -> Report:
            written = self.share.write(directory)
            return Report(written, manifest.written(directory, shards.files_of(written)))

        try:
            return told(f"{directory}", write)
        except MeshwrightError as error:
            problem = f"tensors could not be written (rank {self.share.rank}: {error.problem})"
            return Report(error=type(error)(problem, where=f"{self.path}", remedy=error.remedy))

    def _conclude(self, mine: Report) -> MeshwrightError | None:
        """On rank 0: make what all ranks have written the checkpoint."""
        try:
            reports = [mine]
            for rank in range(1, self.share.num_ranks):
                reports.append(self.board.read(self._key(rank), rank))
                self.board.remove(self._key(rank))
            for report in reports:
                if report.error is not None:
                    raise report.error
            told(f"{self.path}", lambda: self._commit(reports))
        except DiskError as error:
            manifest.abandon(self.path, self.manifest.data)  # first, so that its room counts as free
            return manifest.no_room(self.path, self.num_bytes) or error
        except MeshwrightError as error:
            return error
        log.info("step %d is saved in %s", self.manifest.step, self.path)
        return None

    def _commit(self, reports: list[Report]) -> None:
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
        rest = sorted(one.name for one in directory.iterdir() if one.name not in saved)
        saved |= manifest.written(directory, rest)
        manifest.commit(self.path, msgspec.structs.replace(self.manifest, files=dict(sorted(saved.items()))))
        if self.keep and (later := manifest.prune(self.path.parent, self.path.name, self.keep)):
            where, latest = self.path.parent, later[0]
            log.warning("%s holds later steps than the one just saved; load_latest takes %s", where, latest)


class Saver:
    """The saves of a trainer, one at a time. Every rank calls the same methods in the same order."""

    def __init__(self) -> None:
        self._last: Save | None = None
        self._thread: threading.Thread | None = None
        self._error: MeshwrightError | None = None

    @cached_property
    def board(self) -> Board:
        """Where the ranks tell each other what became of a save."""
        return Board(attend())

    def start(self, save: Save, *, blocking: bool) -> None:
        """Write; in a thread unless ``blocking``, which raises a CheckpointError on every rank. No other save is under
        way, and since the last one ranks have met."""
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
        """Keep why a save that does not block has failed, until ``wait``; rank 0 warns of it. Training goes on."""
        self._error = error
        if rank == 0:
            after = "; training goes on, and the next save tries again" if isinstance(error, DiskError) else ""
            log.warning("%s: %s%s", error.where, error.problem, after)

    def wait(self) -> MeshwrightError | None:
        """Wait for the save under way. Returns why the last one that did not block has failed; once."""
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
        """At the program's end."""
        if self._thread is not None:
            self._thread.join(None if getattr(sys, "last_value", None) is None else AFTER_ERROR_S)
