"""Optimizers beyond those of the zoo tests: right, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle

ALL = {**oracle.OPTIMIZERS, **oracle.OTHER_OPTIMIZERS}
BRANCH_ON_DATA = {"radam", "asgd", "adafactor"}


def compare(build_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer], steps: int = 5) -> sg.TrainStep:
    """Eager and graph on twins of MLP, bit for bit after every step; returns the compiled step."""
    eager_model, graph_model = oracle.twin(lambda: fixtures.mlp().model)
    batches = fixtures.batches(fixtures.mlp, steps)
    every = range(1, steps + 1)
    eager = oracle.eager_steps(
        eager_model, build_optimizer(eager_model.parameters()), fixtures.squared_error, batches, checkpoints=every
    )
    optimizer = build_optimizer(graph_model.parameters())
    step = sg.compile_train_step(graph_model, optimizer, loss_fn=fixtures.squared_error)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, graph_model, optimizer, batches, checkpoints=every))
    return step


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_is_right_or_refused(name: str) -> None:
    if name in BRANCH_ON_DATA:
        with pytest.raises(sg.CaptureError, match=r"step\(\) branches on the value of a tensor") as caught:
            compare(ALL[name])
        assert "not supported yet" in str(caught.value)
    else:
        assert compare(ALL[name]).captures == 1


class Custom(torch.optim.Optimizer):
    """Gradient descent, with a way to misbehave."""

    def __init__(self, params: Iterable[Tensor], misbehave: Callable[[Custom, Tensor], None]) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.misbehave = misbehave
        self.history: list[Any] = []
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.misbehave(self, param)
                param.data.add_(param.grad, alpha=-group["lr"])


def counts(optimizer: Custom, param: Tensor) -> None:
    optimizer.count += 1


def counts_in_group(optimizer: Custom, param: Tensor) -> None:
    optimizer.param_groups[0]["k"] += 1


def adds_to_group(optimizer: Custom, param: Tensor) -> None:
    optimizer.param_groups[0]["new"] = 1.0


def remembers(optimizer: Custom, param: Tensor) -> None:
    optimizer.history.append(param.grad)


def counts_in_state(optimizer: Custom, param: Tensor) -> None:
    optimizer.state[param]["step"] = optimizer.state[param].get("step", 0) + 1


def flags_in_state(optimizer: Custom, param: Tensor) -> None:
    optimizer.state[param]["begun"] = True


def keeps_global_state(optimizer: Custom, param: Tensor) -> None:
    optimizer.state["all"]["t"] = torch.zeros(())  # type: ignore[index]


def assigns_data(optimizer: Custom, param: Tensor) -> None:
    param.data = param.data * 0.5


def behaves(optimizer: Custom, param: Tensor) -> None:
    optimizer.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)  # type: ignore[arg-type]


def test_custom_optimizer_with_tensor_state() -> None:
    compare(lambda params: Custom(params, behaves))


@pytest.mark.parametrize(
    "misbehave",
    [
        counts,
        counts_in_group,
        adds_to_group,
        remembers,
        counts_in_state,
        flags_in_state,
        keeps_global_state,
        assigns_data,
    ],
)
def test_state_that_a_graph_cannot_carry_is_refused(misbehave: Callable[[Custom, Tensor], None]) -> None:
    model = nn.Linear(3, 2)
    optimizer = Custom(model.parameters(), misbehave)
    before = [p.detach().clone() for p in model.parameters()]
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    with pytest.raises((sg.CaptureError, sg.NotYetError), match=r"step\(\)|state"):
        step(torch.ones(4, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.history == []
    assert (optimizer.count, optimizer.param_groups[0]["k"], len(optimizer.state)) == (0, 0, 0)


def test_numpy_numbers_are_refused_and_floats_of_numpy_taken() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    step(torch.ones(4, 3))
    optimizer.param_groups[0]["lr"] = np.float64(0.05)
    assert step.verify(torch.ones(4, 3)).equal
    optimizer.param_groups[0]["lr"] = np.float32(0.05)
    with pytest.raises(sg.CaptureError, match="is a numpy.float32"):
        step(torch.ones(4, 3))
    assert step.captures == 1


def test_a_learning_rate_that_becomes_a_tensor() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    for lr in (0.1, torch.tensor(0.05), 0.02):
        optimizer.param_groups[0]["lr"] = lr
        assert step.verify(torch.ones(4, 3)).equal
        step(torch.ones(4, 3))
