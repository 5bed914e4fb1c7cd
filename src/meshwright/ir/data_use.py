"""What a loader that fetches ahead did in a run, beside what was predicted of it."""

import msgspec

from meshwright.ir.units import aligned, seconds, size


class DataUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fetches of all ranks in a run.

    ``fetches`` maps each class of storage to the number of samples that came from it. ``misses`` is the number of reads
    of the file system, those for steps after the last included. ``predicted_misses``, ``belady_misses`` and
    ``lru_misses`` are those of the placement, of the best cache that sees the future, and of caches that drop what was
    not used for longest, all of the same size (None: there were too many accesses to replay). ``waited_s`` is the mean
    time that a step waits for data on the rank that waits longest, over ``num_steps`` steps. ``file_bytes_per_s`` is
    what the file system gives all ranks together, ``needed_bytes_per_s`` what steps without waits need of it.
    ``staging_bytes`` is the limit of staging on each rank, ``staged_bytes`` the largest number of bytes that a rank has
    staged; ``kept_bytes`` those that all ranks keep, by class. ``num_bad`` is the number of fetches of samples that
    could not be read and were skipped, and of truncated shards whose rest was skipped; ``bad`` names some of them."""

    data: str
    num_ranks: int
    num_steps: int
    fetches: dict[str, int]
    misses: int
    predicted_misses: int | None = None
    belady_misses: int | None = None
    lru_misses: int | None = None
    waited_s: float
    predicted_waited_s: float | None = None
    file_bytes_per_s: float = 0.0
    needed_bytes_per_s: float = 0.0
    staging_bytes: int = 0
    staged_bytes: int = 0
    kept_bytes: dict[str, int] = {}
    num_bad: int = 0
    bad: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str, str]]:
        """Triples (what, predicted, measured); empty where a value is not known."""
        waits = "" if self.predicted_waited_s is None else seconds(self.predicted_waited_s)
        return [
            ("waiting for data in a step", waits, seconds(self.waited_s)),
            ("reads of the file system", _count(self.predicted_misses), _count(self.misses)),
            ("the same, of the best cache (Belady)", _count(self.belady_misses), ""),
            ("the same, of caches that drop the oldest (LRU)", _count(self.lru_misses), ""),
        ]

    def shares(self) -> list[tuple[str, str, str]]:
        """Triples (class of storage, fetches from it, their share of all)."""
        total = sum(self.fetches.values()) or 1
        return [(name, f"{count:,}", f"{count / total:.1%}") for name, count in self.fetches.items()]

    def facts(self) -> list[tuple[str, str]]:
        """Pairs (name, value)."""
        facts = [("data", self.data), ("fetches", f"{sum(self.fetches.values()):,} by {self.num_ranks} ranks")]
        facts += [(f"kept in {name}", size(count)) for name, count in self.kept_bytes.items() if count]
        facts.append(("staged on a rank", f"at most {size(self.staged_bytes)} of {size(self.staging_bytes)}"))
        if self.file_bytes_per_s:
            rates = f"{size(self.file_bytes_per_s)}/s measured, {size(self.needed_bytes_per_s)}/s needed"
            facts.append(("file system, all ranks", rates))
        if self.num_bad:
            facts.append(("skipped", f"{self.num_bad:,} fetches of bad samples: {', '.join(self.bad)}"))
        return facts

    @property
    def explanation(self) -> str:
        """Why steps wait for data, in a sentence."""
        if self.needed_bytes_per_s <= self.file_bytes_per_s:
            return "The file system is fast enough: faster decoding of samples, or more threads, would explain it."
        return (
            f"Steps without waits need {size(self.needed_bytes_per_s)}/s from the file system, which gives "
            f"{size(self.file_bytes_per_s)}/s: more memory_bytes, a cache_directory or more ranks read less of it."
        )

    def lines(self) -> list[str]:
        """The comparison as text."""
        rows = [("data", "predicted", "measured"), *self.rows()]
        return [
            "  data fetched ahead",
            *aligned(rows),
            *aligned([("fetched from", "samples", "share"), *self.shares()]),
        ]


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
