"""Transformers by their sizes: parameters as published, configs of Hugging Face, and errors that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.catalog.models import family_names, load_model, make_model, model_names
from meshwright.catalog.models.hugging_face import from_config
from meshwright.errors import FileFormatError, LayoutError

PUBLISHED = {
    "gpt2": 124.4e6, "gpt2-xl": 1557.6e6, "gpt3-175b": 174.6e9, "megatron-145b": 145.6e9, "megatron-530b": 529.6e9,
    "megatron-1t": 1008e9, "llama2-7b": 6.738e9, "llama2-70b": 68.98e9, "llama3-8b": 8.03e9, "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9, "mistral-7b": 7.24e9, "mixtral-8x7b": 46.7e9, "mixtral-8x22b": 140.6e9,
    "bert-large": 335e6, "t5-3b": 2.85e9, "t5-11b": 11.3e9, "vit-large": 304e6, "vit-huge": 632e6,
    "gshard-moe-10b": 10e9, "gshard-moe-70b": 70e9, "megatron-8b3": 8.3e9, "turing-nlg-17b": 17.2e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    tolerance = 0.03 if name.startswith("gshard") else 0.01
    assert load_model(name).parameters == pytest.approx(PUBLISHED[name], rel=tolerance)


@pytest.mark.parametrize("name", model_names())
def test_every_model_says_where_its_sizes_are_from(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert model.active_parameters <= model.parameters


def test_a_token_meets_only_its_experts() -> None:
    mixtral = load_model("mixtral-8x7b")
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=0.01)


def test_step_flops_are_the_closed_form_of_korthikanti() -> None:
    """72 B L s h² (1 + s / 6h + v / 12 h L)."""
    model = load_model("megatron-22b")
    layers, hidden, sequence, vocabulary = model.layers, model.hidden, model.sequence, model.vocabulary
    closed = 72.0 * 4 * layers * sequence * hidden**2
    closed *= 1 + sequence / (6 * hidden) + vocabulary / (12 * hidden * layers)
    assert model.step_flops(4) == pytest.approx(closed)


LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def test_a_hugging_face_config_is_the_model_of_the_catalog(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_model(str(path)).parameters == load_model("llama3-8b").parameters
    assert load_model(str(path), sequence=2048).sequence == 2048
    gpt = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert from_config(gpt).parameters == load_model("gpt2").parameters
    t5 = {"model_type": "t5", "num_layers": 24, "d_model": 1024, "num_heads": 32, "d_kv": 128, "d_ff": 16384}
    assert from_config({**t5, "vocab_size": 32128}).parameters == load_model("t5-3b").parameters


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "lama"}, "config.json: model_type: unknown model_type 'lama'\n  -> did you mean `llama`?"),
        ({}, "config.json: model_type: unknown model_type None"),
        ({**LLAMA, "hidden_size": None}, "config.json: hidden_size: hidden_size is missing\n  -> give a whole number"),
        ({**LLAMA, "num_hidden_layers": "x"}, "config.json: num_hidden_layers: num_hidden_layers is 'x'"),
        (
            {**LLAMA, "num_attention_heads": 48, "num_key_value_heads": 48},
            "heads: hidden size 4096 is not divisible by 48",
        ),
        ({**LLAMA, "num_key_value_heads": 5}, "kv_heads: 32 heads cannot share 5 key-value heads evenly"),
    ],
)
def test_a_config_that_says_nothing_useful_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises((FileFormatError, LayoutError)) as caught:
        from_config(config)
    assert str(caught.value).startswith(problem)


def test_an_unknown_name_says_what_is_near(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="unknown model 'lama3-8b'\n  -> did you mean `llama3-8b`"):
        load_model("lama3-8b")
    with pytest.raises(LayoutError, match="family: unknown family 'lama'\n  -> did you mean `llama`"):
        make_model("lama", layers=1, hidden=8, heads=1, vocabulary=8, sequence=8)
    with pytest.raises(FileFormatError, match="cannot read the file: No such file"):
        load_model("nowhere/config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FileFormatError, match="not a JSON object"):
        load_model(str(tmp_path / "config.json"))
    with pytest.raises(FileFormatError, match="unknown field"):
        make_model("gpt", layers=1, hidden=8, heads=1, vocabulary=8, sequence=8, widht=3)
    assert "gpt" in family_names()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layers": 0}, "layers: 0 is less than 1"),
        ({"vocabulary": -1}, "vocabulary: -1 is less than 0"),
        ({"heads": 3}, "heads: hidden size 8 is not divisible by 3 heads"),
        ({"experts": 4}, "experts_per_token: a token cannot visit 0 of 4 experts"),
    ],
)
def test_impossible_sizes_name_their_key(change: dict[str, Any], problem: str) -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "vocabulary": 8, "sequence": 8}
    with pytest.raises(LayoutError) as caught:
        make_model("gpt", **(sizes | change))
    assert str(caught.value).startswith(problem)
