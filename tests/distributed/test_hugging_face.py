"""Hugging Face models as they come, in layouts of their own on real ranks; `make bench-models` has them all."""

from __future__ import annotations

import pytest

from tests.distributed import hugging_face
from tests.distributed.hugging_face import Found
from tests.distributed.pool import Ranks


def compare(model: str, layout: str) -> Found:
    return hugging_face.compare(model, layout, 2)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Llama", "tp2, sequence parallel"),
        ("GPT-2", "cp2"),
        ("Qwen2", "cp2, ring"),
        ("Mixtral", "dp2, ep2"),
        ("Whisper", "tp2"),
        ("ResNet", "spatial2"),
        ("Swin", "mixed2"),
        *(
            pytest.param(*case, marks=pytest.mark.product)
            for case in [
                ("ConvNeXt", "spatial2"),
                ("SegFormer", "spatial2"),
                ("MobileNet", "mixed2"),
                ("MobileNet 2", "dp2 x mixed2"),
                ("ViT", "mixed2"),
            ]
        ),
    ],
)
def test_parallel_equals_one_process(ranks: Ranks, model: str, layout: str) -> None:
    for result in ranks(hugging_face.num_ranks(layout), compare, model, layout, timeout=600):
        assert result.error <= hugging_face.tolerance(model), result
        assert result.moved > 1e-3, "the parameters were trained"
        assert not result.unsplit
        if "spatial" not in layout and "mixed" not in layout:
            assert bool(result.num_split) == (not layout.startswith("cp2"))
