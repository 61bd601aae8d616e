"""The peak of real architectures: predicted as measured, within the budget, and the numbers of eager under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph as sg
from stepgraph.planner import measured_workspaces, simulate

from . import fixtures, oracle, zoo
from .peaks import held_bytes, peak_of_step

STEPS = 5
QUICK = ("gpt2", "llama", "bert", "vit", "resnet")
FIRST_RUN = 512  # numbers that only a first run makes


def _budgets(entry: zoo.ZooModel) -> tuple[int, int, int]:
    """Three budgets between what any plan needs and what keeping everything needs."""
    step = _compiled(entry.build(), "none")
    step.prepare(entry.batch())
    most = step.plan.prediction.peak_bytes
    with pytest.raises(sg.PlanError) as error:
        _compiled(entry.build(), "auto", memory_budget=1).prepare(entry.batch())
    least = error.value.least_bytes
    assert 0 < least <= most
    return least, (least + most) // 2, most - (most - least) // 8


def _compiled(model: torch.nn.Module, plan: Any, **options: Any) -> sg.TrainStep:
    optimizer = oracle.OPTIMIZERS["adamw_fused"](oracle.two_groups(model))
    return sg.compile_train_step(model, optimizer, plan, max_norm=1.0, master_weights=False, **options)


def _check(entry: zoo.ZooModel, plans: list[tuple[str, int | None]]) -> None:
    eager_model, _ = oracle.twin(entry.build)
    batches = [entry.batch(seed) for seed in range(STEPS)]
    optimizer = oracle.OPTIMIZERS["adamw_fused"](oracle.two_groups(eager_model))
    eager = oracle.eager_steps(eager_model, optimizer, fixtures.own_loss, batches, max_norm=1.0)
    for plan, budget in plans:
        _, model = oracle.twin(entry.build)
        step = _compiled(model, plan, memory_budget=budget)
        measured: list[int] = []
        step.prepare(batches[0])
        first = simulate(step.graph, measured_workspaces(step.graph)).peak().peak_bytes

        def run(batch: Any, step: Any = step, measured: list[int] = measured) -> Any:
            result, peak = peak_of_step(step, batch)
            measured.append(peak)
            return result

        oracle.assert_bitwise(eager, oracle.graph_steps(run, model, step.optimizer, batches))
        predicted = step.plan.prediction.peak_bytes
        copies = held_bytes(list(model.buffers()))  # of those that the step writes, to undo a step that fails
        beyond = measured[0] - first
        assert -FIRST_RUN <= beyond <= copies + FIRST_RUN, f"{plan} {budget}: first {measured[0]}, predicted {first}"
        for peak in measured[1:]:
            assert peak == pytest.approx(predicted, rel=1e-3), f"{plan} {budget}: {measured}, predicted {predicted}"
        if budget is not None:
            assert max(predicted, *measured) <= budget, f"{plan} {budget}: {measured}, predicted {predicted}"
            assert sum(step.plan.prediction.by_category.values()) == predicted


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in zoo.ZOO])
@pytest.mark.case("B30", "B31", "B33", "B55", "B56")
@pytest.mark.feature("MEM-1", "MEM-2", "CKPT-1", "CKPT-12")
def test_peak_is_as_predicted_and_numbers_are_those_of_eager(name: str) -> None:
    entry = zoo.ZOO[name]
    least, middle, high = _budgets(entry)
    _check(entry, [("none", None), ("sqrt", None), ("auto", least), ("auto", middle), ("auto", high)])


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
@pytest.mark.parametrize("plan", ["none", "auto"])
@pytest.mark.case("B55")
@pytest.mark.feature("MEM-2")
def test_a_measured_step_tells_its_peak_by_category_and_its_time_by_stage(name: str, plan: str) -> None:
    """What is alive at the peak, counted on the tensors, is what the simulator says, category for category.

    With convolutions, whose workspace is measured on zeros, another call can be the one at the peak.
    """
    entry = zoo.ZOO[name]
    budget = _budgets(entry)[1] if plan == "auto" else None
    step = _compiled(entry.build(), plan, memory_budget=budget)
    for seed in range(3):
        step.measure(entry.batch(seed))
    found, report = step._measured, step.report()
    assert found is not None
    assert sum(counted for counted, _ in found.categories.values()) == found.peak_bytes
    assert sum(expected for _, expected in found.categories.values()) == found.predicted_bytes
    for category, (counted, expected) in found.categories.items():
        if name != "resnet" or category in ("parameters", "optimizer state", "buffers", "batch"):
            assert abs(counted - expected) <= 512, category
        assert f"{category} {counted:,}" in report
    assert {"parameters", "optimizer state", "activations"} <= found.categories.keys()
    assert "measured peak" in report
    stages = {"forward", "backward", "norm", "update", *(["computing again"] if plan == "auto" else [])}
    assert stages <= found.stages.keys()
    assert all(took > 0 and expected > 0 for took, expected in found.stages.values())


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("adamw_fused", {"precision": "bf16"}),
    "fp16": ("adamw_fused", {"precision": "fp16"}),
    "for-loop": ("adamw_forloop", {}),
    "foreach": ("adamw_foreach", {}),
    "momentum": ("sgd_momentum", {"clip_value": 0.1}),
    "window": ("adamw_fused", {"accumulate": 2}),
    "spared backward": ("sgd", {"spare_backward": True}),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.case("B55", "B56")
def test_peaks_in_other_precisions_with_other_optimizers_and_windows(name: str, other: str) -> None:
    """A budget halfway: kept, as predicted, with the bits of the plan that computes nothing again."""
    entry, (optimizer, options) = zoo.ZOO[name], OTHERS[other]

    def compiled(plan: str, budget: int | None = None) -> sg.TrainStep:
        model = oracle.twin(entry.build)[1]
        return sg.compile_train_step(
            model, oracle.OPTIMIZERS[optimizer](model.parameters()), plan, memory_budget=budget, **options
        )

    with pytest.raises(sg.PlanError) as error:
        compiled("auto", 1).prepare(entry.batch())
    plain = compiled("none")
    plain.prepare(entry.batch())
    budget = (error.value.least_bytes + plain.plan.prediction.peak_bytes) // 2
    step = compiled("auto", budget)
    peaks = []
    for seed in range(6):
        batch = entry.batch(seed)
        with fixtures.seeded(seed):
            expected = plain(batch)
        with fixtures.seeded(seed):
            result, peak = peak_of_step(step, batch)
        peaks.append(peak if result.applied else 0)  # the plan is for calls that update
        assert torch.equal(result.loss, expected.loss)
        assert result.applied == expected.applied
    for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert step.plan.repeats
    sums = (
        sum(p.nbytes for p in step.model.parameters()) if "accumulate" in options else 0
    )  # the window's, inputs of the step
    settled = max(peaks[2:]) + sums
    assert settled == pytest.approx(step.plan.prediction.peak_bytes, rel=1e-3)
    assert settled <= budget + 512, "numbers of the step itself, such as its norm"
