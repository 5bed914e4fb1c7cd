"""Layers and losses beyond the reference models: each has a rule, and its gradient over two ranks is the serial one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture.builder import Capture, capture
from tests.distributed.lockstep import TOLERANCE, run_step
from tests.distributed.oracle import plan_of

Function = Callable[[Tensor], Tensor]
BATCH = 4
SEQUENCE, IMAGE, VECTOR = (6, 8), (4, 8, 8), (8,)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Gallery(nn.Module):
    """Parts side by side, each behind a scale of its own, whose gradient is that part's."""

    def __init__(self, parts: Mapping[str, nn.Module | Function], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: part if isinstance(part, nn.Module) else Call(part) for name, part in parts.items()}
        )
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.rand(shape) + 0.5) for name in parts})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: part(x * self.scales[name]) for name, part in self.parts.items()}


def total_loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Each part's loss is a metric too, so that a wrong one is named."""
    losses = {
        name: (value.to(batch["x"].dtype) * 1.5).sin().square().mean() for name, value in model(batch["x"]).items()
    }
    return sum(losses.values(), torch.zeros((), dtype=batch["x"].dtype)), losses


def without_rule(captured: Capture) -> dict[str, str]:
    return {operator.target: operator.reason for operator in captured.graph.operators if operator.rule is None}


def differences(
    model: nn.Module, loss_fn: Any, batch: dict[str, Tensor], layout: mw.Layout, captured: Capture
) -> list[str]:
    """What differs between the step on the layout's ranks and eager PyTorch."""
    plan = plan_of(captured.graph, layout, layout.dp * layout.feature_ranks)
    values = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    inputs = {f"batch.{name}": value for name, value in batch.items()}
    result, _ = run_step(captured, plan, {**{name: value.clone() for name, value in values.items()}, **inputs})
    loss, metrics = loss_fn(model, batch)
    parameters = dict(model.named_parameters())
    expected = dict(
        zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True)
    )
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"loss": (result.loss, loss)}
    pairs |= {f"metric {name}": (result.metrics[name], value) for name, value in metrics.items()}
    pairs |= {f"gradient of {name}": (result.gradients[name], value) for name, value in expected.items()}
    pairs |= {f"buffer {name}": (result.buffers[name], value) for name, value in model.named_buffers()}
    return [name for name, (value, other) in pairs.items() if not same(value, other)]


def same(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return (actual is None or not bool(actual.any())) and (expected is None or not bool(expected.any()))
    expected = expected.detach()
    if actual.shape != expected.shape or not bool(torch.isfinite(expected).all()):
        return False
    return float((actual - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


def check(model: nn.Module, loss_fn: Any, batch: dict[str, Tensor], layout: mw.Layout, unsplit: set[str]) -> None:
    captured = capture(model, loss_fn, batch)
    assert set(without_rule(captured)) == unsplit
    assert differences(model, loss_fn, batch, layout, captured) == []


ACTIVATIONS: dict[str, nn.Module | Function] = {
    kind.__name__: kind()
    for kind in (
        nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
        nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
        nn.Softsign, nn.Tanh, nn.Tanhshrink,
    )
}  # fmt: skip
NORMS: dict[str, nn.Module | Function] = {
    "batch": nn.BatchNorm2d(4),
    "frozen": nn.BatchNorm2d(4).eval(),
    "group": nn.GroupNorm(2, 4),
    "instance": nn.InstanceNorm2d(4, affine=True),
    "instance_running": nn.InstanceNorm2d(4, track_running_stats=True),
    "layer": nn.LayerNorm(8),
    "layer_of_two": nn.LayerNorm((8, 8)),
    "layer_plain": nn.LayerNorm(8, elementwise_affine=False),
    "local_response": nn.LocalResponseNorm(2),
    "rms": nn.RMSNorm(8),
    "unit": lambda x: F.normalize(x, dim=1),
}
IMAGES: dict[str, nn.Module | Function] = {
    "adaptive_average": nn.AdaptiveAvgPool2d(3),
    "adaptive_maximum": nn.AdaptiveMaxPool2d(2),
    "average": nn.AvgPool2d(2),
    "average_padded": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "global_average": nn.AdaptiveAvgPool2d(1),
    "maximum": nn.MaxPool2d(3, 2, 1),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest": nn.Upsample(scale_factor=2),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4, padding=1),
    "transposed": nn.ConvTranspose2d(4, 2, 2, 2),
    "pixel_shuffle": nn.PixelShuffle(2),
    "reflected": nn.ReflectionPad2d(1),
    "replicated": nn.ReplicationPad2d(1),
    "zeros_around": nn.ZeroPad2d(1),
}
REDUCTIONS: dict[str, nn.Module | Function] = {
    "amax": lambda x: x.amax(1),
    "batch_mean": lambda x: x - x.mean(0),
    "batch_standardized": lambda x: (x - x.mean(0)) / x.std(0),
    "cosine": lambda x: F.cosine_similarity(x[:, :1], x, dim=-1),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_of_batch": lambda x: x.cumsum(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max_of_batch": lambda x: x.amax(0),
    "max_of_all": lambda x: x.max(),
    "max_with_index": lambda x: x.max(1)[0],
    "mean": lambda x: x.mean((0, 1)),
    "median": lambda x: x.median(1)[0],
    "norm": lambda x: x.norm(),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
    "norm_infinite": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "prod": lambda x: x.prod(1),
    "softmax": lambda x: x.softmax(1),
    "softmax_of_batch": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(-1)[0],
    "std": lambda x: x.std((0, 1)),
    "std_mean": lambda x: torch.std_mean(x, 1)[0],
    "topk": lambda x: x.topk(2, -1)[0],
    "var": lambda x: x.var(0, correction=0),
    "any_all": lambda x: x * (x > 0).any().to(x.dtype) * (x > -2).all(1, keepdim=True),
}
VIEWS: dict[str, nn.Module | Function] = {
    "chunk": lambda x: x.chunk(2, -1)[1] * x.chunk(2, -1)[0],
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "contrast": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "einsum": lambda x: torch.einsum("bsk,btk->bst", x, x),
    "expand": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "flip": lambda x: x.flip(1),
    "flip_of_batch": lambda x: x.flip(0) * x,
    "gather": lambda x: x.gather(1, (x[:, :2] > 0).long()),
    "index": lambda x: x[:, torch.tensor([0, 2, 2])],
    "index_of_pairs": lambda x: x[torch.arange(x.shape[0]), (x[:, 0, 0] > 0).long()],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2, 2])),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2) * x.unsqueeze(-1),
    "padded": lambda x: F.pad(x, (1, 2)),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "roll": lambda x: x.roll(1, 1),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, torch.zeros(x.shape, dtype=torch.long), x),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x),
    "select": lambda x: x[:, 0],
    "set_row": lambda x: _set(x, (slice(None), 0), 1.0),
    "set_rows": lambda x: _set(x, (slice(None), slice(1, 3)), 2.0),
    "set_sample": lambda x: _set(x, (0,), 2.0),
    "slice": lambda x: x[:, 1:5:2],
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "triangle": lambda x: x.tril() + x.triu(1),
    "unbind": lambda x: x.unbind(1)[2],
    "uneven_split": lambda x: x.split([2, 4], 1)[1],
    "where": lambda x: torch.where(x > 0, x, -x),
    "zeroed": lambda x: x + x.clone().zero_(),
    "constant": lambda x: x * torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(4),
    "positions": lambda x: x + torch.arange(8) // 3,
    "attention_of_three_dims": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
}

_LAYER: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
_CAUSAL = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)


class Transformer(nn.Module):
    """Encoder and decoder of torch.nn, with masks that nobody has said to be causal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, **_LAYER)

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.inner(x, x.flip(1), src_mask=_CAUSAL, tgt_mask=_CAUSAL)
        return decoded


class Encoder(nn.Module):
    """The encoder of torch.nn; the last positions are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **_LAYER), 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) > 3
        encoded: Tensor = self.inner(x, src_key_padding_mask=padding)
        return encoded


class SelfAttention(nn.Module):
    """torch.nn's attention of a sequence to itself."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(8, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.inner(x, x, x, need_weights=self.need_weights)[0]
        return attended


TRANSFORMERS: dict[str, nn.Module | Function] = {
    "attention": SelfAttention(need_weights=False),
    "attention_and_weights": SelfAttention(need_weights=True),
    "encoder_layer": nn.TransformerEncoderLayer(8, 2, norm_first=True, **_LAYER),
    "encoder": Encoder(),
    "decoder": Transformer(),
}


def _set(x: Tensor, where: tuple[Any, ...], value: float) -> Tensor:
    result = x.clone()
    result[where] = value
    return result


GALLERIES: dict[str, tuple[dict[str, nn.Module | Function], tuple[int, ...], set[str]]] = {
    "activations": (ACTIVATIONS, SEQUENCE, set()),
    "norms": (NORMS, IMAGE, set()),
    "images": (IMAGES, IMAGE, set()),
    "reductions": (REDUCTIONS, SEQUENCE, set()),
    "views": (VIEWS, SEQUENCE, set()),
    "transformers": (TRANSFORMERS, SEQUENCE, set()),
}


@pytest.mark.parametrize("name", GALLERIES)
def test_layers(name: str) -> None:
    parts, shape, unsplit = GALLERIES[name]
    torch.manual_seed(3)
    model = Gallery(parts, shape).double()
    batch = {"x": torch.randn(BATCH, *shape, dtype=torch.float64)}
    check(model, total_loss, batch, mw.Layout(dp=2), unsplit)


def test_evaluation_of_torchs_own_layers() -> None:
    """Their fused forms, which ask for the values of masks, are not taken."""
    model = Gallery(TRANSFORMERS, SEQUENCE).double()
    captured = capture(model, total_loss, {"x": torch.randn(BATCH, *SEQUENCE, dtype=torch.float64)}, training=False)
    attentions = [
        operator for operator in captured.graph.operators if operator.target == "meshwright.attention.default"
    ]
    assert len(attentions) == 1 + 1 + 2 + 3, "one a layer, and the decoder's to the encoder; with weights it is none"


LOSSES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "bce": lambda y, b: F.binary_cross_entropy(y.sigmoid(), b["y"].sigmoid()),
    "bce_with_logits": lambda y, b: F.binary_cross_entropy_with_logits(y, b["y"].sigmoid()),
    "bce_weighted": lambda y, b: F.binary_cross_entropy_with_logits(y, b["y"].sigmoid(), pos_weight=b["w"][0]),
    "cosine": lambda y, b: F.cosine_embedding_loss(y, b["y"], torch.ones(y.shape[0])),
    "cross_entropy": lambda y, b: F.cross_entropy(y, b["label"]),
    "cross_entropy_none": lambda y, b: F.cross_entropy(y, b["label"], reduction="none").mean(),
    "cross_entropy_of_images": lambda y, b: F.cross_entropy(y.view(-1, 2, 2, 2), b["pixels"] % 2),
    "cross_entropy_of_weights": lambda y, b: F.cross_entropy(y, b["y"].softmax(-1)),
    "cross_entropy_smoothed": lambda y, b: F.cross_entropy(y, b["label"], label_smoothing=0.1),
    "cross_entropy_sum": lambda y, b: F.cross_entropy(y, b["label"], reduction="sum"),
    "cross_entropy_weighted": lambda y, b: F.cross_entropy(y, b["label"], weight=b["w"][0].exp()),
    "cross_entropy_weighted_smoothed": lambda y, b: F.cross_entropy(
        y, b["label"], weight=b["w"][0].exp(), label_smoothing=0.1
    ),
    "hinge": lambda y, b: F.hinge_embedding_loss(y, b["y"].sign()),
    "huber": lambda y, b: F.huber_loss(y, b["y"]),
    "kl": lambda y, b: F.kl_div(y.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    "l1": lambda y, b: F.l1_loss(y, b["y"]),
    "l1_sum": lambda y, b: F.l1_loss(y, b["y"], reduction="sum"),
    "mse": lambda y, b: F.mse_loss(y, b["y"]),
    "mse_none": lambda y, b: (F.mse_loss(y, b["y"], reduction="none") * b["y"]).sum(),
    "multi_label": lambda y, b: F.multilabel_soft_margin_loss(y, (b["y"] > 0).to(y.dtype)),
    "poisson": lambda y, b: F.poisson_nll_loss(y, b["y"].exp()),
    "smooth_l1": lambda y, b: F.smooth_l1_loss(y, b["y"]),
    "soft_margin": lambda y, b: F.soft_margin_loss(y, b["y"].sign()),
    "triplet": lambda y, b: F.triplet_margin_loss(y, b["y"], b["y"] * 2),
    "multi_margin": lambda y, b: F.multi_margin_loss(y, b["label"].clamp(min=0)),
}


def every_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    outputs = model(batch["x"])
    losses = {name: loss(outputs[name], batch) for name, loss in LOSSES.items()}
    return sum(losses.values(), torch.zeros((), dtype=batch["x"].dtype)), losses


@pytest.mark.parametrize("ignored", [0, 1])
def test_losses_divide_by_global_counts(ignored: int) -> None:
    torch.manual_seed(4)
    model = Gallery({name: nn.Identity() for name in LOSSES}, VECTOR).double()
    label = torch.randint(8, (BATCH,))
    label[:ignored] = -100  # so that the ranks count differently
    batch = {
        "x": torch.randn(BATCH, 8, dtype=torch.float64),
        "y": torch.randn(BATCH, 8, dtype=torch.float64),
        "w": torch.randn(BATCH, 8, dtype=torch.float64),
        "label": label,
        "pixels": torch.randint(8, (BATCH, 2, 2)),
    }
    check(model, every_loss, batch, mw.Layout(dp=2), set())
