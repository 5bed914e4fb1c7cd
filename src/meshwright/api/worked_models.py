"""Worked numbers of lectures that need a model: a loss, a filter, exclusive-or, softmax regression. The models are
captured, planned and trained as any other model."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.api.plans import capture
from meshwright.api.trainers import parallelize
from meshwright.build import read_digits
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.models import MLP, classification_loss
from meshwright.runtime.ranks import run_ranks
from meshwright.worked.line import Line, compared, held

SAME = 1e-9
"""The largest relative difference of float64 losses of one rank and of two."""

# --- cross-entropy-cat ------------------------------------------------------------------------------------------------

CAT = 0.54
"""The probability that the classifier gives to the label."""


def cross_entropy() -> Iterator[Line]:
    """The loss of a classifier that gives the label "cat" a probability of 0.54, by the operator that training uses."""
    logits = torch.tensor([[CAT, 1 - CAT]], dtype=torch.float64).log()
    loss, _ = classification_loss(nn.Identity(), {"inputs": logits, "label": torch.tensor([0])})
    graph = capture(
        MLP((2, 2)), classification_loss, {"inputs": torch.zeros(4, 2), "label": torch.zeros(4, dtype=torch.int64)}
    )
    used = [each.target for each in graph.operators if "loss" in each.target and not each.backward]
    yield compared(
        "0.54 for the label: the loss is -ln 0.54 = 0.616", 0.616, float(loss), "{:.4f}",
        f"from the loss function of the reference models, whose operator in a captured step is {' and '.join(used)}",
    )  # fmt: skip


# --- sobel ------------------------------------------------------------------------------------------------------------

SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))
PATCH = ((3.0, 0.0, 1.0), (2.0, 6.0, 2.0), (2.0, 4.0, 1.0))
"""The filter, and the patch of an image on which it is shown."""


class _Filter(nn.Module):
    """A Sobel filter over images [b, 1, y, x], with zeros around the border."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        self.convolution.weight = nn.Parameter(torch.tensor(SOBEL).view(1, 1, 3, 3))

    def forward(self, images: Tensor) -> Tensor:
        filtered: Tensor = self.convolution(images)
        return filtered


def _chosen_pixel(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The filtered pixel at which ``chosen`` is 1."""
    value: Tensor = (model(batch["image"]) * batch["chosen"]).sum()
    return value


def _filtered(layout: Layout) -> tuple[float, str]:
    """The filtered pixel in the middle of the patch, and how the plan splits the convolution."""
    chosen = torch.zeros(1, 1, 3, 3)
    chosen[0, 0, 1, 1] = 1.0
    batch = {"image": torch.tensor(PATCH).view(1, 1, 3, 3), "chosen": chosen}
    trainer = parallelize(_Filter(), _chosen_pixel, batch, plan=layout, optimizer=_sgd)
    splits = {note.split for note in trainer.plan.notes if note.module.startswith("convolution")}
    return float(trainer.evaluate(batch)), " ".join(sorted(splits))


def sobel() -> Iterator[Line]:
    """A 3 x 3 Sobel filter on a patch of an image whose rows are divided over two ranks."""
    value, split = run_ranks(_filtered, Layout(spatial=(2,)), num_ranks=2)
    yield compared(
        "the filter gives -3 in the middle of the patch", -3, value, "{:g}",
        f"{split}: two rows on rank 0, one on rank 1; the convolution exchanges rows between the ranks",
    )  # fmt: skip


# --- xor --------------------------------------------------------------------------------------------------------------

XOR = {
    "inputs": torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]),
    "label": torch.tensor([0, 1, 1, 0]),
}
XOR_STEPS = 200


def exclusive_or() -> Iterator[Line]:
    """Exclusive-or of two bits (Minsky and Papert, "Perceptrons", 1969), learned by one layer and by two."""
    single_layer, two_layers = (_accuracy(sizes) for sizes in ((2, 2), (2, 8, 2)))
    trained = f"after {XOR_STEPS} steps of Adam"
    yield held(
        "one perceptron cannot learn it: at most 75 %",
        f"{single_layer:.0%}",
        single_layer <= 0.75,
        f"no line separates the ones from the zeros; {trained}",
    )
    yield held("two layers can: 100 %", f"{two_layers:.0%}", two_layers == 1.0, f"8 hidden units; {trained}")


def _accuracy(sizes: tuple[int, ...]) -> float:
    """The part of the four points that an MLP of these sizes gets right after training."""
    torch.manual_seed(0)
    trainer = parallelize(
        MLP(sizes, activation=nn.Tanh), classification_loss, XOR,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    )  # fmt: skip
    for _ in range(XOR_STEPS):
        trainer.step(XOR)
    trainer.evaluate(XOR)
    return float(trainer.metrics["correct"]) / len(XOR["label"])


# --- softmax-784x10 ---------------------------------------------------------------------------------------------------

PIXELS, CLASSES = 784, 10
SOFTMAX_STEPS, LEAST = 200, 0.9
SPLITS: Mapping[str, Layout] = {"batch": Layout(dp=2), "class": Layout(tp=2)}


class _Regression(NamedTuple):
    """A trained softmax regression: its losses, the part of held-out digits that it gets right, and its split."""

    losses: list[float]
    accuracy: float
    split: str


def softmax_regression() -> Iterator[Line]:
    """y = softmax(xW + b) on 784 pixels and 10 classes: scikit-learn's handwritten digits, enlarged to 28 x 28."""
    yield Line(
        claim="the graph of y = softmax(xW + b)",
        ours=" -> ".join(_drawn(_regression_graph())),
        verdict="agrees",
        why="the captured forward: a product, an addition and a loss that contains the softmax",
    )
    alone = _trained(Layout())
    yield held(
        "it learns digits: at least 90 %",
        f"{alone.accuracy:.1%} of 360 held-out digits",
        alone.accuracy >= LEAST,
        f"{SOFTMAX_STEPS} steps of 1,437 digits, SGD with momentum, float64",
    )
    for what, layout in SPLITS.items():
        shared: _Regression = run_ranks(_trained, layout, num_ranks=2)
        off = max(abs(a - b) for a, b in zip(alone.losses, shared.losses, strict=True))
        yield held(
            f"it can be split by {what}",
            f"losses differ by at most {off:.0e}",
            off <= SAME * max(1.0, *alone.losses),
            f"{SOFTMAX_STEPS} steps on two ranks, beside those of one: {shared.split}; {shared.accuracy:.1%} right",
        )


def _drawn(graph: Graph) -> list[str]:
    """The forward operators in order, without views."""
    names = [each.target.split(".")[1] for each in graph.operators if not each.backward]
    return ["pixels", *(name for name in names if name in ("mm", "addmm", "add", "_log_softmax", "nll_loss_forward"))]


def _regression_graph() -> Graph:
    batch = {"inputs": torch.zeros(8, PIXELS), "label": torch.zeros(8, dtype=torch.int64)}
    return capture(MLP((PIXELS, CLASSES)), classification_loss, batch)


def _digits(part: Literal["train", "held_out"]) -> dict[str, Tensor]:
    """Digits of 28 x 28 pixels from 0 to 1, in float64. Every fifth of all digits is held out."""
    data = read_digits()
    nearest = torch.arange(28) * 8 // 28
    pixels = data["image"][:, 0][:, nearest][:, :, nearest].flatten(1).double()
    held_out = torch.arange(len(pixels)) % 5 == 0
    chosen = held_out if part == "held_out" else ~held_out
    return {"inputs": pixels[chosen], "label": data["label"][chosen]}


def _trained(layout: Layout, steps: int = SOFTMAX_STEPS) -> _Regression:
    """Train the regression on these ranks."""
    torch.manual_seed(0)
    digits, held_out = _digits("train"), _digits("held_out")
    trainer = parallelize(
        MLP((PIXELS, CLASSES)).double(), classification_loss, digits, plan=layout,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )  # fmt: skip
    losses = [float(trainer.step(digits)) for _ in range(steps)]
    trainer.evaluate(held_out)
    splits = " ".join(sorted({note.split for note in trainer.plan.notes if note.module.startswith("layers")}))
    return _Regression(losses, float(trainer.metrics["correct"]) / len(held_out["label"]), splits)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)  # type: ignore[arg-type]
