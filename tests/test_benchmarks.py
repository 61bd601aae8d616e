"""The benchmarks' own arithmetic, and that each of them runs; nothing here asserts a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from . import test_scripts

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads a benchmark by name, as running it would."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_ratios_are_of_medians_with_an_interval_around_them(load) -> None:
    harness = load("harness")
    result = harness.Measurement({"a": [2.0, 2.2, 1.8, 2.0, 9.0], "b": [1.0, 1.1, 0.9, 1.0, 1.0]})
    ratio = result.ratio("a", "b")
    assert ratio.value == 2.0
    assert ratio.low <= 2.0 <= ratio.high
    assert (ratio.low, ratio.high) == (result.ratio("a", "b").low, result.ratio("a", "b").high)
    assert result.ratio("b", "a").value == 0.5
    assert result.as_json()["median_seconds"] == {"a": 2.0, "b": 1.0}


def test_disturbed_rounds_are_discarded(load, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("harness")
    controls = iter([1.0, 1.0, 1.0, 1.5, 1.0, 1.02])
    monkeypatch.setattr(harness, "control_seconds", lambda: next(controls))
    calls: list[str] = []
    result = harness.measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, calls=3)
    assert result.discarded == 1
    assert [len(seconds) for seconds in result.seconds.values()] == [2, 2]
    assert calls == ["a", "b", *(["a"] * 3 + ["b"] * 3) * 3]


def test_a_machine_that_is_too_busy_is_told(load, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("harness")
    flip = iter(range(100))
    monkeypatch.setattr(harness, "control_seconds", lambda: 1.0 + next(flip) % 2)
    with pytest.raises(RuntimeError, match="too busy to measure"):
        harness.measure({"a": lambda: None}, rounds=3)


def test_flops_of_a_model_follow_its_weights_and_tokens(load) -> None:
    step_time = load("step_time")
    small, large = step_time.Size(64, 1, 1, 8, 1, 1), step_time.Size(64, 1, 2, 8, 1, 1)
    model = step_time.build(small)
    assert step_time.flops(large, model) == 2 * step_time.flops(small, model)
    weights = 4 * 64 * 64 + 3 * 64 * 168 + 64 * 256
    assert step_time.flops(small, model) == 6 * weights * 8 + 3 * (2 * 2 * 8**2 * 64 / 2)


def test_gpu_check_compares_bit_for_bit(load) -> None:
    """On the CPU, up to the last call: the same comparison and the same page."""
    gpu_check = load("gpu_check")
    assert gpu_check.bitwise("cpu", ["gpt-demo", "resnet-tiny"])[2:] == [
        "| gpt-demo | bitwise equal |",
        "| resnet-tiny | bitwise equal |",
    ]


def test_gpu_check_tells_whether_steps_wait(load, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = load("gpu_check")
    assert all("| for the gate" in line and "10 of 10" in line for line in gpu_check.without_waiting("cpu")[2:4])
    monkeypatch.setattr("stepgraph.runtime.compiled.reads_are_cheap", lambda device: False)
    assert [line.split(" | ")[1] for line in gpu_check.without_waiting("cpu")[2:]] == ["never"] * 3


def test_gpu_check_finds_the_region_that_becomes_a_cuda_graph(load) -> None:
    gpu_check = load("gpu_check")
    model, _, batch, options = gpu_check.preset_parts("llama-tiny")
    optimizer = gpu_check.torch.optim.AdamW(model.eval().parameters(), fused=True)
    step = gpu_check.sg.compile_train_step(model, optimizer, **options, lowering="inductor")
    run, inputs, operators = gpu_check.largest_region(step, batch)
    assert operators > 100
    with gpu_check.torch.no_grad():
        first, second = run(*inputs), run(*inputs)
    assert all(gpu_check.torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gpu_check_without_a_gpu_says_so(load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gpu_check").main(["--device", "cuda"]) == (0 if __import__("torch").cuda.is_available() else 1)
    assert "no CUDA device here" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmarks_run(tmp_path: Path) -> None:
    test_scripts.run("benchmarks/capture_time.py", "--rounds", "1", "--models", "resnet")
    results = json.loads((BENCHMARKS / "results" / "capture_time.json").read_text())
    assert results["models"]["resnet"]["median_seconds"]["stepgraph"] > 0
    page = tmp_path / "gpu.md"
    test_scripts.run(
        "benchmarks/gpu_check.py", "--device", "cpu", "--presets", "llama-tiny", "--timed", "llama-tiny", "--calls", "1",
        "--out", page,
    )  # fmt: skip
    text = page.read_text()
    assert "| llama-tiny | bitwise equal |" in text
    assert "failed" not in text


@pytest.mark.slow
def test_recompute_prints_peaks_beside_times(load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(load("harness"), "control_seconds", lambda: 1.0)
    recompute = load("recompute")
    results = recompute.run(1, [60], [0.5], ["dp", "ilp"], name="llama", layers=2, hidden=64)
    assert results["peak_mb"]['plan="auto" at 60 MB'] <= 60
    assert results["peak_mb"]["eager"] == pytest.approx(results["peak_mb"]['plan="none"'], rel=0.02)
    assert "activation_memory_budget dp 0.5" in capsys.readouterr().out
    recompute.draw(results, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.slow
def test_clock_compares_what_it_says(load, capsys) -> None:
    load("harness")
    load("recompute")
    clock = load("clock")
    clock.TURN_SECONDS = 0.001
    found = clock.compared(clock.steps_of_models(["llama"], 2, 32), 1)
    assert all(predicted > 0 and measured > 0 for predicted, measured in found.values())
    plans = clock.plans_of("llama", 4, 64, 3)
    assert len({step.plan.prediction.peak_bytes for step, _ in plans.values()}) == 3
    assert "llama, 2 layers of 32" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.feature("AMP-23")
def test_precision_table_has_a_row_for_each_precision(load, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(load("harness"), "control_seconds", lambda: 1.0)
    step_time = load("step_time")
    monkeypatch.setitem(step_time.SIZES, "64", step_time.Size(64, 1, 1, 16, 2, 1))
    monkeypatch.setattr(sys, "argv", ["precision.py", "--sizes", "64", "--rounds", "2"])
    load("precision").main()
    shown = capsys.readouterr().out
    for name in ("eager fp32", "eager bf16", "eager fp16", "stepgraph fp32", "stepgraph bf16", "stepgraph fp16"):
        assert name in shown
    results = json.loads((BENCHMARKS / "results" / "precision.json").read_text())["measured"]
    assert results["gemm"]["median_seconds"].keys() == {"fp32", "bf16", "fp16"}
