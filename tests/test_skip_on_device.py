"""Where reading a value waits for the device, updates are left out there, and what became of them is read when somebody asks.

On the CPU, with the one function replaced that says that reading is cheap there.
"""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stepgraph as sg
from stepgraph.graph import Phase, effects_of, family_of
from stepgraph.graph.ops import move_scale_
from stepgraph.runtime.loss_scale import Scaler

from . import fixtures, oracle
from .amp_loop import HandWritten, compiled_update, poisoned

INF = math.inf


@pytest.fixture(autouse=True)
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.runtime.compiled.reads_are_cheap", lambda device: False)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def small() -> nn.Module:
    with fixtures.seeded(0):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def build(precision: str = "fp16", optimizer: str = "adamw_fused", **options: Any) -> sg.TrainStep:
    model = small()
    make = oracle.OPTIMIZERS.get(optimizer) or oracle.OTHER_OPTIMIZERS[optimizer]
    options = {"max_norm": 0.05, "loss_fn": mean_square, "precision": precision, **options}
    return sg.compile_train_step(model, make(model.parameters()), **options)


def unread(step: sg.TrainStep) -> int:
    return len(step._outcomes)


BAD = {2: INF, 4: math.nan}


def batches(count: int, bad: dict[int, float] | None = None) -> list[Tensor]:
    found = list(fixtures.inputs(4, 8, steps=count))
    return [poisoned(x, bad[n]) if bad and n in bad else x for n, x in enumerate(found)]


@pytest.mark.case("B15", "B16")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adagrad_fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_updates_are_bitwise_those_of_the_loop_by_hand(precision: str, optimizer: str, norm_type: float) -> None:
    make = oracle.OPTIMIZERS.get(optimizer) or oracle.OTHER_OPTIMIZERS[optimizer]
    eager = small()
    scaler = torch.amp.GradScaler("cpu", growth_interval=2) if precision == "fp16" else None
    loop = HandWritten(
        eager, make(eager.parameters()), mean_square, precision, scaler, max_norm=0.05, norm_type=norm_type
    )
    scale = {"loss_scale": sg.LossScale(growth_interval=2)} if precision == "fp16" else {}
    step = build(precision, optimizer, norm_type=norm_type, **scale)
    for number, batch in enumerate(batches(9, BAD), start=1):
        want, got = loop.update([batch]), compiled_update(step, number, [batch])
        want.snapshot.rng = got.snapshot.rng
        oracle.assert_bitwise(want.snapshot, got.snapshot)
        assert (got.applied, got.scale) == (want.applied, want.scale)
    assert not any(effects_of(n).control for n in step.graph.calls), "no gate"
    assert step.verify(batches(1)[0]).equal


@pytest.mark.case("B16")
def test_nothing_is_read_until_somebody_asks() -> None:
    step = build(loss_scale=sg.LossScale(growth_interval=2))
    data = batches(8, BAD)
    results = [step(data[0])]
    assert unread(step) == 0, "the update that creates the state is gated"
    results += [step(x) for x in data[1:]]
    assert unread(step) == 2, "no more than two"
    assert [r.skipped for r in results] == [False, False, True, False, True, False, False, False]
    assert unread(step) == 0
    assert [r.applied for r in results] == [not r.skipped for r in results]
    assert results[2].skip_reason == "the gradient of 0.weight is not finite"
    assert results[5].skip_reason is None
    scales = [r.loss_scale for r in results]
    assert scales == [2.0**16, 2.0**17, 2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**16]
    assert float(step._state.scaler.scale) == scales[-1]
    counts = {entries["step"].item() for entries in step.optimizer.state.values()}
    assert counts == {6.0}, "Adam counts the updates that were applied"
    reads = [n for n in step.graph.calls if family_of(n.target) == "_local_scalar_dense"]
    assert all(n.args[0].op == "placeholder" for n in reads), "hyperparameters, which are on the host"


@pytest.mark.case("B16")
def test_a_schedule_gated_on_applied_advances_on_applied_updates() -> None:
    step = build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda t: 1 / (t + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches(7, BAD):
            if step(batch).applied:
                scheduler.step()
    assert scheduler.last_epoch == 5


def test_asking_for_an_old_result_reads_no_newer_one() -> None:
    step = build()
    data = batches(5)
    step(data[0])
    old, new = step(data[1]), step(data[2])
    assert old.applied
    assert unread(step) == 1
    assert new.applied


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_windows(precision: str) -> None:
    """Beside a step that reads at once: micro-batches between, a bad one, a flush, a batch of weight 0."""
    steps = [build(precision, accumulate=3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepgraph.runtime.compiled.reads_are_cheap", lambda device: True)
        steps.append(build(precision, accumulate=3))
        for step in steps[1:]:
            _run_windows(step)
    _run_windows(steps[0])
    for mine, theirs in zip(*(s.model.parameters() for s in steps), strict=True):
        assert torch.equal(mine, theirs)
    assert steps[0]._tally == steps[1]._tally


def _run_windows(step: sg.TrainStep) -> None:
    for number, batch in enumerate(batches(14, {7: INF})):
        result = step(batch, weight=float(number % 4))
        assert result.loss is not None
    step.flush()
    step.report()


def test_parameters_in_16_bit_keep_their_bits_when_an_update_is_left_out() -> None:
    model = small().bfloat16()
    step = sg.compile_train_step(
        model, torch.optim.AdamW(model.parameters(), fused=True), loss_fn=mean_square, max_norm=0.05
    )
    data = [x.bfloat16() for x in batches(4)]
    for batch in data[:3]:
        step(batch)
    before = copy.deepcopy(model.state_dict())
    masters = {k: v.clone() for k, v in step._state.masters.tensors.items()}
    result = step(poisoned(data[3], INF))
    assert unread(step) > 0
    assert result.skipped
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(torch.equal(masters[k], v) for k, v in step._state.masters.tensors.items())


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adamw_foreach", {}),
        ("adamw_forloop", {}),
        ("sgd_momentum", {}),
        ("adamw_fused", {"max_norm": None}),
        ("adamw_fused", {"max_norm": None, "clip_value": 0.1}),
        ("adamw_fused", {"nonfinite": "raise"}),
        ("adamw_fused", {"error_if_nonfinite": True}),
    ],
    ids=str,
)
def test_what_has_to_be_read_is_read_at_once(optimizer: str, options: dict[str, Any]) -> None:
    step = build(optimizer=optimizer, **options)
    for batch in batches(3):
        step(batch)
        assert unread(step) == 0
    assert any(effects_of(n).control for n in step.graph.calls)


def test_a_log_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    step = build(log=path)
    for number, batch in enumerate(batches(6, BAD), start=1):
        step(batch)
        assert len(path.read_text().splitlines()) == number + 1
    assert path.read_text().count("True") == 2


def test_endless_skips_raise_a_little_later() -> None:
    step = build(skips_before_warning=None, skips_before_error=3)
    data = batches(12)
    step(data[0])
    step(data[1])
    for x in data[2:6]:
        step(poisoned(x, INF))
    with pytest.raises(sg.NonFiniteError, match="step 5: 3 updates in a row were skipped") as error:
        step(data[6])
    assert error.value.parameter == "0.weight"
    assert step._tally.updates == 6


def test_a_checkpoint_knows_what_became_of_every_update(tmp_path: Path) -> None:
    data = batches(9, BAD)
    step, other = build(loss_scale=sg.LossScale(growth_interval=2)), build(loss_scale=sg.LossScale(growth_interval=2))
    for x in data[:5]:
        step(x)
    assert unread(step) > 0
    step.save(tmp_path)
    other.load(tmp_path)
    for x in data[5:]:
        step(x), other(x)
    assert step.state_dict()["stepgraph"]["scaler"] == other.state_dict()["stepgraph"]["scaler"]
    assert step._tally == other._tally
    assert step._tally.skips == 2
    for mine, theirs in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_looking_at_a_step_changes_neither_scale_nor_counts() -> None:
    step = build(loss_scale=sg.LossScale(growth_interval=2))
    data = batches(4)
    for x in data:
        step(x)
    scale, trackers = step._state.scaler.scale.clone(), step._state.scaler.trackers.clone()
    assert step.verify(data[0]).equal
    step.find_nonfinite(data[0])
    assert torch.equal(scale, step._state.scaler.scale)
    assert torch.equal(trackers, step._state.scaler.trackers)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_folded_kernels_skip_too(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast tier of a GPU: scaled, clipped and left out in one kernel."""
    monkeypatch.setattr("stepgraph.runtime.compiled.compiles_updates", lambda device: False)
    step, exact = (build(precision, numerics=numerics, lowering="eager") for numerics in ("fast", "exact"))
    for batch in batches(8, BAD):
        assert step(batch).skipped == exact(batch).skipped
    [kernel] = [n for n in step.graph.calls if n.meta["phase"] is Phase.UPDATE and "fused" in family_of(n.target)]
    assert None not in kernel.args[-2:]
    for mine, theirs in zip(step.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([2.0**-24, 1e-3, 2.0**10]),
    st.sampled_from([None, 2.0**17, 8e37]),
    st.sampled_from([2.0**16, 2.0**10, 12345.678]),
    st.sampled_from([(2.0, 0.5), (3.7, 0.3), (2.0**60, 0.9)]),
)
def test_the_scale_moves_on_the_device_as_on_the_host(
    skips: list[bool], interval: int, hysteresis: int, least: float, most: float | None, init: float, factors: Any
) -> None:
    policy = sg.LossScale(init, *factors, interval, hysteresis, least, most)
    host, graph = Scaler(policy, torch.device("cpu")), Scaler(policy, torch.device("cpu"))
    trackers = graph.for_graphs("trackers")
    for skipped in skips:
        host.update(skipped=skipped)
        move_scale_(graph.scale, trackers, torch.tensor(7 * skipped), *policy.numbers)
        graph.update(skipped=skipped, is_moved=True)
        assert float(graph.scale) == graph.value == host.value == float(host.scale)
        assert trackers.tolist() == [host.growth_tracker, host.hysteresis_tracker]
