"""Capture: what a training step becomes, operator by operator, and what is said about one that cannot be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.builder import Capture, capture
from meshwright.errors import CaptureError, DataError
from meshwright.ir.graph import Graph, Operator
from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    LeNet,
    ResNet,
    classification_loss,
    language_model_loss,
)

BATCH, SEQUENCE, VOCABULARY = 4, 8, 32


def gpt(layers: int = 2, dropout: float = 0.0, heads: int = 2) -> GPT:
    return GPT(GPTConfig(layers, 16, heads, VOCABULARY, SEQUENCE, dropout))


def tokens(batch: int = BATCH) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, SEQUENCE, dtype=torch.int64) for name in ("tokens", "targets")}


def images(batch: int = BATCH) -> dict[str, Tensor]:
    return {"image": torch.zeros(batch, 1, 8, 8), "label": torch.zeros(batch, dtype=torch.int64)}


def vectors(batch: int = BATCH) -> dict[str, Tensor]:
    return {"inputs": torch.zeros(batch, 8), "label": torch.zeros(batch, dtype=torch.int64)}


def hugging_face_gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, loss_type="ForCausalLM",
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def text(*, masked: bool) -> dict[str, Tensor]:
    names = ["input_ids", "labels", *["attention_mask"] * masked]
    return {name: torch.ones(BATCH, SEQUENCE, dtype=torch.int64) for name in names}


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def captured_gpt() -> Capture:
    return capture(gpt(), language_model_loss, tokens())


@pytest.fixture(scope="module")
def graph(captured_gpt: Capture) -> Graph:
    return captured_gpt.graph


def named(graph: Graph, name: str) -> Operator:
    return next(operator for operator in graph.operators if operator.name == name)


# --- where operators come from ----------------------------------------------------------------------------------------


def test_operators_are_named_by_module_and_kind(graph: Graph) -> None:
    names = [operator.name for operator in graph.operators]
    assert len(set(names)) == len(names)
    assert named(graph, "blocks.1.attention.qkv:mm#0").module == "blocks.1.attention.qkv"
    assert named(graph, "blocks.1.attention:attention#0").target == "meshwright.attention.default"
    assert named(graph, "final_norm:native_layer_norm#0").inputs[1:] == ("final_norm.weight", "final_norm.bias")


def test_every_operator_has_the_source_line_that_called_it(graph: Graph) -> None:
    assert named(graph, "token_embedding:embedding#0").source.startswith("meshwright/models/gpt.py:")
    assert {operator.source.partition(":")[0] for operator in graph.operators} == {
        "meshwright/models/gpt.py",
        "meshwright/models/losses.py",
    }
    captured = capture(MLP((8, 4)), lambda model, batch: model(batch).sum(), torch.zeros(2, 8))
    line = (lambda: 0).__code__.co_firstlineno - 1
    assert named(captured.graph, "sum#0").source == f"tests/end_to_end/test_capture.py:{line}"


def test_sequence_numbers_pair_a_backward_operator_with_its_forward(graph: Graph) -> None:
    forward = {(operator.module, operator.sequence) for operator in graph.operators if not operator.backward}
    backward = [operator for operator in graph.operators if operator.backward]
    assert len(backward) > 80
    for operator in backward:
        assert (operator.module, operator.sequence) in forward, operator.name
    products = [named(graph, f"blocks.0.mlp.up:mm#{index}") for index in range(3)]
    assert len({product.sequence for product in products}) == 1
    assert [product.backward for product in products] == [False, True, True]


def test_attention_is_one_operator_and_its_gradient_another(graph: Graph) -> None:
    counts = Counter(operator.target for operator in graph.operators)
    assert counts["meshwright.attention.default"] == counts["meshwright.attention_backward.default"] == 2
    assert not any(
        "scaled_dot_product" in target or "softmax.default" in target for target in counts if "log" not in target
    )
    pair = [named(graph, "blocks.1.attention:attention#0"), named(graph, "blocks.1.attention:attention_backward#0")]
    assert pair[0].sequence == pair[1].sequence


def test_repeated_blocks_share_a_pattern(graph: Graph) -> None:
    assert named(graph, "blocks.0.mlp.up:mm#0").repeat == "blocks.*.mlp.up"
    assert named(graph, "head:mm#0").repeat == ""


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_tensor(graph: Graph) -> None:
    assert graph.tied == {"head.weight": "token_embedding.weight"}
    assert "head.weight" not in graph.parameters
    assert "token_embedding.weight" in named(graph, "head:t#0").inputs
    gradient = next(gradient.gradient for gradient in graph.gradients if gradient.parameter == "token_embedding.weight")
    assert gradient == "token_embedding:add#0", "the sum of both uses"


def test_buffers_come_out_updated_once() -> None:
    graph = captured_family("ResNet").graph
    assert set(graph.buffer_updates) == set(graph.buffers)
    assert graph.buffer_updates["stem_norm.running_mean"] == "stem_norm:_native_batch_norm_legit_functional#0.3"
    assert graph.buffer_updates["stem_norm.num_batches_tracked"].startswith("stem_norm:add#")
    evaluation = captured_family("ResNet", training=False).graph
    assert evaluation.buffer_updates == {}
    assert evaluation.gradients == ()


def test_meta_models_are_captured_like_others(graph: Graph) -> None:
    with torch.device("meta"):
        model = gpt()
    assert capture(model, language_model_loss, tokens()).graph.fingerprint == graph.fingerprint


def test_parameters_without_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    graph = capture(Partly(), square, torch.zeros(2, 4)).graph
    gradients = {gradient.parameter: gradient.gradient for gradient in graph.gradients}
    assert gradients["unused.weight"] is None
    assert gradients["used.weight"] is not None
    assert "frozen.weight" not in gradients
    assert "frozen.weight" in graph.parameters


def test_views_share_the_storage_of_what_they_view(graph: Graph) -> None:
    split = named(graph, "blocks.0.attention:split#0")
    source = graph.tensors[split.inputs[0]]
    assert {graph.tensors[name].storage for name in split.outputs} == {source.storage}
    assert named(graph, "blocks.0.attention:split#0").bytes == 0
    product = named(graph, "head:mm#0")
    assert graph.tensors[product.outputs[0]].storage == product.outputs[0]
    assert product.bytes == 4 * (BATCH * SEQUENCE * 16 + 16 * VOCABULARY + BATCH * SEQUENCE * VOCABULARY)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 2, 0)], ids=str)
def test_a_tensor_without_elements_is_reshaped(shape: tuple[int, ...]) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        return output.sum() + output[:, :0].reshape(shape).sum()

    reshaped = named(capture(nn.Linear(3, 3), loss, torch.ones(BATCH, 3)).graph, "view#0")
    assert reshaped.rule is not None


def test_the_prologue_depends_on_no_parameter_and_no_random_number() -> None:
    captured = captured_family("GPT with dropout")
    prologue = [operator for operator in captured.graph.operators if operator.prologue]
    assert {"arange#0", "ne#1", "sum#1"} <= {operator.name for operator in prologue}
    assert not any("bernoulli" in operator.target for operator in prologue)
    state = {*captured.graph.parameters, *captured.graph.buffers}
    outputs = {name for operator in prologue for name in operator.outputs}
    for operator in prologue:
        assert not state & set(operator.inputs)
        assert all(name in outputs or name.startswith(("batch.", "constant.")) for name in operator.inputs)


# --- factors ----------------------------------------------------------------------------------------------------------


def test_the_batch_is_found_in_every_tensor_that_has_it(graph: Graph) -> None:
    batch = [name for name, factor in graph.factor_classes.items() if factor.role == "batch"]
    assert batch == ["b"]
    assert graph.factor_classes["b"].size == BATCH
    assert graph.tensors["batch.tokens"].dims == (("b",), ("s",))
    assert graph.tensors[named(graph, "head:view#0").outputs[0]].dims == (("b", "s"), ("k",))
    assert named(graph, "blocks.0.attention:attention#0").classes["b"] == "b"
    assert not any("b" in dim for name in graph.parameters for dim in graph.tensors[name].dims)


@pytest.mark.parametrize("model", ["ours", "hugging face"])
def test_a_fused_projection_is_refined_to_three_times_heads_times_width(model: str, graph: Graph) -> None:
    if model == "ours":
        product, weight = named(graph, "blocks.0.attention.qkv:mm#0"), "blocks.0.attention.qkv.weight"
        dims: tuple[tuple[str, ...], ...] = (("x", "h", "f"), ("k",))
    else:
        graph = captured_family("Hugging Face GPT-2").graph
        product, weight = named(graph, "transformer.h.0.attn.c_attn:mm#0"), "transformer.h.0.attn.c_attn.weight"
        dims = (("k",), ("x", "h", "f"))
    assert product.rule is not None
    assert product.rule.pattern == "^(b s) k, ^^k (x h f) -> (b s) (x h f)"
    assert {letter: product.rule.sizes[letter] for letter in "xhf"} == {"x": 3, "h": 2, "f": 8}
    assert graph.tensors[weight].dims == dims
    attention = next(operator for operator in graph.operators if operator.target == "meshwright.attention.default")
    assert attention.classes["h"] == product.classes["h"]


def test_queries_and_keys_are_letters_of_their_own_though_both_are_the_sequence(graph: Graph) -> None:
    attention = named(graph, "blocks.0.attention:attention#0")
    assert attention.rule is not None
    assert attention.rule.pattern == "b h s !f, b h !s1 !f, b h !s1 !f1 -> b h s !f1, b h s"
    assert attention.classes["s"] == attention.classes["s1"] == "s"
    assert attention.rule.splittable("s")
    assert list(attention.rule.decompositions) == ["s1", "st"]
    assert attention.rule.members("st") == ("s", "s1"), "the ring splits both"


def test_a_batch_that_meets_itself_is_split_on_one_side() -> None:
    """The similarities of a contrastive loss are batch by batch."""

    def contrast(model: nn.Module, batch: Tensor) -> Tensor:
        vectors = model(batch)
        return F.cross_entropy(vectors @ vectors.t(), torch.arange(len(batch)))

    graph = capture(MLP((8, 4)), contrast, torch.zeros(BATCH, 8)).graph
    product = named(graph, "mm#0")
    assert product.rule is not None
    assert product.rule.pattern == "^b f, ^^f b1 -> b b1"
    assert product.classes["b"] == product.classes["b1"] == "b"


# --- fingerprint and FLOPs --------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_model_s_and_not_the_batch_s(graph: Graph) -> None:
    assert capture(gpt(), language_model_loss, tokens(2 * BATCH + 1)).graph.fingerprint == graph.fingerprint
    others = [gpt(layers=1), gpt(heads=4)]
    fingerprints = {capture(other, language_model_loss, tokens()).graph.fingerprint for other in others}
    fingerprints |= {graph.fingerprint, captured_family("GPT with dropout").graph.fingerprint}
    assert len(fingerprints) == 4


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], dict[str, Tensor]]]] = {
    "GPT": (gpt, language_model_loss, tokens),
    "LeNet": (
        lambda: LeNet(image_size=8, classes=4, channels=(2, 4), dense=(16,), kernel=3),
        classification_loss,
        images,
    ),
    "MLP": (lambda: MLP((8, 16, 4)), classification_loss, vectors),
    "ResNet": (lambda: ResNet(8, 4, 1, 4), classification_loss, images),
}
COUNTED = ("aten.mm.", "aten.bmm.", "aten.convolution.", "aten.convolution_backward.", "meshwright.attention")


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_pytorch_counts(name: str) -> None:
    make, loss_fn, batch = MODELS[name]
    model, graph = make(), captured_family(name).graph
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_fn(model, batch())[0].backward()
    counted = sum(operator.flops for operator in graph.operators if operator.target.startswith(COUNTED))
    attention = sum(operator.flops for operator in graph.operators if operator.target == "meshwright.attention.default")
    assert bool(attention) == (name == "GPT")
    # our backward of attention computes the scores again, one of the forward's two products
    assert counted == counter.get_total_flops() + attention / 2
    assert counted < graph.flops() < 1.5 * counted + 1e5


# --- every operator of the model families has a rule ------------------------------------------------------------------

FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[], dict[str, Tensor]]]] = {
    **MODELS,
    "GPT with dropout": (lambda: gpt(dropout=0.1), language_model_loss, tokens),
    "Hugging Face GPT-2": (hugging_face_gpt2, own_loss, lambda: text(masked=False)),
    "Hugging Face GPT-2 with mask": (hugging_face_gpt2, own_loss, lambda: text(masked=True)),
    "Hugging Face GPT-2 with dropout": (lambda: hugging_face_gpt2(0.1), own_loss, lambda: text(masked=False)),
    "Hugging Face GPT-2 with mask and dropout": (lambda: hugging_face_gpt2(0.1), own_loss, lambda: text(masked=True)),
}


@cache
def captured_family(name: str, training: bool = True) -> Capture:
    make, loss_fn, batch = FAMILIES[name]
    return capture(make(), loss_fn, batch(), training=training)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_operator_is_replicated_for_want_of_a_rule(name: str) -> None:
    for training in [True, False] if name in ("ResNet", "Hugging Face GPT-2 with mask") else [True]:
        graph = captured_family(name, training).graph
        assert {operator.target: operator.reason for operator in graph.operators if operator.rule is None} == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_operator_on_the_batch_can_split_it(name: str) -> None:
    graph = captured_family(name).graph
    whole = set()
    for operator in graph.operators:
        letters = [
            letter for letter, factor in operator.classes.items() if graph.factor_classes[factor].role == "batch"
        ]
        if letters and operator.rule is not None and not any(map(operator.rule.splittable, letters)):
            whole.add(f"{operator.name}: {operator.rule.pattern}")
    # an index of positions 0, 1, ... of the batch, with which Hugging Face builds its mask
    assert {name for name in whole if ":arange" not in name} == set()


# --- errors -----------------------------------------------------------------------------------------------------------


SCALAR = "return a scalar floating-point loss, or (loss, {name: scalar tensor})"


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.sum() > 0:  # this line is in the message
            return y
        return -y


class BatchCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        for _ in range(x.shape[0]):
            y = y.relu()
        return y


def test_data_dependent_control_flow_is_named_with_its_line() -> None:
    line = Branch.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(Branch()), square, torch.zeros(2, 4))
    error = caught.value
    assert error.problem.startswith("data-dependent control flow: the step asks for the value of a tensor")
    assert error.where == f"module 0, tests/end_to_end/test_capture.py:{line}"
    assert error.remedy.startswith("replace the branch on a tensor's value by torch.where and .item() by the tensor")


def test_operators_that_depend_on_the_batch_size_are_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(BatchCounts(), square, torch.zeros(2, 4))
    assert "batch size 4" in caught.value.problem
    assert caught.value.remedy == "make the model's control flow independent of the batch size"


@pytest.mark.parametrize(
    ("loss_fn", "batch", "message"),
    [
        (
            lambda model, batch: model(batch),
            torch.zeros(2, 4),
            f"loss_fn: loss_fn returned a tensor of shape (2, 4) and torch.float32\n  -> {SCALAR}",
        ),
        (
            lambda model, batch: 1.0,
            torch.zeros(2, 4),
            f"loss_fn: loss_fn returned float\n  -> {SCALAR}",
        ),
        (
            lambda model, batch: (model(batch).sum(), {"each": model(batch)}),
            torch.zeros(2, 4),
            "loss_fn: metric 'each' is a tensor of shape (2, 4) and torch.float32\n  -> return scalar tensors",
        ),
        (
            lambda model, batch: (model(batch).sum(), 1, 2),
            torch.zeros(2, 4),
            (
                "loss_fn: loss_fn returned a tuple (Tensor, int, int)\n"
                "  -> return a scalar floating-point loss, or (loss, {name: scalar tensor})"
            ),
        ),
        (
            lambda model, batch: (model(batch).sum(), {"loss": model(batch).sum()}),
            torch.zeros(2, 4),
            "loss_fn: a metric is called 'loss'\n  -> rename it: the trainer has a metric of this name",
        ),
        (
            lambda model, batch: batch.sum(),
            torch.zeros(2, 4),
            "loss_fn: the loss depends on no parameter\n  -> return a loss computed by the model",
        ),
        (
            square,
            {"size": 3},
            "batch: the batch holds no tensor\n  -> pass tensors whose dim 0 is the batch",
        ),
    ],
    ids=["not scalar", "not a tensor", "metric", "three", "name", "no parameter", "no tensor"],
)
def test_what_is_said_about_a_wrong_loss_or_batch(loss_fn: Any, batch: Any, message: str) -> None:
    with pytest.raises((CaptureError, DataError)) as caught:
        capture(nn.Linear(4, 4), loss_fn, batch)
    assert str(caught.value) == message


def test_shapes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(4, 4), lambda model, batch: model(batch)[batch.sum(1) > 0].sum(), torch.zeros(2, 4))
    assert "the shape of a tensor depends on values (aten.nonzero.default)" in str(caught.value)
    assert "keep every element and weigh it" in caught.value.remedy


def test_an_error_inside_a_model_is_named_with_its_module_and_line() -> None:
    line = BatchCounts.forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError) as caught:
        capture(BatchCounts(), square, torch.zeros(2, 3))
    assert caught.value.problem.startswith("the step cannot be traced: RuntimeError: ")
    assert caught.value.where == f"module inner, tests/end_to_end/test_capture.py:{line}"


@pytest.mark.parametrize("error", [RuntimeError("std::bad_alloc"), MemoryError()])
def test_a_trace_without_memory(error: Exception) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise error

    with pytest.raises(CaptureError, match="not enough memory to trace the step") as caught:
        capture(nn.Linear(2, 2), loss, {"x": torch.zeros(2, 2)})
    assert "opaque" not in caught.value.remedy


def test_a_parameter_that_is_reached_past_the_model_is_refused() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight
    with pytest.raises(CaptureError) as caught:
        capture(model, lambda model, batch: model(batch).sum() + weight.square().sum(), torch.zeros(2, 4))
    assert str(caught.value) == (
        "loss_fn: weight is used by other means than the model passed to loss_fn\n"
        "  -> use only the model that loss_fn is given, and no reference to its parameters kept elsewhere"
    )


def test_a_tensor_of_the_user_s_own_is_a_constant() -> None:
    scale = torch.arange(4.0)
    graph = capture(nn.Linear(4, 4), lambda model, batch: (model(batch) * scale).sum(), torch.zeros(2, 4)).graph
    assert [name for name, tensor in graph.tensors.items() if tensor.kind == "constant"] == [
        "constant._tensor_constant0"
    ]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_model_s_own_recomputation_is_left_to_the_plan(use_reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP((4, 8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, checkpoint(self.inner, x, use_reentrant=use_reentrant))

    captured_graph = capture(Recomputing(), square, torch.zeros(2, 4)).graph
    expected = capture(nn.Sequential(MLP((4, 8, 4))), square, torch.zeros(2, 4)).graph
    assert Counter(operator.target for operator in captured_graph.operators) == Counter(
        operator.target for operator in expected.operators
    )
    assert not [tensor for tensor in captured_graph.tensors.values() if tensor.kind == "constant"]
    assert checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).grad_fn is not None


def test_capture_leaves_the_model_as_it_was() -> None:
    model = gpt(dropout=0.1).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, language_model_loss, tokens())
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
