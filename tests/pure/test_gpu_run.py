"""``make gpu`` without a GPU: its packages, the limits of its parts, what is kept of a part that is stopped."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import needs
from benchmarks.gpu.findings import Line, Notebook, broken, lines_of
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.results import Results
from meshwright.bench.lint import lint
from meshwright.ir import files
from meshwright.ir.result import Machine, Result


def test_the_wheels_are_those_of_every_dependency() -> None:
    project = tomllib.loads((needs.ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", text) for text in project["dependencies"]]
    assert {name[0] for name in names if name} <= needs.PACKAGES.keys() | needs.LARGE.keys()


def wheel(folder: Path, name: str, content: str = "x = 1\n") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name.split('-')[0]}.py", content)
    return path


def test_wheels_for_this_python_are_taken(tmp_path: Path) -> None:
    here = f"cp{needs.sys.version_info.major}{needs.sys.version_info.minor}"
    machine = needs.platform.machine()
    for name, fitting in {
        "a-1-py3-none-any.whl": True,
        "a-1-py2.py3-none-any.whl": True,
        f"a-1-{here}-{here}-manylinux_2_17_{machine}.manylinux2014_{machine}.whl": True,
        f"a-1-cp38-abi3-manylinux_2_28_{machine}.whl": True,
        f"a-1-cp310-cp310-manylinux_2_28_{machine}.whl": False,
        f"a-1-{here}-{here}-manylinux_2_28_other.whl": False,
    }.items():
        assert needs.fits(tmp_path / name) == fitting, name


def test_missing_packages_are_unpacked_and_the_rest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "missing", lambda: ["torch", "tomli-w", "msgspec"])
    wheel(tmp_path, "tomli_w-1.2.0-py3-none-any.whl")
    left = needs.unpack(tmp_path, tmp_path / "site")
    assert left == ["torch", "msgspec"]
    assert (tmp_path / "site" / "tomli_w.py").exists()
    explanation = needs.explained(left)
    assert "install torch there; PyTorch in a build for CUDA" in explanation
    assert f"make gpu-wheels GPU_PYTHON={needs.sys.version_info.major}.{needs.sys.version_info.minor}" in explanation


def test_without_what_it_needs_it_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(needs, "missing", lambda: ["highspy"])
    assert driver.main(["--wheels", str(tmp_path)]) == 2


def test_lines_of_a_part_that_was_stopped_are_kept(tmp_path: Path) -> None:
    notes = Notebook(tmp_path / "part.jsonl")
    notes.add(Line(machine=Machine(cpu="a", cores=2, accelerators=("b",)), versions={"torch": "2"}))
    assert notes.tried("first", lambda: 3) == 3
    assert notes.tried("second", lambda: 1 / 0) is None
    with (tmp_path / "part.jsonl").open("ab") as file:
        file.write(b'{"finding": {"kind": "che')
    lines = list(lines_of(tmp_path / "part.jsonl"))
    assert [line.finding.target for line in lines if line.finding] == ["second"]
    assert lines[1].finding is not None
    assert "ZeroDivisionError" in lines[1].finding.measured


def test_results_name_the_device_and_pass_the_lint(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    part = PARTS[0]
    notes = Notebook(scratch / f"{part.name}.jsonl")
    device = Machine(cpu="a", cores=2, accelerators=("NVIDIA H100 80GB HBM3",), system="Linux")
    notes.add(Line(machine=device, versions={"torch": "2", "python": "3"}))
    notes.add_finding(broken("a claim", "it did not hold"))
    results = Results(tmp_path, scratch, "0123456789ab", rehearsed=False)
    results.take(part, "stopped after 30 s", 30.0)
    results.write()
    loaded = files.load(tmp_path / "gpu-nvidia-h100-80gb-hbm3.json", Result)
    assert [each.target for each in loaded.findings] == ["a claim", f"{part.name}: {part.what}"]
    assert not lint(loaded)
    assert results.exit_code == 1
    assert "| a claim | fail | it did not hold |" in (tmp_path / "gpu-nvidia-h100-80gb-hbm3.md").read_text()


def test_parts_that_were_chosen_leave_the_files_of_a_whole_run(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    device = Machine(cpu="a", cores=2, accelerators=("H100",), system="Linux")
    Notebook(scratch / "machine.jsonl").add(Line(machine=device, versions={"torch": "2", "python": "3"}))
    for only in ((), ("llama", "gpt", "gpt")):
        results = Results(tmp_path, scratch, "0123456789ab", rehearsed=False, only=only)
        results.take(PARTS[0], "stopped", 1.0)
        results.write()
    commands = {path.name: files.load(path, Result).command for path in tmp_path.glob("*.json")}
    assert commands == {"gpu-h100.json": "make gpu", "gpu-h100-gpt-llama.json": 'make gpu GPU="--only gpt llama"'}


def test_a_part_is_stopped_at_its_limit_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    with (tmp_path / "log").open("wb") as log:
        environment = {"PYTHONPATH": str(tmp_path)}
        why = driver.run(Part("tests", "sleeps", 1, 1), 0.3, tmp_path, environment, log, rehearse=True)
    assert why == "stopped after 0 s"


def test_the_parts_of_one_gpu_that_matter_most_fit_into_the_time() -> None:
    first = [part for part in PARTS if not part.several][:4]
    assert [part.name for part in first] == ["machine", "tests", "parity", "gpt"]
    assert sum(part.most_s for part in first) < driver.SECONDS
