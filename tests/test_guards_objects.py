"""Parameters, modules, attributes and hooks that are replaced or added between two steps: followed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures
from .fixtures import rows
from .refusals import refusal_of
from .side_by_side import SideBySide, adamw, mlp_pair, sgd

# Objects that are replaced


def test_replaced_parameter_is_named() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    before = {n: p.detach().clone() for n, p in fixture.model.named_parameters()}
    old = fixture.model[2].bias
    fixture.model[2].bias = nn.Parameter(torch.zeros(4))
    for call in (step, step.prepare, step.verify):
        with pytest.raises(sg.GuardError, match=r"2\.bias") as caught:
            call(fixture.batch)
        assert "compile the step again" in str(caught.value)
    fixture.model[2].bias = old
    assert all(torch.equal(p, before[n]) for n, p in fixture.model.named_parameters())
    assert step(fixture.batch).applied


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(fixtures.mlp(seed=3).model.state_dict(), assign=True),
        lambda m: m.__setitem__(0, nn.Linear(8, 16)),
        lambda m: m[0].register_parameter("weight", None),
        lambda m: delattr(m[0], "bias"),
    ],
    ids=["assign", "module", "none", "deleted"],
)
def test_every_way_to_replace_a_parameter(change: Callable[[nn.Module], Any]) -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    step(fixture.batch)
    change(fixture.model)
    with pytest.raises(sg.GuardError, match=r"'0'|0\.(weight|bias)"):
        step(fixture.batch)


def test_parameter_or_module_added_later_is_noticed() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Growing()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square)
    x = rows(0, 3, 4)
    step(x)
    model.layers.append(nn.Linear(4, 4))
    want = fixtures.mean_square(model, x)
    losses = []
    refusal = refusal_of(lambda: losses.append(step(x).loss))
    assert torch.equal(losses[0], want) if refusal is None else "layers" in refusal


def test_tied_weight_that_is_untied_is_noticed() -> None:
    fixture = fixtures.tied()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    step(fixture.batch)
    fixture.model.head.weight = nn.Parameter(fixture.model.embedding.weight.detach().clone())
    with pytest.raises(sg.GuardError, match=r"head\.weight"):
        step(fixture.batch)


def test_parameter_data_replaced_in_place_is_followed() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)

    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        model[0].weight.data = torch.full((16, 8), 0.1)
        with torch.no_grad():
            model[2].weight.zero_()

    pair.both(change)
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


def test_parameter_data_of_another_shape_is_noticed() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1))
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, b: m(b).sum() / m[0].weight.shape[0]
    )
    ids = torch.tensor([0, 1, 2])
    step(ids)
    model[0].weight.data = torch.randn(10, 4)
    with torch.no_grad():
        want = model(ids).sum() / 10
    losses = []
    refusal = refusal_of(lambda: losses.append(step(ids).loss))
    assert torch.equal(losses[0], want) if refusal is None else "0.weight" in refusal


def test_parameter_data_of_another_layout_is_followed() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        optimizer.state.clear()

    pair.both(change)
    pair.run(batch, steps=2)


class Settings(nn.Module):
    """Reads plain attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.flip, self.mode, self.shift = 2.0, False, "sum", None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        x = -x if self.flip else x
        x = x if self.shift is None else x + self.shift
        return x.sum() if self.mode == "sum" else x.square().mean()


@pytest.mark.case("B48")
def test_plain_attributes_that_change_are_followed() -> None:
    """As `training` is: another value is another capture, and the first one is used again."""
    pair = SideBySide(Settings, fixtures.own_output, adamw())
    batch = rows(0, 3, 4)
    pair.run(batch)
    for name, value in (("scale", 3.0), ("flip", True), ("mode", "mean"), ("shift", 0.5), ("scale", 2.0)):
        pair.both(lambda m, _, name=name, value=value: setattr(m, name, value))
        pair.run(batch)
    pair.both(lambda m, _: m.__dict__.update(scale=2.0, flip=False, mode="sum", shift=None))
    pair.run(batch)
    assert pair.step.captures == 6


# Hooks and other things added after compilation


ADDITIONS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "gradient": lambda m, _: m[0].weight.register_hook(lambda g: g * 0.5),
    "forward": lambda m, _: m[0].register_forward_hook(lambda mod, a, out: out * 2),
    "forward_pre": lambda m, _: m.register_forward_pre_hook(lambda mod, a: (a[0] * 2,)),
    "full_backward": lambda m, _: m[0].register_full_backward_hook(lambda mod, gi, go: None),
    "full_backward_pre": lambda m, _: m[2].register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,)),
    "post_accumulate": lambda m, _: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    "step_pre": lambda _, o: o.register_step_pre_hook(lambda *a: None),
    "step_post": lambda _, o: o.register_step_post_hook(lambda *a: None),
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_hooks_added_later_act_as_in_eager_or_are_refused(addition: str) -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)
    pair.both(ADDITIONS[addition])
    refusal = refusal_of(lambda: pair.run(batch))
    assert refusal is None or "hook" in refusal


def test_a_post_accumulate_hook_is_noticed_at_once_and_for_as_long_as_it_is_there() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    handle = fixture.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    for _ in range(2):
        with pytest.raises(sg.GuardError, match="post-accumulate-grad hook"):
            step(fixture.batch)
    handle.remove()
    assert step(fixture.batch).applied


def test_hooks_that_come_and_go() -> None:
    pair = mlp_pair(sgd())
    batch = fixtures.mlp().batch
    pair.run(batch)
    handles: list[Any] = []
    pair.both(lambda m, _: handles.append(m[0].weight.register_hook(lambda g: g * 2)))
    pair.run(batch)
    pair.both(lambda m, _: handles.append(m[2].register_forward_hook(lambda mod, a, out: out * 3)))
    pair.run(batch)
    for handle in handles:
        handle.remove()
    pair.run(batch)
    assert pair.step.captures == 3
