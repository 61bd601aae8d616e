"""``spare_backward``: a step whose loss is not finite ends before its backward, and nothing else differs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import Phase

from . import fixtures
from .amp_loop import pair, poisoned, same_update

INF = math.inf


def build(**options: Any) -> sg.TrainStep:
    with fixtures.seeded(0):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    options = {"loss_fn": lambda m, x: m(x).square().mean(), "spare_backward": True, **options}
    return sg.compile_train_step(model, torch.optim.AdamW(model.parameters(), fused=True), **options)


def matrix_products(step: sg.TrainStep, batch: Tensor) -> int:
    """How many a step runs; forward has two."""
    with torch.profiler.profile() as profile:
        step(batch)
    return sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))


@pytest.mark.feature("AMP-5")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_backward_does_not_run(precision: str) -> None:
    step = build(precision=precision, max_norm=1.0)
    good, bad = torch.randn(3, 4), torch.full((3, 4), INF)
    step(good), step(good)
    assert matrix_products(step, bad) == 2
    assert matrix_products(step, good) > 2


@pytest.mark.feature("AMP-5")
def test_what_a_spared_step_returns_and_leaves() -> None:
    step = build(precision="fp16", max_norm=1.0)
    good, bad = torch.randn(3, 4), torch.full((3, 4), INF)
    step(good)
    scale = step(good).loss_scale
    before = [p.clone() for p in step.model.parameters()]
    result = step(bad)
    assert (result.skipped, result.applied, result.skip_reason) == (True, False, "the loss is not finite")
    assert result.grad_norm.isnan()
    assert result.grad_norm.dtype is torch.float32
    assert result.loss_scale == scale / 2
    assert all(map(torch.equal, before, step.model.parameters()))
    assert "pass spare_backward" in step.report()
    report = step.verify(bad)
    assert report.equal, str(report)
    assert "the update is skipped" in report.detail
    assert step.verify(good).equal
    assert step.find_nonfinite(bad).reaches == "the loss"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_windows_are_those_of_the_loop_by_hand(position: int, precision: str) -> None:
    """Buffers and random streams go on through the forward of every micro-batch, and the window is skipped."""
    make = fixtures.FIXTURES["DROP"]
    loss_fn = make().loss_fn
    loop, step = pair(
        lambda: make().model,
        lambda m, b: loss_fn(m, b[0]) * b[1],
        "adamw_fused",
        precision,
        accumulate=3,
        init_scale=2.0**8,
        further={"spare_backward": True},
    )
    batches = [(b, torch.ones(())) for b in fixtures.batches(make, 12)]
    batches[3 + position][1].fill_(INF)
    for number in range(4):
        window = batches[3 * number : 3 * number + 3]
        if number != 1:
            assert same_update(loop, step, number + 1, window).applied
            continue
        torch.manual_seed(number)
        loop.update(window)
        torch.manual_seed(number)
        assert [step(b).applied for b in window] == [False] * 3
        for mine, theirs in zip(step.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert step._tally.skips == 1


def test_a_backward_that_draws_is_not_spared() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + torch.rand_like(grad)

    step = build(loss_fn=lambda m, x: Noisy.apply(m(x)).square().mean())
    step(torch.randn(3, 4))
    assert not any(n.meta["phase"] is Phase.FORWARD and n.meta["key"].family == "gate" for n in step.graph.calls)
    assert step(torch.full((3, 4), INF)).skipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "ignore"}, "does not go with nonfinite"),
        ({"error_if_nonfinite": True}, "does not go with error_if_nonfinite"),
        ({"lowering": "inductor"}, "does not go with lowering"),
        ({"spare_backward": 1}, "must be True or False"),
    ],
)
def test_what_contradicts_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sg.ConfigError, match=message):
        build(**options)


def test_where_reading_waits_for_the_device_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.api.reads_are_cheap", lambda device: False)
    with pytest.raises(sg.ConfigError, match="would wait for the device"):
        build()


def test_raise_names_the_loss() -> None:
    step = build(nonfinite="raise")
    with pytest.raises(sg.NonFiniteError, match="the loss is not finite") as error:
        step(poisoned(torch.randn(3, 4), INF))
    assert error.value.parameter is None
