"""Small Hugging Face models as they come, with random weights and without dropout, and batches to train them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.ir.layout_text import layout_text
from tests.distributed import oracle
from tests.distributed.oracle import BATCH, STEPS, Subject


@dataclass(frozen=True)
class Size:
    """How large a model and its batch are. Of Llama's kin, half as many key and value heads. ``ragged``: the ends of
    samples have no labels."""

    width: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    vocabulary: int = 64
    batch: int = BATCH
    sequence: int = 8
    image: int = 8
    patch: int = 4
    sounds: int = 16
    dtype: torch.dtype = torch.float64
    ragged: bool = True

    @property
    def decoder(self) -> dict[str, Any]:
        """What the configurations of Llama's kin call these."""
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": 4 * self.sequence, "head_dim": self.width // self.heads, "bos_token_id": 0,
            "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip


SMALL = Size()


def _without_dropout(config: Any) -> Any:
    for name in vars(config):
        if ("drop" in name or name == "layerdrop") and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return config


def _decoder(name: str, **options: Any) -> Callable[[Size], nn.Module]:
    def build(size: Size) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**size.decoder, **options})
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(_without_dropout(config))
        return model

    return build


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary, n_positions=4 * size.sequence, n_embd=size.width, n_layer=size.layers,
        n_head=size.heads, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(_without_dropout(config))


def _opt(size: Size) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, ffn_dim=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, max_position_embeddings=4 * size.sequence,
        word_embed_proj_dim=size.width, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return OPTForCausalLM(_without_dropout(config))


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, max_position_embeddings=4 * size.sequence,
    )  # fmt: skip
    return BertForMaskedLM(_without_dropout(config))


def _t5(size: Size) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=size.width, d_kv=size.width // size.heads, d_ff=size.inner, num_layers=size.layers,
        num_decoder_layers=size.layers, num_heads=size.heads, vocab_size=size.vocabulary,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(_without_dropout(config))


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, image_size=size.image, patch_size=size.patch, num_labels=4,
    )  # fmt: skip
    return ViTForImageClassification(_without_dropout(config))


_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 4}


def _images_to(name: str, task: str = "ImageClassification", **sizes: Any) -> Callable[[Size], nn.Module]:
    def build(_: Size) -> nn.Module:
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


def _clip(size: Size) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    both = {
        "hidden_size": size.width, "intermediate_size": size.inner, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "projection_dim": size.width // 2, "attention_dropout": 0.0,
    }  # fmt: skip
    config = CLIPConfig(
        text_config={
            **both, "vocab_size": size.vocabulary, "max_position_embeddings": size.sequence, "bos_token_id": 0,
            "eos_token_id": size.vocabulary - 1, "pad_token_id": 0,
        },
        vision_config={**both, "image_size": size.image, "patch_size": size.patch},
        projection_dim=size.width // 2,
    )  # fmt: skip
    return CLIPModel(config)


def _whisper(size: Size) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=size.vocabulary, d_model=size.width, encoder_layers=size.layers, decoder_layers=size.layers,
        encoder_attention_heads=size.heads, decoder_attention_heads=size.heads, encoder_ffn_dim=size.inner,
        decoder_ffn_dim=size.inner, num_mel_bins=8, max_source_positions=size.sounds // 2,
        max_target_positions=2 * size.sequence, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return WhisperForConditionalGeneration(_without_dropout(config))


def _tokens(size: Size) -> dict[str, Tensor]:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.sequence))
    return {"input_ids": tokens, "labels": oracle.ragged_ends(tokens) if size.ragged else tokens.clone()}


def _pairs(size: Size) -> dict[str, Tensor]:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.sequence))
    return {"input_ids": tokens, "labels": _tokens(size)["labels"]}


def _padded(size: Size) -> dict[str, Tensor]:
    lengths = torch.randint(size.sequence // 2, size.sequence + 1, (size.batch, 1))
    return {**_tokens(size), "attention_mask": (torch.arange(size.sequence) < lengths).long()}


def _images(size: Size, side: int = 0, *labels: int) -> dict[str, Tensor]:
    side = side or size.image
    pixels = torch.randn(size.batch, 3, side, side, dtype=size.dtype)
    return {"pixel_values": pixels, "labels": torch.randint(4, (size.batch, *labels))}


def _captions(size: Size) -> dict[str, Tensor]:
    tokens = torch.randint(1, size.vocabulary - 1, (size.batch, size.sequence))
    tokens[:, -1] = size.vocabulary - 1
    pixels = _images(size)["pixel_values"]
    return {"input_ids": tokens, "pixel_values": pixels, "attention_mask": torch.ones_like(tokens)}


def _sounds(size: Size) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(size.batch, 8, size.sounds, dtype=size.dtype),
        "labels": _tokens(size)["labels"],
    }


def contrastive_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """CLIP's own loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


Batches = Callable[[Size], dict[str, Tensor]]
MODELS: Mapping[str, tuple[Callable[[Size], nn.Module], Batches]] = {
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
    "Phi": (_decoder("Phi", num_key_value_heads=SMALL.heads), _tokens),
    "OPT": (_opt, _padded),
    "BERT": (_bert, _padded),
    "T5": (_t5, _pairs),
    "ViT": (_vit, _images),
    "ResNet": (_images_to("ResNet", embedding_size=8, **_STAGES), lambda size: _images(size, 64)),
    "ConvNeXt": (_images_to("ConvNext", **_STAGES), lambda size: _images(size, 64)),
    "Swin": (_swin, lambda size: _images(size, 32)),
    "SegFormer": (_segformer, lambda size: _images(size, 32, 32, 32)),
    "MobileNet": (_images_to("MobileNetV1", **_mobile), lambda size: _images(size, 64)),
    "MobileNet 2": (_images_to("MobileNetV2", **_mobile), lambda size: _images(size, 64)),
    "CLIP": (_clip, _captions),
    "Whisper": (_whisper, _sounds),
}
"""By name, how the model is built and what a batch is."""


def subject(name: str, steps: int = STEPS, size: Size = SMALL) -> Subject:
    """A model with the loss that it computes itself."""
    build, batch = MODELS[name]
    torch.manual_seed(7)
    model = build(size).to(size.dtype)
    loss_fn = contrastive_loss if name == "CLIP" else oracle.own_loss
    return Subject(model, loss_fn, [batch(size) for _ in range(steps)])


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
OF_ONE_SIZE = ("ResNet", "ConvNeXt", "Swin", "SegFormer", "MobileNet", "MobileNet 2")
"""Models that do not follow a :class:`Size`."""
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


def tolerance(model: str) -> float:
    """Of errors. In one process, MobileNet 2's weights of which each is changed by 1e-16 of itself end 1e-8 elsewhere:
    its gradients come through fifty batch norms, and AdamW divides by their size, which can be next to nothing."""
    return 1e-7 if model == "MobileNet 2" else oracle.TOLERANCE


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
        expected = oracle.reference(serial, *arguments)
        run, trainer = oracle.in_parallel(subject(model, steps), LAYOUTS[layout], *arguments)
    result = oracle.compared(before, expected, run, trainer)
    unsplit = {operator.target: None for operator in trainer.graph.operators if operator.rule is None}
    text = layout_text(trainer.plan.layout)
    return Found(result.error, result.moved, text, result.num_split, tuple(unsplit))
