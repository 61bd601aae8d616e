"""Norms of other types, clipping by value, errors for norms that are not finite, and the functions for hand-written loops."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.errors import VerificationError
from stepgraph.graph import Phase
from stepgraph.graph.verifier import verify

from . import fixtures, oracle
from .portrait import assert_same, portrait

CLIPS: dict[str, dict[str, Any]] = {
    "L1": {"max_norm": 0.5, "norm_type": 1},
    "L2": {"max_norm": 0.05, "norm_type": 2.0},
    "L3": {"max_norm": 0.05, "norm_type": 3.0},
    "inf": {"max_norm": 0.01, "norm_type": math.inf},
    "idle": {"max_norm": 1e6, "norm_type": 1.0},
    "norm alone": {"norm_type": math.inf},
    "value": {"clip_value": 0.01},
    "idle value": {"clip_value": 1e6, "norm_type": 1.0},
}
UPDATES = ["sgd_momentum", "adamw_forloop", "adamw_foreach", "adamw_fused"]


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["MLP", "ODD", "TIED"])
@pytest.mark.feature("CLIP-1", "CLIP-2", "CLIP-3", "CLIP-4")
def test_every_kind_of_clipping_is_bitwise(name: str, clip: str, optimizer: str) -> None:
    make = fixtures.FIXTURES[name]
    eager, graph = make(), make()
    batches = fixtures.batches(make, 5)
    build = oracle.OPTIMIZERS[optimizer]
    eager_optimizer, graph_optimizer = build(eager.model.parameters()), build(graph.model.parameters())
    want = oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, **CLIPS[clip])
    step = sg.compile_train_step(graph.model, graph_optimizer, loss_fn=graph.loss_fn, **CLIPS[clip])
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))
    assert step.verify(batches[0]).equal


@pytest.mark.parametrize("clip", ["inf", "value"])
def test_in_the_fast_tier(clip: str) -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.AdamW(fixture.model.parameters(), fused=True)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, numerics="fast", **CLIPS[clip])
    for _ in range(3):
        assert step.verify(fixture.batch).ok
        assert step(fixture.batch).applied


# Given gradients


class Given(nn.Module):
    """Parameters of ones whose gradients are the batch."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(size) for size in sizes])

    def forward(self, batch: list[Tensor]) -> Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, batch, strict=True)), torch.zeros(()))


def given_step(grads: list[Tensor], **options: Any) -> tuple[sg.TrainStep, Given]:
    model = Given(*map(len, grads))
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=lambda m, batch: m(batch), **options
    )
    return step, model


B06 = [torch.tensor([3.0, -4.0, 0.0]), torch.tensor([1.0, -12.0])]


@pytest.mark.case("B06")
@pytest.mark.parametrize("empty", [False, True], ids=["", "with a gradient of no elements"])
@pytest.mark.parametrize(("norm_type", "norm"), [(math.inf, 12.0), (1.0, 20.0), (2.0, 13.0384)])
def test_norms_of_given_gradients(norm_type: float, norm: float, empty: bool) -> None:
    grads = [B06[0], torch.zeros(0), B06[1]] if empty else B06
    step, model = given_step(grads, max_norm=6.0, norm_type=norm_type)
    result = step(grads)
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    factor = 6.0 / norm
    for weight, grad in zip(model.weights, grads, strict=True):
        torch.testing.assert_close(1.0 - weight.detach(), grad * factor, rtol=1e-5, atol=1e-6)
    by_hand = [nn.Parameter(torch.ones(len(g))) for g in grads]
    for param, grad in zip(by_hand, grads, strict=True):
        param.grad = grad.clone()
    assert sg.clip_grad_norm_(by_hand, 6.0, norm_type).item() == result.grad_norm.item()
    for param, grad in zip(by_hand, grads, strict=True):
        torch.testing.assert_close(param.grad, grad * factor, rtol=1e-5, atol=1e-6)


def test_a_model_of_nothing_but_empty_gradients_has_norm_zero() -> None:
    step, _ = given_step([torch.zeros(0)], max_norm=1.0, norm_type=math.inf)
    assert step([torch.zeros(0)]).grad_norm.item() == 0.0


B07 = [torch.tensor([1.0, math.inf, 0.0]), torch.tensor([1.0, 2.0])]
HUGE = [torch.full((3,), 1e20), torch.full((2,), 1e20)]


@pytest.mark.case("B07")
@pytest.mark.feature("CLIP-5")
@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {}, {"clip_value": 1.0}, {"max_norm": 1.0, "norm_type": math.inf}], ids=str
)
@pytest.mark.parametrize("how", [{"error_if_nonfinite": True}, {"nonfinite": "raise"}, {"nonfinite": "skip"}], ids=str)
def test_a_norm_that_is_not_finite(how: dict[str, Any], options: dict[str, Any]) -> None:
    step, model = given_step(B07, **options, **how)
    before = portrait(model, step.optimizer)
    if how.get("nonfinite") == "skip":
        result = step(B07)
        assert result.skipped
        assert "weights.0" in result.skip_reason
    else:
        with pytest.raises(sg.NonFiniteError, match=r"weights\.0") as caught:
            step(B07)
        assert caught.value.parameter == "weights.0"
    assert_same(before, portrait(model, step.optimizer))
    assert step([torch.ones(3), torch.ones(2)]).applied


@pytest.mark.case("B07")
def test_an_overflowing_norm_of_finite_gradients() -> None:
    step, model = given_step(HUGE, max_norm=1.0, error_if_nonfinite=True)
    with pytest.raises(sg.NonFiniteError, match="norm overflows"):
        step(HUGE)
    assert all(bool((w == 1).all()) for w in model.weights)
    step, _ = given_step(HUGE, error_if_nonfinite=True)
    with pytest.raises(sg.NonFiniteError, match="norm overflows"):
        step(HUGE)
    for harmless in ({"clip_value": 1.0}, {"max_norm": 1.0, "norm_type": math.inf}):
        step, model = given_step(HUGE, **harmless)
        assert step(HUGE).applied
        assert bool((model.weights[0] == 0).all())


def test_error_if_nonfinite_is_about_gradients_and_skip_about_the_loss() -> None:
    model = nn.Linear(2, 1)
    step = sg.compile_train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda m, x: m(x).sum() + x.sum().detach() * math.inf,
        error_if_nonfinite=True,
    )
    assert step(torch.ones(3, 2)).skip_reason == "the loss is not finite"


def test_contradictions_are_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(sg.ConfigError, match="order would matter"):
        sg.compile_train_step(model, optimizer, max_norm=1.0, clip_value=1.0)
    with pytest.raises(sg.ConfigError, match="contradict"):
        sg.compile_train_step(model, optimizer, error_if_nonfinite=True, nonfinite="ignore")


# For hand-written loops


def grads_of(*sizes: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    for param in params[:-1]:
        param.grad = torch.randn_like(param)
    return params


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.feature("CLIP-1", "CLIP-2", "CLIP-4", "CLIP-6")
def test_functions_for_loops_by_hand_are_torchs(foreach: bool | None) -> None:
    for norm_type in (1.0, 2.0, math.inf):
        mine, theirs = grads_of(3, 5, 2), grads_of(3, 5, 2)
        norm = sg.clip_grad_norm_((p for p in mine), 0.5, norm_type, foreach=foreach)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.5, norm_type, foreach=foreach))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine[:-1], theirs[:-1], strict=True))
        assert mine[-1].grad is None
    mine, theirs = grads_of(3, 5, 2), grads_of(3, 5, 2)
    sg.clip_grad_value_(mine, 0.2, foreach=foreach)
    nn.utils.clip_grad_value_(theirs, 0.2, foreach=foreach)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine[:-1], theirs[:-1], strict=True))
    single = grads_of(4, 1)[0]
    norm = single.grad.norm()
    assert torch.equal(sg.clip_grad_norm_(single, 1e-3), norm)
    assert float(single.grad.norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.case("B07")
@pytest.mark.feature("CLIP-5")
def test_an_error_of_a_loop_by_hand_names_the_parameter_and_clips_nothing() -> None:
    params = grads_of(3, 5, 2, 1)
    params[1].grad[2] = math.nan
    before = [p.grad.clone() for p in params[:-1]]
    with pytest.raises(sg.NonFiniteError, match=r"parameter 1 \(\[5\]\)"):
        sg.clip_grad_norm_(params, 0.1, error_if_nonfinite=True)
    assert all(torch.equal(p.grad.nan_to_num(9), b.nan_to_num(9)) for p, b in zip(params[:-1], before, strict=True))


BAD_CALLS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm_type": lambda p: sg.clip_grad_norm_(p, 1.0, 0.5),
    "max_norm": lambda p: sg.clip_grad_norm_(p, -1.0),
    "clip_value": lambda p: sg.clip_grad_value_(p, 0.0),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_by_hand(name: str) -> None:
    with pytest.raises(sg.ConfigError, match=name):
        BAD_CALLS[name](grads_of(3, 1))


@pytest.mark.feature("CLIP-15")
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"clip_value": 1.0}], ids=str)
def test_clipping_twice_is_refused(options: dict[str, float]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    step = sg.compile_train_step(model, optimizer, **options)
    assert step.captures == 0
    for call in (lambda: sg.clip_grad_norm_(model.parameters(), 1.0), lambda: sg.clip_grad_value_(model.weight, 1.0)):
        with pytest.raises(sg.ConfigError, match="clipped twice"):
            call()
    assert sg.clip_grad_norm_(nn.Linear(4, 4).parameters(), 1.0).item() == 0.0
    del step
    gc.collect()
    assert sg.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0
    unclipped = sg.compile_train_step(model, optimizer)
    assert unclipped.captures == 0
    assert sg.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0, (
        "a step that does not clip leaves that to the loop"
    )


# The verifier


def clamped_graph() -> Any:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters())
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, clip_value=0.1)
    graph = step.prepare(fixture.batch)
    return graph.copy(), [n.meta["key"].name for n in graph.calls if "clamp" in str(n.target)]


def test_the_verifier_wants_both_sides_once_for_each_gradient() -> None:
    graph, (low, high) = clamped_graph()
    verify(graph)
    graph.graph.erase_node(graph.node_by_key(low))
    with pytest.raises(VerificationError, match="one side only"):
        verify(graph)

    graph, (low, high) = clamped_graph()
    node = graph.node_by_key(low)
    node.args = (node.args[0][1:], node.args[1])
    with pytest.raises(VerificationError, match="0 times through _foreach_clamp_min_"):
        verify(graph)

    graph, (low, high) = clamped_graph()
    node = graph.node_by_key(high)
    with graph.graph.inserting_after(node):
        graph.add_call(node.target, node.args, module="norm", phase=Phase.NORM)
    with pytest.raises(VerificationError, match="2 times through _foreach_clamp_max_"):
        verify(graph)

    graph, (low, high) = clamped_graph()
    norm = next(n for n in graph.calls if "_foreach_norm" in str(n.target))
    norm.prepend(graph.node_by_key(low))
    with pytest.raises(VerificationError, match="clipped before its norm"):
        verify(graph)

    graph, (low, high) = clamped_graph()
    node = graph.node_by_key(high)
    with graph.graph.inserting_after(node):
        graph.add_call(torch.ops.aten._foreach_mul_.Scalar, (node.args[0], 0.5), module="norm", phase=Phase.NORM)
    with pytest.raises(VerificationError, match="scaled 1 times"):
        verify(graph)
