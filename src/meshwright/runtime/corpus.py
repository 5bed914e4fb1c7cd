"""The demo's text: English and code that every Python installation has, split into a training and a held-out part."""

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from meshwright.errors import DataError

# Left out: machine-written tables (encodings), texts that language_topics() reads (pydoc_data), the library's tests.
_SKIPPED_PACKAGES = frozenset({"encodings", "pydoc_data"})
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "__pycache__"})

_HELD_OUT_EVERY = 8  # every n-th document is a candidate for the held-out text
_MOST_REPEATED = 0.1  # a document is new if at most this fraction of it repeats other documents
_LEAST_SOURCE_BYTES = 1_000_000


def standard_library_text(train_bytes: int = 8_000_000, held_out_bytes: int = 256_000) -> tuple[bytes, bytes]:
    """Return training and held-out text (UTF-8) of at most these sizes. The texts are from Python's language reference
    and then from the standard library's sources. Raise a DataError if this Python was installed without ``pydoc_data``
    or readable sources.

    A document is never split between the two texts. Documents are ordered by the hashes of their names, so a Python
    version always gives the same two texts. Other versions give other texts: compare losses only within a version.
    """
    topics, sources = language_topics(), library_sources()
    return split_documents([*by_hash(topics), *by_hash(sources)], train_bytes, held_out_bytes)


def language_topics() -> dict[str, bytes]:
    """The texts of Python's ``help()``, by topic. A topic that repeats longer topics is left out. Raise a DataError if
    this Python has no ``pydoc_data``."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"this Python has no help texts ({error})",
            where="pydoc_data.topics",
            remedy="use a complete Python (on Debian: libpython3-stdlib), or your own text",
        ) from None
    kept: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for name, topic in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        text = topic.encode()
        if _is_new(text, seen):
            kept[f"topics/{name}"] = text
            seen.update(_paragraphs(text))
    return kept


def library_sources() -> dict[str, bytes]:
    """The standard library's ``.py`` files, by their path in the library; line ends are ``\\n``. Raise a DataError if
    this Python's library is not a folder of sources (a zip file, or compiled files only)."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = {}
    for path in _source_files(library) if library.is_dir() else ():
        try:
            text = path.read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):  # a dangling link, or a file that is not UTF-8
            continue
        sources[path.relative_to(library).as_posix()] = text.replace(b"\r\n", b"\n")
    size = sum(map(len, sources.values()))
    if size < _LEAST_SOURCE_BYTES:
        contents = f"only {size:,} bytes of Python sources" if library.is_dir() else "no folder of Python sources"
        raise DataError(
            f"the standard library has {contents}",
            where=str(library),
            remedy="use a Python whose library is installed as source files (not a zip file), or your own text",
        )
    return sources


def by_hash(documents: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """Sort documents by the hashes of their names. This mixes them evenly, in the same order on every file system."""
    return sorted(documents.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def split_documents(
    documents: Iterable[tuple[str, bytes]], train_bytes: int, held_out_bytes: int
) -> tuple[bytes, bytes]:
    """Join whole (name, text) documents, in the given order, to a training and a held-out text. Documents that do not
    fit are left out.

    Every eighth document is a candidate for the held-out text, and all others are for training. A candidate is left out
    of both texts if more than a tenth of it repeats paragraphs of the training text.
    """
    texts = [text for _, text in documents]
    candidates = texts[::_HELD_OUT_EVERY]
    train = _fitting((text for place, text in enumerate(texts) if place % _HELD_OUT_EVERY), train_bytes)
    seen = {paragraph for text in train for paragraph in _paragraphs(text)}
    held_out = _fitting((text for text in candidates if _is_new(text, seen)), held_out_bytes)
    return b"\n".join(train), b"\n".join(held_out)


def _source_files(library: Path) -> Iterable[Path]:
    for entry in library.iterdir():  # only names of the library itself: never site-packages
        if entry.stem not in sys.stdlib_module_names or entry.name in _SKIPPED_PACKAGES:
            continue
        if entry.suffix == ".py":
            yield entry
        elif entry.is_dir():
            for path in entry.rglob("*.py"):
                if not _SKIPPED_FOLDERS.intersection(path.relative_to(entry).parts):
                    yield path


def _fitting(texts: Iterable[bytes], most_bytes: int) -> list[bytes]:
    chosen, size = [], 0
    for text in texts:
        if text and size + len(text) + 1 <= most_bytes:  # 1: the line end that separates two texts
            chosen.append(text)
            size += len(text) + 1
    return chosen


def _is_new(text: bytes, seen: Set[bytes]) -> bool:
    repeated = sum(len(paragraph) for paragraph in _paragraphs(text) if paragraph in seen)
    return repeated <= _MOST_REPEATED * len(text)


def _paragraphs(text: bytes) -> list[bytes]:
    return [paragraph for part in text.split(b"\n\n") if (paragraph := part.strip())]
