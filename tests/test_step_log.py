"""The step log: rows that are whole whenever the process ends, alarms, and what the norms say."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph.runtime import Outcome, StepResult
from stepgraph.tools.cli import main
from stepgraph.tools.norms import norm_report

from . import fixtures
from .amp_loop import INF, Pulls

ROOT = Path(__file__).parents[1]
COLUMNS = ["step", "lr", "grad_l2_pre_clip", "grad_l2_post_clip", "loss", "skipped", "skip_reason", "scaler_scale"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pulls(log: Any, gradients: list[float], **options: Any) -> sg.TrainStep:
    model = Pulls()
    step = sg.compile_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), log=log, **options)
    for gradient in gradients:
        step(torch.tensor(gradient))
    return step


@pytest.mark.feature("AMP-16", "AMP-18", "AMP-22", "CLIP-20")
def test_a_row_for_each_update_and_a_json_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "steps.csv"
    scale = sg.LossScale(init_scale=16, growth_interval=2)
    pulls(path, [4200.0, INF, 0.5], precision="fp16", loss_scale=scale, max_norm=1.0)
    assert path.read_text().splitlines()[0].split(",") == COLUMNS
    first, second, third = rows(path)
    assert float(first["grad_l2_pre_clip"]) == 4200
    assert float(first["grad_l2_post_clip"]) == pytest.approx(1, rel=1e-5)
    assert [r["skipped"] for r in (first, second, third)] == ["False", "True", "False"]
    assert second["skip_reason"] == "the gradient of weight is not finite"
    assert [float(r["scaler_scale"]) for r in (first, second, third)] == [16, 8, 8]
    assert [r["step"] for r in (first, second, third)] == ["1", "2", "3"]
    assert {r["lr"] for r in (first, second, third)} == {"0.1"}
    assert float(third["grad_l2_post_clip"]) == 0.5
    settings = json.loads(path.with_suffix(".json").read_text())
    assert (settings["precision"], settings["autocast_device"], settings["max_norm"]) == ("fp16", "cpu", 1.0)
    assert settings["skip_alert_rate"] == 0.05
    assert settings["loss_scale"]["growth_interval"] == 2


def test_values_are_those_of_the_results_to_the_last_bit(tmp_path: Path) -> None:
    make = fixtures.FIXTURES["MLP"]
    fixture = make()
    path = tmp_path / "steps.csv"
    step = sg.compile_train_step(
        fixture.model, torch.optim.AdamW(fixture.model.parameters()), loss_fn=fixture.loss_fn, clip_value=0.01, log=path
    )
    results = [step(batch) for batch in fixtures.batches(make, 5)]
    for row, result in zip(rows(path), results, strict=True):
        assert float(row["loss"]) == result.loss.item()
        assert float(row["grad_l2_pre_clip"]) == result.grad_norm.item()
        assert float(row["grad_l2_post_clip"]) == result.clipped_norm.item()
        assert result.clipped_norm < result.grad_norm
        assert row["scaler_scale"] == ""


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_value": 0.01}], ids=str)
def test_the_norm_after_clipping_is_that_of_what_the_optimizer_sees(clip: dict[str, float]) -> None:
    fixture = fixtures.mlp()
    optimizer = torch.optim.SGD(fixture.model.parameters(), lr=0.1, momentum=0.9)
    result = sg.compile_train_step(fixture.model, optimizer, loss_fn=fixture.loss_fn, **clip)(fixture.batch)
    seen = torch.cat([entries["momentum_buffer"].flatten() for entries in optimizer.state.values()]).norm()
    assert result.clipped_norm.item() == pytest.approx(seen.item(), rel=1e-5)


def test_a_window_is_one_row_with_its_mean_loss(tmp_path: Path) -> None:
    make = fixtures.FIXTURES["MLP"]
    fixture = make()
    path = tmp_path / "steps.csv"
    step = sg.compile_train_step(
        fixture.model,
        torch.optim.SGD(fixture.model.parameters(), lr=0.1),
        loss_fn=fixture.loss_fn,
        accumulate=3,
        log=path,
    )
    losses = [
        step(batch, weight).loss.item()
        for batch, weight in zip(fixtures.batches(make, 5), (1, 2, 3, 4, 5), strict=True)
    ]
    step.flush()
    means = [(losses[0] + 2 * losses[1] + 3 * losses[2]) / 6, (4 * losses[3] + 5 * losses[4]) / 9]
    assert [float(r["loss"]) for r in rows(path)] == pytest.approx(means)
    step(fixture.batch, 0)
    step(fixture.batch, 0)
    step(fixture.batch, 0)
    assert rows(path)[-1]["skip_reason"] == "the weights of its batches sum to 0"


def test_another_norm_is_not_called_l2(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    pulls(path, [2.0], max_norm=1.0, norm_type=INF)
    assert (rows(path)[0]["grad_l2_pre_clip"], rows(path)[0]["grad_l2_post_clip"]) == ("", "")
    assert json.loads(path.with_suffix(".json").read_text())["norm_type"] == "inf"


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    step = pulls(path, [1.0, 2.0, 3.0])
    step.save(tmp_path / "at3")
    for gradient in (4.0, 5.0):
        step(torch.tensor(gradient))
    step.load(tmp_path / "at3")
    step(torch.tensor(6.0))
    assert [float(r["grad_l2_pre_clip"]) for r in rows(path)] == [1, 2, 3, 6]
    other = pulls(path, [])
    other.load(tmp_path / "at3")
    other(torch.tensor(7.0))
    other(torch.tensor(8.0))
    assert [float(r["grad_l2_pre_clip"]) for r in rows(path)] == [1, 2, 3, 7, 8]
    with pytest.warns(sg.StepGraphWarning, match="held another run"):
        pulls(path, [9.0])
    assert [float(r["grad_l2_pre_clip"]) for r in rows(path)] == [9], "a run from the beginning begins the file"


@pytest.mark.feature("AMP-15", "API-10")
def test_lines_are_tagged(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = sg.StepLog(tmp_path / "steps.csv", console=True)
    pulls(log, [1.0, INF])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "SKIP"]
    assert isinstance(log.last, sg.SkipRecord)
    monkeypatch.setenv("RANK", "3")
    other = sg.StepLog(tmp_path / "rank3.csv", console=True)
    pulls(other, [1.0])
    assert capsys.readouterr().out.startswith("[rank 3] STEP")
    assert not other.path.exists(), "files are rank 0's"


def test_a_raised_step_is_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    with pytest.raises(sg.NonFiniteError):
        pulls(path, [1.0, INF], nonfinite="raise")
    assert [r["skipped"] for r in rows(path)] == ["False", "True"]


def outcome(step: int, skipped: bool, scale: float | None = None) -> StepResult:
    one = torch.ones(())
    known = Outcome(reason="bad" if skipped else None)
    known.applied, known.loss_scale = not skipped, scale
    return StepResult(one, None, one, None, step, known)


def fed(log: sg.StepLog, skips: list[bool], scales: list[float] | None = None) -> list[tuple[int, str]]:
    """Warnings, with the step that they came at."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    found = []
    for number, skipped in enumerate(skips, start=1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            log.record(outcome(number, skipped, None if scales is None else scales[number - 1]), optimizer)
        found += [(number, str(w.message)) for w in caught]
    return found


@pytest.mark.feature("AMP-17", "AMP-24")
def test_the_alarm_fires_when_the_rate_passes_and_again_after_it_fell(tmp_path: Path) -> None:
    skips = [True] * 50 + [False] * 10 + [True] + [False] * 1000 + [True] * 51
    found = fed(sg.StepLog(tmp_path / "a.csv"), skips)
    assert [step for step, text in found if "of the last 1000 updates were skipped" in text] == [61, len(skips)]
    assert "5.1% of the last 1000" in found[0][1]
    assert not fed(sg.StepLog(tmp_path / "b.csv"), [True] * 50)


def test_the_run_fails_when_and_only_when_the_rate_stays_high(tmp_path: Path) -> None:
    options: dict[str, Any] = {"window": 20, "alert_rate": 0.99, "fail_rate": 0.25, "fail_after": 10}
    log = sg.StepLog(tmp_path / "a.csv", **options)
    fed(log, [True] * 6 + [False] * 8)  # above a quarter at the sixth; nine in a row so far
    with pytest.raises(sg.NonFiniteError, match=r"step 15: more than 25\.0% of the last 20"):
        log.record(outcome(15, False), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    calm = sg.StepLog(tmp_path / "b.csv", **options)
    fed(calm, ([True] * 5 + [False] * 20) * 20)  # at a quarter, not above
    assert len(rows(calm.path)) == 500


def test_the_run_that_falls_below_in_time_goes_on(tmp_path: Path) -> None:
    log = sg.StepLog(tmp_path / "a.csv", window=10, alert_rate=0.99, fail_rate=0.25, fail_after=12)
    fed(log, ([True] * 3 + [False] * 17) * 10)  # above for ten updates each time
    assert log.skip_rate == 0


@pytest.mark.feature("AMP-18")
def test_symptoms_of_the_scale_are_told_once(tmp_path: Path) -> None:
    down = [2.0 ** (16 - n) for n in range(1, 26)]
    found = fed(sg.StepLog(tmp_path / "a.csv", alert_rate=0.99), [True] * 25, down)
    assert [step for step, text in found if "backs off since the first update" in text] == [20]
    scales = [8.0] + [s for _ in range(8) for s in (16.0, 8.0)]
    skips = [False] + [s for _ in range(8) for s in (False, True)]
    found = fed(sg.StepLog(tmp_path / "b.csv", alert_rate=0.99), skips, scales)
    assert [step for step, text in found if "oscillates" in text] == [11]
    steady = [8.0] * 3 + [16.0] * 30
    assert not fed(sg.StepLog(tmp_path / "c.csv"), [False] * 33, steady)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"alert_rate": 1.0}, {"fail_rate": -0.1}, {"fail_after": 1.5}, {"window": True}], ids=str
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(sg.ConfigError, match=f"StepLog: {next(iter(options))}"):
        sg.StepLog(tmp_path / "a.csv", **options)


_TRAINS = """
import signal, sys, torch, stepgraph as sg
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
step = sg.compile_train_step(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, x: m(x).square().mean(), log=sys.argv[1]
)
print("ready", flush=True)
while True:
    step(torch.ones(2, 4))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_rows_are_whole_when_the_process_is_ended(sent: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINS, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        while not path.exists() or path.stat().st_size < 20_000:
            assert process.poll() is None
    finally:
        os.kill(process.pid, sent)
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    text = path.read_text()
    assert text.endswith("\n")
    found = rows(path)
    assert [int(r["step"]) for r in found] == list(range(1, len(found) + 1))
    assert all(None not in r.values() and math.isfinite(float(r["loss"])) for r in found)


@pytest.mark.feature("CLIP-25", "CLIP-21")
def test_norms_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.csv"
    step = pulls(path, [], max_norm=5.0)
    for number in range(200):
        step(torch.tensor(INF if number == 50 else 1.0 + number % 10))
    report, points = norm_report(path)
    assert (report.steps, report.skipped, report.threshold, len(points)) == (200, 1, 5.0, 199)
    assert report.clipped == pytest.approx(0.5, abs=0.02)
    assert report.quantiles[0.5] == pytest.approx(5.5, abs=0.6)
    assert report.quantiles[1.0] == 10
    assert report.suggested == pytest.approx(9.5, abs=0.6)
    assert main(["norms", str(path)]) == 0
    out = capsys.readouterr().out
    assert "suggested max_norm: " in out
    assert "clipped at 5" in out
    assert (tmp_path / "steps.norms.png").read_bytes().startswith(b"\x89PNG")
    assert main(["norms", str(path), "--no-plot"]) == 0


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", ",".join(COLUMNS) + "\n"])
def test_norms_of_what_is_no_log(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    if content is not None:
        path.write_text(content)
    assert main(["norms", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def demo(*options: str, out: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "stepgraph.tools.cli", "demo", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=out,
        timeout=240,
    )
    return done.returncode, done.stdout


@pytest.mark.feature("AMP-19", "AMP-11")
@pytest.mark.parametrize(
    ("options", "skips"),
    [
        (["--inject-inf", "5"], [5]),
        (["--inject-inf", "5", "--precision", "fp32"], [5]),
        (["--spike", "1e8"], [10]),
        (["--spike", "1e8", "--precision", "bf16"], []),
        (["--precision", "bf16"], []),
    ],
    ids=str,
)
def test_demos_end_well_and_skip_where_they_must(options: list[str], skips: list[int], tmp_path: Path) -> None:
    status, out = demo(*options, out=tmp_path)
    assert status == 0, out
    lines = [line for line in out.splitlines() if re.match(r"STEP|SKIP", line)]
    assert len(lines) == 20
    assert [int(line.split()[1]) for line in lines if line.startswith("SKIP")] == skips
    losses = [float(r["loss"]) for r in rows(tmp_path / "steps.csv")]
    assert (max(losses) > 1e15) == ("--spike" in options or "--inject-inf" in options)


def test_a_demo_says_what_is_wrong_with_its_options(tmp_path: Path) -> None:
    status, _ = demo("--inject-inf", "50", out=tmp_path)
    assert status == 2


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    pulls(path, [1.0, 2.0, 3.0])
    before = path.read_bytes()
    for number in (1, 2):
        with pytest.warns(sg.StepGraphWarning, match=rf"held another run, which is now steps\.{number}\.csv"):
            pulls(path, [1.0])
    assert (tmp_path / "steps.1.csv").read_bytes() == before
    assert [len(rows(tmp_path / name)) for name in ("steps.csv", "steps.1.csv", "steps.2.csv")] == [1, 3, 1]
    assert {p.name for p in tmp_path.glob("*.json")} == {"steps.json", "steps.1.json", "steps.2.json"}


def test_a_file_that_is_no_log_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("my,own,data\n")
    with pytest.raises(sg.ConfigError, match="is no step log"):
        pulls(path, [1.0])
    assert path.read_text() == "my,own,data\n"
