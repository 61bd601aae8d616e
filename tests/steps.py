"""A small compiled step, for tests of what is around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stepgraph as sg

from . import fixtures


def linear(width: int = 4, groups: int = 1, **options: Any) -> sg.TrainStep:
    """Two layers under AdamW, in one group or a group each, after a first call."""
    with fixtures.seeded(0):
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    params = list(model.parameters())
    parts = [params] if groups == 1 else [params[:2], params[2:]]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), **options)
    step(fixtures.rows(0, 2, 3))
    return step
