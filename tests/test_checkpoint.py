"""``save`` and ``load``: a resumed run has the bits of one that was never interrupted."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .amp_loop import INF, SEQUENCE, Pulls, poisoned
from .steps import linear

ROOT = Path(__file__).parents[1]


class Counts(nn.Module):
    """Dropout, BatchNorm, a counter that is rebound, a buffer that state_dict leaves out, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.hidden.mul_(0.5).add_(x.detach().clamp(-1, 1).mean(0))
        return self.last(self.drop(self.norm(self.first(x)) + self.hidden)).float().square().mean()


def build(precision: str, half: bool = False, **options: Any) -> tuple[sg.TrainStep, Any]:
    with fixtures.seeded(0):
        model = Counts()
    if half:
        model.first.bfloat16(), model.last.bfloat16(), model.norm.bfloat16()
        model.hidden = model.hidden.bfloat16()
    optimizer = torch.optim.AdamW(oracle.two_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    scale = {"loss_scale": sg.LossScale(init_scale=2.0**12, growth_interval=2)} if precision == "fp16" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = sg.compile_train_step(model, optimizer, precision=precision, max_norm=0.1, **scale, **options)
    return step, scheduler


def batches(half: bool = False) -> list[Tensor]:
    found = fixtures.inputs(4, 8, steps=12)
    found[5] = poisoned(found[5], INF)
    return [x.bfloat16() for x in found] if half else found


def train(step: sg.TrainStep, scheduler: Any, data: list[Tensor]) -> list[sg.StepResult]:
    results = []
    for x in data:
        results.append(step(x))
        random.random()
        if results[-1].applied:
            scheduler.step()
    return results


def everything(step: sg.TrainStep, scheduler: Any) -> dict[str, Any]:
    state = copy.deepcopy(step.state_dict(scheduler.state_dict()))
    state["further"] = step.model.hidden.clone()
    return state


def assert_equal(left: Any, right: Any, where: str = "") -> None:
    if isinstance(left, Tensor):
        assert left.dtype is right.dtype, where
        assert (
            torch.equal(left.nan_to_num(), right.nan_to_num()) if left.is_floating_point() else torch.equal(left, right)
        ), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_equal(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    else:
        assert left == right, where


RUNS = [("fp16", False, 2), ("fp32", False, 1), ("bf16", True, 2), ("fp16", False, 1)]


@pytest.mark.case("B20", "B49")
@pytest.mark.parametrize(("precision", "half", "size"), RUNS, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    precision: str, half: bool, size: int, tmp_path: Path
) -> None:
    data = batches(half)
    torch.manual_seed(0)
    random.seed(0)
    step, scheduler = build(precision, half, accumulate=size)
    results = []
    for position, x in enumerate(data):
        step.save(tmp_path / str(position), scheduler.state_dict())
        results += train(step, scheduler, [x])
    assert any(r.skipped for r in results)
    assert sum(r.applied for r in results) >= 4
    want = everything(step, scheduler)
    for position in range(len(data)):
        torch.manual_seed(99)
        random.seed(99)
        resumed, other = build(precision, half, accumulate=size)
        extra = resumed.load(tmp_path / str(position))
        other.load_state_dict(extra)
        got = train(resumed, other, data[position:])
        assert_equal(want, everything(resumed, other), f"saved before {position}")
        for mine, theirs in zip(got, results[position:], strict=True):
            assert torch.equal(mine.loss.nan_to_num(), theirs.loss.nan_to_num())
            assert (mine.step, mine.applied, mine.loss_scale) == (theirs.step, theirs.applied, theirs.loss_scale)


@pytest.mark.case("B20")
def test_the_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    def fresh() -> tuple[sg.TrainStep, Any]:
        model = Pulls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
        scale = sg.LossScale(init_scale=16, growth_interval=2, hysteresis=2)
        return sg.compile_train_step(model, optimizer, precision="fp16", loss_scale=scale), scheduler

    def run(step: sg.TrainStep, scheduler: Any, gradients: list[float]) -> list[tuple[float, float, float]]:
        found = []
        for gradient in gradients:
            result = step(torch.tensor(gradient))
            if result.applied:
                scheduler.step()
            found.append((step.model.weight.item(), result.loss_scale, step.optimizer.param_groups[0]["lr"]))
        return found

    whole = run(*fresh(), SEQUENCE)
    for position in range(len(SEQUENCE)):
        step, scheduler = fresh()
        assert run(step, scheduler, SEQUENCE[:position]) == whole[:position]
        step.save(tmp_path, {"scheduler": scheduler.state_dict()})
        resumed, other = fresh()
        other.load_state_dict(resumed.load(tmp_path)["scheduler"])
        assert run(resumed, other, SEQUENCE[position:]) == whole[position:]


def test_loading_into_a_running_step_goes_back(tmp_path: Path) -> None:
    data = batches()
    step, scheduler = build("fp16", accumulate=2)
    train(step, scheduler, data[:3])
    step.save(tmp_path, scheduler.state_dict())
    first = train(step, scheduler, data[3:])
    want = everything(step, scheduler)
    parameters = [id(p) for p in step.model.parameters()]
    scheduler.load_state_dict(step.load(tmp_path))
    second = train(step, scheduler, data[3:])
    assert_equal(want, everything(step, scheduler))
    assert [r.step for r in first] == [r.step for r in second]
    assert [id(p) for p in step.model.parameters()] == parameters
    assert step.captures == 1


@pytest.mark.case("B53")
def test_plain_torch_reads_what_is_saved_and_the_other_way_round(tmp_path: Path) -> None:
    make = fixtures.FIXTURES["MLP"]
    data = fixtures.batches(make, 6)

    def fresh() -> tuple[fixtures.Fixture, torch.optim.Optimizer]:
        fixture = make()
        return fixture, torch.optim.AdamW(oracle.two_groups(fixture.model), lr=1e-2)

    def eager(fixture: fixtures.Fixture, optimizer: torch.optim.Optimizer, some: list[Any]) -> None:
        for batch in some:
            fixture.loss_fn(fixture.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, whole_optimizer = fresh()
    eager(whole, whole_optimizer, data)

    fixture, optimizer = fresh()
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    for batch in data[:3]:
        step(batch)
    path = step.save(tmp_path)
    saved = torch.load(path, weights_only=True)
    plain, plain_optimizer = fresh()
    plain.model.load_state_dict(saved["model"])
    plain_optimizer.load_state_dict(saved["optimizer"])
    eager(plain, plain_optimizer, data[3:])
    assert_equal(whole.model.state_dict(), plain.model.state_dict())
    assert_equal(whole_optimizer.state_dict(), plain_optimizer.state_dict())

    half_way, half_optimizer = fresh()
    eager(half_way, half_optimizer, data[:3])
    file = tmp_path / "plain.pt"
    torch.save({"model": half_way.model.state_dict(), "optimizer": half_optimizer.state_dict()}, file)
    fixture, optimizer = fresh()
    step = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)
    assert step.load(file) is None
    for batch in data[3:]:
        step(batch)
    assert_equal(whole.model.state_dict(), fixture.model.state_dict())
    assert_equal(whole_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.case("B53")
def test_state_is_found_by_parameter_name(tmp_path: Path) -> None:
    make = fixtures.FIXTURES["MLP"]
    first, second = make(), make()
    step = sg.compile_train_step(first.model, torch.optim.AdamW(first.model.parameters()), loss_fn=first.loss_fn)
    for batch in fixtures.batches(make, 3):
        step(batch)
    step.save(tmp_path)
    turned = torch.optim.AdamW(list(second.model.parameters())[::-1])
    other = sg.compile_train_step(second.model, turned, loss_fn=second.loss_fn)
    other.load(tmp_path)
    names = {id(p): name for name, p in second.model.named_parameters()}
    mine = {names[id(p)]: entries for p, entries in turned.state.items()}
    theirs = {name: step.optimizer.state[p] for name, p in first.model.named_parameters()}
    assert_equal(theirs, {name: mine[name] for name in theirs})
    step(make().batch)
    other(make().batch)
    assert_equal(first.model.state_dict(), second.model.state_dict())


class Code:
    """What a checkpoint must not run."""


@pytest.mark.parametrize("extra", [{"loader": Code()}, [lambda: 1]], ids=["object", "function"])
def test_what_needs_code_is_refused_when_it_is_saved(extra: Any, tmp_path: Path) -> None:
    step = linear()
    step.save(tmp_path, {"epoch": 3})
    with pytest.raises(sg.ConfigError, match="extra holds something"):
        step.save(tmp_path, extra)
    assert step.load(tmp_path) == {"epoch": 3}, "the one before is whole"


def test_a_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {}, "optimizer": Code()}, tmp_path / "checkpoint.pt")
    with pytest.raises(sg.ConfigError, match="no checkpoint that can be read safely"):
        linear().load(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(sg.ConfigError, match="no checkpoint that can be read safely"):
        linear().load(tmp_path)
    with pytest.raises(sg.ConfigError, match="there is no checkpoint at"):
        linear().load(tmp_path / "elsewhere")


def test_an_error_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = linear()
    path = step.save(tmp_path, 1)
    whole = path.read_bytes()

    def fails(state: Any, file: Any) -> None:
        file.write(whole[: len(whole) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr("stepgraph.runtime.checkpoint._check_plain", lambda state: None)
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space"):
        step.save(tmp_path, 2)
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


_SAVES = """
import sys, torch, stepgraph as sg
torch.set_num_threads(1)
model = torch.nn.Linear(400, 400)
step = sg.compile_train_step(model, torch.optim.AdamW(model.parameters()), loss_fn=lambda m, x: m(x).square().mean())
for number in range(100_000):
    step(torch.ones(1, 400))
    step.save(sys.argv[1], number)
    print(number, flush=True)
"""


@pytest.mark.parametrize("run", range(3))
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(run: int, tmp_path: Path) -> None:
    """Killed at random points of about 50 saves in all."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVES, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        count = 12 + 5 * run
        for _ in range(count):
            line = process.stdout.readline()
            assert line, "the process ended by itself"
        time.sleep(random.Random(time.time_ns()).uniform(0, 0.03))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    with fixtures.seeded(0):
        model = nn.Linear(400, 400)
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters()), loss_fn=lambda m, x: m(x).square().mean()
    )
    number = step.load(tmp_path)
    assert number >= count - 1
    assert step(torch.ones(1, 400)).step == number + 2


@pytest.mark.parametrize("name", ["Adafactor", "RAdam", "ASGD", "NAdam", "Rprop", "Adagrad", "RMSprop"])
def test_every_kind_of_state_comes_back(name: str, tmp_path: Path) -> None:
    make = fixtures.FIXTURES["MLP"]
    data = fixtures.batches(make, 6)

    def fresh() -> sg.TrainStep:
        fixture = make()
        optimizer = getattr(torch.optim, name)(fixture.model.parameters(), lr=0.01)
        return sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn)

    whole, resumed = fresh(), fresh()
    for position, batch in enumerate(data):
        if position == 3:
            whole.save(tmp_path)
            resumed.load(tmp_path)
        whole(batch)
        if position >= 3:
            resumed(batch)
    assert_equal(whole.model.state_dict(), resumed.model.state_dict())
    assert_equal(whole.optimizer.state_dict(), resumed.optimizer.state_dict())
    whole.load(tmp_path)
    assert whole(data[3]).step == 4
