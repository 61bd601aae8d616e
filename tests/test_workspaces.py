"""What operators need while they run, where it depends on the values that they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .peaks import peak_of_step


class LargestOfBag(nn.Module):
    """Its backward picks out the rows that were the largest, of bags that are not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 256, mode="max")

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class PutWhere(nn.Module):
    """Its kernel turns a mask into the indices of what it selects."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 256))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return torch.index_put(scaled, (x > -9.0,), torch.zeros(()))


class Decomposed(nn.Module):
    """What a solver works in, whatever the values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(96) * 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.weight @ self.weight.t()) @ x


class Exponential(nn.Module):
    """The number of terms depends on the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((48, 48), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.weight) @ x


class Folded(nn.Module):
    """The kernel folds into a padded image and returns a view of its inner part."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.fold(nn.functional.unfold(self.convolution(x), 3, padding=8), (16, 16), 3, padding=8)
        return x.sin().exp()


class Drawing(nn.Module):
    """Kernels that draw, some of them in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.layer(x), 0.3)
        y = nn.functional.gumbel_softmax(nn.functional.rrelu(y + torch.randn_like(y), training=True))
        picked = torch.multinomial(y.detach(), 3)
        return y[torch.randperm(len(y))].gather(-1, picked) * torch.bernoulli(y.detach()).sum()


def _ids() -> Tensor:
    return torch.randint(0, 50, (2048, 3), generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "bag": (LargestOfBag, _ids()),
    "mask": (PutWhere, torch.randn(64, 256, generator=torch.Generator().manual_seed(0))),
    "exponential": (Exponential, torch.ones(48, 8)),
    "folded": (Folded, torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(0))),
    "draws": (Drawing, torch.ones(64, 16)),
    "decomposition": (Decomposed, torch.ones(96, 96)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.feature("MEM-1")
def test_workspaces_that_depend_on_values_are_counted_at_their_most(name: str) -> None:
    kind, batch = CASES[name]
    model = kind()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "none", loss_fn=fixtures.mean_square
    )
    step(batch)
    predicted = step.plan.prediction.peak_bytes
    assert peak_of_step(step, batch)[1] == pytest.approx(predicted, rel=1e-3)
    assert not step.plan.notes


def test_what_runs_on_no_trial_values_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Any, device: torch.device) -> Any:
        raise RuntimeError("not these values")

    model = Decomposed()
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "none", loss_fn=fixtures.mean_square
    )
    monkeypatch.setattr("stepgraph.planner.workspaces._MEASURED", {})
    monkeypatch.setattr("stepgraph.planner.workspaces.allocation_peak", refuse)
    step.prepare(torch.ones(96, 96))
    (note,) = step.plan.notes
    assert "aten.linalg_cholesky_ex" in note
    assert note in str(step.plan)


class Unread(nn.Module):
    """Holds tensors that forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 64)
        self.register_buffer("buffer", torch.zeros(1000))
        self.table = torch.zeros(5000)
        self.aside = False

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) if self.aside else self.layer(x)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RAdam])
def test_what_is_held_and_not_read_counts(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Buffers, attributes, and the state of parameters that another step trained."""
    model, batch = Unread(), torch.ones(4, 16)
    step = sg.compile_train_step(model, optimizer(model.parameters()), "none", loss_fn=fixtures.mean_square)
    peaks = {}
    for aside in (True, False):
        model.aside = aside
        for _ in range(8):
            step.measure(batch)
        found, (_, peaks[aside]) = step._measured, peak_of_step(step, batch)
        assert found is not None
        assert (
            peaks[aside] == pytest.approx(found.peak_bytes, rel=1e-3) == pytest.approx(found.predicted_bytes, rel=1e-3)
        )
    assert peaks[False] > 4 * (1000 + 5000 + 3 * (16 * 16 + 16) + 3 * (16 * 64 + 64))


class OfSizesOfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0].sin() * 2.0


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_sizes_that_depend_on_data_are_told(budget: str | None) -> None:
    """The step runs with eager's bits; such results can only be left out of the peak."""
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    eager_model, model = oracle.twin(OfSizesOfData)
    optimizer = torch.optim.SGD(eager_model.parameters(), lr=0.1)
    eager = oracle.eager_steps(eager_model, optimizer, fixtures.mean_square, batches, checkpoints=(1, 3))
    step = sg.compile_train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), memory_budget=budget, loss_fn=fixtures.mean_square
    )
    oracle.assert_bitwise(eager, oracle.graph_steps(step, model, step.optimizer, batches, checkpoints=(1, 3)))
    (note,) = step.plan.notes
    assert "depends on data" in note
    assert "index" in note


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(8), lambda: nn.GroupNorm(2, 8)])
def test_statistics_of_norms_under_autocast_are_as_wide_as_the_weights(norm: Callable[[], nn.Module]) -> None:
    """A budget of the least is kept to the byte; fake kernels have them in 16 bit."""
    batch = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def build(budget: int) -> sg.TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(), nn.ReLU()) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sg.compile_train_step(
            model, optimizer, memory_budget=budget, loss_fn=fixtures.mean_square, precision="bf16"
        )

    with pytest.raises(sg.PlanError) as error:
        build(1).prepare(batch)
    step = build(error.value.least_bytes)
    assert max(peak_of_step(step, batch)[1] for _ in range(3)) == error.value.least_bytes
    assert not step.plan.notes


class BetweenTransposes(nn.Module):
    """BatchNorm's kernel on the CPU makes its result contiguous, whatever its input is, and its fake kernel does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batch_norm_of_what_is_not_contiguous(precision: str) -> None:
    batches = [torch.randn(4, 16, 48, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    eager_model, model = oracle.twin(BetweenTransposes)
    optimizer = torch.optim.SGD(eager_model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return fixtures.mean_square(model, batch)

    eager = oracle.eager_steps(eager_model, optimizer, loss, batches, checkpoints=(1, 3))
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), "none", loss_fn=loss)
    oracle.assert_bitwise(eager, oracle.graph_steps(step, model, step.optimizer, batches, checkpoints=(1, 3)))
    assert peak_of_step(step, batches[0])[1] == pytest.approx(step.plan.prediction.peak_bytes, rel=1e-3)
