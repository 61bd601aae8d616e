"""The fast tier and Inductor: eager's random numbers, eager's results up to rounding, nothing compiled in that may change."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import stepgraph as sg
from stepgraph.graph import Phase
from stepgraph.runtime import Executor, Region, lowered, progress, regions_of

from . import fixtures, oracle, zoo
from .fixtures import rows

aten = torch.ops.aten
TIERS = [("fast", "inductor"), ("exact", "inductor"), ("fast", "eager")]


def compiled(
    model: nn.Module, loss_fn: fixtures.LossFn, optimizer: str = "adamw_fused", **options: Any
) -> sg.TrainStep:
    built = oracle.OPTIMIZERS.get(optimizer) or oracle.OTHER_OPTIMIZERS[optimizer]
    options = {"numerics": "fast", "max_norm": 0.1, **options}
    return sg.compile_train_step(model, built(model.parameters()), loss_fn=loss_fn, **options)


def assert_close_for_steps(step: sg.TrainStep, batches: list[Any]) -> None:
    """Every step starts where the one before ended, and is within the tolerance of eager from there."""
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        report = step.verify(batch)
        assert report.ok, str(report)
        assert report.tolerance > 0 or report.equal
        torch.manual_seed(number)
        assert step(batch).applied


@pytest.mark.parametrize(("numerics", "lowering"), TIERS)
@pytest.mark.parametrize("name", ["MLP", "DROP", "BN", "TIED"])
def test_fixtures_in_every_tier(name: str, numerics: str, lowering: str) -> None:
    fixture = fixtures.FIXTURES[name]()
    step = compiled(fixture.model, fixture.loss_fn, numerics=numerics, lowering=lowering)
    assert_close_for_steps(step, [fixture.batch] * 3)
    assert (step.captures, step.update_traces) == (1, 2)


@pytest.mark.parametrize("name", ["sgd_nesterov", "adam_amsgrad", "nadam", "rmsprop", "radam", "rprop"])
def test_optimizers_in_the_fast_tier(name: str) -> None:
    """Rounding alone in double precision: a term that is left out would show at once."""
    fixture = fixtures.mlp(dtype=torch.float64)
    step = compiled(fixture.model, fixture.loss_fn, name)
    assert_close_for_steps(step, [fixture.batch] * 3)


class Draws(nn.Module):
    """Draws whose numbers are used in another order, of several kinds, some from values that forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.rand(4, 6)
        second = torch.empty(4, 6).uniform_(-1.0, 1.0)
        third = torch.empty(4, 6).uniform_(-1.0, 1.0)
        hidden = self.layers[0](x) * third
        kept = torch.bernoulli(hidden.sigmoid())
        hidden = self.drop(self.layers[1](hidden)) * kept + second
        noise = torch.randn_like(hidden)
        hidden = self.layers[2](hidden + noise * first)
        return self.layers[3](self.drop(hidden) * torch.poisson(hidden.square()))


@pytest.mark.parametrize(("numerics", "lowering"), TIERS)
def test_every_draw_gives_eagers_numbers(numerics: str, lowering: str) -> None:
    with fixtures.seeded(0):
        model = Draws()
    step = compiled(model, fixtures.mean_square, numerics=numerics, lowering=lowering)
    assert_close_for_steps(step, fixtures.inputs(4, 6, steps=3))


def test_draws_are_outside_of_regions_and_in_order() -> None:
    with fixtures.seeded(0):
        model = Draws()
    step = compiled(model, fixtures.mean_square)
    step.prepare(rows(0, 4, 6))
    captured = [n for n in step.graph.calls if "uniform" in str(n.target) or "poisson" in str(n.target)]
    parts = regions_of(step.graph, compiles_update=True)
    outside = [part for part in parts if not isinstance(part, Region)]
    assert [n for n in outside if n in captured] == captured
    assert sum(isinstance(part, Region) for part in parts) == 5, (
        "three draws take computed values; then there is the update"
    )


# Nothing that may change is compiled in


def test_a_schedule_compiles_nothing_again() -> None:
    fixture, twin = fixtures.mlp(dtype=torch.float64), fixtures.mlp(dtype=torch.float64)
    step = compiled(fixture.model, fixture.loss_fn)
    eager = oracle.OPTIMIZERS["adamw_fused"](twin.model.parameters())
    schedulers = [LambdaLR(o, lambda t: 1 / (t + 1)) for o in (step.optimizer, eager)]
    oracle_losses, losses = [], []
    for _ in range(6):
        loss = twin.loss_fn(twin.model, twin.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.1)
        eager.step()
        eager.zero_grad()
        oracle_losses.append(loss.item())
        losses.append(step(fixture.batch).loss.item())
        for scheduler in schedulers:
            scheduler.step()
    assert step.update_traces == 2
    assert losses == pytest.approx(oracle_losses, rel=1e-12)
    for name, value in step.optimizer.state_dict()["state"][0].items():
        assert torch.allclose(value, eager.state_dict()["state"][0][name], rtol=1e-12), name


@pytest.mark.case("B50")
def test_last_smaller_batch_under_inductor() -> None:
    def error_per_row(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum() / x.shape[0]

    step = compiled(fixtures.mlp(dtype=torch.float64).model, error_per_row)
    batches = [fixtures.mlp(n, rows=n, dtype=torch.float64).batch for n in (4, 3, 4, 1)]
    assert_close_for_steps(step, batches)
    assert step.captures == 3


@pytest.mark.case("B48")
def test_train_eval_train_eval_under_inductor() -> None:
    with fixtures.seeded(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    step = compiled(model, fixtures.mean_square)
    x = rows(0, 6, 4)
    for training in (True, False, True, False):
        model.train(training)
        statistics = copy.deepcopy(model[2].state_dict())
        before = model[2].num_batches_tracked.item()
        assert_close_for_steps(step, [x, x])
        assert model[2].num_batches_tracked.item() == before + 2 * training
        assert torch.equal(statistics["running_mean"], model[2].running_mean) is not training
    assert step.captures == 2


@pytest.mark.parametrize(("numerics", "lowering"), TIERS)
def test_a_skipped_step_changes_no_bit(numerics: str, lowering: str) -> None:
    fixture = fixtures.mlp()
    step = compiled(fixture.model, fixture.loss_fn, numerics=numerics, lowering=lowering)
    x, y = fixture.batch
    step((x, y))
    step((x, y))
    before = copy.deepcopy((fixture.model.state_dict(), step.optimizer.state_dict()))
    result = step((x * float("inf"), y))
    assert result.skipped
    oracle.assert_same(before, copy.deepcopy((fixture.model.state_dict(), step.optimizer.state_dict())))
    assert step.update_traces == 2


# A wrong graph is found


def plant(step: sg.TrainStep, phase: Phase, target: Any, change: Callable[[Any], None]) -> None:
    """Changes the first call of an operator in the graph that runs next, and compiles it again."""
    _, variant = step._captures.latest  # type: ignore[misc]
    change(next(n for n in variant.graph.calls if n.target is target and n.meta["phase"] is phase))
    variant.executor = Executor(lowered(variant.graph, {}, compiles_update=True))


def forgets_the_bias(node: Any) -> None:
    zeros = node.graph.call_function(aten.zeros_like.default, (node.args[0],))
    zeros.meta.update({**node.meta, "val": node.args[0].meta["val"]})
    node.prepend(zeros)
    node.args = (zeros, *node.args[1:])


def forgets_weight_decay(node: Any) -> None:
    number = node.args[1]
    one = node.graph.call_function(aten.ones_like.default, (number,))
    one.meta.update({**node.meta, "val": number.meta["val"]})
    node.prepend(one)
    node.args = (node.args[0], one)


WRONG: dict[str, tuple[Phase, Any, Callable[[Any], None]]] = {
    "bias": (Phase.FORWARD, aten.addmm.default, forgets_the_bias),
    "decay": (Phase.UPDATE, aten.mul.Tensor, forgets_weight_decay),
    "epsilon of clipping": (Phase.NORM, aten.mul.Tensor, lambda n: n.update_arg(1, n.args[1] * 1.001)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_dropped_term_is_beyond_the_tolerance(wrong: str) -> None:
    """In single precision, with Adam's usual weight decay: the smallest terms that there are."""
    fixture = fixtures.mlp()
    step = compiled(fixture.model, fixture.loss_fn)
    for _ in range(2):
        step(fixture.batch)
    assert step.verify(fixture.batch).ok
    plant(step, *WRONG[wrong])
    report = step.verify(fixture.batch)
    assert not report.ok
    assert report.differences
    assert report.deviation > 3 * report.tolerance
    if wrong == "bias":
        assert "addmm#0@forward" in str(report.first)


def test_first_verification_of_the_fast_tier_does_not_warn() -> None:
    fixture = fixtures.mlp()
    step = compiled(fixture.model, fixture.loss_fn, verify="first")
    step(fixture.batch)
    assert step.last_verification is not None
    assert step.last_verification.ok
    assert "of eager" in step.report()


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_zoo_in_the_fast_tier(name: str) -> None:
    model = zoo.ZOO[name]
    with fixtures.seeded(0):
        built = model.build()
    # Adam divides a gradient by its own size, so that in 16 bit a rounded gradient moves parameters far; SGD is linear in it
    optimizer = "adamw_fused" if model.dtype is torch.float32 else "sgd"
    step = compiled(built, fixtures.own_loss, optimizer)
    assert_close_for_steps(step, [model.batch(seed, model.masks[-1]) for seed in range(3)])


def test_noise_before_a_batch_norm_is_no_deviation() -> None:
    """The bias of a layer before BatchNorm has a gradient of rounding noise, which Adam turns into steps of full size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = sg.compile_train_step(
        model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), max_norm=1.0, numerics="fast"
    )
    assert_close_for_steps(step, [torch.randn(16, 8) for _ in range(4)])


def test_compilation_is_logged_and_shown_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("stepgraph")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    try:
        fixture = fixtures.mlp()
        compiled(fixture.model, fixture.loss_fn)(fixture.batch)
    finally:
        logger.removeHandler(handler)
    assert [m for m in messages if re.fullmatch(r"compiling region 1 of \d \(\d+ operators\) took \d+\.\d s", m)]
    shown = capsys.readouterr().err
    assert re.search(r"\rstepgraph: compiling region 1 of \d \(\d+ operators\) \.\.\. \d+ s", shown)
    assert shown.endswith("\r\033[K"), "the line is wiped in the end"


COMPILES = """
import sys, torch
torch.set_num_threads(1)
import stepgraph as sg
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), numerics="fast", max_norm=1.0)
print(*[step(torch.ones(3, 4)).loss.item() for _ in range(3)])
"""


@pytest.mark.slow
def test_other_processes_find_what_was_compiled(tmp_path: Path) -> None:
    def run() -> tuple[str, set[Path]]:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, timeout=240, check=True
        )
        return result.stdout, {p for p in tmp_path.rglob("*") if p.suffix in (".cpp", ".so", ".py")}

    first, compiled_first = run()
    again, compiled_again = run()
    assert len(compiled_first) > 0
    assert (again, compiled_again) == (first, compiled_first), "the second process compiles nothing"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_model_that_keeps_its_cache_while_it_trains(precision: str) -> None:
    """Transformers' default. Inductor lays out what the cache concatenates otherwise than eager does, and views follow."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    assert config.use_cache
    model = transformers.GPT2LMHeadModel(config).train()
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters(), fused=True), precision=precision, max_norm=1.0, numerics="fast"
    )
    ids = torch.randint(0, 32, (2, 16))
    assert_close_for_steps(step, [{"input_ids": ids, "labels": ids}] * 2)


class Branches(torch.optim.Optimizer):
    """Takes another decay below a learning rate, and another shift by an integer."""

    def __init__(self, params: Any, lr: float = 0.1, shift: int = 1) -> None:
        super().__init__(params, {"lr": lr, "shift": shift})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["m"] = torch.zeros_like(param)
                state["m"].mul_(0.5 if group["lr"] > 0.05 else 0.99).add_(param.grad.roll(range(3)[group["shift"]], 0))
                param.sub_(state["m"] * group["lr"])


@pytest.mark.parametrize("changed", ["lr", "shift", "dtype"])
def test_an_update_that_is_traced_again_is_compiled_again(changed: str) -> None:
    """With the same operators in the same order, and another constant, or other dtypes."""
    weights = []
    for numerics in ("fast", "exact"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Branches(model.parameters())
        step = sg.compile_train_step(model, optimizer, criterion=nn.MSELoss(), numerics=numerics, max_norm=5.0)
        torch.manual_seed(1)
        for number in range(6):
            step((torch.randn(8, 4), torch.randn(8, 4)))
            if number == 2 and changed == "dtype":
                for state in optimizer.state.values():
                    state["m"] = state["m"].double()
            elif number == 2:
                optimizer.param_groups[0][changed] = 0.01 if changed == "lr" else 2
        weights.append(model.weight)
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
