"""The origin of figures: the commit that was measured, and whether the measured code has changed since then."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from meshwright.ir.result import Result

CHANGED = "+"
"""The suffix of a commit if files of the checkout differed from it."""
CODE = (":/src", ":/*.py")
"""Git pathspecs of the files that can change a measurement: all below ``src``, and Python anywhere."""
JUDGES = (
    "benchmarks/report.py", "src/meshwright/bench/claims.py", "src/meshwright/bench/lint.py",
    "src/meshwright/bench/provenance.py", "src/meshwright/ir/result.py",
)  # fmt: skip
"""Code that writes, draws and judges results. A change of it does not change the measured code."""
_DOTTED = re.compile(r"\w+(\.\w+)+")
REMEDY = "measure again from a clean checkout"


def commit_of(folder: Path) -> str:
    """The commit of the checkout around ``folder``, with ``CHANGED`` if files differ; empty if ``folder`` is in no
    checkout."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD").strip()
    return commit + CHANGED if commit and _git(folder, "status", "--porcelain", *CODE) else commit


def stale(result: Result, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Compare the measured code of a result in ``folder`` with the checkout around ``folder``. Yield (key, problem,
    remedy) for each reason why the result does not hold for this code. Outside of a checkout, yield nothing.

    The code is all files that ``result.script`` imports, directly or indirectly, and other files (C++, TOML) in their
    folders. A change of only comments, docstrings or layout of a Python file does not count.
    """
    top = _git(folder, "rev-parse", "--show-toplevel").strip()
    if not result.script or not top:
        return
    root, commit = Path(top), result.commit.removesuffix(CHANGED)
    if not (root / result.script).is_file() or Path(result.script).is_absolute():
        remedy = "name the script that measures, from the root of the repository"
        yield "script", f"there is no file {result.script!r}", remedy
        return
    if commit != result.commit:
        yield "commit", f"files differed from {commit} when it was measured", REMEDY
    if not _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        yield "commit", f"this checkout has no commit {commit!r}", f"{REMEDY}, or fetch the whole history"
        return
    read = imported(root, root / result.script)
    folders = {path.parent for path in read}
    differing = _git(root, "diff", "--name-only", "-z", commit, "--", *CODE).split("\0")
    changed = [
        name
        for name in filter(None, differing)
        if name not in JUDGES and (root / name).parent in folders
        and (not name.endswith(".py") or (root / name in read and _differs(root, commit, name)))
    ]  # fmt: skip
    if changed:
        others = f" and {len(changed) - 1} other files" if len(changed) > 1 else ""
        yield "commit", f"{changed[0]}{others} changed since {commit}", REMEDY


def imported(root: Path, script: Path) -> set[Path]:
    """The script itself and the Python files below ``root`` and ``root/src`` that it imports, directly or indirectly,
    also inside functions. A module that a string names, such as for ``python -m``, counts as imported."""
    files, pending = set[Path](), [script]
    while pending:
        path = pending.pop()
        if path in files or not path.is_file():
            continue
        files.add(path)
        for node in ast.walk(ast.parse(_text(path))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
                names = [node.value, f"{node.value}.__main__"]
            for name in names:
                parts = name.split(".")
                for top in (root, root / "src"):
                    pending += [top.joinpath(*parts).with_suffix(".py")]
                    pending += [top.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
    return files


def _differs(root: Path, commit: str, name: str) -> bool:
    """Whether the program in a file differs from that at the commit, or the file is new."""
    return _program(_git(root, "show", f"{commit}:{name}")) != _program(_text(root / name))


def _program(text: str) -> str:
    """The program of a Python file as text, without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # strings as statements: docstrings, also below fields
            kept = [stmt for stmt in body if not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _git(folder: Path, *arguments: str) -> str:
    """The output of git; empty if git fails or is not installed."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
