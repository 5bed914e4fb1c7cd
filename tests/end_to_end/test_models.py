"""The reference models: shapes, agreement with independent implementations, and that they learn."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models import (
    GPT,
    MLP,
    VGG,
    AlexNet,
    GoogLeNet,
    GPTConfig,
    LeNet,
    ResNet,
    UNet,
    WideResNet,
    classification_loss,
    demo_gpt,
    gpt_s,
    language_model_loss,
    segmentation_loss,
)

TINY = GPTConfig(layers=2, width=32, heads=4, vocabulary=11, sequence_length=9)


def losses_while_training(
    model: nn.Module, loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]], batch: dict[str, Tensor], steps: int
) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _metrics = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --------------------------------------------------------------------------------------------------------------- GPT


@pytest.mark.parametrize("tied_head", [True, False])
def test_gpt_learns_a_sequence(tied_head: bool) -> None:
    model = GPT(GPTConfig(2, 32, 4, vocabulary=11, sequence_length=9, tied_head=tied_head))
    assert (model.head.weight is model.token_embedding.weight) == tied_head
    tokens = torch.randint(11, (4, 10))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    assert model(batch["tokens"]).shape == (4, 9, 11)
    losses = losses_while_training(model, language_model_loss, batch, 40)
    assert losses[0] == pytest.approx(math.log(11), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]


def test_gpt_does_not_look_ahead() -> None:
    model = GPT(TINY)
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    same = model(tokens)[0] == model(changed)[0]
    assert same[:5].all()
    assert not same[5:].all(dim=1).any()


def test_gpt_equals_hugging_faces_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=9, n_embd=32, n_layer=2, n_head=4, activation_function="gelu", attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double()
    model = GPT(TINY).double()
    names = {
        "transformer.wte": "token_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.h": "blocks",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
        "ln_1": "attention_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.projection",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    weights = {}
    for name, value in theirs.state_dict().items():
        transposed = ".c_" in name and value.dim() == 2  # Conv1D stores [inputs, outputs]
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = value.T if transposed else value
    model.load_state_dict(weights)
    tokens = torch.randint(11, (3, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-12, atol=1e-12)


def test_gpt_presets_have_their_sizes() -> None:
    width = 256
    blocks = 4 * (12 * width * width + 13 * width)
    assert parameters(gpt_s()) == (2048 + 128) * width + blocks + 2 * width
    assert parameters(demo_gpt()) == (256 + 256) * width + blocks + 2 * width
    assert demo_gpt()(torch.zeros(1, 256, dtype=torch.int64)).shape == (1, 256, 256)


def test_gpt_starts_as_gpt2_does() -> None:
    model = gpt_s()
    block = model.get_submodule("blocks.2")
    weights = {name: weight.std().item() for name, weight in block.named_parameters() if weight.dim() == 2}
    assert weights == {
        "attention.qkv.weight": pytest.approx(0.02, rel=0.02),
        "attention.projection.weight": pytest.approx(0.02 / math.sqrt(8), rel=0.02),
        "mlp.up.weight": pytest.approx(0.02, rel=0.02),
        "mlp.down.weight": pytest.approx(0.02 / math.sqrt(8), rel=0.02),
    }
    assert all(not bias.any() for name, bias in block.named_parameters() if name.endswith("bias"))
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_gpt_on_the_meta_device_initialises_module_by_module() -> None:
    with torch.device("meta"):
        model = GPT(TINY)
    assert model.head.weight is model.token_embedding.weight
    model.to_empty(device="cpu")
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    projection = model.get_submodule("blocks.0.attention.projection")
    assert isinstance(projection.weight, Tensor)
    assert projection.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_gpt_drops_only_while_training() -> None:
    model = GPT(GPTConfig(2, 32, 4, vocabulary=11, sequence_length=9, dropout=0.5))
    tokens = torch.randint(11, (2, 9))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"width": 250}, "width 250 is not divisible by heads 4"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
    ],
)
def test_gpt_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GPTConfig(**sizes)


def test_gpt_refuses_more_tokens_than_positions() -> None:
    with pytest.raises(ValueError, match="10 tokens, but the model has 9 positions"):
        GPT(TINY)(torch.zeros(1, 10, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize("image_size", [8, 16, 28, 32])
def test_lenet_takes_images_that_its_poolings_divide(image_size: int) -> None:
    model = LeNet(image_size, classes=7)
    assert model(torch.randn(3, 1, image_size, image_size)).shape == (3, 7)


def test_lenet_of_the_paper_has_its_sizes() -> None:
    model = LeNet(image_size=32, padding=0)
    assert model.convolutions(torch.randn(1, 1, 32, 32)).shape == (1, 16, 5, 5)
    assert [layer.weight.shape for layer in model.dense if isinstance(layer, nn.Linear)] == [
        (120, 400), (84, 120), (10, 84),
    ]  # fmt: skip


def test_lenet_is_configurable() -> None:
    model = LeNet(16, image_channels=3, classes=4, channels=(5, 6, 7), dense=(), kernel=3)
    assert parameters(model) == (27 * 5 + 5) + (45 * 6 + 6) + (54 * 7 + 7) + (7 * 2 * 2 * 4 + 4)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4)


def test_lenet_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="gives a map of 15 by 15 pixels before a 2x2 pooling"):
        LeNet(30)
    with pytest.raises(ValueError, match="gives a map of 0 by 0 pixels"):
        LeNet(8, padding=0)
    with pytest.raises(ValueError, match=r"an even kernel \(4\)"):
        LeNet(8, kernel=4)


@pytest.mark.parametrize(("depth", "image_size"), [(8, 8), (14, 32)])
def test_resnet_takes_small_images(depth: int, image_size: int) -> None:
    model = ResNet(depth, width=4)
    assert model(torch.randn(2, 3, image_size, image_size)).shape == (2, 10)
    weighted = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len([name for name in weighted if "shortcut" not in name]) == depth
    assert model.blocks(torch.randn(1, 4, image_size, image_size)).shape == (1, 16, image_size // 4, image_size // 4)


def test_resnet_20_has_the_size_of_the_paper() -> None:
    # 0.27 M in table 6; ours projects at its two wider shortcuts (option B).
    assert parameters(ResNet(depth=20, width=16)) == 272_474


def test_resnet_depth_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 10 is not 6 n"):
        ResNet(10)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_unet_keeps_the_size_and_learns_which_pixels_are_bright(norm: str) -> None:
    model = UNet(depth=2, width=4, image_channels=1, classes=2, norm=norm)
    image = torch.randn(4, 1, 8, 12)
    assert model(image).shape == (4, 2, 8, 12)
    batch = {"image": image, "label": (image[:, 0] > 0).long()}
    losses = losses_while_training(model, segmentation_loss, batch, 30)
    assert losses[-1] < 0.5 * losses[0]


def test_unet_has_the_sizes_of_its_levels() -> None:
    model = UNet(depth=2, width=4, image_channels=1, classes=3)
    levels = [(1, 4), (4, 8), (8, 16), (16, 8), (8, 4)]
    convolutions = sum(9 * (inputs + outputs) * outputs + 4 * outputs for inputs, outputs in levels)
    enlarged = sum(4 * inputs * outputs + outputs for inputs, outputs in [(16, 8), (8, 4)])
    assert parameters(model) == convolutions + enlarged + 4 * 3 + 3


def test_unet_joins_levels_of_one_size() -> None:
    """What the encoder's first level sees is in the decoder's last, although the levels below see nothing of it."""
    model = UNet(depth=1, width=2, image_channels=1, classes=2)
    for parameter in model.down[1].parameters():
        nn.init.zeros_(parameter)
    first, second = model(torch.randn(2, 1, 4, 4)).unbind()
    assert not torch.allclose(first, second)


def test_unet_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="norm is 'layer'; it can be 'group' or 'batch'"):
        UNet(norm="layer")
    with pytest.raises(ValueError, match="width even, not 2 and 3"):
        UNet(width=3)
    with pytest.raises(ValueError, match="images of 8 by 10 pixels cannot be halved 2 times"):
        UNet(depth=2)(torch.zeros(1, 3, 8, 10))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (AlexNet, 61_100_840),  # torchvision's too
        (VGG, 138_357_544),  # configuration D: 138 M in table 2
        (lambda: VGG((2, 2, 4, 4, 4)), 143_667_240),  # configuration E: 144 M
        (WideResNet, 68_883_240),  # torchvision's wide_resnet50_2 too: 68.9 M in table 8
        (lambda: WideResNet(widened=1), 25_557_032),  # ResNet-50
        (GoogLeNet, 6_998_552 + 7_280),  # Caffe's bvlc_googlenet, with two numbers of each norm in place of a bias
    ],
    ids=["alexnet", "vgg16", "vgg19", "wide-resnet50", "resnet50", "googlenet"],
)
def test_networks_of_papers_have_their_sizes(make: Callable[[], nn.Module], expected: int) -> None:
    with torch.device("meta"):
        model = make()
        assert parameters(model) == expected
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_a_module_of_branches_concatenates_them() -> None:
    model = GoogLeNet(width=8, classes=3)
    first = model.get_submodule("modules_3.0")
    x = torch.randn(2, 24, 6, 6)
    output = first(x)
    assert output.shape == (2, (64 + 128 + 32 + 32) // 8, 6, 6)
    torch.testing.assert_close(output[:, 8:24], first.get_submodule("three")(x))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: AlexNet(62), "image_size 62 leaves nothing after three poolings; it must be at least 63"),
        (lambda: AlexNet(channels=(1, 2)), "2 numbers of channels; AlexNet has five"),
        (lambda: AlexNet(towers=3), "3 towers do not divide the channels 64, 192, 384, 256, 256"),
        (lambda: VGG(image_size=40), "images of 40 pixels cannot be halved 5 times"),
        (lambda: GoogLeNet(width=12), "width must be a multiple of 8, not 12"),
    ],
)
def test_sizes_of_networks_that_cannot_be_are_refused(make: Callable[[], nn.Module], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: VGG((1, 1), 8, 8, 1, 10, (16,)),
        lambda: WideResNet((1, 1), 4, image_channels=1, classes=10),
        lambda: GoogLeNet(8, 1, 10),
        lambda: LeNet(8, channels=(4, 8), dense=(16,), kernel=3),
        lambda: ResNet(8, width=4, image_channels=1),
        lambda: MLP((64, 32, 10)),
    ],
    ids=["vgg", "wide-resnet", "googlenet", "lenet", "resnet", "mlp"],
)
def test_classifiers_learn(make: Callable[[], nn.Module]) -> None:
    batch = {"image": torch.randn(16, 1, 8, 8), "label": torch.randint(10, (16,))}
    losses = losses_while_training(make(), classification_loss, batch, 30)
    assert losses[-1] < 0.5 * losses[0]


# --------------------------------------------------------------------------------------------------------------- MLP


def test_mlp_has_an_activation_between_layers_only() -> None:
    model = MLP((3, 5, 4, 2), nn.Tanh, bias=False)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert parameters(model) == 15 + 20 + 8
    assert len(MLP((2, 2)).layers) == 1


@pytest.mark.parametrize("sizes", [(3,), (), (3, 0)])
def test_mlp_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        MLP(sizes)


# ------------------------------------------------------------------------------------------------------------ losses


def test_language_model_loss_is_the_mean_over_targets_that_count() -> None:
    model = GPT(TINY)
    tokens, targets = torch.randint(11, (3, 9)), torch.randint(11, (3, 9))
    targets[0, 2:] = -100
    targets[1] = -100
    loss, metrics = language_model_loss(model, {"tokens": tokens, "targets": targets})
    rows, columns = torch.where(targets != -100)
    logs = F.log_softmax(model(tokens), dim=-1)
    torch.testing.assert_close(loss, -logs[rows, columns, targets[rows, columns]].mean())
    assert metrics["tokens"].item() == 2 + 9


def test_classification_loss_counts_the_correct_samples() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])
    for name in ("image", "inputs"):
        loss, metrics = classification_loss(nn.Identity(), {name: logits, "label": torch.tensor([0, 1, 1])})
        assert metrics["correct"].item() == 2
        torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([0, 1, 1])))


def test_segmentation_loss_is_the_mean_over_pixels_that_count() -> None:
    logits, label = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    label[0, :, 1:] = -100
    loss, metrics = segmentation_loss(nn.Identity(), {"image": logits, "label": label})
    image, row, column = torch.where(label != -100)
    logs = F.log_softmax(logits, dim=1)
    torch.testing.assert_close(loss, -logs[image, label[image, row, column], row, column].mean())
    assert metrics["correct"].item() == int((logits.argmax(1) == label).sum())
