"""What a step tells about its plan, predicted against measured, and a capture: operators, passes, update, precision, notes."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..capture import CapturedUpdate, garbage_collection_paused
from ..device import allocation_peak, synchronize
from ..graph import HALF_DTYPES, InputRole, StepGraph
from ..planner import CATEGORIES, WORKSPACE, Plan, measured_workspaces, node_seconds, simulate, timeline_of
from .calibrated import spec_of
from .census import Census
from .compiled import CompiledBatch, Program, Variant
from .executor import watched

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measurement:
    """One step, measured, beside what the simulator and the clock say of the graph that ran.

    Attributes:
        peak_bytes: the step's inputs, and the most that it had allocated beside them at once.
        predicted_bytes: the simulator's figure.
        categories: for each category of what is alive at the peak, bytes counted and predicted; workspace is what the
            allocator counts beyond tensors.
        seconds: of its operators, with what measuring costs.
        predicted_seconds: the clock's figure.
        stages: for each phase, and for computing again, seconds measured and predicted.
        hardware: what the clock goes by.
        creates_state: whether the step was a first one, which creates optimizer state, and notes the random state.
    """

    peak_bytes: int
    predicted_bytes: int
    categories: Mapping[str, tuple[int, int]]
    seconds: float
    predicted_seconds: float
    stages: Mapping[str, tuple[float, float]]
    hardware: str
    creates_state: bool


class _Watch:
    """Times the stages of a step, without its own work, and counts what is alive."""

    def __init__(self, device: torch.device) -> None:
        self.census = Census()
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._stage, self._since = "", time.perf_counter()

    def begins(self, graph: StepGraph, inputs: Sequence[Any]) -> None:
        self.census.begin(graph, inputs)

    def at(self, stage: str) -> None:
        synchronize(self._device)
        self.seconds[self._stage] += time.perf_counter() - self._since
        self._stage, self._since = stage, time.perf_counter()

    def made(self, position: int, value: Any) -> None:
        self.seconds[self._stage] += time.perf_counter() - self._since
        self.census.add(position, value)
        self._since = time.perf_counter()


def measured(
    run: Callable[[], Result], program: Callable[[], Program], device: torch.device
) -> tuple[Result, Measurement]:
    """What a call of a step that is compiled already returns, and its measurement.

    Args:
        program: what ran, to be asked afterwards.
    """
    watch = _Watch(device)
    gc.collect()  # what it frees amid the step would be taken off the peak
    with watched(watch), garbage_collection_paused():
        result, allocated_bytes = allocation_peak(run, device)
    graph, spec = program().graph, spec_of(device)
    census, clock = watch.census, timeline_of(graph, node_seconds(spec))
    expected, spent = clock.seconds_by_stage(), watch.seconds
    memory = simulate(graph, measured_workspaces(graph))
    peak = (memory if census.creates_state else memory.settled()).peak()
    peak_bytes = census.resident_bytes + allocated_bytes
    beyond = peak_bytes - census.peak_bytes
    counted = {**census.by_category, **({WORKSPACE: beyond} if beyond else {})}
    return result, Measurement(
        peak_bytes,
        peak.peak_bytes,
        {
            c: (counted.get(c, 0), peak.by_category.get(c, 0))
            for c in CATEGORIES
            if c in counted or c in peak.by_category
        },
        sum(spent[stage] for stage in expected),
        clock.seconds,
        {stage: (spent[stage], expected[stage]) for stage in expected},
        spec.name,
        census.creates_state,
    )


def describe_plan(plan: Plan, measured: Measurement | None) -> Iterator[str]:
    """Lines about what a plan does, what it was predicted to need and what a step was measured to need."""
    yield from str(plan).splitlines()
    if measured is not None:
        off = measured.peak_bytes / measured.predicted_bytes - 1
        first = ", in a first step, which creates the optimizer's state" if measured.creates_state else ""
        yield f"  measured peak {measured.peak_bytes:,} bytes, predicted {measured.predicted_bytes:,} ({off:+.3%}){first}"
        told = [
            f"{category} {counted:,}" + ("" if counted == expected else f" (predicted {expected:,})")
            for category, (counted, expected) in measured.categories.items()
        ]
        yield f"    {', '.join(told)}"
        times = f"{measured.seconds * 1e3:.1f} ms, predicted {measured.predicted_seconds * 1e3:.1f} ms"
        yield f"  measured time {times} on {measured.hardware}"
        for stage, (took, expected) in measured.stages.items():
            yield f"    {stage:15} {took * 1e3:8.1f} ms, predicted {expected * 1e3:.1f}"


def describe_compiled(number: int, compiled: CompiledBatch) -> Iterator[str]:
    """Lines about a capture and the variant of it that ran last."""
    if not compiled.variants:
        yield f"capture {number}: {', '.join(compiled.batch)} ({compiled.capture_seconds:.1f} s), no update yet"
        return
    variant = compiled.variants[0]
    counts = ", ".join(f"{n} {phase}" for phase, n in variant.graph.op_counts_by_phase().items())
    planned = f", planned in {compiled.planning_seconds:.1f} s" if compiled.planning_seconds >= 0.1 else ""
    yield f"capture {number}: {', '.join(compiled.batch)} ({compiled.capture_seconds:.1f} s{planned})"
    yield f"  {counts} operators"
    for record in variant.records:
        yield f"  pass {record}"
    yield f"  {_describe_update(variant.update)}"
    for line in _describe_precision(compiled, variant):
        yield f"  {line}"
    for note in compiled.step.notes:
        yield f"  note: {note}"


def _describe_update(update: CapturedUpdate) -> str:
    if update.opaque_reason:
        return f"the update is one call of the optimizer's own step(), since {update.opaque_reason}"
    guards = ", ".join(map(str, update.guards))
    return f"update holds while {guards}" if guards else "update holds for all hyperparameters"


def _describe_precision(compiled: CompiledBatch, variant: Variant) -> Iterator[str]:
    scaler = compiled.state.scaler
    if scaler is not None:
        yield f"the loss is scaled by {scaler.value:g}, {scaler.policy or 'which never changes'}"
    params = [n.meta["val"] for n in variant.graph.input_nodes(InputRole.PARAM).values()]
    held = [p for p in params if isinstance(p, torch.Tensor) and p.dtype in HALF_DTYPES]
    masters = len(variant.graph.input_nodes(InputRole.MASTER))
    if held:
        yield f"{len(held)} parameters are held in 16 bit; {masters} of them are updated through float32 masters"
