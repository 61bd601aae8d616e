"""Modules beside the model, plain attributes of every kind, and calls that belong outside of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures
from .fixtures import rows

X, CLASSES = rows(0, 6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def assert_follows(
    step: sg.TrainStep, loss: Callable[[], Tensor], batch: Any, changes: dict[str, Callable[[], Any]]
) -> None:
    """After each change the step computes the loss that eager computes then."""
    for name, change in {"nothing": lambda: None, **changes}.items():
        change()
        torch.manual_seed(0)
        want = loss().detach()
        torch.manual_seed(0)
        assert torch.equal(step(batch).loss, want), name


@pytest.mark.case("B48")
def test_a_criterion_that_changes_is_followed() -> None:
    with fixtures.seeded(0):
        model = nn.Linear(4, 3)
    criterion = nn.CrossEntropyLoss()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion=criterion)
    changes: dict[str, Callable[[], Any]] = {
        "a number": lambda: setattr(criterion, "label_smoothing", 0.3),
        "and back": lambda: setattr(criterion, "label_smoothing", 0.0),
        "a string": lambda: setattr(criterion, "reduction", "sum"),
        "a buffer that is bound": lambda: setattr(criterion, "weight", torch.tensor([1.0, 2.0, 3.0])),
        "another buffer": lambda: setattr(criterion, "weight", torch.tensor([3.0, 2.0, 3.0])),
        "a buffer that is written": lambda: criterion.weight.mul_(2.0),  # type: ignore[union-attr]
    }
    assert_follows(step, lambda: criterion(model(X), CLASSES), (X, CLASSES), changes)
    assert step.captures == 5


@pytest.mark.case("B48")
def test_a_teacher_in_the_loss_is_followed() -> None:
    with fixtures.seeded(0):
        model, teacher = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()

    def distilled(student: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(student(x), target)

    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=distilled)
    state = {name: value + 1.0 for name, value in teacher.state_dict().items()}
    changes: dict[str, Callable[[], Any]] = {
        "mode": lambda: teacher.train(),
        "back to the first mode": lambda: teacher.eval(),
        "new values": lambda: teacher.load_state_dict(state),
        "a new parameter": lambda: setattr(teacher[0], "weight", nn.Parameter(rows(1, 3, 4))),
        "new parameters": lambda: teacher.load_state_dict(state, assign=True),
        "a new layer": lambda: teacher.__setitem__(0, nn.Linear(4, 3)),
        "a hook": lambda: None,
    }
    assert_follows(step, lambda: distilled(model, X), X, changes)
    assert step.captures == 5


class Attributes(nn.Module):
    """Reads attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.activation: Any = F.gelu
        self.factors = [1.0]
        self.sizes: dict[str, Any] = {"a": (1, 2)}
        self.names = {"x", "y"}
        self.dtype = torch.float32
        self.scale = np.float32(2.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.layer(x)) * self.factors[0] * self.sizes["a"][0] * len(self.names)
        return (hidden.to(self.dtype) * float(self.scale)).float()


def test_plain_attributes_of_every_kind_are_followed() -> None:
    with fixtures.seeded(0):
        model = Attributes()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, x: m(x).square().mean()
    )
    changes: dict[str, Callable[[], Any]] = {
        "a builtin function": lambda: setattr(model, "activation", torch.tanh),
        "another builtin function": lambda: setattr(model, "activation", torch.relu),
        "a list that is bound": lambda: setattr(model, "factors", [3.0]),
        "an item of a list": lambda: model.factors.__setitem__(0, 4.0),
        "an item of a dict": lambda: model.sizes.update(a=(2, 2)),
        "a set": lambda: model.names.add("z"),
        "a dtype": lambda: setattr(model, "dtype", torch.bfloat16),
        "a number of numpy": lambda: setattr(model, "scale", np.float32(3.0)),
    }
    with pytest.warns(sg.StepGraphWarning, match="captures so far"):
        assert_follows(step, lambda: model(X).square().mean(), X, changes)
    assert step.captures == 9
    step(X)
    assert step.captures == 9


# What belongs outside of the loss


def test_schedulers_and_optimizers_inside_of_the_loss_are_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    inside: dict[str, Callable[[], Any]] = {
        r"ExponentialLR\.step": lambda: scheduler.step(),
        r"ReduceLROnPlateau\.step": lambda: plateau.step(1.0),
        r"SGD\.step": optimizer.step,
        "compiled step is called inside": lambda: other(X),
    }
    other = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    for says, call in inside.items():

        def loss(m: nn.Module, x: Tensor, call: Callable[[], Any] = call) -> Tensor:
            call()
            return fixtures.mean_square(m, x)

        with pytest.raises(sg.StepGraphError, match=says):
            sg.compile_train_step(model, optimizer, loss_fn=loss)(X)
    assert optimizer.param_groups[0]["lr"] == 0.1
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "text": lambda loss: f"{loss.item():.3f}",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_read_for_logging_say_to_return_the_tensor(read: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(4, 3)

    def logged(m: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = fixtures.mean_square(m, x)
        return loss, {"loss": read(loss)}

    with pytest.raises(sg.CaptureError, match="return the tensor"):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=logged)(X)


# Failures that only real values show

FAILING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "float64 batch after BatchNorm": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), X.double()),
    "float64 batch after dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)), X.double()),
    "index out of range": (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Dropout(0.5)), torch.tensor([1, 9])),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_first_run_that_fails_is_told_with_its_place_and_undone(name: str) -> None:
    build, batch = FAILING[name]
    model = build()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, x: m(x).float().square().mean()
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(sg.CaptureError, match="first run of the step failed") as caught:
            step(batch)
        assert "works in eager" in str(caught.value)
        assert caught.value.module_path in ("0", "1")
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert step.captures == 0
