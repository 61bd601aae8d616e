"""ResNet-34 as in He et al., "Deep Residual Learning for Image Recognition" (2015), table 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.projection: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.projection is None else self.projection(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)


class ResNet34(nn.Module):
    """Images of shape [N, 3, H, W] to logits of shape [N, classes]."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, (width, depth) in enumerate(STAGES):
            for position in range(depth):
                blocks.append(Block(inputs, width, stride=2 if stage and not position else 1))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def first_parameter_element(model: nn.Module) -> float:
    """The first element of the first parameter: a glance at whether weights move."""
    with torch.no_grad():
        return float(next(model.parameters()).flatten()[0])
