"""Buffers that forward writes, and tensors that are registered nowhere, bit for bit eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import inputs, rows
from .side_by_side import compare

# B49: buffers that forward writes


class Discarded(nn.Module):
    """Calls BatchNorm and drops its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.norm(hidden)
        return hidden


class Counting(nn.Module):
    """Every way to write a buffer; the loss depends on what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("queue", torch.zeros(3, 4))
        self.register_buffer("copied", torch.zeros(4))
        self.plain = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.n += 1
        self.replaced = self.replaced + 1
        self.cache[0] = x.sum()
        self.cache[1:] = self.cache[:2].clone()
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.queue = torch.cat([self.queue[1:], hidden[:1].detach()])
        self.copied.copy_(hidden.detach()[0])
        self.plain += x.sum(0)
        return hidden + self.mean + self.cache.sum() / self.n + self.queue.mean() + self.replaced + self.plain


@pytest.mark.parametrize("build", [lambda: fixtures.bn().model, Discarded, Counting])
@pytest.mark.case("B49")
def test_buffers_are_those_of_eager(build: Callable[[], nn.Module]) -> None:
    step = compare(build, inputs(6, 4))
    eager, _ = oracle.twin(build)
    for batch in inputs(6, 4, steps=1):
        eager(batch)
    assert step.model.state_dict().keys() == eager.state_dict().keys()
    step = compare(build, inputs(6, 4, steps=5), optimizer="sgd", max_norm=None)
    if build is Counting:
        assert step.model.n == 5
        assert step.model.replaced == 5
        assert torch.allclose(step.model.plain, torch.stack(inputs(6, 4)).sum((0, 1)), atol=1e-5)
    elif build is Discarded:
        assert step.model.norm.num_batches_tracked == 5


@pytest.mark.case("B49")
def test_counter_and_cache_after_three_steps() -> None:
    model = Counting()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square)
    for batch in inputs(6, 4, steps=3):
        step(batch)
    sums = [batch.sum() for batch in inputs(6, 4, steps=3)]
    assert model.n == 3
    assert torch.equal(model.cache, torch.stack([sums[2], sums[2], sums[1]]))


class Shifted(nn.Module):
    """Buffers that take each other's places, registered in either order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for index, name in enumerate(names):
            self.register_buffer(name, torch.full((4,), float(index)))

    def forward(self, x: Tensor) -> Tensor:
        self.oldest = self.previous
        self.previous = self.current
        self.current = x.mean(0)
        self.left, self.right = self.right, self.left
        return self.linear(x) + self.oldest - self.previous + self.left * 2


ORDERS = [
    ("current", "previous", "oldest", "left", "right"),
    ("right", "left", "oldest", "previous", "current"),
]


@pytest.mark.parametrize("order", ORDERS, ids=["newest_first", "newest_last"])
@pytest.mark.case("B49")
def test_buffers_that_change_places(order: tuple[str, ...]) -> None:
    compare(lambda: Shifted(order), inputs(6, 4))


class Late(nn.Module):
    """A buffer that starts as None and is set by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + x.mean(0)
        return self.linear(x) + self.mean


class Registering(nn.Module):
    """Registers a buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4))
        self.mean += x.mean(0)
        return self.linear(x) + self.mean


class Dropping(nn.Module):
    """Sets a buffer to None in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("once", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.once is not None:
            hidden = hidden + self.once
            self.once = None
        return hidden


@pytest.mark.parametrize("build", [Late, Registering, Dropping])
@pytest.mark.case("B49", "B54")
def test_buffers_that_come_and_go_are_eager_s_or_refused(build: Callable[[], nn.Module]) -> None:
    """Steps may not silently lose them: either every bit is eager's, or the capture says what it cannot do."""
    refusal = None
    try:
        compare(build, inputs(6, 4))
    except sg.CaptureError as error:
        refusal = error
    if refusal is not None:
        assert ("once" if build is Dropping else "mean") in str(refusal)
        assert refusal.remedy


# Tensors that are registered nowhere


class Attributes(nn.Module):
    """Plain tensors on the module: alone, in a list, a tuple and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.tensor(2.0)
        self.listed = [torch.randn(4), torch.randn(4)]
        self.tupled = (torch.randn(4), "name")
        self.mapped = {"a": torch.randn(4)}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.listed[0] * self.listed[1] + self.tupled[0] - self.mapped["a"]


def test_plain_tensor_attributes() -> None:
    step = compare(Attributes, inputs(3, 4))
    model = step.model
    x = rows(0, 3, 4)
    with torch.no_grad():
        model.scale.fill_(5.0)
        model.listed[1].fill_(1.0)
    with torch.no_grad():
        want = fixtures.mean_square(model, x)
    assert torch.equal(step(x).loss, want), "written in place"
    model.scale = torch.tensor(7.0)
    model.listed[0] = torch.zeros(4)
    model.mapped = {"a": torch.ones(4)}
    with torch.no_grad():
        want = fixtures.mean_square(model, x)
    assert torch.equal(step(x).loss, want), "replaced"
    assert step.captures == 1
    assert model.scale == 7.0


def test_attributes_and_buffers_replaced_before_another_capture() -> None:
    class Both(Attributes):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    with fixtures.seeded(0):
        model = Both()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square)

    def check(batch: Tensor) -> None:
        with torch.no_grad():
            want = fixtures.mean_square(model, batch)
        assert torch.equal(step(batch).loss, want)

    check(rows(0, 3, 4))
    for number, value in enumerate((3.0, 5.0, 7.0)):
        model.scale = torch.tensor(value)
        model.shift = torch.full((4,), value)
        model.listed[1] = torch.full((4,), value)
        check(rows(1, 4 + number, 4))
        check(rows(1, 3, 4))
        assert model.scale == value, "no step writes what forward only reads"
        assert torch.equal(model.shift, torch.full((4,), value))


def test_tensors_closed_over_by_the_loss() -> None:
    weights = torch.tensor([0.2, 1.0, 3.0, 0.5])
    targets = [torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(s)) for s in range(5)]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    batches = list(zip(inputs(6, 8), targets, strict=True))
    step = compare(lambda: fixtures.mlp().model, batches, loss_fn)
    weights.mul_(2.0)[0] = 0.0
    with torch.no_grad():
        want = loss_fn(step.model, batches[0])
    assert torch.equal(step(batches[0]).loss, want), "changed in place between steps"
    assert torch.equal(weights, torch.tensor([0.0, 2.0, 6.0, 1.0]))


def test_loss_module_with_a_buffer_of_its_own() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 0.5]), label_smoothing=0.1)
    targets = [torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(s)) for s in range(5)]
    batches = list(zip(inputs(6, 8), targets, strict=True))
    eager, graph = fixtures.mlp(), fixtures.mlp()
    eager_optimizer, graph_optimizer = (torch.optim.AdamW(f.model.parameters()) for f in (eager, graph))
    want = oracle.eager_steps(eager.model, eager_optimizer, lambda m, b: criterion(m(b[0]), b[1]), batches)
    step = sg.compile_train_step(graph.model, graph_optimizer, criterion=criterion)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))
