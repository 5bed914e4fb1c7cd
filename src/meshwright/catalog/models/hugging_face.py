"""Turns a Hugging Face config.json into a ``Transformer``, by its ``model_type``."""

from typing import Any

import msgspec

from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.transformer import Transformer

_GPT = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "sequence": "n_positions",
}  # fmt: skip
_COMMON = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_size": "head_dim", "ffn": "intermediate_size",
    "sequence": "max_position_embeddings",
}  # fmt: skip
_LLAMA = {"gated": True, "bias": False, "dropout": False, "rotary": True}
_EXPERTS = {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}

# By model_type: the config's key for each field of Transformer, fields with a fixed value, and whether the head is tied
# by default.
ARCHITECTURES: dict[str, tuple[dict[str, str], dict[str, Any], bool]] = {
    "gpt2": (_GPT, {}, True),
    "gpt_bigcode": (_GPT, {"kv_heads": 1}, True),
    "gptj": (_GPT, {"rotary": True}, False),
    "gpt_neox": (_COMMON, {"rotary": True, "dropout": False}, False),
    "opt": ({**_COMMON, "ffn": "ffn_dim"}, {}, True),
    "bloom": ({**_GPT, "layers": "n_layer", "hidden": "hidden_size", "sequence": "seq_length"}, {"rotary": True}, True),
    "phi": (_COMMON, {"rotary": True, "dropout": False}, False),
    "llama": (_COMMON, _LLAMA, False),
    "mistral": (_COMMON, _LLAMA, False),
    "qwen2": (_COMMON, _LLAMA, False),
    "qwen3": (_COMMON, _LLAMA, False),
    "gemma": (_COMMON, _LLAMA, True),
    "gemma2": (_COMMON, _LLAMA, True),
    "mixtral": ({**_COMMON, **_EXPERTS}, _LLAMA, False),
    "bert": (_COMMON, {"causal": False}, True),
    "roberta": (_COMMON, {"causal": False}, True),
    "t5": (
        {"layers": "num_layers", "hidden": "d_model", "heads": "num_heads", "head_size": "d_kv", "ffn": "d_ff",
         "sequence": "n_positions"},
        {"causal": False, "bias": False, "rotary": True},
        True,
    ),
}  # fmt: skip


def is_config(name: str) -> bool:
    """Whether a text is the path of a config rather than a model's name."""
    return name.endswith(".json") or "/" in name


def load_config(path: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        FileFormatError: the file cannot be read or is not a JSON object.
    """
    try:
        config = msgspec.json.decode(files.read_bytes(path))
    except msgspec.DecodeError as error:
        raise FileFormatError(f"not valid JSON: {error}", where=path, remedy="save it again") from None
    if not isinstance(config, dict):
        raise FileFormatError("not a JSON object", where=path, remedy="give the config.json of a model")
    return config


def from_config(config: dict[str, Any], *, where: str = "config.json") -> Transformer:
    """The transformer that a Hugging Face config describes.

    Raises:
        FileFormatError: ``model_type`` is unknown, or a size is missing or not a number.
        LayoutError: a size does not divide another, for example the heads the width.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        remedy = files.did_you_mean(str(kind), ARCHITECTURES, f"known: {', '.join(ARCHITECTURES)}")
        raise FileFormatError(f"unknown model_type {kind!r}", where=f"{where}: model_type", remedy=remedy)
    keys, fixed, tied = ARCHITECTURES[kind]
    fields: dict[str, Any] = {
        **fixed,
        "name": str(config.get("_name_or_path") or kind),
        "tied": bool(config.get("tie_word_embeddings", tied)),
        "vocabulary": config.get("vocab_size", 0),
        "source": where,
    }
    fields |= {ours: config[theirs] for ours, theirs in keys.items() if config.get(theirs) is not None}
    if kind == "t5":
        decoder = config.get("num_decoder_layers") or fields.get("layers", 0)
        fields["cross"], fields["layers"] = decoder, fields.get("layers", 0) + decoder
        fields["gated"] = "gated" in str(config.get("feed_forward_proj", ""))
        fields.setdefault("sequence", 512)
    if "hidden" in fields:
        fields.setdefault("ffn", 4 * fields["hidden"])
    for key in ("layers", "hidden", "heads", "sequence"):
        if not isinstance(fields.get(key), int):
            raise FileFormatError(
                f"{keys[key]} is {'missing' if key not in fields else repr(fields[key])}",
                where=f"{where}: {keys[key]}",
                remedy="give a whole number",
            )
    try:
        return msgspec.convert(fields, Transformer)
    except msgspec.ValidationError as error:
        raise FileFormatError(str(error), where=where, remedy="correct that key") from None
