"""The packages that ``make gpu`` needs beside PyTorch, and a folder of wheels that brings them to a machine without a
network.

    make gpu-wheels              here, with a network: collects wheels in .gpu-wheels, which git ignores
    copy the checkout, with that folder, to the machine with GPUs
    make gpu                     there: what Python lacks is unpacked from the folder, beside the checkout

PyTorch with CUDA, NumPy and SciPy must be on the machine already: their wheels are large. The other wheels have 9 MB.
This module imports the standard library only.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".gpu-wheels"
COMMIT = "commit"
"""The file in the folder that names the commit of the checkout, for copies without their history."""
LARGE = {"torch": "torch", "numpy": "numpy", "scipy": "scipy"}
"""Packages that must be installed there, and the modules by which they are found."""
PACKAGES = {
    "msgspec": "msgspec", "typer": "typer", "rich": "rich", "tomli-w": "tomli_w", "jinja2": "jinja2",
    "highspy": "highspy", "pytest": "pytest", "pytest-timeout": "pytest_timeout", "hypothesis": "hypothesis",
    "click": "click", "shellingham": "shellingham", "annotated-doc": "annotated_doc", "markupsafe": "markupsafe",
    "markdown-it-py": "markdown_it", "mdurl": "mdurl", "pygments": "pygments", "iniconfig": "iniconfig",
    "pluggy": "pluggy", "packaging": "packaging", "sortedcontainers": "sortedcontainers",
    "typing-extensions": "typing_extensions",
}  # fmt: skip
"""Packages that the folder brings: Meshwright's own, those of tests/gpu, and what these need."""
GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2014", "2010", "1")
"""The manylinux tags whose wheels are taken: pip matches each exactly."""


def missing() -> list[str]:
    """The packages that this Python cannot import."""
    return [name for name, module in {**LARGE, **PACKAGES}.items() if find_spec(module) is None]


def fits(wheel: Path) -> bool:
    """Whether a wheel is for this version of Python and this processor, by its name (PEP 427)."""
    *_, python, abi, where = wheel.stem.split("-")
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    stable = abi == "abi3" and int(re.sub(r"\D", "", python.split(".")[0])[1:] or 0) <= sys.version_info.minor
    known = {"py3", here} & set(python.split(".")) or stable
    return bool(known) and (where == "any" or platform.machine() in where)


def unpack(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels of missing packages from ``folder`` into ``into``, which the caller puts on Python's path.
    Return the packages that are still missing. Packages that are installed stay those that are used."""
    left = []
    for name in missing():
        pattern = name.replace("-", "_")
        wheels = [each for each in sorted(folder.glob("*.whl")) if each.name.lower().startswith(f"{pattern}-")]
        fitting = [each for each in wheels if fits(each)]
        if name in LARGE or not fitting:
            left.append(name)
            continue
        with zipfile.ZipFile(fitting[-1]) as wheel:
            wheel.extractall(into)
    return left


def explained(left: Sequence[str]) -> str:
    """What to do about packages that are missing."""
    here = f"Python {platform.python_version()} ({sys.executable}) on {platform.machine()}"
    large = [name for name in left if name in LARGE]
    small = [name for name in left if name not in LARGE]
    lines = [f"{here} lacks {', '.join(left)}"]
    if large:
        lines.append(f"  -> install {', '.join(large)} there; PyTorch in a build for CUDA")
    if small:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        lines.append(
            f"  -> pip install {' '.join(small)}; or, without a network there, `make gpu-wheels GPU_PYTHON={version}` "
            f"on a machine with one, and copy {FOLDER.name} beside the checkout"
        )
    return "\n".join(lines)


def collect(python: str, machine: str, folder: Path = FOLDER) -> None:
    """Download the wheels for a version of Python and a processor, at the versions of constraints.txt, and note the
    commit of this checkout."""
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    for old in folder.glob("*.whl"):
        old.unlink()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {re.sub(r"[_.]", "-", name).lower(): version for name, version in pinned.items()}
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in PACKAGES]
    tags = [f"manylinux_{tag}" if "_" in tag else f"manylinux{tag}" for tag in GLIBC]
    platforms = [argument for tag in tags for argument in ("--platform", f"{tag}_{machine}")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms, "-d", str(folder),
         *wanted],
        check=True,
    )  # fmt: skip
    (folder / COMMIT).write_text(commit())
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(wanted)} wheels for Python {python} on {machine}, {size / 1e6:.1f} MB, in {folder}")


def commit() -> str:
    """The commit of this checkout, with ``+`` if files differ from it; in a copy without history, the commit that was
    noted when its wheels were collected; else empty."""
    revision = _git("rev-parse", "--short=12", "HEAD")
    if revision:
        return revision + "+" * bool(_git("status", "--porcelain", ":/src", ":/*.py"))
    noted = FOLDER / COMMIT
    return noted.read_text().strip() if noted.exists() else ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect wheels."""
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="its version")
    parser.add_argument("--machine", default="x86_64", help="its processor, as `uname -m` prints it")
    options = parser.parse_args(arguments)
    collect(options.python, options.machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
