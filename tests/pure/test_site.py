"""The site's hooks: every page of the repository that is linked has one place, and links lead there."""

import importlib.util
import posixpath
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from docs.site import hooks

DOCS = hooks.ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


class Files(list[Any]):
    """The files of a site, as MkDocs hands them to a hook."""

    def documentation_pages(self) -> list[Any]:
        return [file for file in self if file.src_uri.endswith(".md")]

    def get_file_from_path(self, path: str) -> Any:
        return next((file for file in self if file.src_uri == path), None)


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """The pages that the hook adds, by name, with their Markdown. MkDocs itself is not installed for tests."""
    module = ModuleType("mkdocs.structure.files")
    generated = lambda config, page, content: SimpleNamespace(src_uri=page, content=content)  # noqa: E731
    module.File = SimpleNamespace(generated=generated)  # type: ignore[attr-defined]
    names = ("mkdocs", "mkdocs.structure", "mkdocs.structure.files")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, module if name == names[-1] else ModuleType(name))
        files = Files(SimpleNamespace(src_uri=page) for page in PAGES)
        hooks.on_files(files, {"nav": []})
    return {file.src_uri: file.content for file in files if hasattr(file, "content")}


def test_pages_outside_of_docs_are_added_once_and_lead_back(site: dict[str, str]) -> None:
    assert {"index.md", "repository/CHANGELOG.md", "repository/benchmarks/results/ui.md", "api/index.md"} <= set(site)
    assert not set(site) & set(PAGES)
    assert "# Meshwright" in site["index.md"]
    shown = {page: hooks.repository_path(page) for page in site if page.startswith("repository/")}
    assert all((hooks.ROOT / path).exists() for path in shown.values())
    assert {page: hooks.site_path(path) for page, path in shown.items()} == {page: page for page in shown}


def test_every_link_of_a_page_leads_to_a_page_of_the_site(site: dict[str, str]) -> None:
    known, count = {*site, *PAGES}, 0
    for page in [*PAGES, "index.md", "repository/CONTRIBUTING.md"]:
        markdown = site.get(page) or (DOCS / page).read_text()
        shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        changed = hooks.on_page_markdown(markdown, shown, None, None)
        for target in re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)\s]*)?\)", changed):
            if ":" not in target:
                count += 1
                assert posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) in known, (page, target)
    assert count > 300


def test_links_to_files_and_folders_lead_to_pages_that_show_them() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/a.md"))
    text = "[code](../../src/meshwright/errors.py#L1) [folder](../../benchmarks) [other](https://x.org/a.py) [b](b.md)"
    assert hooks.on_page_markdown(text, page, None, None) == (
        "[code](../repository/src/meshwright/errors.py.md#L1) [folder](../repository/benchmarks/index.md) "
        "[other](https://x.org/a.py) [b](b.md)"
    )


def test_a_folder_of_the_navigation_becomes_its_pages_with_the_index_first() -> None:
    pages = ["a/2.md", "a/1.md", "a/README.md", "b.md"]
    assert hooks.with_folders([{"Home": "b.md"}, {"A": "a/"}], pages) == [
        {"Home": "b.md"},
        {"A": ["a/README.md", "a/1.md", "a/2.md"]},
    ]


def test_a_large_file_is_not_shown_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "def refuse" in hooks.text_of("src/meshwright/errors.py")
    monkeypatch.setattr(hooks, "MOST_BYTES", 10)
    assert "it is in the repository" in hooks.text_of("src/meshwright/errors.py")


def test_modules_of_the_reference_exist() -> None:
    pages = dict(hooks.api_pages())
    assert set(pages) == {"api/index.md", *(f"api/{module}.md" for module in hooks.API)}
    assert all(importlib.util.find_spec(module) for module in hooks.API)
    assert all(f"[`{module}`]({module}.md)" in pages["api/index.md"] for module in hooks.API)
    assert Path(hooks.__file__).parent.name == "site"
