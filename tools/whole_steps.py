"""What only whole steps show of a machine: operators amid others take longer than when they are called over and over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn

from ..api import compile_train_step
from ..planner import HardwareSpec
from ..planner.cost import beside_seconds, node_seconds
from .undisturbed import seconds_in_turns

_TURN_SECONDS = 0.02
_TURNS = 20  # undisturbed ones, of each step


class _Sizes(NamedTuple):
    blocks: int
    width: int
    hidden: int
    length: int
    rows: int


_STEPS = (
    _Sizes(blocks=0, width=32, hidden=64, length=16, rows=2),
    _Sizes(blocks=1, width=32, hidden=64, length=16, rows=2),
    _Sizes(blocks=3, width=32, hidden=64, length=16, rows=2),
    _Sizes(blocks=2, width=64, hidden=256, length=256, rows=4),
    _Sizes(blocks=2, width=256, hidden=1024, length=64, rows=6),
)


class WholeSteps:
    """What a step takes beside its operators, and how much longer these take in it.

    Five steps tell it: three of small operators, few to many, one of large operators that are bound by memory, and one of large
    products. What they take is linear in four unknowns: the step's own, first calls of operators, the factor of launches, and
    that of the rest; the least squares of relative errors are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = [_TrialStep(sizes, device) for sizes in _STEPS]
        self._seconds = np.full(len(_STEPS), np.inf)

    def measure(self) -> None:
        """Runs the steps; of several measurements, some time apart, the least of each step counts."""
        calls = {number: step.run for number, step in enumerate(self._steps)}
        found = np.array(list(seconds_in_turns(calls, _TURNS, _TURN_SECONDS, self._device).values()))
        self._seconds = np.minimum(self._seconds, found)

    def told(self, spec: HardwareSpec) -> HardwareSpec:
        """The spec with what they say, by its tables of operators."""
        spec = replace(spec, step_seconds=0.0, first_call_seconds=0.0, launch_factor=1.0, amid_factor=1.0)
        measured = self._seconds

        def predicted(change: dict[str, Any]) -> np.ndarray:
            return np.array([step.predicted(replace(spec, **change)) for step in self._steps])

        plain = predicted({})
        launches, rest = (predicted({name: 2.0}) - plain for name in ("launch_factor", "amid_factor"))
        kinds = predicted({"first_call_seconds": 1.0}) - plain
        columns = np.column_stack([np.ones(len(measured)), kinds, launches, rest]) / measured[:, None]
        beside = (measured - (plain - launches - rest)) / measured
        lower, upper = zip(*[(0.0, np.inf)] * 2, *[(0.5, 5.0)] * 2, strict=True)
        own, first_call, launch, amid = map(float, lsq_linear(columns, beside, (lower, upper)).x)
        return replace(spec, step_seconds=own, first_call_seconds=first_call, launch_factor=launch, amid_factor=amid)


class _TrialStep:
    """A step of a small transformer."""

    def __init__(self, sizes: _Sizes, device: torch.device) -> None:
        model = _Model(sizes).to(device)
        step = compile_train_step(model, torch.optim.AdamW(model.parameters(), fused=True), plan="none")
        batch = torch.randn(sizes.rows, sizes.length, sizes.width, device=device)
        step(batch)
        self._graph = step.prepare(batch)
        self.run: Callable[[], Any] = functools.partial(step, batch)

    def predicted(self, spec: HardwareSpec) -> float:
        """Seconds of the step."""
        return sum(map(node_seconds(spec), self._graph.calls)) + beside_seconds(self._graph, spec)


class _Model(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[_Block(sizes.width, sizes.hidden) for _ in range(sizes.blocks)])
        self.head = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.blocks(x)).square().mean()
        return loss


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = (heads[0] @ heads[1].transpose(-2, -1) / 2.0).softmax(-1) @ heads[2]
        x = x + self.out(scores.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result
