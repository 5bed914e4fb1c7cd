"""Small reference models in plain PyTorch, and their loss functions. They contain no code for parallel training."""

from meshwright.models.alexnet import AlexNet
from meshwright.models.googlenet import GoogLeNet
from meshwright.models.gpt import GPT, GPTConfig, demo_gpt, gpt_s
from meshwright.models.lenet import LeNet
from meshwright.models.losses import classification_loss, language_model_loss, segmentation_loss
from meshwright.models.mlp import MLP
from meshwright.models.resnet import ResNet, WideResNet
from meshwright.models.unet import UNet
from meshwright.models.vgg import VGG

__all__ = [
    "GPT", "MLP", "VGG", "AlexNet", "GPTConfig", "GoogLeNet", "LeNet", "ResNet", "UNet", "WideResNet",
    "classification_loss", "demo_gpt", "gpt_s", "language_model_loss", "segmentation_loss",
]  # fmt: skip
