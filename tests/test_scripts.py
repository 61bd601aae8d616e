"""The demo and the benchmark run from the command line, on small sizes."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "6", "--layers", "1", "--heads", "2", "--width", "32", "--context", "16", "--batch", "4"]


def run(*arguments: str | Path) -> str:
    """Output of a script; fails where the script does. One thread, in this process's environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(path: Path) -> list[dict[str, str]]:
    """The CSV without the column that depends on the clock."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def test_demo_gives_the_same_weights_compiled_and_eager(tmp_path: Path) -> None:
    """The main job, shortened: both runs write the same CSV and end with the same weights, bit for bit."""
    compiled = run("examples/train_gpt.py", *SMALL, "--out", tmp_path / "compiled")
    eager = run("examples/train_gpt.py", *SMALL, "--eager", "--out", tmp_path / "eager")
    assert "bitwise equal to eager" in compiled
    hashes = [re.findall(r"\b[0-9a-f]{64}\b", text) for text in (compiled, eager)]
    assert hashes[0] == hashes[1] != []
    csv_files = [next((tmp_path / kind).glob("*.csv")) for kind in ("compiled", "eager")]
    assert rows(csv_files[0]) == rows(csv_files[1])
    assert len(rows(csv_files[0])) == 6
    assert next((tmp_path / "compiled").glob("*.png")).stat().st_size > 10_000


def test_demo_says_what_to_do_without_python_s_text(tmp_path: Path) -> None:
    missing = tmp_path / "pydoc_data"
    missing.mkdir()
    (missing / "__init__.py").write_text("")
    command = [sys.executable, "examples/train_gpt.py", *SMALL, "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "--text" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_overhead_benchmark_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    text = run("benchmarks/call_overhead.py", "--parameters", "10", "--calls", "5", "--out", out)
    result = json.loads(out.read_text())
    assert 0 < result["runtime_seconds"] < result["step_seconds"]
    assert "runtime alone" in text


@pytest.mark.slow
def test_loss_curves_of_the_fast_tier_overlap_with_eagers(tmp_path: Path) -> None:
    """200 steps from the same weights, batches and dropout masks: rounding grows, and the curves stay together."""
    size = ["--steps", "200", "--layers", "2", "--heads", "2", "--width", "64"]
    run("examples/train_gpt.py", *size, "--numerics", "fast", "--out", tmp_path / "fast")
    run("examples/train_gpt.py", *size, "--eager", "--out", tmp_path / "eager")
    fast, eager = ([float(row["loss"]) for row in rows(tmp_path / kind / "train.csv")] for kind in ("fast", "eager"))
    assert len(fast) == len(eager) == 200
    assert fast[:20] == pytest.approx(eager[:20], rel=1e-4)
    assert max(abs(a - b) for a, b in zip(fast, eager, strict=True)) < 0.02
    assert eager[-1] < eager[0] - 2
