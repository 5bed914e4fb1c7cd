"""Where figures are from: the commit that was measured, and whether the code that it measured has changed since."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from meshwright.ir.result import Result

CHANGED = "+"
"""After a commit: files of the checkout differed from it."""
CODE = (":/src", ":/*.py")
"""What decides figures, as git spells it: all below ``src``, and Python anywhere."""
JUDGES = ("benchmarks/report.py", "src/meshwright/bench/", "src/meshwright/ir/result.py")
"""Code that writes, draws and judges results. A change of it does not change what was measured."""
REMEDY = "measure again from a clean checkout"


def commit_of(folder: Path) -> str:
    """The commit of the checkout around ``folder``, with ``CHANGED`` where files differ; empty where there is none."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD").strip()
    return commit + CHANGED if commit and _git(folder, "status", "--porcelain", *CODE) else commit


def stale(result: Result, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Why a result in ``folder`` is not of the code of the checkout around it, as (key, problem, remedy).

    A file counts as changed where its program has: comments, docstrings and layout do not. Of Python files those count
    that ``result.script`` imports, directly or through others; of other files (C++, TOML) all below ``src``.
    """
    if not result.script:
        return
    root = Path(_git(folder, "rev-parse", "--show-toplevel").strip() or folder)
    commit = result.commit.removesuffix(CHANGED)
    if commit != result.commit:
        yield "commit", f"files differed from {commit} when it was measured", REMEDY
    if not commit or not _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        yield "commit", f"there is no commit {commit!r}", REMEDY
        return
    read = {path.relative_to(root).as_posix() for path in imported(root, root / result.script)}
    differing = _git(root, "diff", "--name-only", commit, "--", *CODE).split()
    changed = [
        name
        for name in differing
        if not name.startswith(JUDGES)
        and (name in read and _program(_git(root, "show", f"{commit}:{name}")) != _program(_text(root / name))
             if name.endswith(".py") else name.startswith("src/"))
    ]  # fmt: skip
    if changed:
        others = f" and {len(changed) - 1} other files" if len(changed) > 1 else ""
        yield "commit", f"{changed[0]}{others} changed since {commit}", REMEDY


def imported(root: Path, script: Path) -> set[Path]:
    """The Python files below ``root`` and ``root/src`` that a script imports, also within functions, and itself."""
    found, pending = set[Path](), [script]
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(_text(path))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                for top in (root, root / "src"):
                    pending += [top.joinpath(*parts).with_suffix(".py")]
                    pending += [top.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
    return found


def _program(text: str) -> str:
    """A Python file without what does not run."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # strings as statements: docstrings, also below fields
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _git(folder: Path, *arguments: str) -> str:
    """What git prints, or nothing where it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
