"""A plan: what a step keeps in memory and what it computes again, with what that was predicted to cost. JSON, no code."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PlanMismatchError
from .memory import CATEGORIES

VERSION = 1
STRATEGIES = ("none", "sqrt", "auto")


@dataclass(frozen=True)
class Repeat:
    """One run of a forward operator in backward.

    Attributes:
        operator: logical key of the operator.
        before: logical key of the operator of backward that it runs right before; of several with the same, in order.
        results: positions, among the storages that the operator allocates, of those that what follows reads from this run.
    """

    operator: str
    before: str
    results: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What becomes of one result of forward that backward reads.

    Attributes:
        value: logical key of the operator that makes it.
        keeps: whether it stays in memory; otherwise it is computed again.
        bytes: its size.
        seconds: predicted time of computing it again, alone.
        reason: why, in words.
    """

    value: str
    keeps: bool
    bytes: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class Prediction:
    """What the plan was predicted to need.

    Attributes:
        peak_bytes: most that is alive at once, the step's inputs included.
        at: logical key of the operator at the peak.
        by_category: what is alive there.
        seconds: of the step.
        extra_seconds: of that, what runs again.
        seconds_by_stage: of each phase, of what runs again, and what a step takes beside its operators.
    """

    peak_bytes: int
    at: str
    by_category: Mapping[str, int]
    seconds: float
    extra_seconds: float
    seconds_by_stage: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """What to do about memory.

    Attributes:
        strategy: ``"none"``, ``"sqrt"`` or ``"auto"``.
        fingerprint: of the step that it was made for, by part: parameters, batch, optimizer.
        budget_bytes: that it was made to keep; None where there was none.
        found_by: what it was found by.
        compacts_masks: whether dropout masks are kept as one bit an element.
        repeats: what runs again, in execution order.
        decisions: for each result of forward that backward reads, in order.
        prediction: what it was predicted to need.
        frontier: peaks in bytes and seconds of the plans beside it, by rising peak.
        price: of memory at the budget, in seconds per byte at the peak.
        gap: by how much the step's time is above a bound that no plan can be below, as a share of that.
        hardware: name of the spec that the seconds are of.
        notes: what else is worth knowing.
    """

    strategy: str = "none"
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    budget_bytes: int | None = None
    found_by: str = ""
    compacts_masks: bool = False
    repeats: tuple[Repeat, ...] = ()
    decisions: tuple[Decision, ...] = ()
    prediction: Prediction | None = None
    frontier: tuple[tuple[int, float], ...] = ()
    price: float = 0.0
    gap: float = 0.0
    hardware: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What it does and why, in a few lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        again = sum(not d.keeps for d in self.decisions)
        budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes:,} bytes"
        yield f"plan: {self.strategy}{budget}"
        found = self.prediction
        if found is not None:
            kept = len(self.decisions) - again
            if again:
                yield f"  {kept} results of forward kept, {again} computed again by {len(self.repeats)} operators"
            else:
                yield f"  all {kept} results of forward that backward reads are kept"
            yield f"  found by: {self.found_by}"
            yield f"  predicted peak {found.peak_bytes:,} bytes at {found.at}"
            yield f"    {', '.join(f'{c} {found.by_category[c]:,}' for c in CATEGORIES if c in found.by_category)}"
            share = f", {found.extra_seconds / found.seconds:.1%} of it computing again" if again else ""
            yield f"  predicted time {found.seconds * 1e3:.1f} ms on {self.hardware}{share}"
            yield f"    {', '.join(f'{stage} {seconds * 1e3:.1f}' for stage, seconds in found.seconds_by_stage.items())}"
        if self.frontier:
            price = f"memory costs {self.price * 1e9:.3g} s per GB there"
            yield f"  at most {self.gap:.1%} slower than any plan within the budget; {price}"
        yield from (f"  note: {note}" for note in self.notes)

    def to_json(self) -> str:
        """The plan as text: equal bytes for equal plans."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it to a file."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_json(), encoding="utf-8")
        return file

    def check(self, fingerprint: Mapping[str, str], name: str = "the plan") -> None:
        """Raises :class:`PlanMismatchError` where the plan, told by ``name``, was made for another step."""
        parts = sorted(self.fingerprint.keys() | fingerprint.keys())
        differing = [part for part in parts if self.fingerprint.get(part) != fingerprint.get(part)]
        if differing:
            told = ". ".join(
                f"{p.capitalize()} here: {fingerprint.get(p, 'none')}; in the plan: {self.fingerprint.get(p, 'none')}"
                for p in differing
            )
            raise PlanMismatchError(
                f'{name} was made for another step. {told}. Plan again, with plan="auto".', differing
            )


def rounded(value: float) -> float:
    """To nine digits: what is left after them depends on the machine."""
    return float(f"{value:.9g}")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads what :meth:`Plan.save` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else, such as fields that this version does not know.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {os.fspath(path)!r} cannot be read: {error}") from error
    try:
        return parse_plan(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{os.fspath(path)!r} holds no plan: {error}") from error


def parse_plan(text: str) -> Plan:
    """The plan in a text; ValueError, TypeError or KeyError where it is none."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    version = values.pop("version", None)
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, and this stepgraph reads version {VERSION}")
    plan: Plan = _read(Plan, values)
    if plan.strategy not in STRATEGIES:
        raise ValueError(f"its strategy is {plan.strategy!r}, none of {', '.join(STRATEGIES)}")
    return plan


def _read(kind: Any, values: Any) -> Any:
    """A dataclass from JSON, with every field there, known and of its type."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is {type(values).__name__}, not an object")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{kind.__name__} has unknown fields: {', '.join(unknown)}")
    if missing := sorted(known - values.keys()):
        raise ValueError(f"{kind.__name__} lacks fields: {', '.join(missing)}")
    readers = _READERS[kind]
    return kind(**{name: readers[name](value) for name, value in values.items()})


def _of(*kinds: type) -> Any:
    def read(value: Any) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{value!r} is not of type {' or '.join(k.__name__ for k in kinds)}")
        return value

    return read


def _list_of(read: Any) -> Any:
    return lambda values: tuple(read(v) for v in _of(list)(values))


def _mapping_of(read: Any) -> Any:
    return lambda values: {_of(str)(k): read(v) for k, v in _of(dict)(values).items()}


def _pair(value: Sequence[Any]) -> tuple[int, float]:
    peak_bytes, seconds = value
    return _of(int)(peak_bytes), float(_of(int, float)(seconds))


_number = _of(int, float)
_READERS: dict[Any, dict[str, Any]] = {
    Repeat: {"operator": _of(str), "before": _of(str), "results": _list_of(_of(int))},
    Decision: {"value": _of(str), "keeps": _of(bool), "bytes": _of(int), "seconds": _number, "reason": _of(str)},
    Prediction: {
        "peak_bytes": _of(int),
        "at": _of(str),
        "by_category": _mapping_of(_of(int)),
        "seconds": _number,
        "extra_seconds": _number,
        "seconds_by_stage": _mapping_of(_number),
    },
    Plan: {
        "strategy": _of(str),
        "fingerprint": _mapping_of(_of(str)),
        "budget_bytes": lambda v: None if v is None else _of(int)(v),
        "found_by": _of(str),
        "compacts_masks": _of(bool),
        "repeats": _list_of(lambda v: _read(Repeat, v)),
        "decisions": _list_of(lambda v: _read(Decision, v)),
        "prediction": lambda v: None if v is None else _read(Prediction, v),
        "frontier": _list_of(_pair),
        "price": _number,
        "gap": _number,
        "hardware": _of(str),
        "notes": _list_of(_of(str)),
    },
}
