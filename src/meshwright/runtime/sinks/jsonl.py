"""metrics.jsonl: one row of JSON for each step and each evaluation."""

import errno
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.runtime.sinks.base import Row, Sink

log = logging.getLogger("meshwright")


class Jsonl(Sink):
    """Appends rows to a file. Rows that do not fit on a full disk are tried again with the next rows."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, and those that wait."""
        if not (rows or self._unwritten):
            return
        waited = bool(self._unwritten)
        self._unwritten.extend(rows)
        data = "".join(json.dumps(row) + "\n" for row in self._unwritten).encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(data) < len(data):  # a partial row is unreadable
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not waited:
                log.warning("%s: %s; its rows wait until there is room", self.path, error.strerror)
        else:
            self._unwritten.clear()

    def flush(self) -> None:
        """Flush the file to the disk. A disk that refuses will refuse the checkpoint, too."""
        with suppress(OSError), self.path.open("rb") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> list[Row]:
        """Remove the rows after ``step``, because these steps will be made again. Return the rows up to ``step``."""
        if not self.path.exists():
            return []
        rows: list[Row] = []
        size = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                row: Row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                break
            if row["step"] > step or not line.endswith(b"\n"):
                break
            rows.append(row)
            size += len(line)
        os.truncate(self.path, size)  # unlike a new file, this needs no disk space
        return rows

    def close(self) -> None:
        """Try once more to write waiting rows, and warn if they cannot be written."""
        self.write(())
        if self._unwritten:
            log.warning("%s: there was no room for the rows from step %d on", self.path, self._unwritten[0]["step"])
