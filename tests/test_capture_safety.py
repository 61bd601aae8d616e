"""Capture changes nothing, also where it fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import stepgraph as sg

from . import fixtures, oracle, zoo
from .fixtures import rows
from .portrait import assert_same, portrait


class Everything(nn.Module):
    """Dropout, BatchNorm, counters, plain tensors, containers, hooks, a region and an old gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("lazy", None)
        self.register_buffer("replaced", torch.zeros(4), persistent=False)
        self.plain = torch.ones(4)
        self.listed = [torch.ones(4), 3, [torch.zeros(1)]]
        self.mapped = {"a": torch.ones(4), "b": {"c": []}}
        self.names = {"x"}
        self.calls = 0
        self.first.weight.register_hook(lambda g: g * 2)
        self.norm.register_forward_hook(lambda m, args, out: out + 1)
        self.first.weight.grad = torch.ones(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False)
        hidden = self.norm(F.dropout(hidden, 0.5)) * self.listed[0] + self.mapped["a"] + self.plain
        self.n += 1
        self.replaced = self.replaced + hidden.detach().mean(0)
        self.plain *= 1.5
        return self.last(hidden)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.case("B54")
def test_capture_changes_nothing(optimizer: str, with_state: bool) -> None:
    model = Everything()
    built = OPTIMIZERS[optimizer](model)
    batch = rows(0, 6, 4)
    if with_state:
        fixtures.mean_square(model, batch).backward()
        built.step()
    before, kept = portrait(model, built), batch.clone()
    step = sg.compile_train_step(model, built, loss_fn=fixtures.mean_square, max_norm=1.0)
    step.prepare(batch)
    step.report()
    str(step.graph)
    assert_same(before, portrait(model, built))
    assert torch.equal(batch, kept)
    assert batch._version == 0


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B54")
def test_adamw_on_a_small_linear(form: dict[str, bool]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **form)
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    step.prepare(torch.ones(3, 2))
    assert_same(before, portrait(model, optimizer))
    assert not optimizer.state
    for count in (1.0, 2.0):
        step(torch.ones(3, 2))
        for entries in optimizer.state.values():
            assert isinstance(entries["step"], Tensor)
            assert entries["step"] == count
    assert step.captures == 1


@pytest.mark.parametrize(
    "name", ["gpt2", "mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "t5", "resnet", "mamba"))]
)
@pytest.mark.case("B54", "B61")
def test_capture_of_real_models_changes_nothing(name: str) -> None:
    model = zoo.ZOO[name].build()
    optimizer = torch.optim.AdamW(model.parameters())
    before = portrait(model, optimizer)
    sg.compile_train_step(model, optimizer, max_norm=1.0).prepare(zoo.ZOO[name].batch())
    assert_same(before, portrait(model, optimizer))


class Failing(Everything):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "hook":
            self.last.weight.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> Tensor:
        raise ValueError("in a hook")

    def forward(self, x: Tensor) -> Tensor:
        self.mapped["b"]["c"].append(1)
        self.names.add("y")
        self.extra = "attribute"
        if self.where == "start":
            raise ValueError("at the start")
        out = super().forward(x)
        if self.where == "end":
            raise KeyboardInterrupt
        if self.where == "data":
            assert out.sum() > 0
        if self.where == "region":
            out = checkpoint(self._region, out, use_reentrant=False)
        if self.where == "backward":
            out = FailsInBackward.apply(out)
        if self.where == "shape":
            return out
        return out.square().mean()

    def _region(self, x: Tensor) -> Tensor:
        self.listed.append(x)
        raise RuntimeError("in a region")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


class FailingSGD(torch.optim.SGD):
    """Creates state, writes parameters, and then fails."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = torch.ones_like(p)
                p.add_(1)
        raise ValueError("in step")


@pytest.mark.filterwarnings("ignore::stepgraph.StepGraphWarning")
@pytest.mark.parametrize("where", ["start", "end", "data", "region", "backward", "hook", "shape", "optimizer"])
@pytest.mark.case("B54")
def test_failing_capture_changes_nothing(where: str) -> None:
    model = Failing(where)
    optimizer = (FailingSGD if where == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(model, optimizer, max_norm=1.0)
    batch = rows(0, 6, 4)
    before = portrait(model, optimizer)
    for call in (step.prepare, step, step.verify):
        with pytest.raises(KeyboardInterrupt if where == "end" else sg.StepGraphError):
            call(batch)
        assert_same(before, portrait(model, optimizer))
    assert step.captures == 0
    model.where = "nowhere"
    model.last.weight._backward_hooks.clear() if where == "hook" else None
    if where != "optimizer":
        assert step(batch).applied, "and a later step works"


@pytest.mark.case("B54")
def test_failing_capture_can_be_followed_by_eager() -> None:
    model, twin = Failing("data"), Everything()
    twin.load_state_dict(model.state_dict())
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(sg.CaptureError):
        step(rows(0, 6, 4))
    losses = []
    for module in (model, twin):
        torch.manual_seed(0)
        losses.append(Everything.forward(module, rows(0, 6, 4)))
    assert torch.equal(*losses)


# prepare


def as_meta(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), batch)


def as_fake(batch: Any) -> Any:
    mode = FakeTensorMode()
    return torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, batch)


@pytest.mark.parametrize("kind", [lambda batch: batch, as_meta, as_fake], ids=["real", "meta", "fake"])
@pytest.mark.parametrize("name", ["MLP", "TIED", "BN", "DROP", "GPT"])
@pytest.mark.case("B54")
def test_prepare_runs_nothing_and_the_step_reuses_it(name: str, kind: Callable[[Any], Any]) -> None:
    make = fixtures.FIXTURES[name]
    fixture, eager = make(), make()
    optimizer = torch.optim.AdamW(fixture.model.parameters(), lr=0.01)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=1.0)
    before = portrait(fixture.model, optimizer)
    graph = step.prepare(kind(fixture.batch))
    assert graph is step.graph
    assert step.captures == 1
    assert step.grad_norm() is None
    assert_same(before, portrait(fixture.model, optimizer))
    batches = fixtures.batches(make, 5)
    got = oracle.graph_steps(step, fixture.model, optimizer, batches)
    assert step.captures == 1, "the prepared graph was used"
    eager_optimizer = torch.optim.AdamW(eager.model.parameters(), lr=0.01)
    oracle.assert_bitwise(oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, max_norm=1.0), got)


@pytest.mark.parametrize("kind", [as_meta, as_fake], ids=["meta", "fake"])
def test_prepare_with_layouts_and_constants(kind: Callable[[Any], Any]) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch["x"]).square().mean() * batch["scale"]

    batch = {"x": rows(0, 8, 3).t(), "scale": 2.0}
    fixture = fixtures.mlp()
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=loss_fn)
    step.prepare(kind(batch))
    with torch.no_grad():
        want = loss_fn(fixture.model, batch)
    assert torch.equal(step(batch).loss, want)
    assert step.captures == 1


def test_nothing_is_captured_before_it_is_needed() -> None:
    model = Failing("start")
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()))
    assert step.captures == 0
    with pytest.raises(sg.ConfigError, match="prepare"):
        _ = step.graph


# Python's own randomness


class Coin(nn.Module):
    """Python's and numpy's random numbers decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.a if random.random() < 0.5 else self.b
        return chosen(x) * (1.0 + numpy.random.rand())


@pytest.mark.case("B54", "B61")
def test_python_s_random_streams_are_as_before() -> None:
    model = Coin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random.seed(0)
    numpy.random.seed(0)
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer, loss_fn=fixtures.mean_square)
    with pytest.warns(sg.StepGraphWarning, match="draws from random and numpy.random"):
        step.prepare(rows(0, 3, 4))
    assert_same(before, portrait(model, optimizer))


# Python state


class Remembers(nn.Module):
    """Stores a tensor, or a number, in Python."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer = nn.Linear(4, 1)
        self.last: Any = None
        self.history: list[Any] = []
        self.nested: dict[str, list[Any]] = {"outputs": []}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.what == "attribute":
            self.last = out.detach()
        elif self.what == "list":
            self.history.append(out.detach())
        elif self.what == "nested":
            self.nested["outputs"].append(out.detach())
        elif self.what == "number":
            self.calls += 1
        return out.square().mean()


@pytest.mark.parametrize("what", ["attribute", "list", "nested"])
@pytest.mark.case("B54", "B49")
def test_tensors_left_in_python_are_refused(what: str) -> None:
    model = Remembers(what)
    optimizer = torch.optim.SGD(model.parameters())
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer)
    with pytest.raises(
        sg.CaptureError, match={"attribute": "last", "list": "history", "nested": "nested"}[what]
    ) as caught:
        step(rows(0, 3, 4))
    assert "aux" in caught.value.remedy
    assert_same(before, portrait(model, optimizer))


@pytest.mark.case("B54")
def test_numbers_left_in_python_warn_and_stay() -> None:
    model = Remembers("number")
    optimizer = torch.optim.SGD(model.parameters())
    before = portrait(model, optimizer)
    step = sg.compile_train_step(model, optimizer)
    with pytest.warns(sg.StepGraphWarning, match="calls"):
        step.prepare(rows(0, 3, 4))
    assert_same(before, portrait(model, optimizer))
    assert "calls" in step.report()
