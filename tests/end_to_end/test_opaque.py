"""Opaque regions: what is refused, and with which words; what capture leaves as it was; prices in plans."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cli import run
from meshwright.errors import CaptureError, LayoutError, RuleError
from meshwright.ir.graph import Graph
from meshwright.ir.opaque import TARGETS, MeasuredCost, call_of
from tests.distributed import opaque_models
from tests.distributed.opaque_models import PARTS, Clipped, Halving, Model, OwnFunction, batch, loss_fn, make_part


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def marked(part: nn.Module, batch_dim: Any = "auto", **options: Any) -> nn.Module:
    model = Model(part, **options)
    mw.opaque(model.part, batch_dim=batch_dim)
    return model


def regions_of(graph: Graph) -> list[str]:
    return [operator.name for operator in graph.operators if operator.target in TARGETS and not operator.backward]


# --- what capture refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_the_error_names_the_module_and_the_way_out(name: str) -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)module part.*opaque_models\.py:\d+.*mw\.opaque\(model\.part(\.inner)?\)"
    ):
        mw.capture(make_part(name), loss_fn, batch())


def test_the_way_out_is_written_as_python_writes_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"one": nn.Sequential(Halving())})["one"], nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=re.escape("mw.opaque(model[1][0])")):
        mw.capture(model, loss_fn, batch())


def test_what_is_in_the_model_itself_is_to_be_moved() -> None:
    with pytest.raises(CaptureError, match=r"module \(model\).*\n.*into a submodule"):
        mw.capture(nn.Linear(8, 4), lambda model, batch: loss_fn(model, batch) * batch["x"].sum().item(), batch())


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.isfinite().all() else x


class Tells(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x, float(x.detach().sum())


class Grows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x] * len(x)) if x.isfinite().all() else x


class TellsLess(Model):
    def forward(self, x: Tensor) -> Tensor:
        first = self.part(self.up(x))[0]
        result: Tensor = self.down(first)
        return result


def fails(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        mw.capture(model, loss_fn, batch())
    return str(caught.value)


def test_what_cannot_be_one_operator_is_refused() -> None:
    assert re.search(r"opaque region part: it changes its argument 0 in place", fails(marked(Writes())))
    model = TellsLess(Tells())
    mw.opaque(model.part)
    assert re.search(r"opaque region part: a result that is not a tensor changes from call to call: -?\d", fails(model))
    assert "the whole model is marked" in fails(mw.opaque(Model(Halving())))


@pytest.mark.parametrize("part", [Halving, opaque_models.Normed], ids=lambda part: part.__name__)
def test_a_region_said_to_be_row_wise_that_is_not_is_refused(part: Any) -> None:
    text = fails(marked(part(), batch_dim=0))
    assert re.search(r"batch_dim=0 says that it computes each sample by itself, but (result 0|it changes buffer)", text)
    assert "leave batch_dim out" in text


def test_arguments_of_opaque() -> None:
    with pytest.raises(CaptureError, match="it is a function"):
        mw.opaque(loss_fn)  # type: ignore[type-var]
    with pytest.raises(CaptureError, match=r"batch_dim=-1"):
        mw.opaque(Halving(), batch_dim=-1)
    with pytest.raises(CaptureError, match=r"opaque='all'.*\n.*'auto'"):
        mw.capture(make_part("loop"), loss_fn, batch(), opaque="all")  # type: ignore[arg-type]


def test_models_without_values_need_the_shapes_of_results() -> None:
    with torch.device("meta"):
        model = marked(Halving())
    assert "outputs=lambda" in fails(model)
    mw.opaque(model.part, outputs=torch.empty_like)  # type: ignore[type-var]
    graph = mw.capture(model, loss_fn, batch())
    assert regions_of(graph) == ["part:opaque#0"]
    (note,) = [note for note in mw.plan(graph, layout=mw.Layout(dp=2)).notes if note.module == "part"]
    assert note.split == "whole on each rank"
    assert "its time is not known" in note.reason


def test_micro_batches_cannot_be_cut_out_of_a_whole_batch() -> None:
    graph = mw.capture(make_part("loop"), loss_fn, batch(), opaque="auto")
    with pytest.raises(LayoutError, match=r"(?s)part:opaque#0.*2 micro-batches.*compute each sample by itself"):
        mw.plan(graph, layout=mw.Layout(microbatches=2))


def test_strict_refuses_what_no_rank_can_split() -> None:
    with pytest.raises(RuleError, match="opaque region, not split by samples: result 0 of samples"):
        mw.parallelize(make_part("loop"), loss_fn, batch(), plan=mw.Layout(), strict=True, opaque="auto")


# --- auto -------------------------------------------------------------------------------------------------------------


def test_auto_takes_the_innermost_modules_whose_capture_fails(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), OwnFunction()), Clipped()))
    model.part[2].forward = lambda x, layer=model.part[2].layer: layer(x) * min(1.0, x.detach().max().item())  # type: ignore[index]
    graph = mw.capture(model, loss_fn, batch(), opaque="auto")
    assert regions_of(graph) == ["part.1.1:opaque#0", "part.2:opaque#0"]
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "module part.1.1 runs as an opaque region: data-", "module part.2 runs as an opaque region: data-de",
    ]  # fmt: skip


def test_auto_leaves_alone_what_can_be_captured_and_what_fails_anyway() -> None:
    assert not regions_of(
        mw.capture(nn.Linear(8, 4), lambda model, batch: model(batch["x"]).sum(), batch(), opaque="auto")
    )
    with pytest.raises(CaptureError, match="fails in plain PyTorch"):
        mw.capture(Model(nn.Linear(9, 8)), loss_fn, batch(), opaque="auto")


class Counted(nn.Module):
    """Its part returns a number that differs from batch to batch; it itself returns tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Tells()])

    def forward(self, x: Tensor) -> Tensor:
        y, number = self.parts[0](x)
        result: Tensor = y / (1 + abs(number))
        return result


def test_auto_takes_the_module_around_one_that_cannot_be_one_operator() -> None:
    assert regions_of(mw.capture(Model(Counted()), loss_fn, batch(), opaque="auto")) == ["part:opaque#0"]
    model: Any = Model(Counted())
    mw.opaque(model.part.parts[0])
    with pytest.raises(CaptureError, match=r"opaque region part\.parts\.0: a result that is not a tensor changes"):
        mw.capture(model, loss_fn, batch(), opaque="auto")


# --- capture and training leave the model as eager PyTorch would ------------------------------------------------------


class Counts(Halving):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.detach().sum()
        torch.rand(1)
        return super().forward(x)


def test_capture_leaves_no_trace() -> None:
    model: Any = marked(Counts())
    model.up.eval()
    before, seen = torch.get_rng_state(), model.part.seen.clone()
    graph = mw.capture(model, loss_fn, batch())
    assert regions_of(graph) == ["part:opaque#0"]
    assert model.part.calls == 0
    assert torch.equal(model.part.seen, seen)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.up.training
    assert model.part.training


class DrawsLater(OwnFunction):
    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(1) if self.draws else x)


def test_random_numbers_that_the_example_did_not_draw_are_refused() -> None:
    model: Any = marked(DrawsLater())
    trainer = mw.parallelize(model, loss_fn, batch(), plan=mw.Layout(), optimizer=sgd)
    trainer.step(batch())
    model.part.draws = True
    with pytest.raises(CaptureError, match="opaque region part: it draws random numbers"):
        trainer.step(batch())


class Pads(OwnFunction):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if float(x.detach().sum()) < 100 else y[:, :4]


def test_shapes_that_depend_on_values_are_refused() -> None:
    trainer = mw.parallelize(marked(Pads()), loss_fn, batch(), plan=mw.Layout(), optimizer=sgd)
    large = {**batch(), "x": torch.full((8, 8), 1e4) @ torch.eye(8)}
    with torch.no_grad():
        for value in trainer.parameters.own.values():
            value.fill_(1.0)
    with pytest.raises(CaptureError, match=r"opaque region part: it returned \[8, 4\] float32; .* \[8, 8\] float32"):
        trainer.step(large)


def test_frozen_parameters_of_a_region_are_not_trained() -> None:
    models = [make_part("item") for _ in range(2)]
    for model in models:
        model.part.layer.bias.requires_grad_(False)  # type: ignore[union-attr]
    trainer = mw.parallelize(models[0], loss_fn, batch(), plan=mw.Layout(), optimizer=sgd, opaque="auto")
    trainer.step(batch())
    loss_fn(models[1], batch()).backward()
    sgd([value for value in models[1].parameters() if value.requires_grad]).step()
    for name, expected in models[1].state_dict().items():
        torch.testing.assert_close(trainer.full_state_dict()[name], expected)


@pytest.mark.parametrize("name", ["function", "item"])
def test_low_precision(name: str) -> None:
    layout = mw.Layout(precision="bfloat16")
    trainer = mw.parallelize(make_part(name), loss_fn, batch(), plan=layout, optimizer=sgd, opaque="auto")
    assert float(trainer.step(batch())) == pytest.approx(loss_fn(make_part(name), batch()).item(), rel=0.02)


# --- prices -----------------------------------------------------------------------------------------------------------


def test_a_cost_for_parts_of_the_batch_is_on_the_line_through_both_measurements() -> None:
    cost = MeasuredCost(whole_s=5.0, half_s=3.0)
    assert [cost.seconds(share) for share in (1.0, 0.5, 0.25)] == [5.0, 3.0, 2.0]
    assert MeasuredCost(whole_s=5.0).seconds(0.5) == 5.0
    assert MeasuredCost(whole_s=5.0, half_s=6.0).seconds(0.25) == 5.0, "noise makes no negative slope"


def test_the_plan_says_what_a_region_costs() -> None:
    graph = mw.capture(make_part("loop"), loss_fn, batch(), opaque="auto")
    (note,) = [note for note in mw.plan(graph, layout=mw.Layout(dp=2)).notes if note.module == "part"]
    assert note.split == "whole on each rank"
    words = (
        r"opaque region, takes [\d.]+ ms, \d+% of the step; result 0 of samples .* is not that of the whole batch; "
        r"split by samples over 2 ranks, the step would take [\d.]+ ms less"
    )
    assert re.fullmatch(words, note.reason), note.reason
    graph = mw.capture(make_part("twice"), loss_fn, batch(), opaque="auto")
    (note,) = [note for note in mw.plan(graph, layout=mw.Layout(dp=2)).notes if note.module == "part"]
    assert note.split == "batch@dp"
    assert re.fullmatch(r"opaque region, 2 times, takes [\d.]+ ms, \d+% of the step", note.reason), note.reason
    far = mw.plan(graph, "h100-dgx", layout=mw.Layout(dp=2)).explain()
    assert re.search(r"measured on .*, not on h100", far), far


def test_a_region_is_measured_once_per_machine() -> None:
    graphs = [mw.capture(make_part("function"), loss_fn, batch(), opaque="auto") for _ in range(2)]
    calls = [[call_of(op.arguments) for op in graph.operators if op.target in TARGETS] for graph in graphs]
    assert calls[0] == calls[1]
    assert all(call.cost is not None and call.cost.forward.whole_s > 0 for call in calls[0])
    assert calls[0][0].cost.backward.scratch_bytes > 0  # type: ignore[union-attr]


# --- dry runs, run files ----------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_did_not_check() -> None:
    report = mw.dry_run(make_part("item"), loss_fn, batch(), mw.Layout(dp=2), opaque="auto")
    assert report.unchecked == ("part",)
    assert report.clean


RUN = """
[model]
name = "factory"
factory = "tests.end_to_end.test_opaque:for_run"
loss = "tests.distributed.opaque_models:loss_fn_of_run"
opaque = ["{name}"]
[data]
kind = "random"
shape = [8]
classes = 4
batch_size = 8
"""


def for_run() -> nn.Module:
    return make_part("loop")


@pytest.mark.parametrize("name", ["part", "auto"])
def test_run_files_name_regions(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(name=name))
    assert run(["plan", str(file), "--dp", "2"]) == 0
    assert "whole on each rank  opaque region" in capsys.readouterr().out


def test_run_files_name_modules_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(name="parts"))
    assert run(["plan", str(file)]) == 2
    assert "model.opaque: the model has no submodule 'parts'" in capsys.readouterr().err


# --- models of others -------------------------------------------------------------------------------------------------


def masked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def test_a_model_of_hugging_face_that_capture_refuses() -> None:
    """I-BERT's activations read values of tensors, and keep ranges in buffers."""
    from transformers import IBertConfig, IBertForMaskedLM

    config = IBertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [IBertForMaskedLM(config)]
    models.append(copy.deepcopy(models[0]))
    ids = torch.randint(2, 32, (4, 8))
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(CaptureError, match=r"mw\.opaque\(model\.ibert\.embeddings\.embeddings_act1\)"):
        mw.capture(models[0], masked_loss, inputs)
    for part in models[0].modules():
        if type(part).__name__ == "QuantAct":
            mw.opaque(part)
    trainer = mw.parallelize(models[0], masked_loss, inputs, plan=mw.Layout(), optimizer=sgd)
    assert len({name.partition(":")[0] for name in regions_of(trainer.graph)}) == 13
    optimizer = sgd(models[1].parameters())
    for _ in range(2):
        loss = masked_loss(models[1], inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(trainer.step(inputs)) == pytest.approx(loss.item(), rel=1e-5)
    state = trainer.full_state_dict()
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in models[1].state_dict().items())
