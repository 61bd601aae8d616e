"""Which plan a step runs by: made for its graph, or one that was saved."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..device import memory_bytes, stands_for
from ..errors import ConfigError, NotYetError, PlanError, some_of
from ..graph import StepGraph, name_of, rehearsal_of, storage_sizes, tensors_in
from ..passes import CompactMasks, PassRecord, Recompute, run_passes
from ..planner import (
    SPECS,
    STRATEGIES,
    HardwareSpec,
    Plan,
    Workspaces,
    fingerprint_of,
    load_plan,
    measured_workspaces,
    plan_step,
    prediction_of,
    rounded,
    simulate,
    spec_from_json,
)
from ..torch_compat import has_symbolic_shape
from .calibrated import spec_of

MARGIN = 0.1  # of the device's memory, left to what is not counted: the allocator's own, the process, other programs
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TO_COME = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Planning:
    """How plans of a step are found.

    Attributes:
        given: a plan to replay, or None.
        name: what messages call it.
        strategy: otherwise, how to make one.
        hardware: what the clock goes by; None is this machine.
        budget_bytes: that was asked for; None is the device's memory less :data:`MARGIN`, where the strategy is ``"auto"``.
    """

    given: Plan | None = None
    strategy: str = "none"
    budget_bytes: int | None = None
    hardware: HardwareSpec | None = None
    name: str = "the plan"

    def plan(
        self, graph: StepGraph, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[Plan, list[PassRecord]]:
        """The plan for a rewritten step graph on ``device``; without figures where there is nothing to decide.

        Where a budget binds, the step is planned with dropout masks as they are and as bits, since what a plan may drop depends
        on it, and the faster plan is taken.

        Args:
            device: of the parameters; on meta, nothing can run to see what it needs.

        Raises:
            PlanError: no plan keeps to the budget.
            PlanMismatchError: the given plan is of another step.
        """
        if self.given is not None:
            self.given.check(fingerprint_of(graph, type(optimizer).__name__), self.name)
            return self.given, []
        if self.decides_nothing(graph, device):
            return Plan(self.strategy), []
        budget = self._budget(device)
        if self.strategy != "auto" or budget is None or self._peak(graph, device) <= budget:
            return self.made(graph, optimizer, device), []
        packed = graph.copy()
        if not any(record.result.changed for record in run_passes(packed, [CompactMasks()])):
            return self.made(graph, optimizer, device), []
        plans = []
        errors = []
        for candidate in (graph, packed):
            try:
                plans.append((self.made(candidate, optimizer, device), candidate is packed))
            except PlanError as error:
                errors.append(error)
        if not plans:
            raise min(errors, key=lambda error: error.least_bytes)
        plan, is_packed = min(plans, key=lambda found: (_seconds(found[0]), found[1]))
        bound = min(_seconds(found) / (1 + found.gap) for found, _ in plans)
        plan = replace(plan, gap=rounded(max(_seconds(plan) / bound - 1, 0.0)), compacts_masks=is_packed)
        return plan, run_passes(graph, [CompactMasks()]) if is_packed else []

    def made(self, graph: StepGraph, optimizer: torch.optim.Optimizer, device: torch.device) -> Plan:
        """The plan with all its figures."""
        workspaces = self._workspaces(graph, device)
        plan = plan_step(
            graph,
            self.strategy,
            self._spec(device),
            budget_bytes=self._budget(device),
            workspace_bytes=workspaces,
            optimizer=type(optimizer).__name__,
        )
        notes = []
        if workspaces.refused:
            operators = ", ".join(workspaces.refused)
            notes.append(f"memory that {operators} may take while running is not counted: it could not be tried")
        if unsized := _unsized(graph):
            notes.append(
                f"results whose size depends on data count as nothing, so the peak is above this: {some_of(unsized)}"
            )
        return replace(plan, notes=(*plan.notes, *notes))

    def _spec(self, device: torch.device) -> HardwareSpec:
        return self.hardware or spec_of(stands_for(device))

    def _peak(self, graph: StepGraph, device: torch.device) -> int:
        return simulate(graph, self._workspaces(graph, device)).settled().peak().peak_bytes

    def _workspaces(self, graph: StepGraph, device: torch.device) -> Workspaces:
        """Nothing, where operators cannot run or would run on something else."""
        return measured_workspaces(graph) if device.type != "meta" and self.hardware is None else Workspaces({})

    def _budget(self, device: torch.device) -> int | None:
        if self.budget_bytes is None and self.strategy == "auto":
            if device.type == "meta" and self.hardware is None:
                return None  # nobody said what it is to fit
            there = self.hardware.memory_bytes if self.hardware is not None else 0
            return int((there or memory_bytes(stands_for(device))) * (1 - MARGIN))
        return self.budget_bytes

    def decides_nothing(self, graph: StepGraph, device: torch.device) -> bool:
        """Whether the plan is known to be empty without looking closer: everything together fits twice, which leaves room for
        what no tensor shows, or nothing is asked for."""
        budget = self._budget(device)
        if self.strategy == "none" and budget is None:
            return not graph.regions
        return self.strategy == "auto" and budget is not None and 2 * everything_bytes(graph) <= budget

    def replayed(self, graph: StepGraph, plan: Plan, device: torch.device) -> Plan:
        """``plan``, which ``graph`` was rewritten by, with what it needs here where it was made elsewhere.

        Raises:
            PlanError: that is more than the budget.
        """
        budget = self.budget_bytes if self.budget_bytes is not None else plan.budget_bytes
        if self.given is None or (budget is None and plan.prediction is None and not plan.repeats):
            return plan
        found = prediction_of(graph, self._spec(device), self._workspaces(graph, device))
        if budget is not None and found.peak_bytes > budget:
            raise PlanError(
                f"{self.name}, made elsewhere, needs {found.peak_bytes:,} bytes here, and the budget is {budget:,}. Plan "
                'again, with plan="auto".',
                found.peak_bytes,
            )
        told = plan.prediction
        if told is not None and (told.peak_bytes, told.at, told.by_category) == (
            found.peak_bytes,
            found.at,
            found.by_category,
        ):
            return plan
        note = f"made where the peak was {told.peak_bytes:,} bytes" if told is not None else "made without a prediction"
        return replace(plan, prediction=found, hardware=self._spec(device).name, notes=(*plan.notes, note))


def _unsized(graph: StepGraph) -> list[str]:
    """Names of calls whose results have sizes that depend on data."""
    return [name_of(n) for n in graph.calls if any(has_symbolic_shape(t) for t in tensors_in(n.meta["val"]))]


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


def apply_plan(graph: StepGraph, plan: Plan, *, uses_inductor: bool) -> list[PassRecord]:
    """Rewrites a graph of the step as the plan says.

    Raises:
        NotYetError: it recomputes, and forward and backward are compiled as one.
    """
    if not plan.repeats and not plan.compacts_masks:
        return []
    if uses_inductor:
        raise NotYetError(
            'recomputing with lowering="inductor" is not implemented yet: the compiler would undo the plan. Use '
            'lowering="eager", or plan="none" without a memory_budget.'
        )
    return run_passes(graph, [*([CompactMasks()] if plan.compacts_masks else []), Recompute(plan)])


def everything_bytes(graph: StepGraph) -> int:
    """Bytes of all storages of a step, were none ever freed."""
    storages = {key: size for node in graph.graph.nodes for key, size in storage_sizes(node).items()}
    opaque = [inside for node in graph.calls if (inside := rehearsal_of(node)) is not None]
    return sum(storages.values()) + sum(inside.state_bytes + inside.workspace_bytes for inside in opaque)


def planning_of(plan: Any, memory_budget: Any, hardware: Any = None) -> Planning:
    """From the arguments ``plan``, ``memory_budget`` and ``hardware`` of a step.

    Raises:
        ConfigError: one of them makes no sense.
        NotYetError: the plan is one of those to come.
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    spec = None if hardware is None else hardware_of(hardware)
    if isinstance(plan, Plan):
        return Planning(plan, plan.strategy, budget, spec)
    if not isinstance(plan, (str, PathLike)):
        raise ConfigError(f"plan must be a name, a path or a Plan, got {type(plan).__name__}")
    if plan in STRATEGIES:
        return Planning(None, str(plan), budget, spec)
    if plan in _TO_COME:
        raise NotYetError(
            f"plan={plan!r} is not implemented yet; plans are {', '.join(map(repr, STRATEGIES))}, or a saved one."
        )
    if isinstance(plan, str) and plan.isidentifier():
        raise ConfigError(
            f"plan must be one of {', '.join(map(repr, STRATEGIES))}, the path of a saved plan or a Plan, got {plan!r}"
        )
    loaded = load_plan(plan)
    return Planning(loaded, loaded.strategy, budget, spec, f"the plan {os.fspath(plan)!r}")


def hardware_of(hardware: Any) -> HardwareSpec:
    """From a spec, the name of one that is built in, or the path of one that was saved.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(hardware, HardwareSpec):
        return hardware
    if isinstance(hardware, str) and hardware in SPECS:
        return SPECS[hardware]
    if isinstance(hardware, (str, PathLike)) and Path(hardware).is_file():
        return spec_from_json(Path(hardware).read_text())
    names = ", ".join(map(repr, SPECS))
    raise ConfigError(f"hardware must be one of {names}, the path of a spec or a HardwareSpec, got {hardware!r}")


def parse_bytes(value: Any, name: str = "memory_budget") -> int:
    """Bytes from a whole number, or from text such as ``"8GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        count = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f'{name} must be bytes as a number, or text such as "8GiB" or "500MB", got {value!r}')
        count = float(match[1]) * unit
    else:
        raise ConfigError(f'{name} must be bytes as a number, or text such as "8GiB", got {value!r}')
    if count < 1:
        raise ConfigError(f"{name} must be above 0, got {value!r}")
    return int(count)
