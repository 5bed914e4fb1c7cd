"""Initial values of meta models: as the model's own way gives them, only where there are none, and never by guess."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import CaptureError, LayoutError
from meshwright.models import MLP, classification_loss
from meshwright.runtime.initialize import materialize
from tests.distributed import oracle
from tests.distributed.pool import Ranks

CPU = torch.device("cpu")


def test_hugging_face_models_begin_as_they_do_themselves() -> None:
    """GPT-2 draws its weights with 0.02, and those that end a block with less; torch.nn's defaults are others."""
    torch.manual_seed(1)
    plain: Any = oracle.hugging_face_gpt2(False).model
    with torch.device("meta"):
        model: Any = type(plain)(plain.config)
    materialize(model, CPU, 0)
    for (name, value), (_, expected) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.25), name
        assert float(value.mean()) == pytest.approx(float(expected.mean()), abs=0.01), name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_rotary_frequencies_are_computed() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vocab_size=20,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"inner": LlamaForCausalLM(config)})
    materialize(model, CPU, 0)
    for name, value in LlamaForCausalLM(config).named_buffers():
        assert torch.equal(model["inner"].get_buffer(name), value), name


def test_only_what_has_no_values_is_initialised() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight = nn.Parameter(model[0].weight.detach().to("meta"))
    model[1].running_mean = torch.arange(4.0)
    bias = model[0].bias
    before = bias.detach().clone()
    materialize(model, CPU, 0)
    assert model[0].bias is bias
    assert torch.equal(bias, before)
    assert torch.equal(model[1].running_mean, torch.arange(4.0))
    assert bool(model[0].weight.isfinite().all())


class Forgetful(nn.Module):
    """Initialises one of its two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4))
        self.register_buffer("positions", torch.arange(4))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def test_tensors_without_initial_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Forgetful())
    with pytest.raises(CaptureError, match=r"tensor 0\.positions: Forgetful is on the meta device, and its init"):
        materialize(model, CPU, 0)


class Counting(nn.Linear):
    """Notes how many elements of the model have memory whenever one such layer is initialised."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            COUNTS.append(sum(value.numel() for value in MODEL[0].parameters() if not value.is_meta))


COUNTS: list[int] = []
MODEL: list[nn.Module] = []


class Rescaling(nn.Sequential):
    """Changes its layers' weights once they have been drawn, as some models do in their own initialisation."""

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            for layer in self:
                cast(nn.Linear, layer).weight.mul_(0.5)


def counting(kind: type[nn.Sequential]) -> nn.Module:
    with mw.auto_parallelize():
        model = kind(*(Counting(8, 8) for _ in range(5)))
    MODEL[:], COUNTS[:] = [model], []
    return model


@pytest.mark.parametrize("kind", [nn.Sequential, Rescaling])
def test_blocks_are_taken_as_soon_as_they_have_values(kind: type[nn.Sequential]) -> None:
    whole = counting(kind)
    materialize(whole, CPU, 0)
    assert max(COUNTS) == 5 * 72
    taken: dict[str, Tensor] = {}
    model = counting(kind)
    materialize(model, CPU, 0, lambda name, value: taken.setdefault(name, value.detach().clone()) is not None)
    if kind is nn.Sequential:
        assert max(COUNTS) == 72, "one layer"
        assert all(value.is_meta for value in model.parameters())
    else:  # what was taken is not what the model begins with
        taken = dict(model.named_parameters())
    for name, value in whole.named_parameters():
        assert torch.equal(taken[name], value), name


def test_one_parameter_may_stay_whole() -> None:
    model = counting(nn.Sequential)
    materialize(model, CPU, 0, lambda name, value: name != "2.bias")
    assert [name for name, value in model.named_parameters() if not value.is_meta] == ["2.bias"]


def twice(first: mw.Layout, second: mw.Layout) -> tuple[str, dict[str, Tensor]]:
    model = MLP((6, 8, 4))
    batch = {"inputs": torch.ones(4, 6), "label": torch.zeros(4, dtype=torch.int64)}
    trainer = mw.parallelize(model, classification_loss, batch, plan=first, optimizer=torch.optim.SGD)
    trainer.step(batch)
    state = trainer.full_state_dict(all_ranks=True)
    try:
        again = mw.parallelize(model, classification_loss, batch, plan=second, optimizer=torch.optim.SGD)
    except LayoutError as error:
        return str(error), state
    return "", {name: value - state[name] for name, value in again.full_state_dict(all_ranks=True).items()}


def test_a_model_whose_values_another_trainer_holds_is_refused(ranks: Ranks) -> None:
    """Its meta tensors would have been initialised anew."""
    for text, _ in ranks(2, twice, mw.Layout(tp=2), mw.Layout(dp=2)):
        assert "it is split over the ranks of another trainer" in text
        assert "trainer.full_state_dict(all_ranks=True), loaded into a new model" in text
    for text, difference in ranks(2, twice, mw.Layout(dp=2), mw.Layout(tp=2)):
        assert not text
        assert not any(bool(value.any()) for value in difference.values()), "whole ones may be given on"
