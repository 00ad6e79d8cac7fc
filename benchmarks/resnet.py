"""ResNet-50 (He et al., "Deep residual learning for image recognition", 2015), for images of any size."""

from __future__ import annotations

import torch
from torch import nn

WIDTHS, BLOCKS, GROWTH, CLASSES = (64, 128, 256, 512), (3, 4, 6, 3), 4, 1000


def _build_convolution(channels: int, width: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its batch normalization."""
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut around them. `stride` is that of the middle convolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * GROWTH
        self.reduce, self.middle = _build_convolution(channels, width, 1), _build_convolution(width, width, 3, stride)
        self.widen = _build_convolution(width, out, 1)
        self.shortcut = (
            nn.Identity() if (channels, stride) == (out, 1) else _build_convolution(channels, out, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.middle(torch.relu(self.reduce(x))))
        return torch.relu(self.widen(inner) + self.shortcut(x))


class ResNet50(nn.Module):
    """The classifier of 25,557,032 parameters: (batch, 3, height, width) to (batch, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = [_build_convolution(3, WIDTHS[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = WIDTHS[0]
        for stage, (width, blocks) in enumerate(zip(WIDTHS, BLOCKS, strict=True)):
            for block in range(blocks):
                stages.append(Bottleneck(channels, width, 2 if stage > 0 and block == 0 else 1))
                channels = width * GROWTH
        self.features = nn.Sequential(*stages)
        self.classes = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classes(self.features(x).mean((2, 3)))
        return scores
