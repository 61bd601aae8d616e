"""The rules that every step graph obeys, checked after each pass.

A rule is a function that yields one message for each violation. Each has mutation tests: graphs corrupted on purpose.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import VerificationError
from ..torch_compat import free_unbacked_symbols
from .effects import effects_of, picks_indices, written_nodes
from .folded_rules import folded_gradients_are_scaled_once
from .gradient_rules import (
    accumulators_are_added_to_once,
    gate_guards_the_update,
    gradients_are_averaged_once,
    gradients_are_unscaled_once,
    gradients_of,
    gradients_own_their_memory,
    gradients_pass_norm_and_clip_once,
    takes_back_counts,
    takes_over_master,
    updates_are_left_out_on_the_device,
)
from .operands import freeze
from .repeat_rules import repeats_compute_what_ran_before
from .spec import CAPTURED_PHASES, InputRole, LogicalKey, OutputRole, Phase
from .step_graph import StepGraph, family_of, name_of
from .storage import StorageMap, layout_of, storages_of, tensors_in, value_type_of

_PHASES = list(Phase)


def verify(graph: StepGraph, *, level: int = 1) -> None:
    """Checks every rule; level 2 also evaluates each node on fake values again.

    Raises:
        VerificationError: naming the rule and the logical key of each violation.
    """
    rules = RULES if level < 2 else (*RULES, metadata_matches_operators)
    violations = []
    for rule in rules:
        violations += [f"{rule.__name__}: {message}" for message in rule(graph)]
        if violations and rule in _FOUNDATIONS:
            break
    if violations:
        shown = "\n  ".join(violations[:10])
        raise VerificationError(f"{len(violations)} violations of the graph's rules:\n  {shown}")


def structure(graph: StepGraph) -> Iterator[str]:
    """Operands come before their uses; inputs and outputs match their specs."""
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        for operand in node.all_input_nodes:
            if position.get(operand, len(position)) >= position[node]:
                yield f"{name_of(node)} uses {name_of(operand)}, which comes later or not at all"
    calls_began = False
    for node in graph.graph.nodes:
        calls_began |= node.op != "placeholder"
        if calls_began and node.op == "placeholder":
            yield f"the input {node.name} comes after calls"
    if len(graph.placeholders) != len(graph.inputs):
        yield f"{len(graph.placeholders)} placeholders, {len(graph.inputs)} input specs"
    if len(graph.output_values) != len(graph.outputs):
        yield f"{len(graph.output_values)} outputs, {len(graph.outputs)} output specs"
    for spec, count in Counter(graph.inputs).items():
        if count > 1:
            yield f"{count} inputs are {spec}"
    if not any(spec.role is OutputRole.LOSS for spec in graph.outputs):
        yield "no output is the loss"
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield f"{node.name} is a {node.op}, and only calls of functions can run"


def metadata(graph: StepGraph) -> Iterator[str]:
    """Every call has a fake value, a phase and a key of its own that agree with each other."""
    seen: set[str] = set()
    for node in graph.calls:
        if missing := [name for name in ("val", "phase", "key", "trace_index") if name not in node.meta]:
            yield f"{node.name} ({node.target}) lacks {missing}"
            continue
        key = node.meta["key"]
        if key.name in seen:
            yield f"{key.name} names two values"
        seen.add(key.name)
        if key.phase is not node.meta["phase"]:
            yield f"{key.name} is in phase {node.meta['phase']}"
        if not _describes(key, node):
            if (key.shape, key.dtype) != value_type_of(node):
                yield f"{key} does not describe its value"
            if key.family != family_of(node.target):
                yield f"{key.name} names another operator than {node.target}"


def _describes(key: LogicalKey, node: fx.Node) -> bool:
    """Whether the key has the node's shape, dtype and operator; remembered with the node while all of them stay."""
    value, target = node.meta["val"], node.target
    described = node.meta.get("described")
    if described is None or described[0] is not key or described[1] is not value or described[2] is not target:
        if (key.shape, key.dtype) != value_type_of(node) or key.family != family_of(target):
            return False
        node.meta["described"] = (key, value, target)
    return True


def phases_in_order(graph: StepGraph) -> Iterator[str]:
    """Phases follow each other: nothing of the forward runs after the first backward node, and so on."""
    latest = Phase.FORWARD
    for node in graph.calls:
        phase = node.meta["phase"]
        if _PHASES.index(phase) < _PHASES.index(latest):
            yield f"{name_of(node)} runs after the {latest} phase has begun"
        else:
            latest = phase


def captured_effects_happen_once(graph: StepGraph) -> Iterator[str]:
    """A captured random draw, write or index choice is there once; draws and writes keep their order."""
    captured = [n for n in graph.calls if n.meta["phase"] is not Phase.UPDATE]
    once = {n for n in captured if n.meta["trace_index"] is not None and (picks_indices(n) or not effects_of(n).pure)}
    counts = Counter(n.meta["trace_index"] for n in once)
    for missing in sorted(graph.effectful.keys() - counts.keys()):
        yield f"{graph.effectful[missing]} draws, writes or checks in the captured program and is gone"
    last = -1
    for node in captured:
        index, effects = node.meta["trace_index"], effects_of(node)
        if index is None:
            if effects.random:
                yield f"{name_of(node)} draws random numbers that the model did not ask for"
            continue
        if node in once and counts[index] > 1:
            yield f"{name_of(node)} would run {counts[index]} times, but it draws, writes or picks indices"
        if effects.random or effects.writes or effects.opaque:
            if index < last:
                yield f"{name_of(node)} runs later than it did in the captured program"
            last = max(last, index)


def reads_see_the_same_writes(graph: StepGraph) -> Iterator[str]:
    """Captured nodes that touch memory which is written in forward or backward run in the captured order."""
    storages = StorageMap(graph.graph)
    written = {k for k, ws in storages.writers.items() if any(w.meta["phase"] in CAPTURED_PHASES for w in ws)}
    if not written:
        return
    holders = [n for n in graph.graph.nodes if not written.isdisjoint(storages_of(n))]
    touching = {*holders, *(user for holder in holders for user in holder.users)}
    last: dict[int, int] = defaultdict(lambda: -1)
    latest: dict[int, int] = defaultdict(lambda: -1)
    for node in graph.calls:
        if node not in touching or node.meta["phase"] not in CAPTURED_PHASES:
            continue
        index = node.meta["trace_index"]
        if index is None:
            continue
        touched = {key for n in (node, *node.all_input_nodes) for key in storages_of(n)} & written
        writes = {key for operand in written_nodes(node) for key in storages_of(operand)}
        for key in touched:
            if index < last[key]:
                yield f"{name_of(node)} touches memory that was written after it in the captured program"
            if key in writes:
                if last[key] <= index < latest[key]:
                    yield f"{name_of(node)} writes memory that was touched after it in the captured program"
                last[key] = max(last[key], index)
            latest[key] = max(latest[key], index)


def writes_are_captured(graph: StepGraph) -> Iterator[str]:
    """Only captured calls write what was captured; passes write what they made themselves, and scale gradients in norm.

    Hyperparameters and constants are never written, the loss scale by what moves it. An update may round a master into its
    parameter, and take back counts of steps.
    What a window sums has rules of its own.
    """
    specs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    owner: dict[int, fx.Node] = {}
    for node in reversed(graph.graph.nodes):
        owner.update(dict.fromkeys(storages_of(node), node))
    grads = {key for grad in gradients_of(graph) for key in storages_of(grad)}
    for node in graph.calls:
        if not effects_of(node).writes:
            continue
        for key in {key for operand in written_nodes(node) for key in storages_of(operand)}:
            made_by = owner[key]
            role = specs[made_by].role if made_by in specs else None
            if role is InputRole.SCALER and family_of(node.target) == "move_scale_":
                continue
            if role in (InputRole.HYPER, InputRole.CONSTANT, InputRole.SCALER):
                yield f"{name_of(node)} writes the {role} {made_by.name}"
            elif (
                node.meta["trace_index"] is not None
                or (key in grads and node.meta["phase"] is Phase.NORM)
                or role is InputRole.ACCUMULATOR
                or (role is InputRole.WINDOW and specs[made_by].key == "loss_sum")
                or takes_over_master(node, specs)
                or (role is InputRole.STATE and takes_back_counts(node))
            ):
                continue
            elif role is not None:
                yield f"{name_of(node)} writes the {role} {made_by.name}, which the captured program does not do there"
            elif made_by.meta["trace_index"] is not None:
                yield f"{name_of(node)} writes {name_of(made_by)}, which the captured program does not do there"


def metadata_matches_operators(graph: StepGraph) -> Iterator[str]:
    """Evaluating a node on its operands' fake values gives its own metadata (level 2 only)."""
    for node in graph.calls:
        if not isinstance(node.target, torch._ops.OpOverload) or effects_of(node).opaque:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if any(_is_symbolic(v) for n in (node, *node.all_input_nodes) for v in _flat(n.meta["val"])):
            continue
        try:
            with graph.fake_mode, torch.no_grad():
                derived = node.target(*args, **kwargs)
        except Exception as error:
            yield f"{name_of(node)} cannot run on its operands' fake values: {str(error).splitlines()[0]}"
            continue
        before, after = ([layout_of(t) for t in tensors_in(v)] for v in (node.meta["val"], derived))
        if before != after:
            yield f"{name_of(node)} is recorded as {before} and computes {after}"


def _flat(value: Any) -> list[Any]:
    return [v for item in value for v in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not isinstance(s, int) for s in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


Rule = Callable[[StepGraph], Iterator[str]]
_FOUNDATIONS: tuple[Rule, ...] = (structure, metadata)
RULES: tuple[Rule, ...] = (
    *_FOUNDATIONS,
    phases_in_order,
    captured_effects_happen_once,
    repeats_compute_what_ran_before,
    reads_see_the_same_writes,
    writes_are_captured,
    gradients_own_their_memory,
    accumulators_are_added_to_once,
    gradients_are_unscaled_once,
    gradients_are_averaged_once,
    gradients_pass_norm_and_clip_once,
    folded_gradients_are_scaled_once,
    gate_guards_the_update,
    updates_are_left_out_on_the_device,
)


@dataclass(frozen=True)
class PhaseCalls:
    """The calls of one phase in order, each with its operator and arguments, as they were at one time."""

    calls: list[tuple[fx.Node, LogicalKey | None, Any, Any, Any]]

    def is_still(self, now: PhaseCalls) -> bool:
        """Whether ``now`` has the same nodes in the same order, and each the same arguments as here."""
        if len(self.calls) != len(now.calls):
            return False
        for before, after in zip(self.calls, now.calls, strict=True):
            if all(map(operator.is_, before, after)):
                continue
            if before[:3] != after[:3] or freeze(before[3:]) != freeze(after[3:]):
                return False
        return True


def calls_by_phase(graph: StepGraph) -> dict[Phase, PhaseCalls]:
    """What a pass that does not touch a phase must leave as it is: its calls, their operands and their order."""
    found: dict[Phase, PhaseCalls] = {phase: PhaseCalls([]) for phase in Phase}
    for node in graph.calls:
        found[node.meta["phase"]].calls.append((node, node.meta.get("key"), node.target, node.args, node.kwargs))
    return found
