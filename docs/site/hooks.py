"""Hooks of MkDocs: pages of the repository that lie outside of docs, pages of the API, and links to both."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MOST_BYTES = 300_000
"""The size of the largest file that becomes a page; larger ones are copied."""
API = {
    "meshwright": "What `import meshwright as mw` gives.",
    "meshwright.errors": "Errors that name the value, its place and a remedy.",
    "meshwright.prediction": "Predictions and searches by sizes, without torch.",
    "meshwright.optim": "Optimizers for large batches, coded gradients and low precision.",
    "meshwright.models": "Small reference models and their losses.",
    "meshwright.data.loaders": "Loaders of batches.",
    "meshwright.ir.cluster": "Devices and the links between them.",
    "meshwright.ir.rule": "How an operator may be split.",
    "meshwright.ir.placement": "How a tensor is stored on the ranks of an axis.",
    "meshwright.ir.plan": "The decisions of a plan.",
    "meshwright.ir.schedule": "Schedules as data.",
    "meshwright.ir.trace": "The work of ranks over time.",
    "meshwright.schedules.pipeline": "Builds pipeline schedules.",
    "meshwright.schedules.check": "Checks and counts schedules.",
    "meshwright.schedules.collectives.operations": "Step lists of collectives.",
}
"""Modules of the API reference, with a line about each."""
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add README as the home page, everything outside of docs that a page links to, and the pages of the API."""
    from mkdocs.structure.files import File

    todo = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    todo += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        path = todo.pop()
        text = text_of(path)
        if site_path(path) is not None:
            files.append(File.generated(config, site_path(path), content=text))
        for linked in linked_paths(path, text) if path.endswith(".md") or (ROOT / path).is_dir() else ():
            if linked not in seen and site_path(linked) is not None:
                seen.add(linked)
                todo.append(linked)
    for page, content in api_pages():
        files.append(File.generated(config, page, content=content))
    for folder, title in (("how-to", "How to"), ("reference", "Reference"), ("decisions", "Decisions")):
        if files.get_file_from_path(f"{folder}/index.md") is None:
            files.append(File.generated(config, f"{folder}/index.md", content=text_of(f"docs/{folder}", title)))
    config["nav"] = with_folders(config["nav"], sorted(file.src_uri for file in files.documentation_pages()))
    return files


def with_folders(nav: Any, pages: list[str]) -> Any:
    """The navigation with a list of pages in place of each folder (``course/``); its index comes first."""
    if isinstance(nav, list):
        return [with_folders(entry, pages) for entry in nav]
    if isinstance(nav, dict):
        return {title: with_folders(entry, pages) for title, entry in nav.items()}
    if not nav.endswith("/"):
        return nav
    inside = [page for page in pages if page.startswith(nav)]
    return sorted(inside, key=lambda page: (posixpath.basename(page) not in ("index.md", "README.md"), page))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to what lies outside of docs, and to folders, lead to the pages that `on_files` has added."""
    path, here = repository_path(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def changed(match: re.Match[str]) -> str:
        target = resolved(path, match[2])
        added = site_path(target) if target is not None else None
        if added is None and target is not None and not path.startswith("docs/"):
            added = target.removeprefix("docs/")
        return match[0] if added is None else f"{match[1]}{posixpath.relpath(added, here or '.')}{match[3]}"

    return _LINK.sub(changed, markdown)


def site_path(path: str) -> str | None:
    """The page of the site that shows a path of the repository; None for files in docs, which MkDocs has already."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return f"{path.removeprefix('docs/')}/index.md" if (ROOT / path).is_dir() else None
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def repository_path(page: str) -> str:
    """The path of the repository that a page of the site shows."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("repository/"):
        return f"docs/{page}"
    path = page.removeprefix("repository/")
    for shown in (path, path.removesuffix("/index.md"), path.removesuffix(".md")):
        if (ROOT / shown).exists():
            return shown
    return path


def resolved(path: str, target: str) -> str | None:
    """The path of the repository to which a page at ``path`` links; None for other sites, and for what is not there."""
    if ":" in target or target.startswith("/"):
        return None
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    linked = posixpath.normpath(posixpath.join(folder, target))
    return linked if not linked.startswith("..") and (ROOT / linked).exists() else None


def linked_paths(path: str, text: str) -> Iterator[str]:
    """The paths of the repository to which a page links."""
    for _, target, _ in _LINK.findall(text):
        linked = resolved(path, target)
        if linked is not None:
            yield linked


def text_of(path: str, title: str = "") -> str:
    """The Markdown of a page that shows a path: the file, a list of a folder's files, or a file's text as a block."""
    place = ROOT / path
    if place.is_dir():
        shown = sorted(file for file in place.iterdir() if file.is_file() and file.suffix in (".md", ".py", ".toml"))
        lines = [f"- [{heading(file)}]({file.name})" for file in shown if file.name != "README.md"]
        return "\n".join([f"# {title or path}", "", *lines]) + "\n"
    if path.endswith(".md"):
        return place.read_text()
    if place.stat().st_size > MOST_BYTES:
        return f"# {path}\n\nThis file has {place.stat().st_size:,} bytes; it is in the repository.\n"
    return f"# {path}\n\n``````{place.suffix.removeprefix('.')}\n{place.read_text()}\n``````\n"


def heading(path: Path) -> str:
    """The title of a Markdown file; the name of any other file."""
    first = path.read_text().partition("\n")[0] if path.suffix == ".md" else ""
    return first.removeprefix("# ").replace("[", "").replace("]", "") or path.name


def api_pages() -> Iterator[tuple[str, str]]:
    """The pages of the API: their names and their Markdown."""
    rows = [f"| [`{module}`]({module}.md) | {about} |" for module, about in API.items()]
    yield "api/index.md", "\n".join(["# API", "", "| module | what it has |", "|---|---|", *rows]) + "\n"
    for module in API:
        yield f"api/{module}.md", f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
