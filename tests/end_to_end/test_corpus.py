"""The demo's text: the same every time, whole documents, and nothing held out is also learned."""

import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DataError
from meshwright.runtime.corpus import by_hash, language_topics, library_sources, split_documents, standard_library_text
from tests.tries import tries


def test_the_standard_library_gives_enough_text_of_both_kinds() -> None:
    train, held_out = standard_library_text()
    assert 4_000_000 < len(train) <= 8_000_000
    assert 200_000 < len(held_out) <= 256_000
    for text in (train, held_out):
        text.decode()
        assert b"def " in text
        assert b"\r\n" not in text
    topics = language_topics().values()
    assert sum(len(topic) for topic in topics if topic in train) > 200_000
    assert sum(len(topic) for topic in topics if topic in held_out) > 5_000
    assert standard_library_text() == (train, held_out)


def test_nothing_held_out_is_in_the_training_text() -> None:
    train, held_out = standard_library_text()
    documents = list(language_topics().values()) + list(library_sources().values())
    kept_apart = [text for text in documents if text and text in held_out]
    assert len(kept_apart) > 20
    assert not [text for text in kept_apart if text in train and len(text) > 200]
    known = set(train.split(b"\n"))
    lines = [line for line in held_out.split(b"\n") if len(line) > 40]
    assert sum(line in known for line in lines) < 0.05 * len(lines)


def test_only_the_library_itself_is_read() -> None:
    names = library_sources().keys()
    assert "textwrap.py" in names
    assert "json/decoder.py" in names
    assert not [name for name in names if name.split("/")[0] in ("site-packages", "test", "encodings")]
    assert not [name for name in names if "tests" in name.split("/") or "sysconfigdata" in name]


documents = st.dictionaries(st.text(min_size=1), st.binary(min_size=1, max_size=30), max_size=40)


@given(documents=documents, train_bytes=st.integers(0, 400), held_out_bytes=st.integers(0, 60))
@tries(25)
def test_the_two_sides_hold_whole_documents_within_their_sizes(
    documents: dict[str, bytes], train_bytes: int, held_out_bytes: int
) -> None:
    # Each text has its document's name in it, so that no two are equal, and no white space.
    texts = {name: name.encode().hex().encode() + b"|" + text.hex().encode() for name, text in documents.items()}
    train, held_out = split_documents(by_hash(texts), train_bytes, held_out_bytes)
    assert len(train) <= train_bytes
    assert len(held_out) <= held_out_bytes
    learned, kept = set(train.split()), set(held_out.split())
    assert not learned & kept
    assert learned | kept <= set(texts.values())


def test_a_held_out_document_that_repeats_training_text_is_in_neither() -> None:
    paragraph, own = b"a paragraph that stands in two documents", b"a paragraph of its own"
    others = [(f"{place}", b"document %d" % place) for place in range(7)]
    train, held_out = split_documents([("x", paragraph), *others, ("y", own)], 1000, 1000)
    assert held_out == paragraph + b"\n" + own
    train, held_out = split_documents([("x", paragraph), *others[:-1], ("z", own + b"\n\n" + paragraph)], 1000, 1000)
    assert paragraph in train
    assert held_out == b""


def test_the_order_is_that_of_the_names_hashes() -> None:
    documents = {name: name.encode() for name in "abcdef"}
    assert by_hash(documents) == by_hash(dict(reversed(documents.items())))
    assert by_hash(documents) != sorted(by_hash(documents))


# --------------------------------------------------------------------------------------------------------- bad input


def test_a_python_without_help_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data.topics: this Python has no help texts") as error:
        standard_library_text()
    assert "use a complete Python" in error.value.remedy


@pytest.mark.parametrize(
    ("library", "problem"),
    [
        ("python311.zip", "python311.zip: the standard library has no folder of Python sources"),
        (".", "the standard library has only 12 bytes of Python sources"),
    ],
)
def test_a_python_without_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, problem: str
) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_bytes(b"import this\n")
    (tmp_path / "json" / "decoder.pyc").write_bytes(b"compiled")
    (tmp_path / "textwrap.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "token.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / library))
    with pytest.raises(DataError, match=problem) as error:
        standard_library_text()
    assert "not a zip file" in error.value.remedy
