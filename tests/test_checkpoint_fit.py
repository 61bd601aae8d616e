"""What does not fit a checkpoint is listed before anything changes; what is left out, and what plain torch saved, is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepgraph as sg

from . import fixtures
from .portrait import assert_same, portrait
from .steps import linear


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


@pytest.mark.parametrize("part", ["masters", "further", "names", "entries", "window", "random"])
def test_not_strict_leaves_out_parts_that_are_something_else(part: str) -> None:
    state = copy.deepcopy(linear().state_dict())
    state["stepgraph"][part] = 1
    step = fresh()
    step.load_state_dict(state, strict=False)
    assert step._tally.updates == 1
    assert step(fixtures.rows(0, 2, 3)).applied


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
