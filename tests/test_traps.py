"""What tracing gets silently wrong unless it is taken care of, each as its own test."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle


def both(build, loss_fn, batches, *, optimizer: str = "adamw_forloop", max_norm: float | None = 0.5, **options):
    """Runs eager and graph on twins and asserts that every bit agrees; returns the step and its model."""
    eager_model, graph_model = oracle.twin(build)
    eager = oracle.eager_steps(
        eager_model, oracle.OPTIMIZERS[optimizer](eager_model.parameters()), loss_fn, batches, max_norm=max_norm
    )
    graph_optimizer = oracle.OPTIMIZERS[optimizer](graph_model.parameters())
    step = sg.compile_train_step(graph_model, graph_optimizer, loss_fn=loss_fn, max_norm=max_norm, **options)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, graph_model, graph_optimizer, batches))
    return step, graph_model


class UsedTwice(nn.Module):
    """A layer that is used twice under autocast: eager casts its weight once and adds both gradients in 16 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(torch.tanh(self.layer(x))).float()


def test_autocast_casts_each_weight_once() -> None:
    batches = fixtures.inputs(5, 16)
    step, _ = both(UsedTwice, fixtures.mean_square, batches)
    casts = [n for n in step.graph.calls if n.meta["key"].family == "_to_copy" and n.meta["phase"] == "forward"]
    weights = [n for n in casts if n.args[0].op == "placeholder" and n.args[0].meta["val"].shape == (16, 16)]
    assert len(weights) == 1
    assert torch.is_autocast_cache_enabled()


def test_autocast_around_the_call_is_part_of_the_signature() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    step, model = both(lambda: nn.Linear(8, 8), loss, [torch.randn(4, 8)] * 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(torch.randn(4, 8))
    assert step.captures == 2
    step(torch.randn(4, 8))
    assert step.captures == 2


class Known(nn.Module):
    """Reads a value in Python that depends on shapes alone, and takes a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        gaps = positions.diff(prepend=positions[:1] - 1)
        return self.layer(x) if bool((gaps == 1).all()) else self.layer(x) * 2


def test_values_made_from_constants_can_be_read() -> None:
    step, _ = both(Known, fixtures.mean_square, [torch.randn(3, 4)] * 5)
    assert not [
        n for n in step.graph.calls if n.meta["key"].family == "_local_scalar_dense" and n.meta["phase"] == "forward"
    ]


class ReadsData(Known):
    """Reads a value that depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool((x > 0).all()) else self.layer(x) * 2


def test_values_of_the_batch_cannot_be_read() -> None:
    model = ReadsData()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=fixtures.mean_square)
    with pytest.raises(sg.CaptureError, match="branches on") as caught:
        step(torch.randn(3, 4))
    assert caught.value.source_line is not None
    assert "test_traps.py" in caught.value.source_line


class Hooked(nn.Module):
    """Tensor hooks on a parameter and on an activation change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return torch.tanh(hidden)


def test_tensor_hooks_are_traced() -> None:
    both(Hooked, fixtures.mean_square, [torch.randn(3, 4)] * 5)


def test_fake_execution_draws_no_random_numbers() -> None:
    fixture = fixtures.drop()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    before, python_before = torch.get_rng_state(), random.getstate()
    step.prepare(fixture.batch)
    assert torch.equal(before, torch.get_rng_state())
    assert python_before == random.getstate()


def test_the_order_of_random_draws_is_eagers() -> None:
    fixture = fixtures.drop()
    step = sg.compile_train_step(
        fixture.model, torch.optim.SGD(fixture.model.parameters(), lr=0.1), loss_fn=fixture.loss_fn
    )
    families = [n.meta["key"].family for n in step.prepare(fixture.batch).calls]
    assert families.count("bernoulli_") == 1
    assert families.index("empty_like") < families.index("bernoulli_") < families.index("div_")


class TwoPhases(nn.Module):
    """A parameter that is read in forward and again in the loss, and a frozen one between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.first(x)))


def test_a_parameter_in_forward_and_loss() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x) + 0.1 * model.first.weight.abs().sum()  # type: ignore[union-attr, operator]

    both(TwoPhases, loss, [torch.randn(3, 4)] * 5)


class PenalisesGradients(nn.Module):
    """Differentiates inside forward (a gradient penalty), so that backward differentiates a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()


def test_double_backward() -> None:
    both(PenalisesGradients, fixtures.own_output, [torch.randn(3, 4)] * 5)


@torch.library.custom_op("stepgraph_tests::double_into", mutates_args=("out",))
def double_into(x: Tensor, out: Tensor) -> None:
    """Writes twice ``x``."""
    out.copy_(x * 2)


@double_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


class Scratch(nn.Module):
    """A layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def writes_one_of_two_zeros(m: Scratch, x: Tensor) -> Tensor:
    a, b = torch.zeros(4, 8), torch.zeros(4, 8)
    double_into(x, a)
    return (m(x) * a + b).square().mean()


def writes_one_of_two_copies(m: Scratch, x: Tensor) -> Tensor:
    y = x.clone()
    double_into(x, y)
    return (m(x) * y + x.clone()).square().mean()


def reads_before_and_after(m: Scratch, x: Tensor) -> Tensor:
    before = m.memory.t().sum()
    double_into(x, m.memory)
    return m(x).mean() * (before - m.memory.t().sum())


@pytest.mark.parametrize("loss", [writes_one_of_two_zeros, writes_one_of_two_copies, reads_before_and_after])
def test_what_custom_operators_write_is_not_merged_with_what_they_do_not(loss) -> None:
    step, model = both(Scratch, loss, fixtures.inputs(4, 8))
    fast = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss, numerics="fast", lowering="eager"
    )
    assert fast.verify(torch.ones(4, 8)).ok


def adds_into_zeros(m: Scratch, x: Tensor) -> Tensor:
    total = torch.zeros(8)
    torch.add(x[0], 1, out=total)
    return (m(x) * total.sum().item()).square().mean()


def adds_into_a_constant(m: Scratch, x: Tensor) -> Tensor:
    total = torch.tensor(0.0)
    torch.add(x[0, 0], 1, out=total)
    return (m(x) * total.item()).square().mean()


def branches_on_what_was_added(m: Scratch, x: Tensor) -> Tensor:
    total = torch.tensor(0.0)
    torch.add(x[0, 0], 1, out=total)
    return m(x).square().mean() if total == 0 else m(2 * x).square().mean()


@pytest.mark.parametrize("loss", [adds_into_zeros, adds_into_a_constant])
def test_constants_that_an_out_argument_overwrites_are_no_longer_known(loss) -> None:
    both(Scratch, loss, fixtures.inputs(4, 8))


def test_a_branch_on_such_a_constant_is_refused() -> None:
    model = Scratch()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=branches_on_what_was_added)
    with pytest.raises(sg.CaptureError, match="needs the value of a tensor"):
        step(torch.ones(4, 8))


def under_another_default_dtype(m: Scratch, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return (m(x) * (torch.arange(8.0) / 3)).float().square().mean()
    finally:
        torch.set_default_dtype(torch.float32)


def without_mkldnn(m: Scratch, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return m(x).square().mean()


def sparse(m: Scratch, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), m(x)).square().mean()


def sparse_rows(m: Scratch, x: Tensor) -> Tensor:
    return (torch.eye(4).to_sparse_csr() @ m(x)).square().mean()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (under_another_default_dtype, "the default dtype is another here"),
        (without_mkldnn, "torch.backends.mkldnn.enabled is another here"),
        (sparse, "makes a sparse tensor"),
        (sparse_rows, "makes a sparse tensor"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_the_graph_s_calls_would_not_carry_is_refused(loss, says: str) -> None:
    model = Scratch()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=loss)
    with pytest.raises(sg.CaptureError, match=says) as caught:
        step(torch.ones(4, 8))
    assert "test_traps.py" in caught.value.source_line
    assert torch.get_default_dtype() is torch.float32
