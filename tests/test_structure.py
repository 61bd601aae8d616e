"""Models, batches and losses of every shape: unused, frozen, tied and odd parameters, buffers, plain attributes, outputs."""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle

FORMS = ["adamw_forloop", "adamw_foreach", "adamw_fused"]


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(*shape: int, steps: int = 5) -> list[Tensor]:
    return [rows(seed, *shape) for seed in range(steps)]


def compare(
    build: Callable[[], nn.Module],
    batches: list[Any],
    loss_fn: fixtures.LossFn = fixtures.mean_square,
    *,
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw_foreach",
    max_norm: float | None = 0.1,
) -> sg.TrainStep:
    """Five steps of eager and of the graph on twins, equal in every bit; returns the compiled step."""
    eager_model, graph_model = oracle.twin(build)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(optimizer, str):
            return oracle.OPTIMIZERS[optimizer](oracle.two_groups(model))
        return optimizer(model)

    eager_optimizer, graph_optimizer = make(eager_model), make(graph_model)
    steps = [n for n in oracle.CHECKPOINTS if n <= len(batches)]
    want = oracle.eager_steps(eager_model, eager_optimizer, loss_fn, batches, max_norm=max_norm, checkpoints=steps)
    step = sg.compile_train_step(graph_model, graph_optimizer, loss_fn=loss_fn, max_norm=max_norm)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph_model, graph_optimizer, batches, checkpoints=steps))
    return step


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


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
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


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
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


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
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


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
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


# Recurrent modules keep their weights in a plain list


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN under a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(5, 6, **options)
        self.head = nn.LazyLinear(2)
        self.head(torch.zeros(1, 6 * (2 if options.get("bidirectional") else 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


RNN_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.3, "batch_first": True},
    {"bidirectional": True},
    {"bias": False},
]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("options", RNN_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    step = compare(lambda: Recurrent(kind, **options), inputs(4, 3, 5))
    rnn = step.model.rnn
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters(), strict=True))


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


# Losses and their company


Pieces = namedtuple("Pieces", "logits norms")


def test_aux_is_a_pytree_of_detached_values() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        out = model(batch[0])
        loss = F.mse_loss(out, batch[1])
        return loss, {
            "pieces": Pieces(out, [out.norm(), out.detach().max()]),
            "rows": out.shape[0],
            "loss": loss,
            "x": None,
        }

    batches = fixtures.batches(fixtures.mlp, 5)
    eager, graph = fixtures.mlp(), fixtures.mlp()
    eager_optimizer = torch.optim.SGD(eager.model.parameters(), lr=0.1)
    step = sg.compile_train_step(
        graph.model, torch.optim.SGD(graph.model.parameters(), lr=0.1), loss_fn=loss_fn, max_norm=1.0
    )
    for batch in batches:
        with torch.no_grad():
            loss, want = loss_fn(eager.model, batch)
        result = step(batch)
        assert list(result.aux) == list(want)
        assert type(result.aux["pieces"]) is Pieces
        assert torch.equal(result.aux["pieces"].logits, want["pieces"].logits)
        assert all(torch.equal(a, b) for a, b in zip(result.aux["pieces"].norms, want["pieces"].norms, strict=True))
        assert (result.aux["rows"], result.aux["x"]) == (6, None)
        assert torch.equal(result.aux["loss"], loss)
        assert torch.equal(result.loss, loss)
        assert not result.loss.requires_grad
        assert not result.aux["pieces"].logits.requires_grad
        oracle.eager_steps(
            eager.model, eager_optimizer, fixtures.squared_error, [batch], max_norm=1.0, checkpoints=(1,)
        )


def test_without_aux_there_is_none() -> None:
    fixture = fixtures.mlp()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=lambda m, b: (fixture.loss_fn(m, b), None)
    )
    assert step(fixture.batch).aux is None
    step = sg.compile_train_step(fixture.model, torch.optim.SGD(fixture.model.parameters()), loss_fn=fixture.loss_fn)
    assert step(fixture.batch).aux is None


@pytest.mark.parametrize("pair", [tuple, list])
def test_criterion(pair: type) -> None:
    batches = [pair(b) for b in fixtures.batches(fixtures.mlp, 5)]
    eager, graph = fixtures.mlp(), fixtures.mlp()
    eager_optimizer, graph_optimizer = (torch.optim.AdamW(f.model.parameters()) for f in (eager, graph))
    want = oracle.eager_steps(eager.model, eager_optimizer, fixtures.squared_error, batches)
    step = sg.compile_train_step(graph.model, graph_optimizer, criterion=nn.MSELoss())
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph.model, graph_optimizer, batches))


@dataclass
class Output:
    """An output object that is no pytree."""

    loss: Tensor
    logits: Tensor


class Flexible(nn.Module):
    """Takes inputs by position or keyword, and returns its loss as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, y: Tensor | None = None, *, scale: float = 1.0) -> Any:
        if isinstance(x, dict):
            x, y = x["x"], x["y"]
        out = self.linear(x) * scale
        loss = (out if y is None else out - y).square().mean()
        return {
            "tensor": loss,
            "one_element": loss.reshape(1),
            "dict": {"logits": out, "loss": loss},
            "ordered": OrderedDict(loss=loss),
            "object": Output(loss, out),
        }[self.how]


def _pairs() -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs(3, 4), inputs(3, 4, steps=5)[::-1], strict=True))


BATCHES: dict[str, Callable[[], list[Any]]] = {
    "tensor": lambda: inputs(3, 4),
    "tuple": _pairs,
    "list": lambda: [list(pair) for pair in _pairs()],
    "dict": lambda: [{"x": x, "y": y} for x, y in _pairs()],
    "dict_with_number": lambda: [{"x": x, "y": y, "scale": 2.0} for x, y in _pairs()],
    "ordered_dict": lambda: [OrderedDict(x=x, y=y) for x, y in _pairs()],
    "user_dict": lambda: [UserDict(x=x, y=y) for x, y in _pairs()],
    "nested": lambda: [({"x": x, "y": y},) for x, y in _pairs()],
}


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, (dict, UserDict)):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(out, dict):
        return out["loss"]
    return out if isinstance(out, Tensor) else out.loss


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("how", ["tensor", "one_element", "dict", "ordered", "object"])
def test_batches_and_outputs_of_every_kind(batch: str, how: str) -> None:
    batches = BATCHES[batch]()
    eager, graph = oracle.twin(lambda: Flexible(how))
    eager_optimizer, graph_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, graph))
    want = oracle.eager_steps(eager, eager_optimizer, _loss_of, batches, max_norm=0.1)
    step = sg.compile_train_step(graph, graph_optimizer, max_norm=0.1)
    oracle.assert_bitwise(want, oracle.graph_steps(step, graph, graph_optimizer, batches))
    assert step.captures == 1


def test_mapping_batches_as_tokenizers_make_them() -> None:
    from transformers import BatchEncoding

    fixture = fixtures.gpt()
    plain, encoded = fixtures.gpt(), fixtures.gpt()
    steps = [
        sg.compile_train_step(f.model, torch.optim.AdamW(f.model.parameters(), lr=0.01), max_norm=1.0)
        for f in (plain, encoded)
    ]
    torch.manual_seed(0)
    want = [steps[0](fixture.batch).loss for _ in range(3)]
    torch.manual_seed(0)
    got = [steps[1](BatchEncoding(dict(fixture.batch))).loss for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert steps[1].captures == 1


def test_mapping_within_a_batch() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]["x"]), batch[1])

    batches = [(UserDict(x=x), y) for x, y in fixtures.batches(fixtures.mlp, 5)]
    compare(lambda: fixtures.mlp().model, batches, loss_fn)


# Gradients of gradients, hooks, and losses that use autograd themselves


def test_gradient_penalty() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + grad.square().sum()

    compare(lambda: fixtures.mlp().model, fixtures.batches(fixtures.mlp, 5), loss_fn)


def test_hooks_on_tensors_and_modules_are_traced() -> None:
    def build() -> nn.Module:
        model = fixtures.mlp().model
        model[0].weight.register_hook(lambda g: g * 0.5)
        model[0].register_forward_hook(lambda m, args, out: out * 2)
        model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        return model

    compare(build, fixtures.batches(fixtures.mlp, 5), fixtures.squared_error)


def test_parametrized_and_spectral_weights() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
        )

    compare(build, inputs(3, 4))


def test_model_that_is_an_embedding_bag_of_tricks() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, padding_idx=0, max_norm=None)
            self.bag = nn.EmbeddingBag(10, 4, mode="sum")
            self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4)])
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.norms[0](self.embedding(ids))
            hidden = hidden + self.attention(hidden, hidden, hidden)[0]
            return self.norms[1](hidden.mean(1) + self.bag(ids))

    batches = [torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(s)) for s in range(5)]
    compare(Bag, batches)


def test_transformer_layers() -> None:
    layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.1, "batch_first": True}
    for build in (
        lambda: nn.TransformerEncoderLayer(**layer),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2, enable_nested_tensor=False),
    ):
        compare(build, inputs(2, 3, 8))
