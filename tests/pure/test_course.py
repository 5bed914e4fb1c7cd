"""The course: every chapter has its parts, exercises have answers that blocks print, and sources are named."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "course"
CHAPTERS = sorted(FOLDER.glob("[0-9]*.md"))
SECTIONS = ["The idea", "The law", "The experiment", "What you should see", "Exercises", "Further reading"]

each_chapter = pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)


def parts(page: Path) -> dict[str, str]:
    """The text of each section by its heading."""
    pieces = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def test_there_are_twelve_chapters_and_the_contents_name_them_in_order() -> None:
    listed = re.findall(r"^\| \d+\. \[[^\]]*\]\(([^)]*)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert listed == [page.name for page in CHAPTERS]
    assert len(listed) == 12


@each_chapter
def test_a_chapter_has_its_sections_in_order_and_a_picture(page: Path) -> None:
    assert list(parts(page)) == SECTIONS
    (picture,) = re.findall(r"^!\[[^\]]+\]\((pictures/[^)]*\.svg)\)$", page.read_text(), re.MULTILINE)
    assert (FOLDER / picture).read_text().startswith("<svg ")
    assert "```python\n" in parts(page)["The experiment"]
    assert "```text\n" in parts(page)["The law"]


@each_chapter
def test_three_exercises_have_answers_that_are_printed_by_a_block(page: Path) -> None:
    questions, _, answers = parts(page)["Exercises"].partition("<details markdown><summary>Answers</summary>")
    assert re.findall(r"^(\d)\. ", questions, re.MULTILINE) == ["1", "2", "3"]
    assert answers.rstrip().endswith("</details>")
    assert re.findall(r"\*\*(\d)\.\*\*", answers) == ["1", "2", "3"]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", answers, re.MULTILINE | re.DOTALL)
    # tests/end_to_end/test_docs.py runs the blocks, and compares what they print with the text below them
    assert [language for language, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    assert all(text.strip() for _, text in blocks)
    numbered = len(re.findall(r"^\*\*\d\.\*\*", answers, re.MULTILINE))
    assert len(blocks) // 2 >= numbered


@each_chapter
def test_sources_have_a_title_a_year_and_an_address(page: Path) -> None:
    entries = re.split(r"^- ", parts(page)["Further reading"], flags=re.MULTILINE)[1:]
    assert len(entries) >= 3
    for entry in entries:
        assert re.search(r": \*[^*]+\*", entry), entry
        assert re.search(r"\b(19|20)\d\d\b", entry), entry
        assert "arXiv:" in entry or "<https://" in entry, entry


@each_chapter
def test_words_about_measured_speed_name_a_result_file(page: Path) -> None:
    """The second half of a section about the outcome links to results wherever it speaks of a measurement."""
    for paragraph in parts(page)["What you should see"].split("\n\n"):
        if re.search(r"\b(measured beside|how fast)\b", paragraph, re.IGNORECASE):
            assert "benchmarks/results/" in paragraph, paragraph
