"""``stepgraph plan`` and ``stepgraph calibrate``, as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stepgraph as sg
from stepgraph.tools.cli import main
from stepgraph.tools.presets import preset_parts

pytest.importorskip("transformers")
PLAN = ["plan", "bert-tiny", "--hardware", "cpu"]


def _peak() -> int:
    model, optimizer, batch, options = preset_parts("bert-tiny")
    step = sg.compile_train_step(model, optimizer, plan="none", hardware="cpu", **options)
    step.prepare(batch)
    return step.plan.prediction.peak_bytes


def test_a_plan_is_told_saved_and_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    budget = int(_peak() * 0.9)
    file = tmp_path / "plan.json"
    assert main([*PLAN, "--budget", f"{budget}B", "--frontier", "--save", str(file)]) == 0
    told = capsys.readouterr().out
    assert f"budget {budget:,} bytes" in told
    assert "computed again" in told
    assert "slower" in told
    assert f"wrote {file}" in told
    saved = sg.load_plan(file)
    assert saved.prediction.peak_bytes <= budget
    model, optimizer, batch, options = preset_parts("bert-tiny")
    step = sg.compile_train_step(model, optimizer, plan=file, **options)
    step(batch)
    assert step.plan == saved
    assert main([*PLAN, "--plan", str(file)]) == 0
    assert main([*PLAN, "--frontier"]) == 0
    assert "everything fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--budget", "1KB"], "the step needs"),
        (["--budget", "many"], "--budget must be bytes"),
        (["--hardware", "abacus"], "hardware must be one of 'a100'"),
        (["--plan", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_planned_says_why(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert-tiny", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_hardware_changes_what_is_computed_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where products are dear and bandwidth is not, other operators run again than where it is the other way round."""
    import dataclasses

    from stepgraph.planner import SPECS

    cpu = SPECS["cpu"]
    slow = dict.fromkeys(cpu.matmul_flops, 1e7)
    fast = dict.fromkeys(cpu.matmul_flops, 1e15)
    specs = {
        "slow products": dataclasses.replace(cpu, matmul_flops=slow, memory_bytes_per_second=1e15),
        "slow memory": dataclasses.replace(cpu, matmul_flops=fast, memory_bytes_per_second=1e7),
    }
    budget = int(_peak() * 0.92)
    products = {}
    for name, spec in specs.items():
        model, optimizer, batch, options = preset_parts("bert-tiny")
        step = sg.compile_train_step(model, optimizer, memory_budget=budget, hardware=spec, **options)
        step.prepare(batch)
        again = [repeat.operator for repeat in step.plan.repeats]
        products[name] = sum("mm#" in operator for operator in again)
        assert again
    assert products["slow products"] < products["slow memory"]


def test_calibrate_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "abacus"]) == 1
    assert "--device must be cpu, cuda or cuda:1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["calibrate", "--device", "cuda"]) == 1
        assert "no GPU here" in capsys.readouterr().err
