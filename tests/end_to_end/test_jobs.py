"""Job graphs that run: outputs equal a serial run, only lost vertices run again, and a stopped graph goes on."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright import api, config
from meshwright.cli import run as cli
from meshwright.errors import JobError
from meshwright.ir.job_graph import JobNode
from meshwright.jobs import load, plan_jobs, run_jobs, value_of
from meshwright.jobs.journal import Failed, Finished
from meshwright.jobs.values import encode
from tests.job_graphs import (
    events_in,
    hashes_in,
    kill_vertex,
    random_graph,
    running_in,
    save,
    serial_hashes,
    starts_in,
)  # fmt: skip

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
STEPS = """\
import os, signal, sys, time
from pathlib import Path
from typing import Any
import numpy as np
def numbers(n): print("made", n); return {"x": np.arange(n), "y": np.ones((2, 2), np.float32)}
def double(xs): return {"total": int(xs["x"].sum()) * 2, "blob": b"ab" * 3}
def use(total, blob, note, pages):
    return [total, blob.decode(), note.read_text(), sorted(p.name for p in pages.iterdir())]
def lines(out):
    with open(out, "w") as file:
        for number in range(50_000): file.write(f"{number}\\n")
def count(lines):
    with open(lines) as file: return sum(1 for _ in file)
def sometimes(marker, wanted):
    path = Path(marker); path.write_text(path.read_text() + "x" if path.exists() else "x")
    if len(path.read_text()) < wanted: raise ValueError("not yet")
    return len(path.read_text())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


def builder(folder: Path, cores: float = 2) -> mw.JobBuilder:
    return mw.JobBuilder("test", folder=folder, nodes={"box": JobNode(cpus=cores)})


def hashes_of(directory: Path, vertex: str, *, first: bool = False) -> dict[str, str]:
    """The hashes of a vertex's outputs, as it has finished last (or first) in a directory."""
    ends = [event for event in events_in(directory) if isinstance(event, Finished) and event.vertex == vertex]
    return {name: stored.sha256 for name, stored in ends[0 if first else -1].outputs.items()}


def mixed(folder: Path) -> mw.JobBuilder:
    """A graph with every form of channel."""
    jobs = builder(folder)
    xs = jobs.function("make", "steps:numbers", outputs={"xs": "arrays"}, arguments={"n": 5})
    objects = jobs.function(
        "double", "steps:double", inputs={"xs": xs["xs"]}, outputs={"total": "json", "blob": "bytes"}
    )
    written = jobs.command(
        "write", "sh", "-c", "printf '{{}}' > {note}; echo a > {pages}/a; mkdir {pages}/sub; echo b > {pages}/sub/b",
        outputs={"note": "note.txt", "pages": "pages/"}, publish={"pages": "shown", "note": "shown/../note.txt"},
    )  # fmt: skip
    jobs.function(
        "use", "steps:use", outputs={"result": "json"},
        inputs={"total": objects["total"], "blob": objects["blob"], "note": written["note"], "pages": written["pages"]},
    )  # fmt: skip
    lines = jobs.function("lines", "steps:lines", outputs={"out": "stream"})
    jobs.command("count", "{python}", "-c", "import sys; print(sum(1 for _ in open(sys.argv[1])))", "{lines}",
                 inputs={"lines": lines["out"]})  # fmt: skip
    return jobs


def test_objects_files_directories_and_streams(folder: Path) -> None:
    record = mixed(folder).run("runs", on="here")
    assert {row.name: (row.state, row.runs) for row in record.rows} == dict.fromkeys(
        ("make", "double", "write", "use", "lines", "count"), ("finished", 1)
    )
    assert value_of(Path("runs"), "use.result") == [20, "ababab", "{}", ["a", "sub"]]
    assert Path("runs/work/count/1/log").read_text() == "50000\n"
    assert Path("runs/work/make/1/log").read_text() == "made 5\n"
    assert Path("shown/sub/b").read_text() == "b\n"
    assert not Path("shown/a").is_symlink()
    assert Path("note.txt").read_text() == "{}"
    assert value_of(Path("runs"), "make.xs")["y"].dtype == np.float32
    with pytest.raises(JobError, match=r"there is no output 'use.nothing'"):
        value_of(Path("runs"), "use.nothing")

    # Unchanged: nothing runs. Other code, equal outputs: what reads them does not run, but it is code of functions too.
    again = mixed(folder).run("runs", on="here")
    assert {row.state for row in again.rows} == {"reused"}
    (folder / "steps.py").write_text(STEPS.replace("* 2,", "+ int(xs['x'].sum()),"))
    third = mixed(folder).run("runs", on="here")
    assert {row.name for row in third.rows if row.state == "reused"} == {"write"}
    assert hashes_of(Path("runs"), "use") == hashes_of(Path("runs"), "use", first=True)


def test_only_folders_that_the_graph_has_published_are_replaced(folder: Path) -> None:
    def pages(text: str) -> mw.JobBuilder:
        jobs = builder(folder)
        jobs.command(
            "v", "sh", "-c", f"echo {text} > {{pages}}/a", outputs={"pages": "pages/"}, publish={"pages": "out"}
        )
        return jobs

    own = folder / "out" / "own.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(JobError, match=r"vertices.v.publish.pages: would replace the folder \S+/out, which no run in "):
        pages("1").run("runs", on="here")
    assert own.read_text() == "mine"
    own.unlink()
    own.parent.rmdir()
    for text, state in (("1", "reused"), ("2", "finished")):
        assert [row.state for row in pages(text).run("runs", on="here").rows] == [state]
        assert (folder / "out" / "a").read_text() == f"{text}\n"
    pages("2").run("others", on="here")  # it is there already
    with pytest.raises(JobError, match="would replace the folder"):
        pages("3").run("others", on="here")
    assert (folder / "out" / "a").read_text() == "2\n"


def test_an_output_that_cannot_be_published_is_named(folder: Path) -> None:
    (folder / "out").write_text("a file")
    jobs = builder(folder)
    jobs.command("v", "sh", "-c", "echo 1 > {a}", outputs={"a": "a.txt"}, publish={"a": "out/a.txt"})
    with pytest.raises(
        JobError, match=r"vertices.v.publish.a: cannot be published as \S+/out/a.txt: .*\n  -> make room"
    ):
        jobs.run("runs", on="here")
    (folder / "out").unlink()
    assert [row.state for row in jobs.run("runs", on="here").rows] == ["reused"]
    assert (folder / "out" / "a.txt").read_text() == "1\n"


def test_equal_inputs_cut_off_what_comes_after(folder: Path) -> None:
    def chain(text: str) -> mw.JobBuilder:
        jobs = builder(folder)
        first = jobs.command("first", "sh", "-c", f"{text} > {{a}}", outputs={"a": "a.txt"})
        jobs.command("second", "cp", "{a}", "{b}", inputs={"a": first["a"]}, outputs={"b": "b.txt"})
        return jobs

    chain("echo 1").run("runs", on="here")
    record = chain("printf '1\\n'").run("runs", on="here")
    assert [row.state for row in record.rows] == ["finished", "reused"]


def test_what_a_stream_carries_is_a_part_of_its_readers_key(folder: Path) -> None:
    jobs = builder(folder)
    jobs.command("read", "sh", "-c", "cat {lines} > {out}", inputs={"lines": "write.lines"}, outputs={"out": "o.txt"})
    jobs.command("write", "sh", "-c", "cat {text} > {lines}", inputs={"text": "./t.txt"}, outputs={"lines": "stream"})
    for text, states in (("a", ["finished"] * 2), ("b", ["finished"] * 2), ("a", ["reused"] * 2)):
        (folder / "t.txt").write_text(text)
        assert [row.state for row in jobs.run("runs", on="here").rows] == states
        assert value_of(Path("runs"), "read.out").decode() == text
    hashes = hashes_of(Path("runs"), "read", first=True)
    assert Path("runs/objects", hashes["out"][:2], hashes["out"]).read_text() == "a"


def test_damaged_outputs_are_made_again(folder: Path) -> None:
    jobs = builder(folder)
    first = jobs.command("first", "sh", "-c", "echo 1 > {a}", outputs={"a": "a.txt"})
    jobs.command("second", "cp", "{a}", "{b}", inputs={"a": first["a"]}, outputs={"b": "b.txt"})
    jobs.run("runs", on="here")
    damaged = next(path for path in Path("runs/objects").rglob("*") if path.is_file())
    damaged.write_text("2\n")
    record = jobs.run("runs", on="here")
    assert [row.state for row in record.rows] == ["finished", "reused"]
    assert damaged.read_text() == "1\n"


def test_an_output_that_is_damaged_while_the_graph_runs_is_made_again(folder: Path) -> None:
    """The second vertex spoils what the first wrote; the third needs it, so that the first runs again."""
    jobs = builder(folder, cores=1)
    first = jobs.command("first", "sh", "-c", "echo 1 > {a}", outputs={"a": "a.txt"})
    jobs.command(
        "second", "sh", "-c", "test -e spoiled || {{ echo 2 > $(readlink -f {a}); touch spoiled; }}; touch {done}",
        inputs={"a": first["a"]}, outputs={"done": "done.txt"},
    )  # fmt: skip
    jobs.command(
        "third", "cp", "{a}", "{b}", inputs={"a": first["a"], "done": "second.done"}, outputs={"b": "b.txt"}, retries=0
    )  # the fault is not its own
    record = jobs.run("runs", on="here")
    assert {row.name: row.runs for row in record.rows} == {"first": 2, "second": 1, "third": 2}
    assert value_of(Path("runs"), "third.b") == b"1\n"


def test_a_damaged_object_of_a_function_that_a_stream_joins_is_made_again(folder: Path) -> None:
    """The second vertex spoils what the first wrote; a function that writes a stream reads it."""
    (folder / "own.py").write_text(
        "def make(): return 7\n"
        "def write(number, done, lines):\n"
        "    with open(lines, 'w') as file: file.write(f'{number}')\n"
    )
    jobs = builder(folder)
    maker = jobs.function("make", "own:make", outputs={"number": "json"})
    jobs.command(
        "spoil", "sh", "-c", "test -e spoiled || {{ echo 2 > $(readlink -f {n}); touch spoiled; }}; touch {done}",
        inputs={"n": maker["number"]}, outputs={"done": "done.txt"},
    )  # fmt: skip
    lines = jobs.function(
        "write", "own:write", inputs={"number": maker["number"], "done": "spoil.done"}, outputs={"lines": "stream"},
        retries=0,
    )  # fmt: skip
    jobs.command("read", "sh", "-c", "cat {lines} > {out}", inputs={"lines": lines["lines"]},
                 outputs={"out": "o.txt"}, retries=0)  # fmt: skip
    record = jobs.run("runs", on="here")
    assert {row.name: row.runs for row in record.rows if row.name != "write"} == {"make": 2, "spoil": 1, "read": 1}
    assert value_of(Path("runs"), "read.out") == b"7"


@pytest.mark.parametrize("on", ["here", "ray"])
def test_workers_start_with_the_variables_of_their_vertices(folder: Path, on: Literal["here", "ray"]) -> None:
    """Libraries read them once, when a process starts. On this machine, workers are kept by them."""
    (folder / "own.py").write_text(
        "import os\n"
        "def look(before=None):\n"
        "    with open('/proc/self/environ') as file: own = file.read().split(chr(0))\n"
        "    variables = dict(entry.partition('=')[::2] for entry in own)\n"
        "    same = os.environ['OMP_NUM_THREADS'] == variables.get('OMP_NUM_THREADS')\n"
        "    return [variables.get('OMP_NUM_THREADS'), same, os.getpid()]\n"
    )
    jobs = builder(folder)
    before: dict[str, str] = {}
    for name, cpus in (("one", 1), ("two", 2), ("again", 1)):
        vertex = jobs.function(name, "own:look", cpus=cpus, inputs=before, outputs={"found": "json"})
        before = {"before": vertex["found"]}
    jobs.run("runs", on=on)
    outputs = [value_of(Path("runs"), f"{name}.found") for name in ("one", "two", "again")]
    assert [output[:2] for output in outputs] == [["1", True], ["2", True], ["1", True]]
    if on == "here":
        assert outputs[0][2] == outputs[2][2] != outputs[1][2]


@pytest.mark.parametrize("seed", range(2))
def test_outputs_equal_a_serial_run_and_starts_keep_to_the_graph(folder: Path, seed: int) -> None:
    graph = random_graph(seed, folder, size=9, cores=3, most_s=0.02)
    record = run_jobs(graph, folder, folder / "runs", on="here")
    assert hashes_in(folder / "runs") == serial_hashes(graph)
    assert starts_in(folder / "runs") == dict.fromkeys(graph.vertices, 1)
    ends = {span.vertex: span.end_s for span in record.measured}
    begins = {span.vertex: span.start_s for span in record.measured}
    assert all(ends[before] <= begins[name] for name, some in graph.before().items() for before in some)


def test_only_a_vertex_whose_worker_was_killed_runs_again(folder: Path) -> None:
    graph = random_graph(7, folder, size=6, cores=2, least_s=0.1, most_s=0.3)
    directory, done = folder / "runs", threading.Event()

    def run() -> None:
        run_jobs(graph, folder, directory, on="here")
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    killed: list[str] = []
    while not done.is_set() and len(killed) < 3:
        for vertex, attempt in running_in(directory).items():
            if vertex not in killed and kill_vertex(directory, vertex, attempt):
                killed.append(vertex)
        time.sleep(0.02)
    thread.join()
    lost = [event.unit for event in events_in(directory) if isinstance(event, Failed) and event.lost]
    assert lost
    assert set(lost) <= set(killed)
    assert starts_in(directory) == {name: 1 + lost.count(name) for name in graph.vertices}
    assert hashes_in(directory) == serial_hashes(graph)
    assert "was killed by SIGKILL" in next(e.problem for e in events_in(directory) if isinstance(e, Failed))


def meshwright(folder: Path, *words: str) -> subprocess.Popen[str]:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores the signal
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli", "jobs", *words], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def until_running(directory: Path, vertex: str) -> None:
    end_s = time.monotonic() + 60
    while vertex not in running_in(directory):
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_graph_whose_scheduler_was_stopped_goes_on(folder: Path, how: signal.Signals) -> None:
    jobs = builder(folder)
    first = jobs.command("first", "sh", "-c", "echo 1 > {out}", outputs={"out": "a.txt"})
    jobs.command(
        "second", "sh", "-c", "cat {out} > {twice}; cat {out} >> {twice}; test -e quick || sleep 60",
        inputs={"out": first["out"]}, outputs={"twice": "b.txt"},
    )  # fmt: skip
    save(jobs.graph(), folder / "g.toml")
    directory = folder / "runs" / "g"
    with meshwright(folder, "g.toml", "--on", "here") as process:
        until_running(directory, "second")
        with pytest.raises(JobError, match="another run is at work in this directory"):
            jobs.run(directory, on="here")
        pid = directory / "work" / "second" / "1" / "pid"
        while not pid.exists() or not pid.read_text():
            time.sleep(0.01)
        process.send_signal(how)
        _, stderr = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    if how == signal.SIGINT:
        assert "finished vertices are kept in runs/g: the same command goes on\nmeshwright: stopped\n" in stderr
    gone = time.monotonic() + 30  # what it had started ends with it
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < gone
        time.sleep(0.02)
    (folder / "quick").touch()
    with (directory / "journal.jsonl").open("a") as file:
        file.write('{"event":"fini')  # as if it had been killed while it wrote
    record = jobs.run(directory, on="here")
    assert [row.state for row in record.rows] == ["reused", "finished"]
    assert starts_in(directory) == {"first": 1, "second": 2}
    assert value_of(directory, "second.twice") == b"1\n1\n"


def test_what_fails_each_time_is_told_with_its_last_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = builder(folder)
    bad = jobs.command("bad", "sh", "-c", "echo working; echo no such tape >&2; exit 3", retries=1,
                       outputs={"x": "x.txt"})  # fmt: skip
    jobs.command("after", "true", inputs={"x": bad["x"]})
    jobs.command("beside", "sh", "-c", "echo 1 > {y}", outputs={"y": "y.txt"})
    save(jobs.graph(), folder / "g.toml")
    assert cli(["jobs", "g.toml", "--on", "here"]) == 2
    stderr = capsys.readouterr().err
    assert "bad: exit code 3; it runs again (1 more of 2 runs)" in stderr
    assert (
        "meshwright: g.toml: vertices.bad: failed 2 times: exit code 3; its last lines:\n  | working\n  | no such t"
        in stderr
    )
    assert re.search(r"-> its output is in \S+/work/bad/2/log; correct it and give the same command again", stderr)
    assert starts_in(Path("runs/g")) == {"bad": 2, "beside": 1}
    page = json.loads(Path("runs/g/jobs.json").read_text())
    assert {row["name"]: row["state"] for row in page["rows"]} == {
        "bad": "failed",
        "after": "waiting",
        "beside": "finished",
    }


@pytest.mark.parametrize(
    ("form", "body", "problem"),
    [
        ("json", "return object()", "its output 'out' is no JSON: "),
        ("arrays", "return [1]", "its output 'out' is list, not a dict of arrays: return a dict of arrays"),
        ("arrays", "return {'a': [None]}", "its output 'out' array 'a' holds Python objects"),
        ("bytes", "return 'text'", "its output 'out' is str, not bytes: return bytes"),
        ("page.txt", "return 'text'", "ended well, but did not write its output 'out'"),
        ("json", "raise KeyError('lost')", "KeyError: 'lost'"),
        ("json", "import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_functions_that_fail(folder: Path, form: str, body: str, problem: str) -> None:
    (folder / "own.py").write_text(f"def f(**paths):\n    {body}\n")
    jobs = builder(folder)
    jobs.function("v", "own:f", outputs={"out": form}, retries=0)
    with pytest.raises(JobError, match=r"vertices.v: failed 1 time: ") as error:
        jobs.run("runs", on="here")
    assert problem in error.value.problem


def test_a_vertex_may_fail_before_it_succeeds(folder: Path) -> None:
    jobs = builder(folder)
    marker = str(folder / "marker")
    jobs.function("v", "steps:sometimes", outputs={"n": "json"}, arguments={"marker": marker, "wanted": 3})
    record = jobs.run("runs", on="here")
    assert [span.end for span in record.measured] == ["failed", "failed", "finished"]
    assert value_of(Path("runs"), "v.n") == 3


def test_one_end_of_a_stream_that_fails_ends_the_other(folder: Path) -> None:
    jobs = builder(folder)
    lines = jobs.command("lines", "sh", "-c", "yes > {out}", outputs={"out": "stream"}, retries=0)
    jobs.command(
        "fails", "sh", "-c", "head -c 100 {lines} > /dev/null; exit 4", inputs={"lines": lines["out"]}, retries=0
    )
    with pytest.raises(JobError, match=r"vertices\.(fails: failed 1 time: exit code 4|lines: failed 1 time: )"):
        jobs.run("runs", on="here")


def test_without_ray_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    jobs = builder(folder)
    jobs.command("v", "true")
    with pytest.raises(JobError, match=re.escape("ray is not installed\n  -> pip install 'meshwright[ray]', or run")):
        jobs.run("runs")


def test_a_cluster_that_does_not_answer_is_named(folder: Path) -> None:
    jobs = builder(folder)
    jobs.command("v", "true")
    for address in ("127.0.0.1:1", "nowhere"):
        with pytest.raises(JobError, match=f"--address {address}: no Ray cluster answers: .*\n  -> write HOST:PORT"):
            jobs.run("runs", address=address)
    with pytest.raises(JobError, match="--address box:1: only Ray has clusters"):
        jobs.run("runs", on="here", address="box:1")


def test_on_ray_only_what_was_lost_runs_again(folder: Path) -> None:
    graph = random_graph(3, folder, size=5, cores=2, least_s=0.2, most_s=0.5)
    save(graph, folder / "g.toml")
    directory = folder / "runs" / "g"
    with meshwright(folder, "g.toml", "--json") as process:
        until_running(directory, "v0")
        assert kill_vertex(directory, "v0", 1)
        printed, stderr = process.communicate()
    assert process.returncode == 0, stderr
    record = json.loads(printed)
    lost = [event for event in events_in(directory) if isinstance(event, Failed)]
    assert [event.unit for event in lost] == ["v0"]
    assert "its worker was lost (WorkerCrashedError" in lost[0].problem
    assert starts_in(directory) == {name: 1 + (name == "v0") for name in graph.vertices}
    assert hashes_in(directory) == serial_hashes(graph)
    assert {row["state"] for row in record["rows"]} == {"finished"}
    assert (directory / "jobs.html").exists()


def test_the_example_trains_as_the_same_training_alone(folder: Path) -> None:
    """Softmax regression on real digits: the weights are those of its run file trained in this process, bit for bit."""
    runs, alone = folder / "runs", folder / "alone"
    record = run_jobs(load(EXAMPLES / "softmax.toml"), EXAMPLES, runs, on="here")
    assert record.notes[0].startswith("all 4 vertices are a chain: no two can run at once")
    assert value_of(runs, "evaluate.accuracies")["softmax"] > 0.9
    assert value_of(runs, "export.model") == value_of(runs, "train.weights")
    assert [step for step, _ in value_of(runs, "train.losses")["losses"]] == list(range(1, 201))

    raw = config.read(EXAMPLES / "digits_run.toml")
    data = value_of(runs, "prepare.train")
    (folder / "train.npz").write_bytes(encode(data, "arrays"))
    raw["data"]["path"], raw["train"]["directory"] = str(folder / "train.npz"), str(alone)
    run = config.make(raw, where="digits_run.toml")
    assert api.run_ranks(api.train, run, num_ranks=1, directory=alone).steps == 200
    trainer = api.trainer_of(run, {name: torch.as_tensor(value[:64]) for name, value in data.items()}, mw.Layout())
    trainer.load_latest(alone / "checkpoints")
    expected = {name: tensor.numpy() for name, tensor in trainer.full_state_dict().items()}
    weights = dict(np.load(io.BytesIO(value_of(runs, "train.weights"))))
    assert list(weights) == list(expected)
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def test_the_layouts_of_the_example_run_side_by_side(folder: Path) -> None:
    nodes = {"box": JobNode(cpus=6)}
    record = plan_jobs(load(EXAMPLES / "layouts.toml"), EXAMPLES, folder / "runs", nodes=nodes)
    assert [row.level for row in record.rows] == [0, 1, 1, 1, 1, 2, 3]
