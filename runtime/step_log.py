"""One row a step, in a CSV that is whole whenever the process ends, and alarms about skipped updates."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
from collections import deque
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..capture import warn_user
from ..errors import ConfigError, NonFiniteError
from ..knobs import launched_rank
from .result import StepResult

logger = logging.getLogger("stepgraph")


@dataclass(frozen=True)
class StepRecord:
    """One update; the fields are the columns of the CSV.

    Attributes:
        step: number of the update, from 1.
        lr: learning rate of the first parameter group.
        grad_l2_pre_clip: L2 norm of all gradients, unscaled; None where a norm of another type is taken.
        grad_l2_post_clip: the same of what the optimizer saw.
        loss: of the batch; over a window, the weighted mean of its micro-batches.
        skipped: whether the update was left out.
        skip_reason: why; empty where it was not.
        scaler_scale: the loss scale after the update; None where losses are not scaled.
    """

    step: int
    lr: float
    grad_l2_pre_clip: float | None
    grad_l2_post_clip: float | None
    loss: float | None
    skipped: bool
    skip_reason: str
    scaler_scale: float | None

    def row(self) -> list[str]:
        """The cells of the CSV; floats to the last bit, nothing for None."""
        return [_cell(getattr(self, name)) for name in COLUMNS]

    def __str__(self) -> str:
        norms = f"grad_norm {_short(self.grad_l2_pre_clip)} -> {_short(self.grad_l2_post_clip)}"
        scale = "" if self.scaler_scale is None else f"  scale {self.scaler_scale:g}"
        return f"STEP {self.step:>5}  loss {_short(self.loss)}  {norms}  lr {self.lr:.3g}{scale}"


@dataclass(frozen=True)
class SkipRecord(StepRecord):
    """An update that was left out."""

    def __str__(self) -> str:
        scale = "" if self.scaler_scale is None else f"  scale {self.scaler_scale:g}"
        return f"SKIP {self.step:>5}  loss {_short(self.loss)}  {self.skip_reason}{scale}"


COLUMNS = tuple(field.name for field in fields(StepRecord))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


class StepLog:
    """Writes a row for each update, and a JSON file beside the CSV with what the numbers were made under.

    Reading the loss and the norm waits for the device. A run that is resumed goes on in the same file: rows of steps that it
    takes again are dropped. With several ranks, rank 0 writes the files, and every rank prints and warns.

    Args:
        path: of the CSV; its folder is made. The JSON has the same name with the suffix ``.json``.
        console: whether each row is printed, as a line that starts with ``STEP`` or ``SKIP``, to stdout.
        window: updates that the skip rate is taken over: skips among the last ``window``, divided by ``window``.
        alert_rate: a skip rate above this warns, once until it has fallen again.
        fail_rate: the run ends with :class:`NonFiniteError` when the skip rate stays above this for ``fail_after`` updates;
            None is never.
        fail_after: updates in a row.

    Attributes:
        last: the record that was written last, or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        console: bool = False,
        window: int = 1000,
        alert_rate: float = 0.05,
        fail_rate: float | None = None,
        fail_after: int = 100,
    ) -> None:
        for name, count in (("window", window), ("fail_after", fail_after)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"StepLog: {name} must be a whole number of updates, 1 or more, got {count!r}")
        for name, rate in (("alert_rate", alert_rate), ("fail_rate", fail_rate)):
            if rate is not None and not (isinstance(rate, (int, float)) and 0 <= rate < 1):
                raise ConfigError(f"StepLog: {name} must be from 0 up to 1, got {rate!r}")
        self.path = Path(path)
        self.console = console
        self.alert_rate = alert_rate
        self.fail_rate = fail_rate
        self.fail_after = fail_after
        self.last: StepRecord | None = None
        self._recent: deque[bool] = deque(maxlen=window)
        self._window = window
        self._alerted = False
        self._above = 0
        self._symptoms = _ScaleSymptoms()
        self._settings: dict[str, Any] = {}
        self._file: io.FileIO | None = None

    @property
    def skip_rate(self) -> float:
        """Skips among the last ``window`` updates, divided by ``window``."""
        return sum(self._recent) / self._window

    def describe(self, settings: dict[str, Any]) -> None:
        """What goes into the JSON file: how the run is clipped, cast and scaled."""
        self._settings = settings | {
            "skip_alert_rate": self.alert_rate,
            "skip_window": self._window,
            "csv": self.path.name,
        }

    def record(self, result: StepResult, optimizer: torch.optim.Optimizer, *, norm_is_l2: bool = True) -> StepRecord:
        """Notes what became of an update.

        Raises:
            NonFiniteError: the skip rate was above ``fail_rate`` for too long.
        """
        kind = SkipRecord if result.skipped else StepRecord
        loss = result.mean_loss if result.mean_loss is not None else result.loss
        record = kind(
            step=result.step,
            lr=float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else float("nan"),
            grad_l2_pre_clip=_number(result.grad_norm) if norm_is_l2 else None,
            grad_l2_post_clip=_number(result.clipped_norm) if norm_is_l2 else None,
            loss=_number(loss),
            skipped=result.skipped,
            skip_reason=result.skip_reason or "",
            scaler_scale=result.loss_scale,
        )
        self._write(record)
        self.last = record
        if self.console:
            print(f"{_rank_prefix()}{record}", flush=True)
        self._watch(record)
        return record

    def _write(self, record: StepRecord) -> None:
        if rank() not in (None, 0):
            return
        if self._file is None or (self.last is not None and record.step <= self.last.step):
            self._open(record.step)
        assert self._file is not None
        self._file.write(_line(record.row()))  # unbuffered, one call a row: a killed process leaves whole rows

    def _open(self, first_step: int) -> None:
        """Opens the CSV for a row of this step, after those of earlier ones."""
        if self._file is None:
            self._set_aside(is_new=first_step == 1)
        kept = [] if first_step == 1 else [row for row in read_rows(self.path) if int(row["step"]) < first_step]
        if self._file is not None:
            self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        lines = [list(COLUMNS), *([row[name] for name in COLUMNS] for row in kept)]
        partial.write_bytes(b"".join(map(_line, lines)))
        partial.replace(self.path)
        self._file = io.FileIO(self.path, "ab")
        self.path.with_suffix(".json").write_text(json.dumps(self._settings, indent=1) + "\n")

    def _set_aside(self, *, is_new: bool) -> None:
        """Gives another run's file another name.

        Raises:
            ConfigError: the file is something else.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with self.path.open("rb") as file:
            if file.readline() != _line(list(COLUMNS)):
                raise ConfigError(f"{self.path} is there already and is no step log; give log= another path")
            if not is_new or not file.readline():
                return
        numbers = (f"{self.path.stem}.{number}" for number in itertools.count(1))
        stem = next(stem for stem in numbers if not self.path.with_name(stem + self.path.suffix).exists())
        kept = self.path.with_name(stem + self.path.suffix)
        self.path.rename(kept)
        settings = self.path.with_suffix(".json")
        if settings.exists():
            settings.rename(kept.with_name(stem + ".json"))
        warn_user(f"{self.path} held another run, which is now {kept.name}")

    def _watch(self, record: StepRecord) -> None:
        self._recent.append(record.skipped)
        for symptom in self._symptoms.after(record):
            warn_user(f"{_rank_prefix()}step {record.step}: {symptom}")
        rate = self.skip_rate
        if rate <= self.alert_rate:
            self._alerted = False
        elif not self._alerted:
            self._alerted = True
            warn_user(
                f"{_rank_prefix()}step {record.step}: {rate:.1%} of the last {self._window} updates were skipped, more than "
                f"{self.alert_rate:.1%}. The last: {record.skip_reason}."
            )
        self._above = self._above + 1 if self.fail_rate is not None and rate > self.fail_rate else 0
        if self._above >= self.fail_after:
            self._above = 0
            raise NonFiniteError(
                f"step {record.step}: more than {self.fail_rate:.1%} of the last {self._window} updates were skipped, for "
                f"{self.fail_after} updates in a row ({rate:.1%} now).",
                None,
            )


class _ScaleSymptoms:
    """Movements of a loss scale that say that something else is wrong, each told once."""

    STARTUP_SKIPS = 20  # from 2**16 down to 2**-4
    RELAPSES = 5

    def __init__(self) -> None:
        self._startup: int | None = 0
        self._before: float | None = None
        self._has_grown = False
        self._relapses: deque[int] = deque(maxlen=self.RELAPSES)
        self._told_of_relapses = False

    def after(self, record: StepRecord) -> list[str]:
        """What this record shows."""
        scale, before = record.scaler_scale, self._before
        self._before = scale
        if scale is None:
            return []
        found = []
        if self._startup is not None:
            self._startup = self._startup + 1 if record.skipped else None
            if self._startup == self.STARTUP_SKIPS:
                found.append(
                    f"the loss scale backs off since the first update, {self._startup} times, and is {scale:g} now: gradients "
                    "overflow whatever it is. Look at the loss, the learning rate and the data; step.find_nonfinite(batch)."
                )
        if before is not None and scale > before:
            self._has_grown = True
        elif before is not None and scale < before and self._has_grown:
            self._has_grown = False
            self._relapses.append(record.step)
            window = self._relapses[-1] - self._relapses[0]
            if len(self._relapses) == self.RELAPSES and window <= 1000 and not self._told_of_relapses:
                self._told_of_relapses = True
                found.append(
                    f"the loss scale oscillates: it grew and backed off {self.RELAPSES} times within {window} updates, and is "
                    f"{scale:g} now. A longer growth_interval skips less; spikes of the gradients are another cause."
                )
        return found


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a CSV of :class:`StepLog`; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if None not in row.values() and row.get("step")]


def rank() -> int | None:
    """The rank of this process: of the default process group, or of the launcher; None alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return launched_rank()


def _rank_prefix() -> str:
    return "" if rank() is None else f"[rank {rank()}] "


def _line(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _number(value: torch.Tensor | None) -> float | None:
    return None if value is None else float(value)
