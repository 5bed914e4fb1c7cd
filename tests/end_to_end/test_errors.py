"""What users can do wrong, and what happens to ranks: each has its own clear error, and nothing saved is lost."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright import api, config
from meshwright.cli import run as cli
from meshwright.errors import (
    CaptureError,
    DataError,
    LaunchError,
    LayoutError,
    MeshwrightError,
    NonFiniteLossError,
    PlanError,
    RankError,
)
from meshwright.ir import files
from meshwright.ir.run import Run
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.runtime import launch
from meshwright.runtime.loop import Silent
from meshwright.runtime.ranks import run_ranks
from tests.distributed.pool import Ranks

BATCH = {"inputs": torch.zeros(6, 8), "label": torch.zeros(6, dtype=torch.int64)}
SECONDS = 15.0
"""How soon after a rank has failed the whole run must have ended, on a busy machine."""


def tables(directory: Path, **train: Any) -> dict[str, Any]:
    """A small run of an MLP in a directory."""
    return {
        "model": {"name": "mlp", "sizes": [8, 16, 4]},
        "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": 8, "held_out": 0.0},
        "train": {"directory": str(directory), "steps": 6, "checkpoint_every": 2, "log_every": 1, **train},
    }


def small_run(directory: Path, **train: Any) -> Run:
    return config.make(tables(directory, **train), where="test")


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine, the threads of a small model mostly wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


# --- the model, the batch, the layout, the plan ----------------------------------------------------------------------


class Branching(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def test_a_model_that_cannot_be_traced_is_named_with_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        mw.parallelize(Branching(), classification_loss, BATCH)
    text = str(caught.value)
    assert re.match(r"module \(model\), .*test_errors\.py:\d+: data-dependent control flow: the step asks for", text)
    assert "-> replace the branch on a tensor's value by torch.where and .item() by the tensor itself, or move" in text


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            mw.Layout(dp=8),
            "batch: a global batch of 6 is too small for dp=8\n  -> use a batch of 8 or more, or drop the",
        ),
        (
            mw.Layout(dp=2, microbatches=2),
            "batch: a global batch of 6 does not divide over 2 micro-batches on dp=2\n  -> use a batch of 4 or 8, or",
        ),
    ],
    ids=["small", "micro-batches"],
)
def test_a_batch_that_cannot_be_cut(layout: mw.Layout, text: str) -> None:
    graph = mw.capture(MLP((8, 4)), classification_loss, BATCH)
    with pytest.raises(LayoutError) as caught:
        mw.plan(graph, layout=layout)
    assert text in str(caught.value)


def test_a_layout_that_does_not_match_the_ranks() -> None:
    with pytest.raises(LayoutError) as caught:
        mw.parallelize(MLP((8, 4)), classification_loss, BATCH, plan=mw.Layout(dp=2, tp=3))
    assert str(caught.value) == (
        "layout: dp=2 x tp=3 needs 6 ranks, there are 1\n  -> choose sizes whose product is 1, or start 6 ranks"
    )


def test_heads_that_are_too_few() -> None:
    model = GPT(GPTConfig(layers=1, width=32, heads=4, vocabulary=16, sequence_length=8))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    graph = mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})
    with pytest.raises(LayoutError) as caught:
        mw.plan(graph, layout=mw.Layout(tp=5))
    assert str(caught.value) == (
        "module blocks.0.attention: 4 attention heads are too few for tp=5\n  -> use tp of at most 4"
    )


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    graph = mw.capture(MLP((8, 4)), classification_loss, BATCH)
    files.save(mw.plan(graph, devices=1), tmp_path / "plan.json")
    with pytest.raises(PlanError) as caught:
        mw.parallelize(MLP((8, 5, 4)), classification_loss, BATCH, plan=tmp_path / "plan.json")
    assert re.fullmatch(
        r".*plan\.json: the plan was made for MLP \(fingerprint \w+\), this is MLP \(fingerprint \w+\)\n"
        r"  -> plan this model again \(meshwright plan\), or pass the model that the plan belongs to",
        str(caught.value),
    )


def different_models() -> str:
    model = MLP((8, 4)) if dist.get_rank() == 0 else MLP((8, 5, 4))
    try:
        mw.parallelize(model, classification_loss, BATCH)
    except RankError as error:
        return str(error)
    return "no error"


def test_ranks_that_pass_different_models_are_named_on_each(ranks: Ranks) -> None:
    first, second = ranks(2, different_models)
    assert first == second
    assert re.fullmatch(
        r"rank 1: rank 1 has MLP \(69 parameters, .*\), batch 6, .*, "
        r"rank 0 has MLP \(36 parameters, .*\), batch 6, .*\n"
        r"  -> build the same model and pass batches of the same shape on every rank",
        first,
    )


# --- RUN.toml, data, ports -------------------------------------------------------------------------------------------


def test_a_wrong_key_in_run_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "RUN.toml"
    path.write_text('[model]\nname = "gpt"\nlayer = 2\n[data]\nkind = "text"\n')
    assert cli(["train", str(path)]) == 2
    expected = f"meshwright: {path}: model.layer: unknown key\n  -> did you mean `layers`? known keys: loss, layers"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "data.paths (text.txt): the text is empty: 0 bytes\n  -> give a text that is not empty"),
        ("a" * 20, "data.paths (text.txt): the text is too short: 19 bytes, but a window of 32 and the byte after it"),
        ("a" * 100, "data.paths (text.txt): the data set is too short: 2 samples, but a batch has 4"),
        ("a" * 200, "data.held_out: the held-out part is 10 bytes, but 1 windows of 32 need 33\n  -> give more text"),
        (None, "text.txt: cannot be read: No such file or directory\n  -> correct data.paths"),
    ],
)
def test_an_empty_or_too_short_text(
    content: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("text.txt").write_text(content)
    run = config.make(
        {
            "model": {"name": "gpt", "layers": 1, "width": 16},
            "data": {"kind": "text", "paths": "text.txt", "sequence_length": 32, "batch_size": 4},
        },
        where="test",
    )
    with pytest.raises(DataError) as caught:
        api.train(run)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "x.csv",
            b"",
            "data.path: x.csv: '.csv' is not a kind of file that is read\n  -> give one of .npz,",
        ),
        ("x.npz", b"", "data.path: x.npz: is not a .npz file of named tensors"),
        ("x.pt", b"nonsense", "data.path: x.pt: is not a .pt file of named tensors"),
        ("x.safetensors", b"nonsense", "data.path: x.safetensors: is not a .safetensors file of named tensors"),
        ("x.npz", None, "data.path: x.npz: cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_holds_no_tensors(
    name: str, content: bytes | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    raw = tables(tmp_path / "run") | {"data": {"kind": "tensors", "path": name}}
    with pytest.raises(DataError) as caught:
        api.train(config.make(raw, where="test"))
    assert str(caught.value).startswith(error)


def test_an_occupied_port(busy_port: int, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        run_ranks(os.getpid, num_ranks=2, directory=tmp_path, port=busy_port)
    assert str(caught.value) == (
        f"train.port: port {busy_port} cannot be used: Address already in use\n"
        "  -> choose another port, or none: then a free one is taken"
    )


def start_on(port: int) -> str:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(LaunchError) as caught:
        launch.start()
    return str(caught.value)


def test_an_occupied_port_under_another_launcher(busy_port: int) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as rank:
        message = rank.submit(start_on, busy_port).result(120)
    assert message.startswith(f"MASTER_PORT: port {busy_port} cannot be used: another program uses it\n")


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "environment: WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE: 'two' is not a number"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "environment: RANK is 2, but WORLD_SIZE is 2\n  -> ranks are 0 to 1",
        ),
    ],
)
def test_an_environment_that_no_launcher_made(
    environment: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        mw.parallelize(MLP((8, 4)), classification_loss, BATCH)
    assert str(caught.value).startswith(error)


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"another run is at work in this directory: .*\n  -> wait for it, stop it"):
        run_ranks(run_ranks_there, str(tmp_path), num_ranks=1, directory=tmp_path)


def run_ranks_there(directory: str) -> int:
    return run_ranks(os.getpid, num_ranks=1, directory=Path(directory))


def note_end(directory: str) -> tuple[str, float]:
    atexit.register(Path(directory, f"{api.launched_rank()} ended").touch)
    return os.environ["COLOUR"], np.random.random()


def test_a_rank_has_the_environment_of_its_launch_draws_its_own_numbers_and_ends_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    drawn = set()
    for colour in ("red", "blue"):
        monkeypatch.setenv("COLOUR", colour)
        seen, number = run_ranks(note_end, str(tmp_path), num_ranks=2)
        assert seen == colour
        drawn.add(number)
    assert len(drawn) == 2
    assert {path.name for path in tmp_path.glob("* ended")} == {"0 ended", "1 ended"}


def test_the_first_use_may_be_under_another_device_and_what_ranks_find_imported_can_be_forked() -> None:
    """In one process, because its imports take long."""
    program = (
        "import importlib, threading, torch, meshwright as mw\n"
        "with torch.device('meta'): mw.capture\n"
        "from meshwright.compress import elias\n"
        "assert elias._PLACES.device.type == 'cpu'\n"
        "from meshwright.runtime.ranks import PRELOADED\n"
        "for name in PRELOADED: importlib.import_module(name)\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# --- a loss that becomes NaN, ranks that fail ------------------------------------------------------------------------


def test_a_loss_that_becomes_nan_leaves_checkpoints_and_metrics(tmp_path: Path) -> None:
    api.train(small_run(tmp_path, steps=4))
    raw = tables(tmp_path, steps=9) | {"optimizer": {"name": "sgd", "lr": 1e30}}
    with pytest.raises(MeshwrightError):  # the optimizer of the checkpoint is another one
        api.train(config.make(raw, where="test"))
    raw["optimizer"] = {"name": "adamw", "lr": 1e30}
    with pytest.raises(NonFiniteLossError) as caught:
        api.train(config.make(raw, where="test"))
    assert re.match(r"step 6: the loss became (nan|inf) at step 6\n  -> lower the learning rate", str(caught.value))
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert api.train(small_run(tmp_path)).resumed_from == 4


class Failing(Silent):
    """Progress that makes this rank fail after step 3."""

    def __init__(self, how: str, note: Path) -> None:
        self.how, self.note, self.steps = how, note, 0

    def advance(self) -> None:
        self.steps += 1
        if self.steps < 3 or api.launched_rank() != 1:
            return
        while not (self.note.parent / "checkpoints/step-00000002/manifest.json").exists():  # it is being written
            time.sleep(0.01)
        self.note.write_text(f"{time.monotonic()}")
        if self.how == "raise":
            raise ValueError("rank 1 will not\nand says so in two lines")
        if self.how == "refuse":
            raise DataError("this sample is damaged", where="sample 17", remedy="remove it")
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_fail(run: Run, how: str) -> int:
    return api.train(run, Failing(how, Path(run.train.directory, "failed"))).steps


@pytest.mark.parametrize(
    ("how", "kind", "error"),
    [
        (
            "kill",
            RankError,
            r"rank 1 was killed by SIGKILL at step 3\n  -> often the machine had no memory .*",
        ),
        (
            "raise",
            RankError,
            r"rank 1 failed at step 3: ValueError: rank 1 will not\n  -> its traceback is in (.*)",
        ),
        ("refuse", DataError, r"sample 17: this sample is damaged\n  -> remove it"),
    ],
)
def test_a_rank_that_fails_in_step_3_ends_the_run_with_its_own_error(
    how: str, kind: type[MeshwrightError], error: str, tmp_path: Path
) -> None:
    asked: list[RankError] = []

    def again(error: RankError, kept: Path) -> bool:
        asked.append(error)
        return False

    with pytest.raises(kind) as caught:
        run_ranks(train_and_fail, small_run(tmp_path), how, num_ranks=2, directory=tmp_path, again=again)
    assert [error.doing for error in asked] == ([] if how == "refuse" else ["at step 3"]), "mistakes are not repeated"
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < SECONDS
    match = re.fullmatch(error, str(caught.value))
    assert match, str(caught.value)
    if how == "raise":
        assert "in advance\n    raise ValueError" in Path(match[1]).read_text()
    assert checkpoints(tmp_path) == ["step-00000002"]
    # Nothing saved is lost: another number of ranks goes on from there.
    result = api.train(small_run(tmp_path))
    assert (result.resumed_from, result.steps) == (2, 6)


def test_one_rank_that_raises_is_told_in_a_line_too(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(raise_at_once, num_ranks=1, directory=tmp_path)
    assert re.match(r"rank 0 failed: KeyError: 'gone'\n  -> its traceback is in .*0\.traceback", str(caught.value))


def test_a_directory_of_its_own_stays_only_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(os.getpid, num_ranks=1) == os.getpid()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RankError) as caught:
        run_ranks(raise_at_once, num_ranks=1)
    (left,) = tmp_path.iterdir()
    assert str(left) in str(caught.value)


def raise_at_once() -> None:
    raise KeyError("gone")


def living(group: int) -> list[str]:
    """The processes of a process group that have not ended."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                names.append(name)
    return names


def test_ctrl_c_stops_all_ranks_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    config.save(small_run(tmp_path / "run", steps=100000, ranks=2), path)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        output, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.endswith("meshwright: stopped\n")
    assert re.search(r"checkpoints/step-\d+ is saved: --train.directory \S+ goes on from there\n", output)
    deadline = time.monotonic() + 10  # what watches over the launcher ends just after it
    while living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(process.pid)
    # The rank may have been in the middle of writing a later one.
    last = max((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")).parent
    step = int(last.name.removeprefix("step-"))
    assert step >= 4
    assert api.train(small_run(tmp_path / "run", steps=step + 1)).resumed_from == step


def test_a_script_that_starts_ranks_whenever_it_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom meshwright.runtime.ranks import run_ranks\n"
        "run_ranks(os.getpid, num_ranks=2, directory=Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "has imported the script that starts it, which starts ranks again\n  -> put what the script" in done.stderr
    last = re.search(r"FailedRankError: rank [01] ended before it began: (.*)\n  -> (.*)", done.stderr)
    assert last is not None, done.stderr
    assert 'if __name__ == "__main__":' in last[2]


def test_under_torchrun_no_further_ranks_are_started(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    config.save(small_run(tmp_path / "run", steps=2), path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "meshwright.cli", "train", str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starting" not in done.stdout
    assert done.stdout.count("step 2/2  loss") == 1
    assert files.load(tmp_path / "run" / "plan.json", mw.Plan).mesh.world_size == 2
