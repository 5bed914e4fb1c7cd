"""Where metrics go: each sink gets every row, errors of libraries stop no run, and missing packages are named."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import api, config
from meshwright.errors import FileFormatError, LaunchError
from meshwright.ir import prometheus
from meshwright.runtime.metrics import Meter
from meshwright.runtime.sinks import Jsonl, Row, Sink, numbers, opened
from meshwright.runtime.sinks.base import kept_id

ROWS: list[Row] = [
    {"step": 1, "step_s": 0.5, "lr": 0.1, "loss": 3.0},
    {"step": 2, "step_s": 0.25, "lr": 0.1, "loss": 2.5, "grad_norm": 1.5},
    {"step": 2, "held_out": {"loss": 2.75, "accuracy": 0.5, "bits_per_byte": None}},
]
SCALARS = [
    ("step_s", 0.5, 1), ("lr", 0.1, 1), ("loss", 3.0, 1), ("step_s", 0.25, 2), ("lr", 0.1, 2), ("loss", 2.5, 2),
    ("grad_norm", 1.5, 2), ("held_out/loss", 2.75, 2), ("held_out/accuracy", 0.5, 2),
]  # fmt: skip


class Calls:
    """Stands in for objects of a library: notes the calls of its methods."""

    def __init__(self, calls: list[Any], **attributes: Any) -> None:
        self._calls = calls
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._calls.append((name, *args, *([kwargs] if kwargs else [])))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def run_through(sink: Sink) -> None:
    """A run that is interrupted after its rows, goes on after step 1, and ends."""
    sink.write(ROWS[:1])
    sink.write(ROWS[1:])
    sink.rewind(1)
    sink.write(ROWS[1:2])
    sink.close()


def the_sink(name: str, directory: Path) -> Sink:
    return opened([name], directory)[1]


def test_numbers_of_rows_have_flat_names() -> None:
    assert [(name, value, row["step"]) for row in ROWS for name, value in numbers(row).items()] == SCALARS


def test_tensorboard_gets_scalars_and_hides_steps_that_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def writer(**options: Any) -> Calls:
        calls.append(("opened", options))
        return Calls(calls)

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=writer)
    run_through(the_sink("tensorboard", tmp_path))
    assert [call[1] for call in calls if call[0] == "opened"] == [
        {"log_dir": f"{tmp_path}/tensorboard", "purge_step": step} for step in (1, 2)
    ]
    assert [call[1:] for call in calls if call[0] == "add_scalar"] == [*SCALARS, *SCALARS[3:7]]
    assert calls[-1] == ("close",)


def test_weights_and_biases_is_offline_and_a_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    calls: list[Any] = []

    def init(**options: Any) -> Calls:
        begun.append(options)
        return Calls(calls)

    stand_in(monkeypatch, "wandb", init=init)
    for _ in range(2):
        run_through(the_sink("wandb", tmp_path))
    first, second = begun
    assert first == second
    assert (first["mode"], first["dir"], first["resume"]) == ("offline", str(tmp_path), "allow")
    assert calls[:2] == [
        ("log", {"step_s": 0.5, "lr": 0.1, "loss": 3.0, "trainer/step": 1}, {"step": 1}),
        ("log", {"step_s": 0.25, "lr": 0.1, "loss": 2.5, "grad_norm": 1.5, "trainer/step": 2}, {"step": 2}),
    ]
    assert calls[4] == ("finish",)


def mlflow(monkeypatch: pytest.MonkeyPatch, calls: list[Any], uri: str = "") -> None:
    def client(tracking_uri: str) -> Calls:
        calls.append(("client", tracking_uri))
        run = SimpleNamespace(info=SimpleNamespace(run_id="the run"))

        def begin(number: str, run_name: str) -> SimpleNamespace:
            calls.append(("run", number, run_name))
            return run

        return Calls(
            calls, get_experiment_by_name=lambda name: None, create_experiment=lambda name, artifact_location: "7",
            create_run=begin,
        )  # fmt: skip

    stand_in(
        monkeypatch, "mlflow", is_tracking_uri_set=lambda: bool(uri), get_tracking_uri=lambda: uri, MlflowClient=client,
        entities=SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step)),
    )  # fmt: skip


@pytest.mark.parametrize("uri", ["", "http://127.0.0.1:5000"])
def test_mlflow_writes_files_unless_the_user_has_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    calls: list[Any] = []
    mlflow(monkeypatch, calls, uri)
    run_through(the_sink("mlflow", tmp_path))
    assert calls[:2] == [("client", uri or f"sqlite:///{tmp_path}/mlflow.db"), ("run", "7", tmp_path.name)]
    logged = [metric for call in calls if call[0] == "log_batch" for metric in call[2]["metrics"]]
    assert logged == [*SCALARS, *SCALARS[3:7]]
    assert calls[-1] == ("set_terminated", "the run")


def test_prometheus_has_the_newest_numbers(tmp_path: Path) -> None:
    run_through(the_sink("prometheus", tmp_path / 'a "run"'))
    label = '{run="a \\"run\\""}'
    lines = (tmp_path / 'a "run"' / "metrics.prom").read_text().splitlines()
    assert lines[:4] == [
        "# TYPE meshwright_step gauge", f"meshwright_step{label} 2",
        "# TYPE meshwright_step_s gauge", f"meshwright_step_s{label} 0.25",
    ]  # fmt: skip
    assert f"meshwright_held_out_loss{label} 2.75" in lines


@given(st.floats())
def test_numbers_in_prometheus_text_are_read_back(value: float) -> None:
    text = prometheus.number(value)
    number = float(text.replace("+Inf", "inf").replace("-Inf", "-inf"))
    assert number == value or (math.isnan(number) and math.isnan(value))


@pytest.mark.parametrize(
    ("name", "module", "what"),
    [
        ("tensorboard", "torch.utils.tensorboard", "TensorBoard"), ("wandb", "wandb", "Weights & Biases"),
        ("mlflow", "mlflow", "MLflow"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, what: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LaunchError) as caught:
        opened([name], tmp_path)
    assert str(caught.value).startswith(f"train.metrics: {what} cannot be loaded: ")
    assert str(caught.value).endswith(f"\n  -> pip install 'meshwright[{name}]', or leave '{name}' out")


def test_errors_of_a_library_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> None:
        raise OSError("no room\nat all")

    stand_in(monkeypatch, "wandb", init=init)
    with caplog.at_level(logging.WARNING, "meshwright"):
        run_through(the_sink("wandb", tmp_path))
    assert {record.getMessage() for record in caplog.records} == {
        "wandb has not taken the last metrics: OSError: no room"
    }


def test_ids_of_other_programs_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "wandb.id"
    run_id = kept_id(path)
    assert kept_id(path) == run_id
    path.write_text("../../else")
    assert kept_id(path) not in (run_id, "../../else")


def test_all_sinks_get_the_rows_of_a_run_and_unknown_names_are_refused(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "model": {"name": "mlp", "sizes": [4, 3]},
        "data": {"kind": "random", "shape": [4], "classes": 3, "samples": 40},
        "train": {"steps": 3, "log_every": 2, "directory": str(tmp_path), "metrics": ["prometheus"], "ranks": 1},
    }  # fmt: skip
    api.train(config.make(raw, where="test"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    assert f"meshwright_loss{{run=\"{tmp_path.name}\"}} {prometheus.number(last['loss'])}" in (
        tmp_path / "metrics.prom"
    ).read_text().splitlines()  # fmt: skip
    raw["train"]["metrics"] = ["grafana"]
    with pytest.raises(FileFormatError, match=r"test: train.metrics\[0\]: Invalid enum value 'grafana'"):
        config.make(raw, where="test")


def test_a_meter_gives_back_what_a_sink_can_read(tmp_path: Path) -> None:
    meter = Meter(opened(["prometheus"], tmp_path), 9, 1, "samples", 1.0, 0.0, torch.device("cpu"))
    meter.write(*ROWS)
    assert meter.rewind(1) == ROWS[:1]
    assert Jsonl(tmp_path / "metrics.jsonl").rewind(9) == ROWS[:1]
