"""RUN.toml and the options of the command line: typed values, defaults, and errors that name file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import config
from meshwright.cli.overrides import keys, overridden
from meshwright.errors import FileFormatError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.layout import Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Plan, Stage
from meshwright.ir.run import SGD, AdamW, LearningRate, Run
from meshwright.ir.run_data import TextData
from meshwright.ir.run_model import FactoryModel, GPTModel, MLPModel

TEXT = """
[model]
name = "gpt"
layers = 2

[data]
kind = "text"
paths = ["a.txt", "b/*.txt"]
batch_size = 12
"""


def run_of(text: str = TEXT, *options: str) -> Run:
    return config.make(overridden(config.tables(text.encode(), where="RUN.toml"), options), where="RUN.toml")


def message(text: str = TEXT, *options: str) -> str:
    with pytest.raises(MeshwrightError) as caught:
        run_of(text, *options)
    return str(caught.value)


@pytest.mark.parametrize(("text", "parts"), [("2", (2,)), ("2,2", (2, 2)), ("[2, 1]", (2, 1))])
def test_lists_need_no_brackets(text: str, parts: tuple[int, ...]) -> None:
    assert run_of(TEXT, "--layout.spatial", text).layout.chosen() == Layout(dp=-1, spatial=parts)


def test_what_is_not_said_has_its_default() -> None:
    run = run_of()
    assert isinstance(run.model, GPTModel)
    assert (run.model.layers, run.model.width, run.model.loss) == (2, 256, "")
    assert isinstance(run.data, TextData)
    assert run.data.paths == ("a.txt", "b/*.txt")
    assert run.optimizer == AdamW()
    assert run.layout.chosen() == Layout(dp=-1)
    assert run.sample is None


def test_the_kind_of_an_optimizer_decides_its_keys() -> None:
    assert run_of(TEXT + '[optimizer]\nname = "sgd"\nmomentum = 0.9').optimizer == SGD(momentum=0.9)
    assert run_of(TEXT + "[optimizer]\nbetas = [0.9, 0.95]").optimizer == AdamW(betas=(0.9, 0.95))
    error = message(TEXT + "[optimizer]\nmomentum = 0.9")
    assert error.startswith("RUN.toml: optimizer.momentum: unknown key")


def test_a_model_with_a_factory_needs_no_name() -> None:
    run = run_of(
        '[model]\nfactory = "mine:net"\nloss = "classification"\n[model.arguments]\nn = 3\n[data]\nkind = "digits"'
    )
    assert run.model == FactoryModel(factory="mine:net", loss="classification", arguments={"n": 3})


@pytest.mark.parametrize(
    ("wrong", "right", "expected"),
    [
        ("layers", "layerz", "RUN.toml: model.layerz: unknown key\n  -> did you mean `layers`? known keys: loss,"),
        ("[data]", "[dta]", "RUN.toml: dta: unknown key\n  -> did you mean `data`? known keys: model, data, layout"),
        ("layers = 2", 'layers = "two"', "RUN.toml: model.layers: Expected `int`, got `str`"),
        ("layers = 2", "layers = 0", "RUN.toml: model.layers: Expected `int` >= 1"),
        ('"gpt"', '"gtp"', "RUN.toml: model.name: unknown name 'gtp'\n  -> did you mean `gpt`? known: gpt, mlp, lenet"),
        ('name = "gpt"', "", "RUN.toml: model: `name` is missing\n  -> add name = one of gpt, mlp, lenet, resnet"),
        ("layers = 2", "layers = ", "RUN.toml: not valid TOML"),
        ("layers = 2", "width = 50", "RUN.toml: model.width: 50 is not divisible by heads = 4"),
        ("layers = 2", "vocabulary = 100", "RUN.toml: model.vocabulary: text has 256 different bytes, the model's"),
        ("layers = 2", "sequence_length = 8", "RUN.toml: model.sequence_length: the model has 8 positions, but"),
    ],
)  # fmt: skip
def test_an_error_names_file_and_key(wrong: str, right: str, expected: str) -> None:
    assert message(TEXT.replace(wrong, right)).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('factory = "net"\nloss = "a:b"', "RUN.toml: model.factory: 'net' does not name a function"),
        ('factory = "a:b"', "RUN.toml: model.loss: is missing\n  -> write package.module:function, or classification"),
    ],
)
def test_a_factory_must_be_named_with_its_module(text: str, expected: str) -> None:
    assert message(f'[model]\n{text}\n[data]\nkind = "digits"').startswith(expected)


def test_only_a_model_of_text_writes() -> None:
    text = '[model]\nname = "mlp"\n[data]\nkind = "digits"\n[sample]\nlength = 3'
    assert message(text).startswith("RUN.toml: sample: only a model of text can write")


def test_a_plan_leaves_no_room_for_sizes() -> None:
    assert message(TEXT + '[layout]\nplan = "plan.json"\ntp = 2').startswith(
        "RUN.toml: layout: both a plan and tp are given"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"none\.toml: cannot read the file: No such file"):
        config.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["--train.ranks", "4"], "train.ranks", 4),
        (["--train.ranks", "auto"], "train.ranks", "auto"),
        (["--train.directory", "123"], "train.directory", "123"),
        (["--data.paths", "c.txt"], "data.paths", "c.txt"),
        (["--data.paths", '["c", "d"]'], "data.paths", ("c", "d")),
        (["--sample.length", "7"], "sample.length", 7),
        (["--layout.pin.blocks.*", "none@tp"], "layout.pin", {"blocks.*": "none@tp"}),
        (["--model.tied_head", "false"], "model.tied_head", False),
        (["--optimizer.momentum", "0.5", "--optimizer.name", "sgd"], "optimizer.momentum", 0.5),
    ],
)
def test_an_option_has_the_type_of_its_key(option: list[str], key: str, value: Any) -> None:
    section, name = key.split(".")
    assert getattr(getattr(run_of(TEXT, *option), section), name) == value


def test_options_do_not_change_the_tables_they_are_put_into() -> None:
    raw = config.tables(TEXT.encode(), where="RUN.toml")
    overridden(raw, ["--model.layers", "5"])
    assert raw["model"]["layers"] == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--optimizer.lrr", "1"], "--optimizer.lrr: there is no such key in RUN.toml\n  -> did you mean `--opt"),
        (["--steps", "3"], "--steps: there is no such key in RUN.toml\n  -> did you mean `--train.steps`?"),
        (["--optimizer.lr", "high"], "--optimizer.lr: 'high': Expected `float`, got `str`"),
        (["--train.steps", "0"], "--train.steps: '0': Expected `int` >= 1"),
        (["--layout.zero", "4"], "--layout.zero: '4': Invalid enum value 4\n  -> give one of -1, 0, 1, 2, 3"),
        (["--train.steps"], "--train.steps: has no value"),
        (["--optimizer", "sgd"], "--optimizer: is a table\n  -> give one of its keys"),
        (["--optimizer.momentum", "1"], "--optimizer.momentum: there is no such key in RUN.toml\n  -> only another"),
        (["stray"], "command line: unexpected argument 'stray'"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_with_the_nearest(options: list[str], expected: str) -> None:
    assert message(TEXT, *options).startswith(expected)


def test_every_key_is_listed_with_its_default() -> None:
    listed = list(keys())
    assert ("optimizer.lr", "0.001", "adamw") in listed
    assert ("train.steps", "1000", "") in listed


def test_a_saved_run_reads_back_equal_and_its_changes_are_told(tmp_path: Path) -> None:
    run = run_of(TEXT, "--sample.length", "7", "--layout.pin.head", "none@tp")
    config.save(run, tmp_path / "run.toml")
    assert config.load(tmp_path / "run.toml") == run
    assert config.changes(tmp_path / "run.toml", run) == []
    other = run_of(TEXT, "--optimizer.lr", "0.5", "--layout.pin.head", "none@tp")
    assert config.changes(tmp_path / "run.toml", other) == [
        "optimizer.lr: 0.001 -> 0.5",
        "sample.prompt: \n -> not given",
        "sample.length: 7 -> not given",
        "sample.temperature: 0.8 -> not given",
    ]
    assert config.changes(tmp_path / "none.toml", run) == []


def test_references_are_runs() -> None:
    for name, tables in config.REFERENCES.items():
        assert config.make(tables, where=name).model.__struct_config__.tag == name


def test_a_learning_rate_warms_up_and_goes_down() -> None:
    cosine = LearningRate(name="cosine", warmup_steps=3, final=0.1)
    factors = [cosine.factor(step, 10) for step in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    linear = LearningRate(name="linear", final=0.0)
    assert [linear.factor(step, 5) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert LearningRate(warmup_steps=1).factor(500, 10) == 1.0


def test_a_learning_rate_follows_the_batch() -> None:
    """Goyal et al. 2017, section 2: k times the batch, k times the rate, warmed up from the rate of one k-th."""
    linear = LearningRate(scaling="linear", base_batch_size=8, warmup_steps=4, warmup_from="base")
    assert [linear.factor(step, 100, 32) for step in range(6)] == [1.0, 1.75, 2.5, 3.25, 4.0, 4.0]
    assert [linear.factor(step, 100, 8) for step in range(6)] == [1.0] * 6
    sqrt = LearningRate(scaling="sqrt", base_batch_size=8, name="linear", final=0.0)
    assert [sqrt.factor(step, 3, 32) for step in range(3)] == [2.0, 1.0, 0.0]
    from_zero = LearningRate(scaling="sqrt", base_batch_size=8, warmup_steps=1)
    assert [from_zero.factor(step, 9, 2) for step in range(3)] == [0.25, 0.5, 0.5]


def test_a_batch_grows_as_the_schedule_says_and_its_rate_with_it() -> None:
    run = of_tables(
        {
            "data": {"kind": "random", "batch_size": 12},
            "schedule": {"batch_sizes": [[2, 24], [3, 48]], "scaling": "linear", "base_batch_size": 12},
            "train": {"steps": 5},
        }
    )
    assert run.batch_sizes() == [12, 12, 24, 48, 48]
    assert run.lr_factors() == [1.0, 1.0, 2.0, 4.0, 4.0]
    assert run.num_ranks(16) == 12, "every batch divides over the ranks"
    assert (
        of_tables({"data": {"kind": "random", "batch_size": 12}, "schedule": {"batch_sizes": [[1, 6]]}}).num_ranks(9)
        == 6
    )


def of_tables(raw: dict[str, Any]) -> Run:
    return config.make({"model": {"name": "mlp"}, **raw}, where="run")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"scaling": "linear"}, r"run: schedule\.base_batch_size: is missing\n  -> give the batch that optimizer\.lr"),
        ({"base_batch_size": 8}, r"schedule\.base_batch_size: is 8, but nothing is scaled\n  -> give scaling"),
        ({"warmup_from": "base", "warmup_steps": 5}, r"schedule\.warmup_from: 'base' means nothing without"),
        ({"batch_sizes": [[5, 8], [5, 16]]}, r"schedule\.batch_sizes: the steps \[5, 5\] do not rise"),
    ],
)
def test_a_schedule_that_says_nothing_is_refused(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        of_tables({"data": {"kind": "random"}, "schedule": schedule})


@pytest.mark.parametrize(
    ("options", "cores", "ranks"),
    [
        ([], 2, 2),
        ([], 16, 12),  # a batch of 12 divides no further
        ([], 5, 4),
        ([], 1, 1),
        (["--layout.tp", "2"], 16, 12),  # dp 6
        (["--layout.tp", "2"], 1, 2),  # the layout cannot do with fewer
        (["--layout.dp", "3"], 16, 3),
        (["--layout.dp", "2", "--layout.tp", "-1"], 16, 16),
        (["--layout.dp", "2", "--layout.tp", "4"], 2, 8),
        (["--layout.tp", "1x1x2"], 10, 6),  # dp 3: 12 samples divide over 3 x 2 data ranks, and not over 4 x 2
        (["--train.ranks", "7"], 2, 7),
    ],
)
def test_ranks_are_the_cores_as_far_as_they_are_useful(options: list[str], cores: int, ranks: int) -> None:
    assert run_of(TEXT, *options).num_ranks(cores) == ranks


def test_a_plan_says_how_many_ranks_it_needs(tmp_path: Path) -> None:
    plan = Plan(
        model="GPT", graph_fingerprint="", batch_size=12, cluster="", mesh=Mesh.of(dp=3, tp=2),
        stages=(Stage(strategies={}, storage={}),), layout=Layout(dp=3, tp=2),
    )  # fmt: skip
    files.save(plan, tmp_path / "plan.json")
    assert run_of(TEXT, "--layout.plan", str(tmp_path / "plan.json")).num_ranks(2) == 6


def test_the_model_can_change_its_name_on_the_command_line() -> None:
    text = '[model]\nname = "gpt"\n[data]\nkind = "random"'
    assert isinstance(run_of(text, "--model.name", "mlp").model, MLPModel)


def test_ranks_are_those_of_all_stages() -> None:
    layout = {"pp": 2, "stage_sizes": [{"dp": 1}, {"dp": 2, "tp": 2}]}
    assert of_tables({"data": {"kind": "random"}, "layout": layout}).num_ranks(16) == 5
