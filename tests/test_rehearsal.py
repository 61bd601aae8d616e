"""The memory of updates that are one call of the optimizer's own step(): found out before they run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .peaks import peak_of_step


def narrow() -> nn.Module:
    """Its parameters are large beside its activations, so that the update is where the step needs most."""
    torch.manual_seed(0)
    layers = [nn.Linear(48, 96, bias=False), nn.GELU(), nn.Linear(96, 48, bias=False)]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))


class Counting(torch.optim.Optimizer):
    """Keeps its state in itself as well, counts in it, and reads the largest gradient."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps = 0
        self.average: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                self.average.setdefault(index, torch.zeros_like(param)).lerp_(param.grad, 0.1)
                self.state[param].setdefault("largest", []).append(param.grad.abs().amax(0))
                del self.state[param]["largest"][:-2]
                if param.grad.abs().max() > 1e-9:
                    param.sub_(torch.outer(param[:, 0], param[0]), alpha=group["lr"])


class OfNumpy(torch.optim.SGD):
    """Reads values outside of torch."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.numpy()
        return super().step(closure)


def _hooked(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def build(params: Any) -> torch.optim.Optimizer:
        optimizer = kind(params, **options)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    return build


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "radam": oracle.OTHER_OPTIMIZERS["radam"],
    "radam_foreach": lambda params: torch.optim.RAdam(params, foreach=True),
    "asgd": oracle.OTHER_OPTIMIZERS["asgd"],
    "asgd_foreach": lambda params: torch.optim.ASGD(params, foreach=True),
    "adafactor": oracle.OTHER_OPTIMIZERS["adafactor"],
    "adafactor_foreach": lambda params: torch.optim.Adafactor(params, foreach=True),
    "sgd_hooked": _hooked(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw_fused_hooked": _hooked(torch.optim.AdamW, fused=True),
    "muon_hooked": _hooked(torch.optim.Muon, lr=0.01),
    "muon": oracle.OTHER_OPTIMIZERS["muon"],  # traced: its products need memory of their own
}


def _compiled(model: nn.Module, optimizer: torch.optim.Optimizer, plan: str, budget: int | None = None) -> sg.TrainStep:
    return sg.compile_train_step(model, optimizer, plan, memory_budget=budget, loss_fn=fixtures.mean_square)


@pytest.mark.parametrize("rows", [8, 256])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.feature("MEM-1")
def test_the_least_budget_is_kept(name: str, rows: int) -> None:
    """Where the update needs most, and where backward does. RAdam needs most from its sixth step on."""
    batch = torch.randn(rows, 48, generator=torch.Generator().manual_seed(0))

    def build(budget: int) -> sg.TrainStep:
        model = narrow()
        return _compiled(model, OPTIMIZERS[name](model.parameters()), "auto", budget)

    with pytest.raises(sg.PlanError) as error:
        build(1).prepare(batch)
    budget = error.value.least_bytes
    step = build(budget)
    peaks = [peak_of_step(step, batch)[1] for _ in range(8)]
    predicted = step.plan.prediction
    assert predicted.peak_bytes == budget
    assert budget * 0.999 <= max(peaks) <= budget
    assert predicted.by_category.get("optimizer state", 0) == pytest.approx(_state_bytes(step.optimizer), abs=4)
    notes = [note for note in step.plan.notes if "hooks of" in note]
    assert len(notes) == ("hooked" in name)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor))


def test_updates_of_radam_are_one_call_from_the_first_on() -> None:
    model = narrow()
    step = _compiled(model, torch.optim.RAdam(model.parameters()), "none")
    for _ in range(2):
        step(torch.ones(4, 48))
    assert step.update_traces == 1
    assert "the update is one call of the optimizer's own step(), since RAdam.step() branches" in step.report()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rehearsal_changes_nothing(steps: int) -> None:
    model = narrow()
    optimizer = Counting(model.parameters())
    step = _compiled(model, optimizer, "none")
    batch = torch.ones(8, 48)
    for _ in range(steps):
        step(batch)
    step.prepare(batch)
    held = (optimizer.state_dict(), optimizer.average, model.state_dict())
    before, random_before = copy.deepcopy(held), torch.get_rng_state()
    predicted = step.plan.prediction
    assert optimizer.steps == steps
    oracle.assert_same(before, (optimizer.state_dict(), optimizer.average, model.state_dict()))
    assert torch.equal(random_before, torch.get_rng_state())
    parameter_bytes = 96 * 48 * 4
    assert predicted.by_category["workspace"] == pytest.approx(parameter_bytes, abs=512)  # an outer product
    assert predicted.by_category["optimizer state"] == pytest.approx(
        6 * parameter_bytes + 2 * 3 * (96 + 48) * 4, abs=64
    )


def test_float32_masters_are_what_is_rehearsed() -> None:
    model = narrow().to(torch.bfloat16)
    batch = torch.randn(8, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    step = sg.compile_train_step(
        model, torch.optim.RAdam(model.parameters()), "none", loss_fn=fixtures.mean_square, master_weights=True
    )
    step(batch)
    predicted = step.plan.prediction
    assert predicted.by_category["optimizer state"] == pytest.approx(_state_bytes(step.optimizer), abs=4)
    for _ in range(8):
        step.measure(batch)
    found = step._measured
    assert found is not None
    assert found.peak_bytes == pytest.approx(predicted.peak_bytes, rel=1e-3)
    assert found.peak_bytes <= predicted.peak_bytes


def test_a_first_step_is_measured_as_one() -> None:
    model = narrow()
    step = _compiled(model, torch.optim.RAdam(model.parameters()), "none")
    batch = torch.ones(8, 48)
    step.measure(batch)
    assert "in a first step, which creates the optimizer's state" in step.report()
    for _ in range(8):
        step.measure(batch)
    found = step._measured
    assert found is not None
    assert not found.creates_state
    assert found.categories["optimizer state"][0] == pytest.approx(_state_bytes(step.optimizer), abs=4)
    assert found.peak_bytes == pytest.approx(found.predicted_bytes, rel=1e-3)


def test_a_step_that_cannot_be_rehearsed_is_told() -> None:
    model = narrow()
    step = _compiled(model, _hooked(OfNumpy, lr=0.1)(model.parameters()), "none")
    step.prepare(torch.ones(8, 48))
    (note,) = step.plan.notes
    assert "OfNumpy.step" in note
    assert "not counted" in note


def test_the_clock_counts_the_operators_of_the_update() -> None:
    def seconds(optimizer: Callable[[Any], torch.optim.Optimizer]) -> float:
        model = narrow()
        step = _compiled(model, optimizer(model.parameters()), "none")
        step.prepare(torch.ones(8, 48))
        return step.plan.prediction.seconds_by_stage["update"]

    traced = seconds(lambda params: torch.optim.AdamW(params, foreach=False))
    opaque = seconds(_hooked(torch.optim.AdamW, foreach=False))
    assert opaque == pytest.approx(traced, rel=0.3)
