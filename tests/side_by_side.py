"""Eager and the graph on twins of one model, step after step, equal in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import stepgraph as sg

from . import fixtures, oracle


def compare(
    build: Callable[[], nn.Module],
    batches: list[Any],
    loss_fn: fixtures.LossFn = fixtures.mean_square,
    *,
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw_foreach",
    max_norm: float | None = 0.1,
) -> sg.TrainStep:
    """Five steps of eager and of the graph on twins, equal in every bit; returns the compiled step."""
    eager_model, graph_model = oracle.twin(build)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(optimizer, str):
            return oracle.OPTIMIZERS[optimizer](oracle.two_groups(model))
        return optimizer(model)

    eager_optimizer, graph_optimizer = make(eager_model), make(graph_model)
    steps = [n for n in oracle.CHECKPOINTS if n <= len(batches)]
    want = oracle.eager_steps(eager_model, eager_optimizer, loss_fn, batches, max_norm=max_norm, checkpoints=steps)
    step = sg.compile_train_step(graph_model, graph_optimizer, loss_fn=loss_fn, max_norm=max_norm, master_weights=False)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph_model, graph_optimizer, batches, checkpoints=steps))
    return step


class SideBySide:
    """Eager and the graph on twins, step after step, with the same thing done to both in between."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss_fn: fixtures.LossFn,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        max_norm: float | None = 1.0,
    ) -> None:
        self.eager, self.model = oracle.twin(build)
        self.eager_optimizer, self.optimizer = optimizer(self.eager), optimizer(self.model)
        self.loss_fn, self.max_norm = loss_fn, max_norm
        self.step = sg.compile_train_step(
            self.model, self.optimizer, loss_fn=loss_fn, max_norm=max_norm, master_weights=False
        )
        self.count = 0

    def run(self, batch: Any, steps: int = 1) -> None:
        """The same steps in both, which then agree in every bit."""
        for _ in range(steps):
            self.count += 1
            (want,) = oracle.eager_steps(
                self.eager,
                self.eager_optimizer,
                self.loss_fn,
                [batch],
                max_norm=self.max_norm,
                checkpoints=(1,),
                seed=self.count,
            ).values()
            (got,) = oracle.graph_steps(
                self.step, self.model, self.optimizer, [batch], checkpoints=(1,), seed=self.count
            ).values()
            oracle.assert_bitwise(want, got)

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        """Does the same to both."""
        change(self.eager, self.eager_optimizer)
        change(self.model, self.optimizer)


def mlp_pair(optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> SideBySide:
    return SideBySide(lambda: fixtures.mlp().model, fixtures.squared_error, optimizer, **options)


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})


def sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
