"""A network of the size and shape of ResNet-50 (25.6 million weights, 4.1 GFLOP per image), with random weights.

It needs only torch. Narrow and on small images it runs on a CPU, to try the benchmark itself.
"""

from __future__ import annotations

import torch
from torch import nn

CLASSES = 1000
BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, outputs, 1, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """Images [N, 3, size, size] to CLASSES numbers each; `width` is 64 in ResNet-50."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage, blocks in enumerate(BLOCKS):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * (width << stage)
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))

    def forward(self, INPUT: torch.Tensor) -> torch.Tensor:
        return self.layers(INPUT)


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)
