"""A throttled disk: reads of all processes together take at least their bytes over a rate (a token bucket)."""

import multiprocessing
import time
from typing import Any

from meshwright.data.stores import Raw, Store
from meshwright.schedules.samples import Indices


class TokenBucket:
    """Bytes come at a rate, for all threads and forked processes that share this object."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._paid: Any = multiprocessing.get_context("fork").Value("d", 0.0)

    def take(self, num_bytes: int) -> None:
        """Sleep until this many more bytes may have come."""
        with self._paid.get_lock():
            begin = max(self._paid.value, time.monotonic())
            self._paid.value = done = begin + num_bytes / self._rate
        if (left_s := done - time.monotonic()) > 0:
            time.sleep(left_s)


class SlowStore(Store):
    """A store whose reads go through a token bucket."""

    def __init__(self, store: Store, bucket: TokenBucket) -> None:
        self._store, self._bucket = store, bucket
        self.where, self.truncated = store.where, store.truncated

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._store)

    @property
    def sizes(self) -> Indices:
        """The bytes of each sample."""
        return self._store.sizes

    def read(self, index: int) -> Raw:
        """Read a sample, and wait as a slow disk would."""
        raw = self._store.read(index)
        self._bucket.take(len(raw))
        return raw

    def decode(self, index: int, raw: Raw) -> Any:
        """The sample that the bytes hold."""
        return self._store.decode(index, raw)

    def name(self, index: int) -> str:
        """Where a sample lies."""
        return self._store.name(index)

    def describe(self) -> str:
        """The store in words."""
        return self._store.describe()
