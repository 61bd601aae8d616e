"""``find_nonfinite``: the operator that made the first NaN or infinity of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import Phase

from .portrait import assert_same, portrait

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Model(nn.Module):
    """A linear layer without bias, then ``head``, a module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.head = Head(function)
        nn.init.eye_(self.body.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Head(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def log_of_negative(x: Tensor) -> Tensor:
    return x.log()  # log_of_negative


def root_of_zero(x: Tensor) -> Tensor:
    return (x * 0).sqrt()  # root_of_zero


def divides_by_zero(x: Tensor) -> Tensor:
    y = x / (x * 0)  # divides_by_zero
    return y - y


def masks_with_infinity(x: Tensor) -> Tensor:
    weights = x.masked_fill(x > 0.5, float("-inf")).softmax(-1)
    return (weights * x.log()).nan_to_num(0.0) + x.log()  # masks_with_infinity


def masks_everything(x: Tensor) -> Tensor:
    return x.masked_fill(x < 9, float("-inf")).softmax(-1)  # masks_everything


def writes_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].div_(0.0)  # writes_in_place
    return y * 2


def overwrites_the_mask(x: Tensor) -> Tensor:
    h = x.clone()
    h.masked_fill_(x > 0.5, float("-inf"))
    h.clamp_(min=-1.0)
    return h.log_()  # overwrites_the_mask


def masks_another_column(x: Tensor) -> Tensor:
    h = x.clone()
    h[:, 0].fill_(float("-inf"))
    h[:, 1:].log_()  # masks_another_column
    return h.softmax(-1)


def zeroes_a_nan(x: Tensor) -> Tensor:
    z = torch.full((4,), float("nan"))
    z.zero_()
    z.div_(0.0)  # zeroes_a_nan
    return x + z


def reuses_the_buffer(x: Tensor) -> Tensor:
    scores = x.clone()
    scores.masked_fill_(x > 0.5, float("-inf"))
    weights = scores.softmax(-1)
    scores.copy_(weights - 0.3)
    return scores.log_()  # reuses_the_buffer


def is_beside_an_infinity(x: Tensor) -> Tensor:
    h = x.masked_fill(x > 0.5, float("inf"))
    return 1 / torch.sqrt(h)  # is_beside_an_infinity


@torch.library.custom_op("stepgraph_tests::log_into", mutates_args=("out",))
def log_into(x: Tensor, out: Tensor) -> None:
    """Writes the logarithm of ``x``."""
    out.copy_(x.log())


@log_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def calls_a_custom_operator(x: Tensor) -> Tensor:
    out = torch.zeros(3, 4)
    log_into(x.detach(), out)  # calls_a_custom_operator
    return x * out[:, 0:4]


def step_of(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).sum(), **options)


ORIGINS = [
    (log_of_negative, "aten.log.default", "nan", Phase.FORWARD, "the loss"),
    (root_of_zero, "aten.div.Tensor", "inf", Phase.BACKWARD, "the gradient of body.weight"),
    (divides_by_zero, "aten.div.Tensor", "inf", Phase.FORWARD, "the loss"),
    (masks_with_infinity, "aten.log.default", "nan", Phase.FORWARD, "the loss"),
    (masks_everything, "aten.masked_fill.Scalar", "inf", Phase.FORWARD, "the loss"),
    (writes_in_place, "aten.div_.Tensor", "inf", Phase.FORWARD, "the loss"),
    (overwrites_the_mask, "aten.log_.default", "nan", Phase.FORWARD, "the loss"),
    (masks_another_column, "aten.log_.default", "nan", Phase.FORWARD, "the loss"),
    (zeroes_a_nan, "aten.div_.Tensor", "nan", Phase.FORWARD, "the loss"),
    (reuses_the_buffer, "aten.log_.default", "nan", Phase.FORWARD, "the loss"),
    (is_beside_an_infinity, "aten.sqrt.default", "nan", Phase.FORWARD, "the loss"),
    (calls_a_custom_operator, "stepgraph_tests.log_into.default", "nan", Phase.FORWARD, "the loss"),
]


@pytest.mark.case("B22")
@pytest.mark.feature("PAR-6")
@pytest.mark.parametrize("options", [{}, {"nonfinite": "ignore"}, {"numerics": "fast"}], ids=["skip", "ignore", "fast"])
@pytest.mark.parametrize(
    ("function", "operator", "kind", "phase", "reaches"), ORIGINS, ids=lambda v: getattr(v, "__name__", "")
)
def test_the_operator_is_named(
    function: Callable[[Tensor], Tensor], operator: str, kind: str, phase: Phase, reaches: str, options: dict[str, str]
) -> None:
    model = Model(function)
    step = step_of(model, **options)
    before = portrait(model, step.optimizer)
    report = step.find_nonfinite(X)
    assert_same(before, portrait(model, step.optimizer))
    assert (report.reaches, report.operator, report.kind, report.phase) == (reaches, operator, kind, phase)
    assert report.module_path == "head"
    file, line = report.source_line.rsplit(":", 1)
    with open(file) as source:
        assert function.__name__ in source.read().splitlines()[int(line) - 1].partition("#")[2]
    for part in (operator, "head", report.source_line, str(phase)):
        assert part in str(report)


def test_the_node_that_makes_a_nan_of_an_infinity_is_named_too() -> None:
    report = step_of(Model(divides_by_zero)).find_nonfinite(X)
    assert report.became_nan.startswith("aten.sub.Tensor, head/sub#0@forward, ")
    report = step_of(Model(masks_everything)).find_nonfinite(X)
    assert report.became_nan.startswith("aten._softmax.default")
    assert "turned into nan by: aten._softmax" in str(report)


def test_finite_steps_say_so() -> None:
    report = step_of(Model(torch.tanh)).find_nonfinite(X)
    assert report.is_finite
    assert "finite" in str(report)
    assert report.operator is report.key is report.phase is None


def test_what_comes_in_is_named() -> None:
    model = Model(torch.tanh)
    step = step_of(model)
    bad = X.clone()
    bad[1, 2] = float("nan")
    report = step.find_nonfinite(bad)
    assert (report.reaches, report.kind, report.operator) == ("the loss", "nan", None)
    assert report.key == "the batch"
    with torch.no_grad():
        model.body.weight[0, 0] = float("inf")
    report = step.find_nonfinite(X)
    assert report.key == "param body.weight"
    assert "comes in with" in str(report)


def test_the_update_and_the_norm_are_looked_at() -> None:
    model = nn.Linear(4, 1, bias=False)
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=1e38), loss_fn=lambda m, x: m(x).sum() * 1e3
    )
    report = step.find_nonfinite(torch.ones(3, 4))
    assert report.phase is Phase.UPDATE
    assert report.reaches == "param weight"
    model = nn.Linear(4, 1, bias=False)
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x).sum() * 1e30)
    report = step.find_nonfinite(torch.ones(3, 4))
    assert (report.phase, report.reaches) == (Phase.NORM, "the norm of the gradients")


@pytest.mark.case("B22")
def test_the_error_points_to_it() -> None:
    step = step_of(Model(log_of_negative), nonfinite="raise")
    with pytest.raises(sg.NonFiniteError, match="find_nonfinite"):
        step(X)


def test_an_opaque_update_that_writes_a_nan_is_named() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean())
    step(X), step(X)
    assert step.find_nonfinite(X).is_finite
    for entries in optimizer.state.values():
        entries["exp_avg"].fill_(float("nan"))
    report = step.find_nonfinite(X)
    assert (report.phase, report.reaches) == (Phase.UPDATE, "param weight")
    assert "RAdam.step" in report.operator


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_hyperparameter_that_is_not_finite_is_named(make: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters(), lr=0.1)
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean())
    step(X)
    optimizer.param_groups[0]["lr"] = float("nan")
    report = step.find_nonfinite(X)
    assert (report.kind, report.key) == ("nan", "hyper group.0.lr")


def times_a_nan(x: Tensor) -> Tensor:
    return x * torch.tensor(float("nan"))  # times_a_nan


def test_a_constant_that_is_not_finite_is_named_by_its_line() -> None:
    report = step_of(Model(times_a_nan)).find_nonfinite(X)
    assert (report.kind, report.key, report.module_path) == ("nan", "a constant of the code", "head")
    assert report.source_line in str(report)


def test_the_reason_of_a_skip_names_the_loss_first() -> None:
    assert step_of(Model(log_of_negative))(X).skip_reason == "the loss is not finite"
    result = step_of(Model(divides_by_zero))(X)
    assert result.skip_reason == "the loss is not finite, nor is the gradient of body.weight"
    result = step_of(Model(root_of_zero))(X)
    assert result.skip_reason == "the gradient of body.weight is not finite"
