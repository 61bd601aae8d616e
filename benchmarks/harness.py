"""How everything here is measured, on a machine that others use too.

One thread. Candidates take turns in rounds; in a round each makes a few calls in a row and the median of those counts. A fixed
control kernel runs before and after each round, and rounds in which it moved by more than 5 % are discarded. Figures are
medians over rounds. A ratio is one of medians, with a 90 % bootstrap interval over rounds; a bar is met when that interval
reaches it.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
CONTROL_SIZE = 256
CONTROL_REPEATS = 8
LARGEST_CONTROL_CHANGE = 0.05
BOOTSTRAP_SAMPLES = 2000
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians.

    Attributes:
        value: the ratio.
        low: lower end of its 90 % interval.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass
class Measurement:
    """Seconds of each candidate in each round that was kept.

    Attributes:
        seconds: by candidate; entries of one round stand at the same place.
        discarded: how many rounds were disturbed.
        control_seconds: median of the control kernel.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    discarded: int = 0
    control_seconds: float = 0.0

    def median(self, name: str) -> float:
        """Median seconds of one call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> Ratio:
        """Seconds of ``name`` over those of ``other``: above 1, ``other`` is faster."""
        pairs = list(zip(self.seconds[name], self.seconds[other], strict=True))
        draw = random.Random(0)
        samples = sorted(
            _ratio_of_medians([pairs[draw.randrange(len(pairs))] for _ in pairs]) for _ in range(BOOTSTRAP_SAMPLES)
        )
        cut = int(BOOTSTRAP_SAMPLES * (1 - CONFIDENCE) / 2)
        return Ratio(_ratio_of_medians(pairs), samples[cut], samples[-cut - 1])

    def as_json(self) -> dict[str, Any]:
        """Plain data: medians and rounds."""
        medians = {name: self.median(name) for name in self.seconds}
        return {
            "median_seconds": medians,
            "rounds": len(next(iter(self.seconds.values()))),
            "discarded_rounds": self.discarded,
            "control_seconds": self.control_seconds,
        }


def _ratio_of_medians(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def measure(
    candidates: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    before: dict[str, Callable[[], Any]] | None = None,
) -> Measurement:
    """Runs ``candidates`` in turns until ``rounds`` undisturbed rounds were kept, for at most three times as many.

    Args:
        before: what a candidate needs done before each call, which is not counted.

    Raises:
        RuntimeError: fewer than a third of ``rounds`` were undisturbed.
    """
    before = before or {}
    for name, call in candidates.items():
        before.get(name, _nothing)()
        call()
    kept: list[dict[str, float]] = []
    controls: list[float] = []
    tried = 0
    while len(kept) < rounds and tried < 3 * rounds:
        tried += 1
        start = control_seconds()
        times = {name: _median_seconds(call, calls, before.get(name, _nothing)) for name, call in candidates.items()}
        end = control_seconds()
        controls += [start, end]
        if abs(end - start) <= LARGEST_CONTROL_CHANGE * min(end, start):
            kept.append(times)
    if 3 * len(kept) < rounds:
        raise RuntimeError(
            f"the machine is too busy to measure: the control kernel moved by more than {LARGEST_CONTROL_CHANGE:.0%} in "
            f"{tried - len(kept)} of {tried} rounds"
        )
    seconds = {name: [times[name] for times in kept] for name in candidates}
    return Measurement(seconds, discarded=tried - len(kept), control_seconds=statistics.median(controls))


def _nothing() -> None:
    pass


def _median_seconds(call: Callable[[], Any], calls: int, before: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(calls):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


_CONTROL = torch.ones(CONTROL_SIZE, CONTROL_SIZE)


def control_seconds() -> float:
    """Seconds of a fixed matrix product, the least of a few."""
    seconds = []
    for _ in range(CONTROL_REPEATS):
        start = time.perf_counter()
        torch.mm(_CONTROL, _CONTROL)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def gemm_flops_per_second(size: int = 1024) -> float:
    """Rate of a large matrix product in single precision: the least of a few."""
    a = torch.randn(size, size)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def write(name: str, contents: dict[str, Any]) -> Path:
    """Writes ``results/NAME.json`` with what identifies the machine and the versions."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.processor()}
    path.write_text(json.dumps({"about": about, **contents}, indent=2) + "\n")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    """Rows under a header, columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [[*header], ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
