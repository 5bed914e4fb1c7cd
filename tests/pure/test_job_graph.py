"""GRAPH.toml: what it says, what is refused and how, the picture as text, and the builder in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli import run as cli
from meshwright.errors import FileFormatError, JobError
from meshwright.ir import files
from meshwright.ir.job_graph import JobGraph, JobNode, TrainVertex
from meshwright.jobs import load, plan_jobs
from meshwright.jobs.code import vertex_digest

GOLDEN = Path(__file__).parents[1] / "golden"
NODES = "\n[nodes.box]\ncpus = 4\nlabels = { tier = 'cloud' }\n"
STEPS = """\
raise AssertionError("a plan imports nothing")
from os.path import join
def prepare(): ...
def evaluate(xs): ...
"""
RUN = '[model]\nname = "mlp"\n[data]\nkind = "tensors"\npath = "x.npz"\n'
GRAPH = """\
name = "digits"
[vertices.prepare]
function = "steps:prepare"
outputs = { xs = "arrays", page = "page.html" }
seconds = 2
[vertices.train]
run = "run.toml"
ranks = 2
inputs = { xs = "prepare.xs" }
set = { "data.path" = "{xs}", "optimizer.lr" = 0.1 }
seconds = 3
[vertices.copy]
command = ["cp", "{page}", "{copy}"]
inputs = { page = "prepare.page" }
outputs = { copy = "copy.html" }
publish = { copy = "out/copy.html" }
seconds = 1
gpus = 0
[vertices.evaluate]
function = "steps:evaluate"
inputs = { xs = "train.losses" }
seconds = 0.5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "g.toml").write_text(GRAPH + NODES)
    return tmp_path


def test_a_graph_is_drawn_and_costed_and_nothing_is_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["jobs", "g.toml", "--plan", "--page", "page.html"]) == 0
    assert capsys.readouterr().out == (GOLDEN / "job_graph.txt").read_text()
    page = (folder / "page.html").read_text()
    assert page.count("<rect") == 8
    assert "critical path 5.5 s" in page
    assert cli(["jobs", "g.toml", "--plan", "--json"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert decoded["predicted_s"] == decoded["critical_s"] == 5.5
    assert [row["level"] for row in decoded["rows"]] == [0, 1, 1, 2]
    assert not (folder / "runs").exists()


def test_a_serial_chain_is_said_to_be_a_chain(folder: Path) -> None:
    jobs = mw.JobBuilder("chain", folder=folder, nodes={"box": JobNode(cpus=8)})
    first = jobs.command("first", "true", outputs={"a": "a.txt"}, seconds=1)
    second = jobs.command("second", "true", inputs={"a": first["a"]}, outputs={"b": "b.txt"}, seconds=1)
    jobs.command("third", "true", inputs={"a": first["a"], "b": second["b"]})
    record = jobs.plan()
    assert record.notes == (
        "all 3 vertices are a chain: no two can run at once, so more nodes do not help",
        "seconds are not known of third: they count as 0 until they have run once",
    )
    assert record.critical == ("first", "second", "third")


def test_too_few_cores_take_longer_than_the_critical_path(folder: Path) -> None:
    jobs = mw.JobBuilder("wide", folder=folder, nodes={"box": JobNode(cpus=2)})
    for index in range(3):
        jobs.command(f"v{index}", "true", seconds=1)
    record = jobs.plan()
    assert (record.critical_s, record.bound_s, record.predicted_s) == (1.0, 1.5, 2.0)
    assert record.notes == ("no schedule on these nodes takes less than 1.5 s",)


def test_a_graph_survives_its_file(folder: Path) -> None:
    graph = load(folder / "g.toml")
    files.save(graph, folder / "graph.json")
    assert files.load(folder / "graph.json", JobGraph) == graph
    train = graph.vertices["train"]
    assert isinstance(train, TrainVertex)
    assert train.outputs == {"weights": "weights.npz", "losses": "json"}
    assert (train.cores, graph.vertices["copy"].cores) == (2.0, 1.0)


def test_only_what_changes_outputs_changes_the_digest(folder: Path) -> None:
    graph = load(folder / "g.toml")

    def digests(text: str = GRAPH) -> list[str]:
        (folder / "h.toml").write_text(text)
        return [vertex_digest(vertex, folder) for vertex in load(folder / "h.toml").vertices.values()]

    before = [vertex_digest(vertex, folder) for vertex in graph.vertices.values()]
    assert digests(GRAPH.replace("seconds = 1", "seconds = 9\ncpus = 3\nretries = 7")) == before
    changed = digests(GRAPH.replace('"cp"', '"mv"'))
    assert [old != new for old, new in zip(before, changed, strict=True)] == [False, False, True, False]
    (folder / "run.toml").write_text(RUN + "[train]\nsteps = 9\n")
    assert [old != new for old, new in zip(before, digests(), strict=True)] == [False, True, False, False]
    (folder / "steps.py").write_text(STEPS + "# changed\n")
    assert [old != new for old, new in zip(before, digests(), strict=True)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # keys
        ("seconds = 2", "secods = 2", "g.toml: vertices.prepare: Object contains unknown field `secods`\n  -> did you"),
        ("ranks = 2", 'ranks = "two"', "g.toml: vertices.train: ranks: Expected `int`, got `str`"),
        ('function = "steps:prepare"', 'fuction = "s:p"', "vertices.prepare: has no function, command, run\n  -> did "),
        ('run = "run.toml"', 'run = "run.toml"\nfunction = "s:p"', "vertices.train: has function and run\n  -> give"),
        ('copy = "copy.html" }', 'copy = "html" }', "vertices.copy.outputs.copy: 'html' is no form of an output\n  ->"),
        ('copy = "copy.html" }', 'copy = "json" }', "outputs.copy: a command writes files, not json\n  -> name a file"),
        ("labels = { tier = 'cloud' }", "cores = 4", "g.toml: nodes.box: Object contains unknown field `cores`"),
        ("[vertices.copy]", '[vertices."my copy"]', "'my copy' is no name of a vertex\n  -> use letters"),
        # channels
        ('"prepare.xs"', '"prepar.xs"', "vertices.train.inputs.xs: there is no vertex 'prepar'\n  -> did you mean `p"),
        ('"prepare.xs"', '"prepare.x"', "vertices.train.inputs.xs: vertex 'prepare' has no output 'x'\n  -> did you m"),
        ('"prepare.xs"', '"./xs.npz"', "vertices.train.inputs.xs: there is no file "),
        ('xs = "train.losses"', 'xs = "train.run"', "vertex 'train' has no output 'run'\n  -> it has: weights, losses"),
        ("set = {", 'outputs = { wights = "weights.npz" }\nset = {', "a training has no such output\n  -> did you mea"),
        ("publish = { copy =", "publish = { coppy =", "vertices.copy.publish.coppy: is no output that is kept\n  -> d"),
        (
            "seconds = 0.5",
            'outputs = { page = "p.html" }\npublish = { page = "./out/../out/copy.html" }',
            "vertices.evaluate.publish.page: ./out/../out/copy.html is written by vertices.copy.publish.copy too",
        ),
        (
            'inputs = { xs = "train.losses" }',
            'inputs = { xs = "./steps.py" }\noutputs = { s = "s.py" }\npublish = { s = "steps.py" }',
            "steps.py is written by vertices.evaluate.publish.s, before or after it is",
        ),
        ("out/copy.html", ".", "vertices.copy.publish.copy: . would replace the graph's folder\n  -> name a file or"),
        ("out/copy.html", "a/../..", "vertices.copy.publish.copy: a/../.. would replace the graph's folder\n  -> na"),
        ("out/copy.html", "out", "vertices.copy.publish.copy: out is a folder\n  -> name a file in it, such as out/"),
        (
            'seconds = 2', 'inputs = { losses = "evaluate.ys" }\n',
            "vertices.prepare.inputs.losses: vertex 'evaluate' has no output 'ys'\n  -> it has: none",
        ),
        ('page = "page.html" }', 'page = "page.html", s = "stream" }', "vertices.prepare.outputs.s: nobody reads this"),
        ('outputs = { copy = "', 'outputs = { page = "', "vertices.copy.outputs.page: is the name of an input too\n  "),
        # code
        ("steps:prepare", "steps:prepar", "steps.py defines no 'prepar'\n  -> did you mean `prepare`?"),
        ("steps:prepare", "stepz:prepare", "vertices.prepare: function: there is no module 'stepz'\n  -> put stepz.py"),
        ("steps:prepare", "steps", "function: 'steps' does not name a function\n  -> write package.module:function"),
        ("{page}", "{pge}", "command: {pge} in '{pge}' is no input or output\n  -> did you mean `page`?"),
        ("{page}", "{page", "vertices.copy: command: '{page': expected '}' before end of string\n  -> write {{"),
        ("optimizer.lr", "optimizer.l", "vertices.train: run.toml: optimizer.l: unknown key\n  -> did you mean `lr`?"),
        ('run = "run.toml"', 'run = "none.toml"', "vertices.train: "),
        ("gpus = 0", 'code = ["none.py"]', "vertices.copy: code: there is no file "),
        # resources
        ("ranks = 2", "ranks = 5", "vertices.train: 5 cores: no node has that (box: 4 cores, tier = cloud)\n  -> ask"),
        ("gpus = 0", "gpus = 1", "vertices.copy: 1 core, 1 GPU: no node has that"),
        ("gpus = 0", "labels = { tier = 'edge' }", "1 core, tier = edge: no node has that (box: 4 cores, tier = clou"),
    ],
)  # fmt: skip
def test_bad_graphs_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    text = GRAPH + NODES
    assert old in text
    (folder / "g.toml").write_text(text.replace(old, new, 1))
    (folder / "out").mkdir()
    assert cli(["jobs", "g.toml", "--plan"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("meshwright: g.toml: ")
    assert message in error


CYCLE = """\
[vertices.a]
command = ["true"]
inputs = { from_c = "c.x" }
outputs = { x = "x.txt" }
[vertices.b]
command = ["true"]
inputs = { from_a = "a.x" }
outputs = { x = "x.txt" }
[vertices.c]
command = ["true"]
inputs = { from_b = "b.x" }
outputs = { x = "x.txt" }
"""


def test_a_cycle_is_named_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "g.toml").write_text(CYCLE + NODES)
    assert cli(["jobs", "g.toml", "--plan"]) == 2
    message = "g.toml: vertices: a -> b -> c -> a is a cycle: each waits for the one before it\n  -> remove an input"
    assert message in capsys.readouterr().err


def test_vertices_that_run_together_do_not_wait_for_another_between_them(folder: Path) -> None:
    jobs = mw.JobBuilder(folder=folder, nodes={"box": JobNode(cpus=4)})
    jobs.command("a", "true", outputs={"lines": "stream", "x": "x.txt"})
    jobs.command("between", "true", inputs={"x": "a.x"}, outputs={"y": "y.txt"})
    jobs.command("b", "true", inputs={"lines": "a.lines", "y": "between.y"})
    with pytest.raises(JobError, match="a -> between -> a wait for each other, because vertices that a stream joins"):
        jobs.plan()


def test_a_stream_has_one_reader_that_is_no_training(folder: Path) -> None:
    jobs = mw.JobBuilder(folder=folder, nodes={"box": JobNode(cpus=4)})
    jobs.command("a", "true", outputs={"lines": "stream"})
    jobs.command("b", "true", inputs={"lines": "a.lines"})
    jobs.command("c", "true", inputs={"lines": "a.lines"})
    with pytest.raises(JobError, match=r"c.inputs.lines: the stream a.lines is read by b too"):
        jobs.plan()
    jobs = mw.JobBuilder(folder=folder, nodes={"box": JobNode(cpus=4)})
    jobs.command("a", "true", outputs={"lines": "stream"})
    jobs.train("t", "run.toml", inputs={"lines": "a.lines"})
    with pytest.raises(JobError, match="a training reads no stream"):
        jobs.plan()


def test_the_builder_refuses_at_once(folder: Path) -> None:
    jobs = mw.JobBuilder(folder=folder)
    first = jobs.function("load", json.loads, inputs={"s": "./run.toml"}, outputs={"value": "json"})
    with pytest.raises(JobError, match="vertex load: there are two vertices of this name"):
        jobs.command("load", "true")
    with pytest.raises(JobError, match="vertex load: there is no output 'valu'"):
        first["valu"]
    with pytest.raises(JobError, match="<lambda>' is no function of a module that can be imported"):
        jobs.function("other", lambda: 1)
    with pytest.raises(FileFormatError, match=r"vertices.other: Object contains unknown field `secods`"):
        jobs.command("other", "true", secods=1)
    graph = jobs.graph()
    assert list(graph.vertices) == ["load"]
    record = plan_jobs(graph, folder, folder / "runs", nodes={"box": JobNode()})
    assert record.rows[0].work == "json:loads"


def test_unknown_carriers_and_empty_graphs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["jobs", "g.toml", "--on", "spark"]) == 2
    assert "--on: 'spark' runs no jobs\n  -> write ray or here" in capsys.readouterr().err
    (folder / "g.toml").write_text('name = "nothing"\n')
    assert cli(["jobs", "g.toml"]) == 2
    assert "g.toml: there are no vertices\n  -> add a table [vertices.NAME]" in capsys.readouterr().err
