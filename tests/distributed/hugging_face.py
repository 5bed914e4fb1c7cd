"""Small Hugging Face models as they come, with random weights and without dropout, and batches to train them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.ir.layout import layout_text
from tests.distributed import oracle
from tests.distributed.oracle import BATCH, STEPS, Subject

SEQUENCE = 8
VOCABULARY = 64
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def _without_dropout(config: Any) -> Any:
    for name in vars(config):
        if ("drop" in name or name == "layerdrop") and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return config


def _decoder(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**_DECODER, **sizes})
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(_without_dropout(config))
        return model

    return build


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(_without_dropout(config))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return OPTForCausalLM(_without_dropout(config))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertForMaskedLM(_without_dropout(config))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(_without_dropout(config))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        num_labels=4,
    )  # fmt: skip
    return ViTForImageClassification(_without_dropout(config))


_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 4}


def _images_to(name: str, task: str = "ImageClassification", **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = _without_dropout(getattr(transformers, f"{name}Config")(**sizes))
        model: nn.Module = getattr(transformers, f"{name}For{task}")(config)
        return model

    return build


_swin = _images_to(
    "Swin", image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=4,
)  # fmt: skip
_segformer = _images_to(
    "Segformer", "SemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
    patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    num_labels=4,
)  # fmt: skip
_mobile: dict[str, Any] = {"image_size": 64, "depth_multiplier": 0.25, "num_labels": 4}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    both = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "projection_dim": 16, "attention_dropout": 0.0,
    }  # fmt: skip
    config = CLIPConfig(
        text_config={
            **both, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "bos_token_id": 0,
            "eos_token_id": VOCABULARY - 1, "pad_token_id": 0,
        },
        vision_config={**both, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )  # fmt: skip
    return CLIPModel(config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return WhisperForConditionalGeneration(_without_dropout(config))


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": tokens, "labels": oracle.ragged_ends(tokens)}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, VOCABULARY, (BATCH, SEQUENCE)), "labels": _tokens()["labels"]}


def _padded() -> dict[str, Tensor]:
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (BATCH, 1))
    return {**_tokens(), "attention_mask": (torch.arange(SEQUENCE) < lengths).long()}


def _images(side: int = 8, *labels: int) -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, side, side, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(4, (BATCH, *labels))}


def _captions() -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY - 1, (BATCH, SEQUENCE))
    tokens[:, -1] = VOCABULARY - 1
    return {"input_ids": tokens, "pixel_values": _images()["pixel_values"], "attention_mask": torch.ones_like(tokens)}


def _sounds() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(BATCH, 8, 16, dtype=torch.float64),
        "labels": _tokens()["labels"],
    }


def contrastive_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """CLIP's own loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


Batches = Callable[[], dict[str, Tensor]]
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Batches]] = {
    "GPT-2": (_gpt2, _tokens),
    "Llama": (_decoder("Llama"), _tokens),
    "Mistral": (_decoder("Mistral", sliding_window=4), _tokens),
    "Mixtral": (
        _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
        _tokens,
    ),
    "Qwen2": (_decoder("Qwen2"), _padded),
    "Qwen3": (_decoder("Qwen3"), _tokens),
    "Gemma": (_decoder("Gemma"), _tokens),
    "Gemma 2": (_decoder("Gemma2", sliding_window=4), _tokens),
    "Phi": (_decoder("Phi", num_key_value_heads=4), _tokens),
    "OPT": (_opt, _padded),
    "BERT": (_bert, _padded),
    "T5": (_t5, _pairs),
    "ViT": (_vit, _images),
    "ResNet": (_images_to("ResNet", embedding_size=8, **_STAGES), lambda: _images(64)),
    "ConvNeXt": (_images_to("ConvNext", **_STAGES), lambda: _images(64)),
    "Swin": (_swin, lambda: _images(32)),
    "SegFormer": (_segformer, lambda: _images(32, 32, 32)),
    "MobileNet": (_images_to("MobileNetV1", **_mobile), lambda: _images(64)),
    "MobileNet 2": (_images_to("MobileNetV2", **_mobile), lambda: _images(64)),
    "CLIP": (_clip, _captions),
    "Whisper": (_whisper, _sounds),
}
"""By name, how the model is built and what a batch is."""


def subject(name: str, steps: int = STEPS) -> Subject:
    """A model in float64 with the loss that it computes itself."""
    build, batch = MODELS[name]
    torch.manual_seed(7)
    model = build().double()
    loss_fn = contrastive_loss if name == "CLIP" else oracle.own_loss
    return Subject(model, loss_fn, [batch() for _ in range(steps)])


# --- both sides ------------------------------------------------------------------------------------------------------

LAYOUTS: Mapping[str, mw.Layout | str] = {
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "tp2, sequence parallel": mw.Layout(tp=2, sequence_parallel=True),
    "cp2": mw.Layout(cp=2),
    "cp2, ring": mw.Layout(cp=2, context="ring"),
    "dp2, ep2": mw.Layout(dp=2, ep=2),
    "dp2 x tp2": mw.Layout(dp=2, tp=2),
    "spatial2": mw.Layout(spatial=(2,)),
    "mixed2": mw.Layout(mixed=(2,)),
    "dp2 x mixed2": mw.Layout(dp=2, mixed=(2,)),
    "auto on 4": "auto",
}
"""By name, what is asked for."""
ODD_SEQUENCES: Mapping[str, tuple[str, ...]] = {"ViT": ("cp", "sequence"), "CLIP": ("cp",)}
"""Models with a class token beside the patches, and what cannot divide that."""


CONVOLUTIONAL = ("ResNet", "ConvNeXt", "Swin", "SegFormer", "MobileNet", "MobileNet 2", "ViT")
"""Models of images, whose rows can be cut."""


def fits(model: str, layout: str) -> bool:
    """Whether a layout can be asked of a model."""
    if model in CONVOLUTIONAL and ("cp" in layout or "sequence" in layout):
        return False
    if ("spatial" in layout or "mixed" in layout) and model not in CONVOLUTIONAL:
        return False
    if ", ep" in layout and model != "Mixtral":
        return False
    return not any(word in layout for word in ODD_SEQUENCES.get(model, ()))


def num_ranks(layout: str) -> int:
    """The ranks that it needs."""
    asked = LAYOUTS[layout]
    return asked.num_ranks if isinstance(asked, mw.Layout) else 4


@dataclass(frozen=True)
class Found:
    """What one rank saw: the largest error, how far parameters moved, the layout that ran, how many parameters it
    splits, and the operators that no rule splits."""

    error: float
    moved: float
    layout: str
    num_split: int
    unsplit: tuple[str, ...]


def compare(model: str, layout: str, steps: int = 3) -> Found:
    """A model trained both ways on this rank, by AdamW in float64."""
    arguments = (oracle.OPTIMIZERS["AdamW"], None)
    with oracle.WiderCasts():
        serial = subject(model, steps)
        before = {name: value.clone() for name, value in serial.model.state_dict().items()}
        expected = oracle.in_one_process(serial, *arguments)
        found, trainer = oracle.in_parallel(subject(model, steps), LAYOUTS[layout], *arguments)
    result = oracle.compared(before, expected, found, trainer)
    unsplit = {operator.target: None for operator in trainer.graph.operators if operator.rule is None}
    text = layout_text(trainer.plan.layout)
    return Found(result.error, result.moved, text, result.num_split, tuple(unsplit))
