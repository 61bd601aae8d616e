"""``precision="fp16"``: torch's ``GradScaler`` loop in the graph, and the loss scale's automaton."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.runtime import Scaler

from . import fixtures, oracle, zoo
from .amp_loop import INF, SEQUENCE, HandWritten, Pulls, compiled_update, poisoned


def pulled(
    gradients: list[float], optimizer: Any = None, **options: Any
) -> tuple[sg.TrainStep, list[tuple[float, float]]]:
    """A step on one scalar, and (parameter, scale) after each of these gradients."""
    model = Pulls()
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
    step = sg.compile_train_step(model, make(model.parameters()), precision="fp16", **options)
    found = []
    for gradient in gradients:
        result = step(torch.tensor(gradient))
        found.append((round(model.weight.item(), 6), result.loss_scale))
    return step, found


@pytest.mark.case("B15")
@pytest.mark.feature("AMP-2", "AMP-3", "AMP-7")
def test_the_scale_moves_as_in_torch() -> None:
    _, found = pulled(SEQUENCE, loss_scale=sg.LossScale(init_scale=16, growth_interval=2))
    assert [w for w, _ in found] == [0.9, 0.9, 0.8, 0.7, 0.7, 0.6, 0.5]
    assert [s for _, s in found] == [16, 8, 8, 16, 8, 8, 16]


def test_hysteresis_tolerates_one_bad_update_until_the_scale_grows() -> None:
    _, found = pulled(SEQUENCE, loss_scale=sg.LossScale(init_scale=16, growth_interval=2, hysteresis=2))
    assert [w for w, _ in found] == [0.9, 0.9, 0.8, 0.7, 0.7, 0.6, 0.5]
    assert [s for _, s in found] == [16, 16, 16, 32, 32, 32, 64]
    _, found = pulled([INF, 1.0, INF, INF], loss_scale=sg.LossScale(init_scale=16, growth_interval=2, hysteresis=2))
    assert [s for _, s in found] == [16, 16, 8, 4], "bad updates need not be in a row"


@pytest.mark.case("B15")
def test_the_scale_stops_at_a_floor_and_at_a_ceiling() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, found = pulled([INF] * 60, loss_scale=sg.LossScale(init_scale=2.0**16))
        assert found[-1] == (1.0, 2.0**-24)
        _, found = pulled([INF] * 5, loss_scale=sg.LossScale(init_scale=16, min_scale=3))
        assert [s for _, s in found] == [8, 4, 3, 3, 3]
    _, found = pulled([1.0] * 3, loss_scale=sg.LossScale(init_scale=16, growth_interval=1, max_scale=50))
    assert [s for _, s in found] == [32, 50, 50]


def test_a_scale_that_would_not_be_finite_does_not_grow() -> None:
    scaler = Scaler(sg.LossScale(init_scale=2.0**120, growth_factor=2.0**20, growth_interval=1), torch.device("cpu"))
    scaler.update(skipped=False)
    assert scaler.value == 2.0**120


@given(
    st.lists(st.booleans(), max_size=60),
    st.floats(1e-2, 1e6),
    st.floats(1.001, 4),
    st.floats(0.1, 0.999),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_any_sequence_moves_the_scale_as_in_torch(
    outcomes: list[bool], initial: float, growth: float, backoff: float, interval: int
) -> None:
    mine = Scaler(sg.LossScale(initial, growth, backoff, interval, min_scale=2.0**-126), torch.device("cpu"))
    scale, tracker = torch.full((), initial), torch.zeros((), dtype=torch.int32)
    for skipped in outcomes:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(skipped)), growth, backoff, interval)
        mine.update(skipped=skipped)
        assert (mine.value, mine.growth_tracker) == (scale.item(), tracker.item())
        assert torch.equal(mine.scale, scale)


@pytest.mark.case("B15")
@pytest.mark.feature("AMP-24")
def test_endless_skips_warn_and_then_raise_with_the_parameter() -> None:
    with pytest.warns(sg.StepGraphWarning, match=r"3 updates in a row .* gradient of weight .* loss scale is 2\."):
        step, _ = pulled(
            [INF] * 3, loss_scale=sg.LossScale(init_scale=16), skips_before_warning=3, skips_before_error=5
        )
    step(torch.tensor(INF))
    with pytest.raises(sg.NonFiniteError, match="5 updates in a row were skipped") as caught:
        step(torch.tensor(INF))
    assert caught.value.parameter == "weight"
    assert step.model.weight.item() == 1.0
    assert step(torch.tensor(1.0)).applied, "it can go on"


def test_a_good_update_ends_a_row_of_skips() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pulled([INF, INF, 1.0, INF, INF], skips_before_warning=3, skips_before_error=3)
        pulled([INF] * 4, skips_before_warning=None, skips_before_error=None)


def test_in_every_precision_endless_skips_raise() -> None:
    model = Pulls()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), skips_before_error=2)
    step(torch.tensor(math.nan))
    with pytest.raises(sg.NonFiniteError, match="2 updates in a row"):
        step(torch.tensor(math.nan))


def compare(
    build: Callable[[], nn.Module], loss_fn: Any, batches: list[Any], optimizer: str, interval: int = 2, **clip: Any
) -> tuple[sg.TrainStep, list[bool]]:
    """Six updates by hand and by the graph, equal after each. Returns the step, and which were applied."""
    eager, graph = oracle.twin(build)
    make = oracle.OPTIMIZERS[optimizer]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    loop = HandWritten(eager, make(eager.parameters()), loss_fn, "fp16", scaler, **clip)
    policy = sg.LossScale(growth_interval=interval)
    step = sg.compile_train_step(
        graph, make(graph.parameters()), loss_fn=loss_fn, precision="fp16", loss_scale=policy, **clip
    )
    applied = []
    for number, batch in enumerate(batches, start=1):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            want = loop.update([batch])
        torch.manual_seed(number)
        got = compiled_update(step, number, [batch])
        want.snapshot.rng = got.snapshot.rng
        oracle.assert_bitwise(want.snapshot, got.snapshot)
        assert (got.applied, got.scale) == (want.applied, want.scale)
        applied.append(got.applied)
    return step, applied


@pytest.mark.parametrize(
    "clip", [{}, {"max_norm": 0.05}, {"clip_value": 0.01}, {"max_norm": 0.05, "norm_type": 1.0}], ids=str
)
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("name", ["MLP", "TIED", "DROP", "BN"])
@pytest.mark.feature("AMP-1", "AMP-4", "AMP-6", "AMP-13", "CLIP-17")
def test_fixtures_are_bitwise_the_loop_by_hand(name: str, optimizer: str, clip: dict[str, float]) -> None:
    make = fixtures.FIXTURES[name]
    batches = fixtures.batches(make, 6)
    batches[2] = poisoned(batches[2], INF)
    step, applied = compare(lambda: make().model, make().loss_fn, batches, optimizer, **clip)
    assert any(applied)
    assert any(n.meta["val"].dtype is torch.float16 for n in step.graph.calls if isinstance(n.meta["val"], Tensor))
    assert step.verify(make().batch).equal


@pytest.mark.parametrize(
    "name", [n if n in ("gpt2", "bert") else pytest.param(n, marks=pytest.mark.slow) for n in zoo.ZOO if n != "mixtral"]
)
def test_zoo_is_bitwise_the_loop_by_hand(name: str) -> None:
    entry = zoo.ZOO[name]
    batches = [entry.batch(seed) for seed in range(4)]
    compare(entry.build, lambda m, batch: m(**batch).loss, batches, "adamw_fused", max_norm=1.0)


def test_a_loss_in_fp16_overflows_as_in_torch() -> None:
    def build() -> nn.Module:
        with fixtures.seeded(0):
            return nn.Linear(4, 3)

    x = fixtures.rows(1, 5, 4)
    step, applied = compare(build, lambda m, batch: m(batch).mean(), [x] * 6, "sgd_momentum")
    assert applied[:3] == [False, True, True], "2**16 is no float16"
    step, applied = compare(build, lambda m, batch: m(batch).mean().reshape(1), [x] * 3, "sgd_momentum")
    assert applied[0] is False
    assert step.verify(x).equal


@pytest.mark.case("B12")
@pytest.mark.feature("AMP-4")
def test_clipping_sees_unscaled_gradients() -> None:
    make = fixtures.FIXTURES["MLP"]
    scaled, plain = make(), make()

    def half(model: nn.Module, batch: Any) -> Tensor:
        return scaled.loss_fn(model, batch) / 2

    optimizers = [torch.optim.SGD(f.model.parameters(), lr=0.1) for f in (scaled, plain)]
    step = sg.compile_train_step(
        scaled.model, optimizers[0], loss_fn=half, precision="fp16", loss_scale=2.0**16, max_norm=1.0
    )
    result = step(scaled.batch)
    by_hand = HandWritten(plain.model, optimizers[1], half, "fp16").update([plain.batch])
    assert result.clip_factor.item() == 1.0, "clipping is idle"
    assert result.grad_norm.item() == pytest.approx(by_hand.snapshot.grad_norm.item(), rel=1e-2)
    for mine, theirs in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)  # fp16 rounds what is scaled otherwise


def test_a_static_scale_never_moves() -> None:
    step, found = pulled([1.0, INF, 1.0, 1.0], loss_scale=1024)
    assert [s for _, s in found] == [1024.0] * 4
    assert [w for w, _ in found] == [0.9, 0.9, 0.8, 0.7]
    assert step.verify(torch.tensor(1.0)).equal


@pytest.mark.case("B16")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_schedule_gated_on_applied_advances_on_applied_steps_only(kind: str) -> None:
    model = Pulls()
    make = torch.optim.SGD if kind == "sgd" else torch.optim.Adam
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    step = sg.compile_train_step(
        model, optimizer, precision="fp16", loss_scale=sg.LossScale(init_scale=16, growth_interval=2)
    )
    applied = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in SEQUENCE:
            result = step(torch.tensor(gradient))
            applied.append(result.applied)
            if result.applied:
                scheduler.step()
    assert applied == [True, False, True, True, False, True, True]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 6)
    if kind == "adam":
        assert next(iter(optimizer.state.values()))["step"].item() == 5


def test_raise_moves_the_scale_so_that_a_retry_can_pass() -> None:
    model = Pulls()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16", nonfinite="raise"
    )
    with pytest.raises(sg.NonFiniteError) as caught:
        step(torch.tensor(INF))
    assert caught.value.parameter == "weight"
    assert step(torch.tensor(1.0)).loss_scale == 2.0**15


@pytest.mark.feature("AMP-8")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16", "loss_scale": sg.LossScale()}, 'belongs to precision="fp16"'),
        ({"precision": "fp16", "loss_scale": 0}, "number between"),
        ({"precision": "fp16", "loss_scale": True}, "number between"),
        ({"precision": "fp16", "loss_scale": "dynamic"}, "number between"),
        ({"precision": "fp16", "loss_scale": sg.LossScale}, r"LossScale\(\)"),
        ({"precision": "fp16", "loss_scale": torch.amp.GradScaler("cpu")}, "GradScaler"),
        ({"precision": "fp16", "nonfinite": "ignore"}, "dynamic loss scale"),
        ({"skips_before_error": 0}, "skips_before_error"),
        ({"skips_before_warning": 1.5}, "skips_before_warning"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(sg.ConfigError, match=message):
        sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    "values",
    [
        {"init_scale": 0},
        {"init_scale": INF},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"hysteresis": 0},
        {"min_scale": 2.0**17},
        {"max_scale": 1.0},
    ],
    ids=str,
)
def test_a_loss_scale_that_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(sg.ConfigError, match=f"LossScale: {next(iter(values))}"):
        sg.LossScale(**values)


def test_skips_are_logged() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stepgraph").addHandler(handler)
    try:
        pulled([INF])
    finally:
        logging.getLogger("stepgraph").removeHandler(handler)
    assert messages == ["step 1: the update is skipped, since the gradient of weight is not finite"]


class _Ready(torch.autograd.Function):
    """A loss whose gradient is computed with it, as fused losses do, and that forgets the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x / x.numel())
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


def test_a_backward_that_forgets_its_gradient_is_refused_under_a_scale() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: _Ready.apply(m(x).float()), precision="fp16")
    with pytest.raises(sg.CaptureError, match="does not use the gradient that it is given") as error:
        step(torch.randn(2, 4))
    assert "multiply them by its incoming gradient" in error.value.remedy
    assert "test_loss_scale.py" in str(error.value.source_line)
    assert sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: _Ready.apply(m(x)))(torch.randn(2, 4)).applied
