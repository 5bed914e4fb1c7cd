"""One CUDA device: the same losses and parameters as eager PyTorch there (experimental until these have passed)."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.api.machine import known_cluster
from meshwright.errors import NonFiniteLossError
from meshwright.models import GPT, GPTConfig, LeNet, ResNet, classification_loss, language_model_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _cases() -> list[tuple[nn.Module, Any, Any]]:
    tokens = torch.randint(0, 64, (4, 16))
    images = {"image": torch.randn(4, 1, 16, 16, dtype=torch.float64), "label": torch.randint(0, 10, (4,))}
    gpt = GPT(GPTConfig(layers=2, width=32, heads=4, vocabulary=64, sequence_length=16))
    return [
        (gpt, language_model_loss, {"tokens": tokens, "targets": tokens.roll(-1, 1)}),
        (LeNet(image_size=16), classification_loss, images),
        (ResNet(depth=8, width=8, image_channels=1), classification_loss, images),
    ]


@pytest.mark.parametrize("case", range(3), ids=["gpt", "lenet", "resnet"])
def test_five_steps_equal_eager(case: int) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = _cases()[case]
    model = model.double()
    twin = copy.deepcopy(model).cuda()
    trainer = mw.parallelize(model, loss_fn, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    on_device = {name: value.cuda() for name, value in batch.items()}
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn(twin, on_device)[0]
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(batch), loss.detach(), rtol=1e-9, atol=1e-9)
    for name, value in trainer.full_state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name].cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("optimizer", "skips"), [(torch.optim.SGD, True), (torch.optim.RMSprop, False)])
def test_a_loss_that_is_no_number_is_seen_one_step_late_and_its_error_says_so(optimizer: Any, skips: bool) -> None:
    model, loss_fn, batch = _cases()[1]
    trainer = mw.parallelize(model.double(), loss_fn, batch, optimizer=lambda p: optimizer(p, lr=0.1))
    trainer.step(batch)
    trainer.step(batch | {"image": batch["image"] * torch.nan})
    assert all(bool(torch.isfinite(value).all()) == skips for value in trainer.full_state_dict().values())
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.step(batch)
    assert str(caught.value).startswith("step 2: the loss became nan at step 2\n")
    left = "as they were before step 2" if skips else "those after step 2"
    assert f"; parameters are {left}" in str(caught.value)


def test_without_a_cluster_the_device_at_hand_is_known() -> None:
    cluster = known_cluster(None, torch.device("cuda"))
    assert cluster.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_batches_that_are_fetched_ahead_lie_in_pinned_memory() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    with mw.load(data, 4, 10**6, epochs=1) as loader:
        for (batch,) in loader:
            assert batch.is_pinned()
            assert batch.cuda(non_blocking=True).sum() == batch.sum()
