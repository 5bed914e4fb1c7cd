"""Files: what is written is read again, and what is wrong is named with its file, key and remedy."""

import json
import os
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FileFormatError, LayoutError
from meshwright.ir import files


class Word:
    """A value whose file form is one string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_text(self) -> str:
        return self.text

    @classmethod
    def from_text(cls, text: str) -> "Word":
        if "!" in text:
            raise LayoutError("no shouting", where=f"position {text.index('!')}", remedy="speak softly")
        return cls(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0


class Noun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    VERSION: ClassVar[int] = 3
    version: int = 3
    name: str
    size: int = 1
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Part] = {}
    pair: tuple[Part, int] | None = None
    words: tuple[Word, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise LayoutError(f"size is {self.size}", where="size", remedy="give 0 or more")


def refused(text: str, *, toml: bool = False) -> str:
    with pytest.raises((FileFormatError, LayoutError)) as caught:
        files.decode(text.encode(), Noun, where="noun.json", toml=toml)
    return str(caught.value)


PARTS = st.builds(Part, st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1))
TEXTS = st.text(st.characters(codec="utf-8"))
NOUNS = st.builds(
    Noun,
    name=TEXTS,
    size=st.integers(0, 2**62),
    parts=st.lists(PARTS, max_size=4).map(tuple),
    by_name=st.dictionaries(TEXTS, PARTS, max_size=3),
    words=st.lists(TEXTS.filter(lambda text: "!" not in text).map(Word), max_size=9).map(tuple),
)


@given(NOUNS)
def test_json_is_read_as_it_was_written(noun: Noun) -> None:
    assert files.decode(files.encode_json(noun), Noun, where="noun.json") == noun


@given(NOUNS)
def test_the_layout_of_json_changes_no_value(noun: Noun) -> None:
    plain = msgspec.json.encode(noun, enc_hook=lambda word: word.to_text())
    assert json.loads(files.encode_json(noun)) == json.loads(plain)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_saved_file_is_loaded_again(tmp_path: Path, suffix: str) -> None:
    noun = Noun(name="α", parts=(Part(1e-06, 4e-11),), by_name={"x": Part()}, pair=(Part(), 2), words=(Word("a b"),))
    files.save(noun, tmp_path / f"folder/noun{suffix}")
    assert files.load(tmp_path / f"folder/noun{suffix}", Noun) == noun


def test_json_keeps_on_one_line_what_fits() -> None:
    noun = Noun(name="n", parts=(Part(1.0), Part(2.0), Part(3.0)), words=(Word("a" * 70), Word("b" * 70)))
    assert files.encode_json(noun).decode() == (
        "{\n"
        ' "version": 3,\n'
        ' "name": "n",\n'
        ' "size": 1,\n'
        ' "parts": [\n'
        '  {"alpha_s": 1.0, "beta_s_per_byte": 0.0},\n'
        '  {"alpha_s": 2.0, "beta_s_per_byte": 0.0},\n'
        '  {"alpha_s": 3.0, "beta_s_per_byte": 0.0}\n'
        " ],\n"
        ' "by_name": {},\n'
        ' "pair": null,\n'
        ' "words": [\n'
        f'  "{"a" * 70}",\n'
        f'  "{"b" * 70}"\n'
        " ]\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"name": "n", "sise": 1}',
            (
                "noun.json: Object contains unknown field `sise`\n"
                "  -> did you mean `size`? known keys: version, name, size, parts, by_name, pair, words"
            ),
        ),
        (
            '{"name": "n", "parts": [{}, {"alpha_us": 1}]}',
            (
                "noun.json: parts[1]: Object contains unknown field `alpha_us`\n"
                "  -> did you mean `alpha_s`? known keys: alpha_s, beta_s_per_byte"
            ),
        ),
        (
            '{"name": "n", "by_name": {"x": {"gamma": 1}}}',
            "noun.json: by_name[...]: Object contains unknown field `gamma`\n  -> known keys: alpha_s, beta_s_per_byte",
        ),
        (
            '{"name": "n", "pair": [{"gamma": 1}, 2]}',
            "noun.json: pair[0]: Object contains unknown field `gamma`\n  -> known keys: alpha_s, beta_s_per_byte",
        ),
        ('{"size": 1}', "noun.json: Object missing required field `name`\n  -> add `name`"),
        ('{"name": "n", "size": "80 GB"}', "noun.json: size: Expected `int`, got `str`\n  -> correct that key"),
        ("[]", "noun.json: Expected `object`, got `array`\n  -> correct that key"),
        ('{"name": "n", "words": ["a", 3]}', "noun.json: words[1]: Expected `str`, got `int`\n  -> correct that key"),
        (
            '{"name": "n", "version": 4}',
            (
                "noun.json: version: version is 4, this Meshwright reads version 3\n"
                "  -> write the file again with this Meshwright, or use the one that wrote it"
            ),
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_file_and_a_remedy(text: str, message: str) -> None:
    assert refused(text) == message


def test_what_the_noun_refuses_is_named_with_its_file() -> None:
    assert refused('{"name": "n", "size": -1}') == "noun.json: size: size is -1\n  -> give 0 or more"


def test_what_a_text_refuses_is_named_with_its_file_and_key() -> None:
    message = "noun.json: words[1], position 2: no shouting\n  -> speak softly"
    assert refused('{"name": "n", "words": ["a", "ab!"]}') == message


def test_cut_off_files_are_refused() -> None:
    assert refused('{"name": "n", "par').startswith("noun.json: not valid JSON: Input data was truncated")
    assert refused('name = "n', toml=True).startswith("noun.json: not valid TOML: ")
    assert refused("").endswith("\n  -> restore the file or write it again")


def test_toml_may_write_whole_numbers_as_floats() -> None:
    assert files.decode(b'name = "n"\nsize = 80e9', Noun, where="noun.toml", toml=True).size == 80_000_000_000
    assert refused('name = "n"\nsize = 1.5', toml=True).startswith("noun.json: size: Expected `int`, got `float`")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"nothing.json: cannot read the file: No such file or directory\n  -> "):
        files.load(tmp_path / "nothing.json", Noun)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.save(Noun(name="old"), tmp_path / "noun.json")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.save(Noun(name="new"), tmp_path / "noun.json")
    assert files.load(tmp_path / "noun.json", Noun).name == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["noun.json"]


def test_near_words_are_suggested() -> None:
    assert files.did_you_mean("bflaot16", ["bfloat16", "float16", "int8"]) == "did you mean `bfloat16` or `float16`?"
    assert files.did_you_mean("zzz", ["bfloat16"]) == ""
