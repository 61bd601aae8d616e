"""What the norms of a run say about its clipping threshold."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..runtime import COLUMNS, read_rows

WARM_UP_SHARE = 0.1
TARGET_QUANTILE = 0.9
HEALTHY = (0.1, 10.0)
FEW = 100
UNHEALTHY = 100.0


@dataclass(frozen=True)
class NormReport:
    """The distribution of the gradient norms of a run.

    Attributes:
        steps: updates in the CSV.
        skipped: those that were left out.
        warm_up: updates at the beginning that the quantiles leave out.
        quantiles: pre-clip norms of the applied updates after warm-up, by quantile.
        clipped: share of these that were clipped.
        threshold: the run's own, None where it did not clip by norm.
        suggested: a threshold that would clip one update in ten.
    """

    steps: int
    skipped: int
    warm_up: int
    quantiles: dict[float, float]
    clipped: float
    threshold: float | None
    suggested: float

    def __str__(self) -> str:
        spread = "  ".join(f"{_percent(q)} {value:.3g}" for q, value in self.quantiles.items())
        own = "did not clip by norm" if self.threshold is None else f"clipped at {self.threshold:g}"
        if self.threshold is None and self.clipped:
            own = "clipped by value"
        left_out = f"; the first {self.warm_up} are left out as warm-up" if self.warm_up else ""
        lines = [
            f"{self.steps} updates, {self.skipped} skipped{left_out}; norms:",
            f"  {spread}",
            f"  the run {own}; {self.clipped:.1%} of updates were clipped",
            f"  suggested max_norm: {self.suggested:g} (clips about one update in ten)",
        ]
        median = self.quantiles[0.5]
        counted = self.steps - self.skipped - self.warm_up
        if counted < FEW:
            lines.append(f"  {counted} norms are few: a threshold wants some hundred")
        if median > UNHEALTHY:
            lines.append(
                f"  the median is above {UNHEALTHY:g}: the run is unhealthy; look at the loss, the data, the rate first"
            )
        elif not HEALTHY[0] <= median <= HEALTHY[1]:
            lines.append(f"  usual for a healthy run is a median between {HEALTHY[0]:g} and a few")
        if self.threshold is not None and self.clipped > 0.5:
            lines.append("  most updates are clipped: the threshold acts as a learning rate")
        return "\n".join(lines)


def _percent(quantile: float) -> str:
    return "max" if quantile == 1.0 else f"p{quantile * 100:g}"


def norm_report(path: Path) -> tuple[NormReport, list[tuple[int, float, float]]]:
    """The report on a CSV of a step log, and (step, norm before, norm after clipping) of each applied update.

    Raises:
        ConfigError: the file is no such CSV, or holds too few norms.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    rows = read_rows(path)
    if not rows or not set(COLUMNS) <= rows[0].keys():
        raise ConfigError(f"{path} is no step log: it needs the columns {', '.join(COLUMNS)}, and rows")
    points = [
        (int(row["step"]), float(row["grad_l2_pre_clip"]), float(row["grad_l2_post_clip"]))
        for row in rows
        if row["skipped"] == "False" and row["grad_l2_pre_clip"] and row["grad_l2_post_clip"]
    ]
    points = [p for p in points if math.isfinite(p[1])]
    warm_up = int(len(points) * WARM_UP_SHARE)
    late = points[warm_up:]
    if len(late) < 2:
        raise ConfigError(
            f"{path} holds {len(points)} L2 norms of applied updates; a distribution needs more. A run whose "
            "norm_type is not 2 logs none"
        )
    norms = sorted(before for _, before, _ in late)
    percentiles = statistics.quantiles(norms, n=100, method="inclusive")  # the first is the 1st
    quantiles = {p / 100: percentiles[p - 1] for p in (5, 25, 50, 75, 90, 99)} | {1.0: norms[-1]}
    return (
        NormReport(
            steps=len(rows),
            skipped=sum(row["skipped"] == "True" for row in rows),
            warm_up=warm_up,
            quantiles=quantiles,
            clipped=statistics.fmean(after < before * (1 - 1e-6) for _, before, after in late),
            threshold=_threshold(path),
            suggested=float(f"{quantiles[TARGET_QUANTILE]:.2g}"),
        ),
        points,
    )


def _threshold(path: Path) -> float | None:
    settings = path.with_suffix(".json")
    if not settings.exists():
        return None
    value = json.loads(settings.read_text()).get("max_norm")
    return None if value is None else float(value)


def draw(report: NormReport, points: list[tuple[int, float, float]], path: Path) -> None:
    """Norms over steps and their distribution, with the run's threshold and the suggested one, as a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'stepgraph[demo]', or pass --no-plot") from error
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    over_time, spread = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    steps = [step for step, _, _ in points]
    over_time.plot(steps, [before for _, before, _ in points], ".", ms=3, color="#4477aa", label="before clipping")
    over_time.plot(steps, [after for _, _, after in points], ".", ms=3, color="#ccbb44", label="after", zorder=3)
    over_time.set(xlabel="update", ylabel="L2 norm of all gradients", yscale="log")
    late = [math.log10(before) for _, before, _ in points[report.warm_up :] if before > 0]
    low, high = (min(late), max(late)) if late else (0.0, 1.0)
    bins = max(5, min(40, len(late) // 4))
    edges = [10 ** (low + (high - low) * i / bins) for i in range(bins + 1)]
    spread.hist([10**value for value in late], bins=edges, orientation="horizontal", color="#4477aa")
    spread.set(xlabel="updates after warm-up")
    for axes in (over_time, spread):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.axhline(report.suggested, color="#228833", ls="--", lw=1, label=f"suggested: {report.suggested:g}")
        if report.threshold is not None:
            axes.axhline(report.threshold, color="#ee6677", lw=1, label=f"max_norm: {report.threshold:g}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Gradient norms of {report.steps} updates, {report.skipped} skipped", fontsize=10)
    figure.legend(
        *over_time.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=4
    )
    figure.savefig(path, dpi=150)
