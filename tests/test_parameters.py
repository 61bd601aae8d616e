"""Parameters of every kind, bit for bit eager: unused, frozen, tied, grouped, odd, strided, and those that share a gradient."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .fixtures import inputs
from .side_by_side import compare

FORMS = ["adamw_forloop", "adamw_foreach", "adamw_fused"]


# B37: no gradient is not a zero gradient


class Unused(nn.Module):
    """The MLP plus a Linear, all ones, that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 4)
        self.body = fixtures.mlp().model
        for parameter in self.unused.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("weight", [None, 0.0], ids=["no_gradient", "zero_gradient"])
@pytest.mark.case("B37")
def test_unused_parameter_does_not_decay_and_has_no_state(form: dict[str, bool], weight: float | None) -> None:
    def loss(model: Unused, batch: tuple[Tensor, Tensor]) -> Tensor:
        error = fixtures.squared_error(model, batch)
        return error if weight is None else error + weight * model.unused(batch[0]).sum()

    step = compare(
        Unused,
        fixtures.batches(fixtures.mlp, 5),
        loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1, **form),
    )
    unused = step.model.unused
    assert torch.equal(unused.weight, torch.full((4, 8), 1.0)) is (weight is None)
    assert (unused.weight in step.optimizer.state) is (weight == 0.0)
    assert ("unused.weight" in step.report()) is (weight is None)

    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, **form)
    sg.compile_train_step(model, optimizer, loss_fn=loss)(fixtures.mlp().batch)
    expected = 1.0 if weight is None else 0.99
    assert torch.allclose(model.unused.weight, torch.full((4, 8), expected))


class Branches(nn.Module):
    """Two parameters at 1.0; the batch says in Python whether `branch` is used. Gradients are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(()))
        self.branch = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return x * (self.always + self.branch) if use else x * self.always


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B37")
def test_branch_used_in_step_one_and_not_in_step_two(form: dict[str, bool]) -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **form)
    step = sg.compile_train_step(model, optimizer)
    x = torch.tensor(1.0)
    step((x, True))
    step((x, False))
    assert model.branch.item() == pytest.approx(0.9), "0.81 would be a zero gradient"
    assert model.always.item() == pytest.approx(0.71)
    used_first, used_later = ([(x, i % 2 == odd) for i in range(5)] for odd in (0, 1))

    def check(kind: type[torch.optim.Optimizer], batches: list[Any], **options: Any) -> None:
        step = compare(
            Branches, batches, lambda m, b: m(*b), optimizer=lambda m: kind(m.parameters(), lr=0.1, **options, **form)
        )
        assert step.captures == 2

    check(torch.optim.AdamW, used_first)
    check(torch.optim.AdamW, used_later)
    check(torch.optim.SGD, used_first, momentum=0.9)
    if "fused" not in form:  # torch's own fused SGD fails where only some of a group's parameters have a momentum
        check(torch.optim.SGD, used_later, momentum=0.9)


# B38, B40: frozen and tied


@pytest.mark.case("B38")
def test_frozen_parameters_are_carried_along_untouched() -> None:
    step = compare(lambda: fixtures.lora().model, fixtures.batches(fixtures.lora, 5))
    base = fixtures.lora().model.base
    assert torch.equal(step.model.base.weight, base.weight)
    assert {k for k, _ in step.model.named_parameters()} == set(step.model.state_dict())
    assert "base.weight" in step.model.state_dict()
    assert step.model.base.weight.grad is None


@pytest.mark.parametrize("name", ["TIED", "GPT"])
@pytest.mark.case("B40")
def test_tied_weights_stay_tied_through_save_and_load(name: str) -> None:
    make = fixtures.FIXTURES[name]
    batches = fixtures.batches(make, 5)
    whole, first, second = make(), make(), make(seed=77)
    ties = {
        "TIED": ("embedding.weight", "head.weight"),
        "GPT": ("transformer.wte.weight", "lm_head.weight"),
    }[name]

    def compiled(fixture: fixtures.Fixture) -> tuple[torch.optim.Optimizer, sg.TrainStep]:
        optimizer = torch.optim.AdamW(fixture.model.parameters(), lr=0.01, weight_decay=0.1)
        return optimizer, sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, max_norm=1.0)

    def assert_tied(model: nn.Module) -> None:
        state = model.state_dict()
        assert all(tie in state for tie in ties)
        assert state[ties[0]].data_ptr() == state[ties[1]].data_ptr()
        assert model.get_parameter(ties[0]) is model.get_parameter(ties[1])
        assert state.keys() == make().model.state_dict().keys()

    whole_optimizer, whole_step = compiled(whole)
    want = oracle.graph_steps(whole_step, whole.model, whole_optimizer, batches)
    first_optimizer, first_step = compiled(first)
    torch.manual_seed(0)
    for batch in batches[:3]:
        first_step(batch)
    assert_tied(first.model)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first_optimizer.state_dict()}, file)
    random_state = torch.get_rng_state()
    file.seek(0)
    saved = torch.load(file)

    second_optimizer, second_step = compiled(second)
    second.model.load_state_dict(saved["model"])
    second_optimizer.load_state_dict(saved["optimizer"])
    assert_tied(second.model)
    torch.set_rng_state(random_state)
    for batch in batches[3:]:
        last = second_step(batch)
    assert_tied(second.model)
    oracle.assert_bitwise(want[5], oracle.snapshot(second.model, second_optimizer, 5, last.loss, last.grad_norm))
    eager = make()
    eager_optimizer = torch.optim.AdamW(eager.model.parameters(), lr=0.01, weight_decay=0.1)
    oracle.assert_bitwise(oracle.eager_steps(eager.model, eager_optimizer, eager.loss_fn, batches, max_norm=1.0), want)


class SharedModule(nn.Module):
    """One module under two names, one parameter that is also used bare, and one shared by two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.third = nn.Linear(4, 4)
        self.third.bias = self.first.bias
        self.bare = self.third.weight
        self.register_buffer("count", torch.zeros(()))
        self.third.register_buffer("count", self.count)

    def forward(self, x: Tensor) -> Tensor:
        self.third.count += 1
        return self.third(self.second(self.first(x)).tanh()) @ self.bare * self.count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.case("B40", "B03")
def test_shared_modules_parameters_and_buffers(form: str) -> None:
    step = compare(SharedModule, inputs(3, 4), optimizer=form)
    assert step.model.third.bias is step.model.first.bias
    assert step.model.count is step.model.third.count
    assert step.model.count == 5


# B41: groups


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
@pytest.mark.case("B41")
def test_groups_keep_their_own_lr_and_decay(form: dict[str, bool]) -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {
                    "params": [p for n, p in model.named_parameters() if n.endswith("weight")],
                    "lr": 0.1,
                    "weight_decay": 0.1,
                },
                {
                    "params": [p for n, p in model.named_parameters() if n.endswith("bias")],
                    "lr": 0.01,
                    "weight_decay": 0,
                },
            ],
            **form,
        )

    model, start = fixtures.mlp().model, fixtures.mlp().model.state_dict()
    step = sg.compile_train_step(model, groups(model), loss_fn=lambda m, b: 0.0 * fixtures.squared_error(m, b))
    step(fixtures.mlp().batch)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, start[name])
        else:
            assert torch.equal(parameter, start[name] * 0.99)
    compare(lambda: fixtures.mlp().model, fixtures.batches(fixtures.mlp, 5), fixtures.squared_error, optimizer=groups)


@pytest.mark.case("B41")
def test_groups_of_interleaved_parameters_with_different_betas_and_flags() -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        p = list(model.parameters())
        return torch.optim.Adam(
            [
                {"params": [p[3], p[0]], "lr": 0.1, "betas": (0.5, 0.9)},
                {"params": [p[2]], "lr": 0.01, "maximize": True, "eps": 1e-4},
                {"params": [p[1]], "amsgrad": True, "weight_decay": 0.2},
            ],
            lr=0.02,
        )

    compare(lambda: fixtures.mlp().model, fixtures.batches(fixtures.mlp, 5), fixtures.squared_error, optimizer=groups)


@pytest.mark.case("B41")
def test_optimizer_over_a_part_of_the_model() -> None:
    fixture = fixtures.mlp()
    start = fixtures.mlp().model
    step = sg.compile_train_step(
        fixture.model, torch.optim.AdamW(fixture.model[2].parameters(), lr=0.1), loss_fn=fixture.loss_fn, max_norm=0.1
    )
    step(fixture.batch)
    assert torch.equal(fixture.model[0].weight, start[0].weight)
    assert not torch.equal(fixture.model[2].weight, start[2].weight)
    assert all(p.grad is None for p in fixture.model.parameters())


# B42, B45: dtypes and odd sizes


class ScaledMLP(nn.Module):
    """The MLP times a learnable scalar of shape ()."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = fixtures.mlp(dtype=dtype).model
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.to(self.body[0].weight.dtype)).float() * self.scale


@pytest.mark.parametrize("optimizer", oracle.OPTIMIZERS)
@pytest.mark.case("B45")
def test_scalar_parameter_trains_and_keeps_its_shape(optimizer: str) -> None:
    batches = fixtures.batches(fixtures.mlp, 5)
    step = compare(ScaledMLP, batches, fixtures.squared_error, optimizer=optimizer)
    assert step.model.state_dict()["scale"].shape == ()
    assert step.model.scale.item() != 1.5
    fresh = ScaledMLP()
    fresh.load_state_dict(step.model.state_dict())
    assert torch.equal(fresh.scale, step.model.scale)


@pytest.mark.parametrize("optimizer", FORMS + ["sgd_nesterov"])
@pytest.mark.case("B42", "B45")
def test_bf16_model_with_an_fp32_scale(optimizer: str) -> None:
    batches = fixtures.batches(fixtures.mlp, 5)
    step = compare(lambda: ScaledMLP(torch.bfloat16), batches, fixtures.squared_error, optimizer=optimizer)
    assert step.model.scale.dtype is torch.float32
    assert all(p.dtype is torch.bfloat16 for p in step.model.body.parameters())


@pytest.mark.parametrize("optimizer", oracle.OPTIMIZERS)
@pytest.mark.case("B45")
def test_odd_sizes(optimizer: str) -> None:
    compare(lambda: fixtures.odd().model, fixtures.batches(fixtures.odd, 5), fixtures.own_output, optimizer=optimizer)


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x), (x @ self.none.t()).sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("form", FORMS)
def test_parameter_without_elements(form: str) -> None:
    compare(Empty, inputs(3, 4), optimizer=form)


# Gradients that share memory, or are laid out in their own way


class Pair(nn.Module):
    """Two parameters of two ones each, whose gradients are one and the same tensor, of norm 2 together."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) * x).sum()


class Return(torch.autograd.Function):
    """`x.sum()` whose gradient for `x` is the very tensor `gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("form", oracle.IMPLEMENTATIONS, ids=str)
def test_one_gradient_for_two_parameters_is_clipped_once(form: dict[str, bool]) -> None:
    model = Pair()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=1.0, **form), max_norm=1.0)
    result = step(torch.ones(2))
    assert result.grad_norm.item() == pytest.approx(2.0)
    for parameter in model.parameters():
        assert torch.allclose(parameter, torch.full((2,), 0.5)), "0.75 would be clipped twice"
    compare(Pair, inputs(2), fixtures.own_output, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, **form))


class GradientIs(nn.Module):
    """Parameters whose gradient is another tensor of the program, as `what` says; with `copies`, a copy of it.

    Eager itself takes some such tensors over as `.grad` and writes into them, so it is the one that gets copies.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.copies = what, False
        self.p = nn.Parameter(torch.randn(3))
        self.q = nn.Parameter(torch.randn(3))
        self.register_buffer("buffer", torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        gradient = {
            "batch": x,
            "view_of_batch": x.view(3),
            "parameter": self.q.detach(),
            "itself": self.p.detach(),
            "buffer": self.buffer,
            "aux": hidden,
            "expanded": x[:1].expand(3),
            "strided": torch.stack([x, x], 1)[:, 0],
            "part_of_aux": torch.cat([hidden, hidden])[3:],
        }[self.what]
        aux = hidden if self.what != "part_of_aux" else gradient._base
        if self.copies:
            gradient = gradient.clone()
        return Return.apply(self.p, gradient) + Return.apply(self.q, gradient), aux


WHATS = ["batch", "view_of_batch", "parameter", "itself", "buffer", "aux", "expanded", "strided", "part_of_aux"]


@pytest.mark.parametrize("what", WHATS)
def test_gradient_that_is_another_tensor_leaves_that_one_alone(what: str) -> None:
    def eager_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)[0]

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    batches = inputs(3)
    eager, graph = oracle.twin(lambda: GradientIs(what))
    eager.copies = True
    eager_optimizer, graph_optimizer = build(eager), build(graph)
    step = sg.compile_train_step(graph, graph_optimizer, loss_fn=lambda m, b: m(b), max_norm=0.1)
    for batch in batches:
        kept = batch.clone()
        result = step(batch)
        assert torch.equal(batch, kept), "the batch is the user's"
        assert torch.equal(result.aux, torch.cat([kept * 2] * 2) if what == "part_of_aux" else kept * 2)
        want = oracle.eager_steps(eager, eager_optimizer, eager_loss, [kept], max_norm=0.1, checkpoints=(1,))
        assert torch.equal(graph.buffer, eager.buffer)
        oracle.assert_bitwise(want[1], oracle.snapshot(graph, graph_optimizer, 1, result.loss, result.grad_norm))


class Expanded(nn.Module):
    """Sums, means and broadcasts, whose gradients are views with stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))
        self.b = nn.Parameter(torch.randn(4))
        self.c = nn.Parameter(torch.randn(()))
        self.d = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a.sum() + self.b.mean() * x.sum() + self.c + self.d.t().sum()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_with_stride_zero(form: str) -> None:
    compare(Expanded, inputs(2), fixtures.own_output, optimizer=form)


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm, in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.MaxPool2d(2)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Strided(nn.Module):
    """Parameters that are transposed, cut out of larger tensors, or permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.cut = nn.Parameter(torch.randn(4, 12)[:, ::2].detach())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.offset = nn.Parameter(torch.randn(10)[4:])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.transposed) @ self.cut + self.offset
        return hidden.sum(0)[:4, None, None] * self.permuted


@pytest.mark.parametrize("form", [*FORMS, "sgd_nesterov", "sgd_nesterov_fused", "adam_amsgrad_foreach"])
@pytest.mark.parametrize("batch_is_channels_last", [False, True])
def test_channels_last(form: str, batch_is_channels_last: bool) -> None:
    batches = inputs(2, 3, 8, 8)
    if batch_is_channels_last:
        batches = [b.to(memory_format=torch.channels_last) for b in batches]
    step = compare(Convolutions, batches, optimizer=form)
    assert step.model.net[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert step.captures == 1


@pytest.mark.parametrize("form", [*FORMS, "sgd_nesterov", "sgd_nesterov_fused", "adam_amsgrad_foreach"])
def test_parameters_with_strides_of_their_own(form: str) -> None:
    step = compare(Strided, inputs(3, 6), optimizer=form)
    assert step.model.transposed.stride() == (1, 6)
    assert step.model.cut.stride() == (12, 2)
