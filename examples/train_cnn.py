"""Trains a small residual network to tell striped images apart and prints the loss of each step.

An image of class c has stripes of frequency c + 1 under noise. Everything depends on `--seed` alone.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4
IMAGE_SIDE = 32


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut; a 1x1 convolution fits the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A stem, three stages of one block each, and a linear classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 4 * width, stride=2),
        )
        self.classifier = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)), inplace=True)
        x = F.max_pool2d(x, 2)
        x = self.stages(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classifier(F.dropout(x, 0.1, training=self.training))


def draw_batch(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Striped images under noise, and their classes."""
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    across = torch.linspace(0, 2 * torch.pi, IMAGE_SIDE)
    stripes = torch.sin((labels[:, None] + 1) * across)[:, None, None, :]
    noise = torch.randn(batch, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator)
    return stripes + 0.5 * noise, labels


def train(options: argparse.Namespace) -> None:
    """Builds the model and trains it for `options.steps` steps."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = ResNet(options.width).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    for step in range(options.steps):
        images, labels = draw_batch(options.batch, generator)
        loss = F.cross_entropy(model(images.to(options.device)), labels.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small residual network on synthetic images.")
    parser.add_argument("--device", default="cpu", help="any device torch knows: cpu, cuda, cuda:1, xpu, …")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_options())
