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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures, oracle
from .amp_loop import INF, SEQUENCE, Pulls, poisoned
from .portrait import assert_same, portrait

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


def linear(width: int = 4, groups: int = 1, **options: Any) -> sg.TrainStep:
    with fixtures.seeded(0):
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    params = list(model.parameters())
    parts = [params] if groups == 1 else [params[:2], params[2:]]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), **options)
    step(fixtures.rows(0, 2, 3))
    return step


def spoiled(change: Callable[[dict[str, Any]], Any], **options: Any) -> dict[str, Any]:
    step = linear(**options)
    if options:
        step(fixtures.rows(0, 2, 3))
    state = copy.deepcopy(step.state_dict())
    change(state)
    return state


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """As a loop without stepgraph would have saved it."""
    return {name: state[name] for name in ("model", "optimizer")}


@pytest.mark.case("B53")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"].pop("0.weight"), r"model: 0\.weight is missing"),
        (lambda s: s["model"].update({"9.weight": torch.ones(1)}), r"model: 9\.weight is left over"),
        (lambda s: s["model"].update({"0.bias": torch.ones(7)}), r"model: 0\.bias is float32\[7\], here float32\[4\]"),
        (
            lambda s: s["model"].update({"0.bias": torch.ones(4).double()}),
            r"0\.bias is float64\[4\], here float32\[4\]",
        ),
        (lambda s: s.pop("optimizer"), "optimizer: missing"),
        (lambda s: s.update(optimizer=3), "optimizer: no state of an optimizer"),
        (lambda s: s["optimizer"]["state"][0].pop("step"), r"optimizer: 0\.weight/step is missing"),
        (lambda s: s["optimizer"]["state"].pop(2), r"optimizer: 1\.weight/exp_avg is missing"),
        (lambda s: s["optimizer"]["state"].update({1: []}), r"0\.bias has a list"),
        (
            lambda s: s["optimizer"]["state"][1].update(exp_avg=torch.ones(4).half()),
            r"0\.bias/exp_avg is float16\[4\], and was saved as float32\[4\]",
        ),
        (lambda s: s["optimizer"]["param_groups"][0].pop("betas"), "optimizer: group 0 has no betas"),
        (
            lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.ones(9, 9)),
            r"0\.weight/exp_avg is float32\[9, 9\]",
        ),
        (lambda s: s["stepgraph"].update(scaler={"scale": 2.0}), "loss scale: "),
        (lambda s: s["stepgraph"].update(window={"count": 1}), "window: there, here none"),
        (lambda s: s["stepgraph"].update(scaler="64"), "loss scale: 64, here none"),
        (lambda s: s["stepgraph"].pop("window"), "window: missing"),
        (lambda s: s["stepgraph"].pop("tally"), "tally: missing"),
        (lambda s: s["stepgraph"]["tally"].pop("skips"), "tally: skips is missing"),
        (lambda s: s["stepgraph"]["tally"].update(updates=-1), "tally: updates is -1"),
        (lambda s: s["stepgraph"].pop("random"), "random: missing"),
        (lambda s: s["stepgraph"]["random"].pop("python"), "random streams: KeyError"),
        (lambda s: s["stepgraph"]["random"]["torch"].update(cpu=torch.zeros(3)), "random streams: "),
        (lambda s: s["stepgraph"].pop("extra"), "extra: missing"),
        (lambda s: s["stepgraph"].pop("names"), "names: missing"),
        (lambda s: s["stepgraph"].update(names=None), "names: no lists"),
        (lambda s: s["stepgraph"].update(entries=[1]), "entries: no description"),
        (lambda s: s["stepgraph"].update(further=1), "model: int, and should be tensors"),
        (lambda s: s["stepgraph"].update(masters=1), "masters: no tensors"),
        (lambda s: s.update(stepgraph=[]), "format list"),
        (lambda s: s["stepgraph"]["masters"].update({"0.bias": torch.ones(4)}), r"masters: 0\.bias has none here"),
        (lambda s: s["stepgraph"].update(format=99), "format 99"),
        (lambda s: s.pop("model"), "has no model"),
    ],
)
def test_what_does_not_fit_is_listed_and_changes_nothing(change: Callable[[Any], Any], message: str) -> None:
    state, step = spoiled(change), linear()
    before, counters = portrait(step.model, step.optimizer), copy.copy(step._tally)
    with pytest.raises(sg.ConfigError, match=message):
        step.load_state_dict(state)
    assert_same(before, portrait(step.model, step.optimizer))
    assert step._tally == counters


def test_other_groups_are_listed() -> None:
    for state in (linear().state_dict(), plain(linear().state_dict())):
        with pytest.raises(sg.ConfigError, match=r"groups of \[4\] parameters, here of \[2, 2\]"):
            linear(groups=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("count"), "window: count is missing"),
        (lambda w: w.update(count=-1), "window: count is -1"),
        (lambda w: w.update(count=3), "window: 3 micro-batches so far, here 3 make an update"),
        (lambda w: w.update(weight_sum=float("nan")), "window: weight_sum is nan"),
        (lambda w: w.update(loss_sum="1"), "window: loss_sum is '1'"),
        (lambda w: w.update(is_weighted="no"), "window: is_weighted is 'no'"),
        (lambda w: w.update(gradients=[]), r"window: it holds no gradients"),
        (lambda w: w["gradients"].update({"9.bias": torch.ones(1)}), r"window: 9\.bias is left over"),
        (
            lambda w: w["gradients"].update({"0.bias": torch.ones(1)}),
            r"window: the gradient of 0\.bias is float32\[1\], here float32\[4\]",
        ),
    ],
)
def test_a_window_that_does_not_fit_changes_nothing(change: Callable[[Any], Any], message: str) -> None:
    state = spoiled(lambda s: change(s["stepgraph"]["window"]), accumulate=3)
    step = linear(accumulate=3)
    before, sums = portrait(step.model, step.optimizer), copy.deepcopy(step._state.window.state_dict())
    with pytest.raises(sg.ConfigError, match=message):
        step.load_state_dict(state)
    assert_same(before, portrait(step.model, step.optimizer))
    window = step._state.window.state_dict()
    assert window["count"] == sums["count"] == 1
    assert all(torch.equal(window["gradients"][k], sums["gradients"][k]) for k in sums["gradients"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(scale=-7), "between 2\\*\\*-126 and 2\\*\\*126, got -7"),
        (lambda s: s.update(scale=float("nan")), "got nan"),
        (lambda s: s.update(scale=2.0**20), "1048576.0, here between .* and 65536"),
        (lambda s: s.update(growth_tracker=-7), "growth_tracker is -7"),
        (lambda s: s.update(growth_tracker="7"), "growth_tracker is '7'"),
        (lambda s: s.pop("hysteresis_tracker"), "hysteresis_tracker is missing"),
    ],
)
def test_a_loss_scale_that_does_not_fit_changes_nothing(change: Callable[[Any], Any], message: str) -> None:
    options: dict[str, Any] = {"precision": "fp16", "loss_scale": sg.LossScale(max_scale=2.0**16)}
    state = spoiled(lambda s: change(s["stepgraph"]["scaler"]), **options)
    step = linear(**options)
    before, scaler = portrait(step.model, step.optimizer), step._state.scaler.state_dict()
    with pytest.raises(sg.ConfigError, match=message):
        step.load_state_dict(state)
    assert_same(before, portrait(step.model, step.optimizer))
    assert step._state.scaler.state_dict() == scaler
    step.load_state_dict(state, strict=False)
    assert step._state.scaler.state_dict() == scaler


def test_a_static_scale_stays_what_it_is() -> None:
    dynamic = linear(precision="fp16").state_dict()
    with pytest.raises(sg.ConfigError, match=r"loss scale: .*, here 128\.0, which never changes"):
        linear(precision="fp16", loss_scale=128).load_state_dict(dynamic)


def fresh() -> sg.TrainStep:
    """As in a process that resumes: the optimizer has no state yet."""
    step = linear()
    step.optimizer.state.clear()
    return step


@pytest.mark.case("B53")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(3)),
            r"0\.weight/exp_avg is float32\[3\], for a parameter of",
        ),
        (lambda s: s["state"][0].pop("exp_avg"), r"0\.weight/exp_avg is missing"),
        (lambda s: s["param_groups"][0].pop("lr"), "group 0 has no lr"),
    ],
)
def test_a_plain_checkpoint_is_checked_where_the_optimizer_has_no_state_yet(
    change: Callable[[Any], Any], message: str
) -> None:
    state = plain(spoiled(lambda s: change(s["optimizer"])))
    with pytest.raises(sg.ConfigError, match=message):
        fresh().load_state_dict(state)
    fresh().load_state_dict(plain(linear().state_dict()))


def test_a_plain_checkpoint_with_a_grad_scaler(tmp_path: Path) -> None:
    """A loop by hand for four steps, saved as it is in torch's examples, and continued by a step."""
    options: dict[str, Any] = {"precision": "fp16", "loss_scale": sg.LossScale(init_scale=2.0**10, growth_interval=3)}
    whole, step = linear(**options), linear(**options)
    data = fixtures.inputs(2, 3, steps=7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for x in data[:4]:
        whole(x)
    scaler.load_state_dict({**scaler.state_dict(), "scale": whole.state_dict()["stepgraph"]["scaler"]["scale"]})
    saved = {**scaler.state_dict(), "_growth_tracker": whole.state_dict()["stepgraph"]["scaler"]["growth_tracker"]}
    torch.save({**plain(whole.state_dict()), "scaler": saved, "epoch": 3}, tmp_path / "by_hand.pt")
    assert step.load(tmp_path / "by_hand.pt") is None
    for x in data[4:]:
        assert step(x).loss_scale == whole(x).loss_scale
    for mine, theirs in zip(step.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    torch.save({**plain(whole.state_dict()), "scaler": {**saved, "scale": -1.0}}, tmp_path / "bad.pt")
    with pytest.raises(sg.ConfigError, match="got -1"):
        step.load(tmp_path / "bad.pt")
    linear().load(tmp_path / "by_hand.pt")  # fp32 needs no scale


@pytest.mark.parametrize("broken", ["empty", "half", "text"])
def test_a_broken_file_is_told_with_its_path(broken: str, tmp_path: Path) -> None:
    path = linear().save(tmp_path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "text": b"once upon a time"}[broken])
    with pytest.raises(sg.ConfigError, match=r"checkpoint\.pt is no checkpoint that can be read"):
        linear().load(tmp_path)


def test_flags_that_another_version_of_torch_does_not_know_are_those_of_the_optimizer() -> None:
    state = plain(spoiled(lambda s: s["optimizer"]["param_groups"][0].pop("decoupled_weight_decay")))
    step = fresh()
    step.load_state_dict(state)
    assert step.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert step(fixtures.rows(0, 2, 3)).applied


def test_a_master_that_is_missing_is_listed() -> None:
    state = copy.deepcopy(half_linear().state_dict())
    state["stepgraph"]["masters"].pop("bias")
    with pytest.raises(sg.ConfigError, match="masters: bias is missing"):
        half_linear().load_state_dict(state)
    state["stepgraph"]["masters"]["bias"] = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(sg.ConfigError, match=r"masters: bias is bfloat16\[1\], here float32\[2\]"):
        half_linear().load_state_dict(state)


def half_linear() -> sg.TrainStep:
    with fixtures.seeded(0):
        model = nn.Linear(3, 2).bfloat16()
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters()), loss_fn=lambda m, x: m(x).square().mean()
    )
    step(fixtures.rows(0, 2, 3).bfloat16())
    return step


def test_not_strict_takes_what_fits() -> None:
    state = copy.deepcopy(linear().state_dict())
    state["model"]["0.bias"] = torch.ones(7)
    state["model"]["0.weight"] = torch.full_like(state["model"]["0.weight"], 3.0)
    step = linear()
    bias = step.model[0].bias.clone()
    step.load_state_dict(state, strict=False)
    assert torch.equal(step.model[0].bias, bias)
    assert torch.equal(step.model[0].weight, torch.full((4, 3), 3.0))


def test_not_strict_leaves_out_state_that_does_not_fit() -> None:
    state = copy.deepcopy(linear().state_dict())
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(7)
    state["optimizer"]["state"][1].pop("step")
    state["optimizer"]["param_groups"][0].pop("betas")
    for part in ("random", "tally", "extra", "scaler"):
        state["stepgraph"].pop(part)
    step = fresh()
    assert step.load_state_dict(state, strict=False) is None
    with_state = [p for p in step.model.parameters() if p in step.optimizer.state]
    assert with_state == [step.model[1].weight, step.model[1].bias]
    assert step.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert step(fixtures.rows(0, 2, 3)).applied


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


class Routes(nn.Module):
    """A second layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        return (self.always(x) + (self.sometimes(x) if uses_both else 0)).square().mean()


@pytest.mark.parametrize("first", [0, 1])
def test_going_back_to_before_a_parameter_had_state(first: int, tmp_path: Path) -> None:
    with fixtures.seeded(0):
        model = Routes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = sg.compile_train_step(model, optimizer, loss_fn=lambda m, b: m(*b), max_norm=1.0)
    x = fixtures.rows(0, 3, 4)
    step.prepare((x, False))
    for _ in range(first):
        step((x, False))
    step.save(tmp_path)
    step((x, True))
    after = [p.clone() for p in model.parameters()]
    step((x, True))
    step.load(tmp_path)
    assert not optimizer.state.get(model.sometimes.weight)
    step((x, True))
    assert all(map(torch.equal, after, model.parameters()))
