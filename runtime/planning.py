"""Which plan a step runs by: made for its graph, or one that was saved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from ..device import memory_bytes
from ..errors import ConfigError, NotYetError, PlanError
from ..graph import StepGraph, storage_sizes
from ..passes import PassRecord, Recompute, run_passes
from ..planner import (
    STRATEGIES,
    Plan,
    fingerprint_of,
    load_plan,
    measured_workspaces,
    plan_step,
    simulate,
)
from .calibrated import spec_of

MARGIN = 0.1  # of the device's memory, left to what is not counted: the allocator's own, the process, other programs
_UNITS = {
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
        strategy: otherwise, how to make one.
        budget_bytes: that was asked for; None is the device's memory less :data:`MARGIN`, where the strategy is ``"auto"``.
    """

    given: Plan | None = None
    strategy: str = "none"
    budget_bytes: int | None = None

    def plan(self, graph: StepGraph, optimizer: torch.optim.Optimizer, device: torch.device) -> Plan:
        """The plan for a rewritten step graph on ``device``; without figures where there is nothing to decide.

        Raises:
            PlanError: no plan keeps to the budget.
            PlanMismatchError: the given plan is of another step.
        """
        if self.given is not None:
            self.given.check(fingerprint_of(graph, type(optimizer).__name__))
            return self.given
        if self.decides_nothing(graph, device):
            return Plan(self.strategy)
        return self.made(graph, optimizer, device)

    def made(self, graph: StepGraph, optimizer: torch.optim.Optimizer, device: torch.device) -> Plan:
        """The plan with all its figures."""
        return plan_step(
            graph,
            self.strategy,
            spec_of(device),
            budget_bytes=self._budget(device),
            workspace_bytes=measured_workspaces(graph),
            optimizer=type(optimizer).__name__,
        )

    def _budget(self, device: torch.device) -> int | None:
        if self.budget_bytes is None and self.strategy == "auto":
            return int(memory_bytes(device) * (1 - MARGIN))
        return self.budget_bytes

    def decides_nothing(self, graph: StepGraph, device: torch.device) -> bool:
        """Whether the plan is known to be empty without looking closer: everything together fits, or nothing is asked for."""
        budget = self._budget(device)
        if self.strategy == "none" and budget is None:
            return not graph.regions
        return self.strategy == "auto" and budget is not None and everything_bytes(graph) <= budget

    def check(self, graph: StepGraph) -> None:
        """Raises :class:`PlanError` where a graph that a given plan was applied to does not keep to the budget here."""
        if self.given is None:
            return
        budget = self.budget_bytes if self.budget_bytes is not None else self.given.budget_bytes
        peak = simulate(graph, measured_workspaces(graph)).peak().peak_bytes if budget is not None else 0
        if budget is not None and peak > budget:
            raise PlanError(
                f"the plan, made elsewhere, needs {peak:,} bytes here, and the budget is {budget:,}. Plan again, with "
                'plan="auto".',
                peak,
            )


def apply_plan(graph: StepGraph, plan: Plan, *, uses_inductor: bool) -> list[PassRecord]:
    """Rewrites a graph of the step as the plan says.

    Raises:
        NotYetError: it recomputes, and forward and backward are compiled as one.
    """
    if not plan.repeats:
        return []
    if uses_inductor:
        raise NotYetError(
            'recomputing with lowering="inductor" is not implemented yet: the compiler would undo the plan. Use '
            'lowering="eager", or plan="none" without a memory_budget.'
        )
    return run_passes(graph, [Recompute(plan)])


def everything_bytes(graph: StepGraph) -> int:
    """Bytes of all storages of a step, were none ever freed."""
    return sum({key: size for node in graph.graph.nodes for key, size in storage_sizes(node).items()}.values())


def planning_of(plan: Any, memory_budget: Any) -> Planning:
    """From the arguments ``plan`` and ``memory_budget`` of a step.

    Raises:
        ConfigError: one of them makes no sense.
        NotYetError: the plan is one of those to come.
    """
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if isinstance(plan, Plan):
        return Planning(plan, plan.strategy, budget)
    if not isinstance(plan, (str, PathLike)):
        raise ConfigError(f"plan must be a name, a path or a Plan, got {type(plan).__name__}")
    if plan in STRATEGIES:
        return Planning(None, str(plan), budget)
    if plan in _TO_COME:
        raise NotYetError(
            f"plan={plan!r} is not implemented yet; plans are {', '.join(map(repr, STRATEGIES))}, or a saved one."
        )
    if isinstance(plan, str) and plan.isidentifier():
        raise ConfigError(
            f"plan must be one of {', '.join(map(repr, STRATEGIES))}, the path of a saved plan or a Plan, got {plan!r}"
        )
    loaded = load_plan(plan)
    return Planning(loaded, loaded.strategy, budget)


def parse_bytes(value: Any) -> int:
    """Bytes from a whole number, or from text such as ``"8GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        count = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(
                f'memory_budget must be bytes as a number, or text such as "8GiB" or "500MB", got {value!r}'
            )
        count = float(match[1]) * unit
    else:
        raise ConfigError(f'memory_budget must be bytes as a number, or text such as "8GiB", got {value!r}')
    if count < 1:
        raise ConfigError(f"memory_budget must be above 0, got {value!r}")
    return int(count)
