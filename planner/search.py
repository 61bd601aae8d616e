"""From a rewritten step graph and a budget to a plan."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from ..errors import PlanError
from ..graph import InputRole, StepGraph, describe_type, tensors_in, type_of
from .blocks import find_blocks, part_of, shared_storages
from .cost import beside_seconds, node_seconds
from .hardware import HardwareSpec
from .memory import Peak, simulate
from .outline import Outline, outline_of
from .plan import Decision, Plan, Prediction, rounded
from .recompute import Pick, RecomputeProblem
from .schedule import Choice, Schedule, everything_kept, schedule
from .timeline import AGAIN, timeline_of

SHORTEST_FRONTIER = 40  # plans told beside the one that was taken, at most
ASKED = "the model's own checkpointed regions"
ROOT = "every √L-th block's input"
EVERYTHING = "everything fits"
_BESIDE = "beside operators"
_ROWS_TOLD = 4  # inputs of a kind that a fingerprint names one by one


def plan_step(
    graph: StepGraph,
    strategy: str,
    spec: HardwareSpec,
    *,
    budget_bytes: int | None = None,
    workspace_bytes: Callable[[fx.Node], int] = lambda node: 0,
    optimizer: str = "",
) -> Plan:
    """Plans one training step.

    Args:
        graph: the whole step, rewritten but for what the plan asks for. Optimizer state that it creates counts as there from
            the beginning, as it is in every later step.
        strategy: ``"none"`` recomputes what the user's own checkpointed regions ask for; ``"sqrt"`` keeps the inputs of every
            √L-th block and computes the others' forward again; ``"auto"`` the fastest plan that keeps to the budget.
        budget_bytes: peak of the step, its inputs included; None where there is none.
        workspace_bytes: what a call needs while it runs.
        optimizer: its class, for the fingerprint.

    Raises:
        PlanError: no plan keeps to the budget.
    """
    outline = outline_of(graph, node_seconds(spec), workspace_bytes, beside_seconds(graph, spec))
    plan = Plan(strategy, fingerprint_of(graph, optimizer), budget_bytes, hardware=spec.name)
    if strategy == "none":
        return _told(
            replace(plan, found_by=ASKED if graph.regions else EVERYTHING), as_asked(graph, outline), budget_bytes
        )
    if strategy == "sqrt":
        return _told(replace(plan, found_by=ROOT), uniform(outline), budget_bytes)
    unplanned = everything_kept(outline)
    if budget_bytes is None or unplanned.peak_bytes <= budget_bytes:
        return _told(replace(plan, found_by=EVERYTHING), unplanned, None)
    others = {ROOT: uniform(outline), **({ASKED: as_asked(graph, outline)} if graph.regions else {})}
    problem = RecomputeProblem(outline, others)
    pick, chosen = fastest_within(problem, budget_bytes)
    relaxed = problem.relaxed(budget_bytes)
    bound = outline.seconds + problem.bound_seconds(budget_bytes)
    points = problem.frontier[:: math.ceil(len(problem.frontier) / SHORTEST_FRONTIER)]
    plan = replace(
        plan,
        found_by=pick.found_by,
        frontier=tuple((p.peak_bytes, rounded(outline.seconds + p.extra_seconds)) for p in points),
        price=rounded(relaxed.price) if relaxed is not None else 0.0,
        gap=rounded(max(chosen.seconds / bound - 1, 0.0)),
    )
    if chosen.peak_bytes < 0.97 * budget_bytes:
        plan = replace(plan, notes=(*plan.notes, _why_unused(problem, chosen, budget_bytes)))
    return _told(plan, chosen, budget_bytes)


def prediction_of(
    graph: StepGraph, spec: HardwareSpec, workspace_bytes: Callable[[fx.Node], int] = lambda node: 0
) -> Prediction:
    """What a step graph that a plan was applied to needs, by the simulator and the clock."""
    peak, clock = simulate(graph, workspace_bytes).settled().peak(), timeline_of(graph, node_seconds(spec))
    beside, stages = beside_seconds(graph, spec), clock.seconds_by_stage()
    return _prediction(peak, clock.seconds + beside, stages.get(AGAIN, 0.0), {**stages, _BESIDE: beside})


def _prediction(peak: Peak, seconds: float, extra_seconds: float, stages: Mapping[str, float]) -> Prediction:
    by_stage = {stage: rounded(taken) for stage, taken in stages.items() if taken}
    return Prediction(peak.peak_bytes, peak.at, peak.by_category, rounded(seconds), rounded(extra_seconds), by_stage)


def fastest_within(problem: RecomputeProblem, budget_bytes: int) -> tuple[Pick, Schedule]:
    """The fastest plan of the frontier whose simulated peak keeps to the budget.

    Where a plan's peak is what the rows said, as it mostly is, one schedule is all it takes. Otherwise all plans are simulated,
    and the frontier of what comes out counts.

    The frontier holds every way there is to make a plan, so this is also the ladder to fall back on: where no choice of one
    option for each block keeps to the budget, stretches of blocks that start again do, or √L, or what the model asks for.

    Raises:
        PlanError: there is none.
    """
    for pick in reversed(problem.frontier):
        if pick.peak_bytes <= budget_bytes:
            chosen = problem.realised(pick)
            if chosen.peak_bytes == pick.peak_bytes:
                return pick, chosen
            break
    for pick, chosen in reversed(problem.simulated_frontier):
        if chosen.peak_bytes <= budget_bytes:
            return pick, chosen
    least = problem.simulated_frontier[0][1].peak_bytes
    raise PlanError(_infeasible(budget_bytes, least), least)


def fingerprint_of(graph: StepGraph, optimizer: str) -> dict[str, str]:
    """What a plan is tied to: names, shapes and dtypes of parameters and batch, and the optimizer."""
    kinds = {InputRole.PARAM: "parameters", InputRole.BUFFER: "buffers", InputRole.BATCH: "batch"}
    lines: dict[str, list[str]] = {kind: [] for kind in kinds.values()}
    elements = Counter[str]()
    for node, spec in zip(graph.placeholders, graph.inputs, strict=True):
        if (kind := kinds.get(spec.role)) is not None:
            lines[kind].append(f"{spec.key} {describe_type(*type_of(node.meta['val']))}")
            elements[kind] += sum(t.numel() for t in tensors_in(node.meta["val"]))
    found = {}
    for kind, rows in lines.items():
        digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
        told = "; ".join(rows) if len(rows) <= _ROWS_TOLD else f"{len(rows)} tensors of {elements[kind]:,} elements"
        found[kind] = f"{told}, {digest}" if rows else "none"
    return {**found, "optimizer": optimizer}


def as_asked(graph: StepGraph, outline: Outline) -> Schedule:
    """The step with the user's own checkpointed regions computed again, but for what their policies keep; nothing else."""
    asked = {
        node.meta["key"].name
        for node in graph.calls
        if node.meta.get("region") is not None and not node.meta.get("kept")
    }
    regions = {s for op in outline.operators[: outline.forward] if op.name in asked for s in op.makes}
    return schedule(outline, Choice(outline.always_kept.union(set(outline.candidates) - regions)))


def uniform(outline: Outline, segment: int | None = None) -> Schedule:
    """Keeps what enters every ``segment``-th block, and computes each segment's forward again before its backward.

    With L blocks and segments of k, L/k inputs and k blocks' results are alive at once: least for k = √L (Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016). The last segment is kept whole, since its backward comes at once.

    Args:
        segment: blocks; None is √L.
    """
    blocks = find_blocks(outline)
    length = segment or max(round(math.sqrt(len(blocks))), 1)
    shared = shared_storages(outline, blocks)
    kept = set(outline.always_kept | shared)
    for number, block in enumerate(blocks):
        if number % length == 0:
            part = part_of(outline, block, shared)
            kept.update(part.storages[s] for s in part.entering)
        if number >= (len(blocks) - 1) // length * length:
            kept.update(s for i in block.forward for s in outline.operators[i].makes)
    return schedule(outline, Choice(frozenset(kept)))


def _told(plan: Plan, chosen: Schedule, budget_bytes: int | None) -> Plan:
    if budget_bytes is not None and chosen.peak_bytes > budget_bytes:
        raise PlanError(
            f"{_infeasible(budget_bytes, chosen.peak_bytes)} That is what plan={plan.strategy!r} needs; "
            'plan="auto" may keep to less.',
            chosen.peak_bytes,
        )
    outline = chosen.outline
    stages: dict[str, float] = {}
    for run in chosen.runs:
        operator = outline.operators[run.operator]
        stage = AGAIN if run.is_repeat else operator.stage
        stages[stage] = stages.get(stage, 0.0) + operator.seconds
    stages[_BESIDE] = outline.beside_seconds
    found = _prediction(chosen.timeline().peak(), chosen.seconds, chosen.seconds - outline.seconds, stages)
    return replace(plan, repeats=chosen.repeats(), decisions=_decisions(chosen), prediction=found)


def _decisions(chosen: Schedule) -> tuple[Decision, ...]:
    outline = chosen.outline
    again: dict[int, int] = {}
    for run in chosen.runs:
        if run.is_repeat:
            for position in run.results:
                storage = outline.operators[run.operator].makes[position]
                again[storage] = again.get(storage, 0) + 1
    found = []
    for storage in sorted(outline.read_in_backward, key=lambda s: (outline.makers[s], s)):
        maker = outline.operators[outline.makers[storage]]
        if storage in again:
            times = "once" if again[storage] == 1 else f"{again[storage]} times"
            reason = f"computed again {times}"
        elif not maker.can_repeat:
            reason = "draws, writes, picks indices or checks, so it runs once"
        elif storage in outline.outputs:
            reason = "outlives the step"
        else:
            reason = "costs more to compute again than its bytes are worth"
        found.append(Decision(maker.name, storage not in again, outline.sizes[storage], rounded(maker.seconds), reason))
    return tuple(found)


def _why_unused(problem: RecomputeProblem, chosen: Schedule, budget_bytes: int) -> str:
    larger = next((p for p in problem.frontier if p.peak_bytes > budget_bytes), None)
    step = f"the next faster plan needs {larger.peak_bytes:,} bytes" if larger else "there is no faster plan"
    return f"{chosen.peak_bytes / budget_bytes:.0%} of the budget is used: {step}"


def _infeasible(budget_bytes: int, least_bytes: int) -> str:
    return (
        f"the step needs {least_bytes:,} bytes at least, and memory_budget is {budget_bytes:,}. Raise the budget, or make the "
        "batch or the model smaller."
    )
