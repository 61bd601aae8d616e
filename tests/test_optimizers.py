"""Every optimizer: traced, or run as one opaque call; hyperparameters, hooks, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import stepgraph as sg

from . import fixtures, oracle
from .side_by_side import SideBySide

ALL = {**oracle.OPTIMIZERS, **oracle.OTHER_OPTIMIZERS}
OPAQUE = {"radam", "asgd", "adafactor"}
BuildOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def matrices() -> nn.Module:
    """Two layers without biases: Muon takes matrices only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def pair_with(build_optimizer: BuildOptimizer) -> SideBySide:
    """Eager and graph on twins; two groups, the second with half the learning rate."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer([{"params": list(layer.parameters())} for layer in (model[0], model[2])])
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"] / 2
        return optimizer

    return SideBySide(matrices, fixtures.squared_error, build)


def is_opaque(step: sg.TrainStep) -> bool:
    return any(op.endswith(".step") for op in step.graph.op_counts())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.case("B47")
def test_every_optimizer_over_a_schedule_and_changes_of_weight_decay(name: str) -> None:
    """Bitwise after every step; a value costs nothing, crossing zero traces the update again, once."""
    pair = pair_with(ALL[name])
    batch = fixtures.mlp().batch
    schedulers: list[LambdaLR] = []
    pair.both(lambda _, o: schedulers.append(LambdaLR(o, lambda t: 1 / (t + 1))))

    def run(steps: int) -> None:
        for _ in range(steps):
            pair.run(batch)
            for scheduler in schedulers:
                scheduler.step()

    def decay(value: float) -> None:
        pair.both(lambda _, o: [group.update(weight_decay=value) for group in o.param_groups])

    has_decay = "weight_decay" in pair.optimizer.defaults
    if has_decay:
        decay(0.1)
    run(2)
    traces = pair.step.update_traces
    assert traces <= 2  # the first update, which creates state, and the steady one
    if has_decay:
        decay(0.05)
        run(1)
        assert pair.step.update_traces == traces
        decay(0.0)
        run(2)
        branches = name not in OPAQUE and "fused" not in name and name != "muon"  # on weight decay
        assert pair.step.update_traces == traces + branches
    run(1)
    assert pair.step.captures == 1
    assert is_opaque(pair.step) is (name in OPAQUE)


@pytest.mark.parametrize("name", sorted(OPAQUE))
def test_an_opaque_update_says_why_and_leaves_grad_alone(name: str) -> None:
    pair = pair_with(ALL[name])
    kept = torch.ones(16, 8)
    pair.model[0].weight.grad = kept
    for _ in range(2):  # RAdam's first update knows its step count, and is traced
        pair.step(fixtures.mlp().batch)
    assert pair.model[0].weight.grad is kept
    assert pair.model[2].weight.grad is None
    report = pair.step.report()
    assert "one call of the optimizer's own step(), since" in report
    assert "branches on the value of a tensor" in report
    assert pair.step.verify(fixtures.mlp().batch).equal


@pytest.mark.parametrize("name", ["adamw_fused", "radam"])
def test_a_skipped_step_leaves_every_optimizer_alone(name: str) -> None:
    pair = pair_with(ALL[name])
    x, y = fixtures.mlp().batch
    pair.run((x, y), steps=2)
    before = copy.deepcopy(pair.optimizer.state_dict())
    assert pair.step((x * float("nan"), y)).skipped
    oracle.assert_same(before, pair.optimizer.state_dict())
    pair.run((x, y))


HOOKS: dict[str, Callable[[torch.optim.Optimizer, list[Any]], Any]] = {
    "reads gradients": lambda o, seen: o.register_step_pre_hook(
        lambda opt, a, k: seen.append(opt.param_groups[0]["params"][0].grad.norm().item())
    ),
    "changes gradients": lambda o, seen: o.register_step_pre_hook(
        lambda opt, a, k: [p.grad.mul_(0.5) for g in opt.param_groups for p in g["params"]] and None
    ),
    "replaces gradients": lambda o, seen: o.register_step_pre_hook(
        lambda opt, a, k: [setattr(p, "grad", p.grad.sign()) for g in opt.param_groups for p in g["params"]] and None
    ),
    "reads state": lambda o, seen: o.register_step_post_hook(
        lambda opt, a, k: seen.append(sorted(map(str, next(iter(opt.state.values())))))
    ),
    "writes parameters": lambda o, seen: o.register_step_post_hook(
        lambda opt, a, k: [p.data.clamp_(-0.2, 0.2) for g in opt.param_groups for p in g["params"]] and None
    ),
}


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_fused", "radam"])
@pytest.mark.parametrize("hook", HOOKS)
def test_step_hooks_run_as_in_eager(name: str, hook: str) -> None:
    """From the first step or later on, and until they are removed."""
    pair = pair_with(ALL[name])
    batch = fixtures.mlp().batch
    seen: dict[int, list[Any]] = {id(pair.optimizer): [], id(pair.eager_optimizer): []}
    handles: list[Any] = []
    pair.both(lambda _, o: handles.append(HOOKS[hook](o, seen[id(o)])))
    pair.run(batch, steps=2)
    assert pair.step.verify(batch).equal
    mine, theirs = seen[id(pair.optimizer)], seen[id(pair.eager_optimizer)]
    assert mine[: len(theirs)] == theirs
    assert len(theirs) == (2 if "reads" in hook else 0)
    for handle in handles:
        handle.remove()
    pair.run(batch, steps=2)
    assert is_opaque(pair.step) is (name in OPAQUE)
    assert pair.step.captures == 1


def test_hooks_of_all_optimizers_run_too() -> None:
    pair = pair_with(ALL["sgd_momentum"])
    seen: list[str] = []
    handle = register_optimizer_step_post_hook(lambda opt, a, k: seen.append(type(opt).__name__))
    try:
        pair.step(fixtures.mlp().batch)
    finally:
        handle.remove()
    assert seen == ["SGD"]


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


def branches(optimizer: Custom, param: Tensor) -> None:
    if param.grad.abs().max() > 1e-3:  # type: ignore[union-attr]
        param.data.mul_(0.9)


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
    pair = pair_with(lambda params: Custom(params, behaves))
    pair.run(fixtures.mlp().batch, steps=3)
    assert not is_opaque(pair.step)


@pytest.mark.parametrize(
    "misbehave",
    [
        branches,
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
def test_what_a_graph_cannot_carry_makes_the_update_opaque(misbehave: Callable[[Custom, Tensor], None]) -> None:
    """The optimizer's own step() runs then, so that it may do what it likes; verify undoes it."""
    pair = pair_with(lambda params: Custom(params, misbehave))
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)

    def remembered(optimizer: Any) -> Any:
        return copy.deepcopy((optimizer.state_dict(), optimizer.history, optimizer.count))

    before = remembered(pair.optimizer)
    assert pair.step.verify(batch).equal
    oracle.assert_same(before, remembered(pair.optimizer))
    oracle.assert_same(remembered(pair.eager_optimizer), before)
    assert is_opaque(pair.step)
    assert pair.step.captures == 1


class SparingVectors(torch.optim.SGD):
    """Leaves parameters alone that have a gradient, which counts in the norm nevertheless."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim > 1:
                    param.sub_(param.grad, alpha=group["lr"])


def test_an_optimizer_that_leaves_parameters_alone() -> None:
    pair = SideBySide(
        lambda: fixtures.mlp().model, fixtures.squared_error, lambda m: SparingVectors(m.parameters(), lr=0.1)
    )
    pair.run(fixtures.mlp().batch, steps=3)
    assert is_opaque(pair.step)
    assert "does not read the gradient of" in pair.step.report()


def test_a_step_that_fails_is_refused_and_changes_nothing() -> None:
    def fails(optimizer: Custom, param: Tensor) -> None:
        raise RuntimeError("out of ideas")

    model = matrices()
    before = [p.detach().clone() for p in model.parameters()]
    step = sg.compile_train_step(model, Custom(model.parameters(), fails), loss_fn=fixtures.squared_error)
    with pytest.raises(sg.CaptureError, match=r"Custom.step\(\) failed: RuntimeError: out of ideas"):
        step(fixtures.mlp().batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class NeedsClosure(torch.optim.SGD):
    """Evaluates the loss itself."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure])
def test_optimizers_that_evaluate_the_loss_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    model = matrices()
    with pytest.raises(sg.ConfigError, match="closure"):
        sg.compile_train_step(model, kind(model.parameters()), loss_fn=fixtures.squared_error)  # type: ignore[call-arg]


def test_numbers_of_numpy() -> None:
    """float64 is a float; arithmetic with float32 is its own."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    for lr, opaque in ((0.1, False), (np.float64(0.05), False), (np.float32(0.05), True), (1, False), (0.1, False)):
        optimizer.param_groups[0]["lr"] = lr
        assert step.verify(torch.ones(4, 3)).equal
        step(torch.ones(4, 3))
        assert is_opaque(step) is opaque
    assert step.captures == 1


def test_a_learning_rate_that_becomes_a_tensor() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    for lr in (0.1, torch.tensor(0.05), 0.02):
        optimizer.param_groups[0]["lr"] = lr
        assert step.verify(torch.ones(4, 3)).equal
        step(torch.ones(4, 3))
