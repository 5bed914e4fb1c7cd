"""The documentation is true: its Python runs and prints what it says, its files and links exist, its patterns are captured."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ON_TWO_RANKS = ["README.md", "docs/quickstart.md", "docs/how-to/add-an-operator-rule.md"]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``output`` is the text block right below a Python block."""

    language: str
    text: str
    line: int
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    result = []
    for index, match in enumerate(found):
        indent = len(match[1])
        body = "\n".join(line[indent:] for line in match[3].splitlines())
        following = found[index + 1] if index + 1 < len(found) else None
        output = None
        if match[2] == "python" and following and following[2] == "text":
            output = following[3].strip("\n") if not text[match.end() : following.start()].strip() else None
        result.append(Block(match[2], body, text[: match.start()].count("\n") + 2, output))
    return result


def run_python(page: str, directory: Path) -> dict[int, tuple[str, str | None]]:
    """Run the Python blocks of a page, one after the other in one namespace; by line, (printed, what the page says)."""
    found = [block for block in blocks(ROOT / page) if block.language == "python"]
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = {}
    torch.manual_seed(0)
    with contextlib.chdir(directory):
        for block in found:
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                # As many lines down as on the page, so that a traceback names the page's line.
                exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), names)
            printed[block.line] = (stream.getvalue().rstrip(), block.output)
    return printed


def pages_with(language: str) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES if any(block.language == language for block in blocks(page))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page != "CONTRIBUTING.md"])
def test_python_on_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    for line, (printed, says) in run_python(page, tmp_path).items():
        if says is not None:
            assert printed == says, f"{page}:{line}"


@pytest.mark.parametrize("page", ON_TWO_RANKS)
def test_python_on_a_page_runs_on_two_ranks(ranks: Ranks, page: str, tmp_path: Path) -> None:
    ranks(2, run_python, page, tmp_path)


def test_pages_have_blocks_that_are_found() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/concepts.md"} <= set(pages_with("python"))
    (first, *_) = [block for block in blocks(ROOT / "docs/concepts.md") if block.language == "python"]
    assert first.output is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{page.name}: {target}{anchor}"
