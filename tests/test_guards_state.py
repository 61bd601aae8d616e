"""State, groups, frozen parameters, dtypes and global modes that change between two steps: each step uses what holds then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import rows
from .refusals import refusal_of
from .side_by_side import SideBySide, adamw, mlp_pair

# State and membership


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B47", "B53")
def test_optimizer_load_state_dict_between_steps(form: dict[str, bool]) -> None:
    pair = mlp_pair(adamw(weight_decay=0.1, **form))
    batch = fixtures.mlp().batch
    pair.run(batch, steps=2)
    saved = copy.deepcopy(pair.eager_optimizer.state_dict())
    empty = adamw(weight_decay=0.1, **form)(fixtures.mlp().model).state_dict()
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.load_state_dict(copy.deepcopy(saved)))
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.load_state_dict(copy.deepcopy(empty)))
    pair.run(batch, steps=2)
    pair.both(lambda _, o: o.state.clear())
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


@pytest.mark.case("B47")
def test_optimizer_state_written_by_hand() -> None:
    pair = mlp_pair(adamw())
    batch = fixtures.mlp().batch
    pair.run(batch)

    def change(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for entries in optimizer.state.values():
            entries["exp_avg"] = torch.ones_like(entries["exp_avg"])
            entries["step"].fill_(7.0)

    pair.both(change)
    pair.run(batch, steps=2)

    def replace_by_an_equal_one(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for entries in optimizer.state.values():
            entries["step"] = entries["step"].clone()

    pair.both(replace_by_an_equal_one)
    pair.run(batch, steps=2)

    def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del optimizer.state[model[0].weight]

    pair.both(forget)
    pair.run(batch, steps=2)


@pytest.mark.case("B40")
def test_model_load_state_dict_between_steps() -> None:
    pair = SideBySide(lambda: fixtures.bn().model, fixtures.mean_square, adamw())
    batch = fixtures.bn().batch
    pair.run(batch, steps=2)
    other = fixtures.bn(seed=5).model.state_dict()
    pair.both(lambda m, _: m.load_state_dict(other))
    pair.run(batch, steps=2)
    assert pair.step.captures == 1


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B38", "B37")
def test_freeze_and_unfreeze(form: dict[str, bool]) -> None:
    pair = mlp_pair(adamw(weight_decay=0.1, **form))
    batch = fixtures.mlp().batch
    pair.both(lambda m, _: m[0].requires_grad_(False))
    start = pair.model[0].weight.detach().clone()
    pair.run(batch, steps=2)
    assert torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, _: m[0].requires_grad_(True))
    pair.run(batch, steps=2)
    assert not torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, _: m[2].bias.requires_grad_(False))
    pair.run(batch, steps=2)
    pair.both(lambda m, _: m.requires_grad_(True))
    pair.run(batch, steps=2)
    assert pair.step.captures == 3


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B38", "B41")
def test_add_param_group(form: dict[str, bool]) -> None:
    pair = mlp_pair(lambda m: torch.optim.AdamW(m[2].parameters(), lr=0.1, **form), max_norm=None)

    def run(steps: int) -> None:
        for _ in range(steps):  # without clipping, since eager's norm would count what no group holds
            pair.count += 1
            for optimizer, step in ((pair.eager_optimizer, None), (pair.optimizer, pair.step)):
                if step is None:
                    pair.loss_fn(pair.eager, batch).backward()
                    optimizer.step()
                    pair.eager.zero_grad(set_to_none=True)
                else:
                    last = step(batch)
            zero = torch.zeros(())
            assert last.applied
            oracle.assert_bitwise(
                oracle.snapshot(pair.eager, pair.eager_optimizer, 0, zero, zero),
                oracle.snapshot(pair.model, pair.optimizer, 0, zero, zero),
            )

    batch = fixtures.mlp().batch
    start = pair.model[0].weight.detach().clone()
    run(2)
    assert torch.equal(pair.model[0].weight, start)
    pair.both(lambda m, o: o.add_param_group({"params": list(m[0].parameters()), "lr": 0.01, "weight_decay": 0.5}))
    run(3)
    assert not torch.equal(pair.model[0].weight, start)
    removed = pair.model[0].weight.detach().clone()
    pair.both(lambda _, o: o.param_groups.pop())
    pair.both(lambda m, o: [o.state.pop(p) for p in m[0].parameters()])
    run(2)
    assert torch.equal(pair.model[0].weight, removed)


def test_group_with_a_foreign_parameter_is_refused_when_it_appears() -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1)
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    step(fixture.batch)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises((sg.ConfigError, sg.GuardError), match="does not belong to the\\s+model"):
        step(fixture.batch)


@pytest.mark.case("B42")
def test_model_to_another_dtype() -> None:
    def convert(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        model.to(dtype)
        optimizer.load_state_dict(optimizer.state_dict())  # casts the state, as eager needs it too

    pair = SideBySide(
        lambda: fixtures.bn().model, lambda m, x: fixtures.mean_square(m, x.to(m[0].weight.dtype)), adamw()
    )
    batch = fixtures.bn().batch
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16):
        pair.both(lambda m, o, dtype=dtype: convert(m, o, dtype))
        pair.run(batch, steps=2)
        assert all(p.dtype is dtype for p in pair.model.parameters())
    assert pair.model[1].num_batches_tracked == 8


# Autocast, grad mode and default dtype


def autocast_inside(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fixtures.squared_error(model, batch)


class Twice(nn.Module):
    """One layer used twice, whose gradients autocast sums in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).softmax(-1))


@pytest.mark.parametrize("build", [Twice, lambda: fixtures.mlp().model])
def test_autocast_inside_the_loss(build: Callable[[], nn.Module]) -> None:
    pair = SideBySide(build, autocast_inside, adamw())
    for batch in fixtures.batches(fixtures.mlp, 3):
        pair.run(batch)
    assert any(
        "bfloat16" in str(n.meta["val"].dtype) for n in pair.step.graph.calls if isinstance(n.meta["val"], Tensor)
    )


@pytest.mark.parametrize("build", [Twice, lambda: fixtures.mlp().model])
def test_autocast_around_the_call_is_another_capture(build: Callable[[], nn.Module]) -> None:
    """Autocast around a step acts on forward and loss, like autocast around those in eager."""
    eager, graph = oracle.twin(build)
    eager_optimizer, optimizer = adamw()(eager), adamw()(graph)
    step = sg.compile_train_step(graph, optimizer, loss_fn=fixtures.squared_error, max_norm=1.0)
    for number, batch in enumerate(fixtures.batches(fixtures.mlp, 6)):
        enabled = number % 2 == 1
        loss_fn = autocast_inside if enabled else fixtures.squared_error
        want = oracle.eager_steps(eager, eager_optimizer, loss_fn, [batch], max_norm=1.0, checkpoints=(1,))
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = step(batch)
        got = oracle.snapshot(graph, optimizer, 1, result.loss, result.grad_norm)
        oracle.assert_bitwise(want[1], got)
    assert step.captures == 2


def test_a_step_under_no_grad_or_inference_mode() -> None:
    """A training step trains, whatever grad mode the caller is in, or says that it cannot."""
    for mode in (torch.no_grad, torch.inference_mode):
        for captured_before in (True, False):
            fixture, eager = fixtures.mlp(), fixtures.mlp()
            step = sg.compile_train_step(
                fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
            )
            if captured_before:
                step.prepare(fixture.batch)
            start = fixture.model[0].weight.detach().clone()
            with mode():
                refusal = refusal_of(lambda: step(fixture.batch))  # noqa: B023
            if refusal is not None:
                assert "grad" in refusal or "inference_mode" in refusal
                assert torch.equal(fixture.model[0].weight, start)
                continue
            oracle.eager_steps(
                eager.model,
                torch.optim.SGD(eager.model.parameters(), lr=0.1),
                eager.loss_fn,
                [eager.batch],
                checkpoints=(1,),
            )
            assert torch.equal(fixture.model[0].weight, eager.model[0].weight)


def test_functional_loss_that_reads_a_global_setting() -> None:
    """The default dtype takes part in what forward computes, and is guarded."""
    pair = SideBySide(
        lambda: fixtures.mlp(dtype=torch.float64).model,
        lambda m, x: F.mse_loss(m(x).to(torch.get_default_dtype()), torch.zeros(3, 4, dtype=torch.get_default_dtype())),
        adamw(),
    )
    x = rows(0, 3, 8).double()
    pair.run(x)
    torch.set_default_dtype(torch.float64)
    try:
        pair.run(x)
    finally:
        torch.set_default_dtype(torch.float32)
    pair.run(x)
    assert pair.step.captures == 2


class Islands(nn.Module):
    """A product in single precision inside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        with fixtures.seeded(0):
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return self.b(hidden.float())


def test_autocast_around_the_call_does_not_reach_what_was_captured_without() -> None:
    """Neither an island without autocast nor backward, which eager runs outside of it."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    eager, graph = Islands(), Islands()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, graph)]
    step = sg.compile_train_step(graph, optimizers[1], loss_fn=loss_fn, max_norm=0.1)
    for x in fixtures.inputs(3, 4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(eager, x)
            assert step.verify(x).equal
            result = step(x)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert torch.equal(loss.detach(), result.loss)
        assert torch.equal(norm, result.grad_norm)
        assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), graph.parameters(), strict=True))


def test_the_same_graph_twice_of_a_model_without_plain_attributes() -> None:
    model = nn.ParameterList([torch.ones(3), torch.ones(3)])
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, x: (m[0] * x).square().sum()
    )
    for needed in (True, False, True):
        model[1].requires_grad_(needed)  # which takes no part
        assert step(torch.ones(3)).applied
