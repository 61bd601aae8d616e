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
from .operands import freeze, nodes_in
from .spec import InputRole, LogicalKey, OutputRole, Phase
from .step_graph import StepGraph, family_of
from .storage import StorageMap, storages_of, tensors_in, value_type_of

_PHASES = list(Phase)
_CAPTURED = (Phase.FORWARD, Phase.BACKWARD)


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
                yield f"{_name(node)} uses {_name(operand)}, which comes later or not at all"
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
            yield f"{_name(node)} runs after the {latest} phase has begun"
        else:
            latest = phase


def captured_effects_happen_once(graph: StepGraph) -> Iterator[str]:
    """A captured random draw, write or index choice is there once; draws and writes keep their order."""
    captured = [n for n in graph.calls if n.meta["phase"] is not Phase.UPDATE]
    present = {n.meta["trace_index"] for n in captured}
    for missing in sorted(graph.effectful.keys() - present):
        yield f"{graph.effectful[missing]} draws, writes or checks in the captured program and is gone"
    counts = Counter(n.meta["trace_index"] for n in captured if n.meta["trace_index"] is not None)
    last = -1
    for node in captured:
        index, effects = node.meta["trace_index"], effects_of(node)
        if index is None:
            if effects.random:
                yield f"{_name(node)} draws random numbers that the model did not ask for"
            continue
        if counts[index] > 1 and (picks_indices(node) or not effects.pure):
            yield f"{_name(node)} would run {counts[index]} times, but it draws, writes or picks indices"
        if effects.random or effects.writes or effects.opaque:
            if index < last:
                yield f"{_name(node)} runs later than it did in the captured program"
            last = max(last, index)


def reads_see_the_same_writes(graph: StepGraph) -> Iterator[str]:
    """Captured nodes that touch memory which is written in forward or backward run in the captured order."""
    storages = StorageMap(graph.graph)
    written = {k for k, ws in storages.writers.items() if any(w.meta["phase"] in _CAPTURED for w in ws)}
    if not written:
        return
    holders = [n for n in graph.graph.nodes if not written.isdisjoint(storages_of(n))]
    touching = {*holders, *(user for holder in holders for user in holder.users)}
    last: dict[int, int] = defaultdict(lambda: -1)
    latest: dict[int, int] = defaultdict(lambda: -1)
    for node in graph.calls:
        if node not in touching or node.meta["phase"] not in _CAPTURED:
            continue
        index = node.meta["trace_index"]
        if index is None:
            continue
        touched = {key for n in (node, *node.all_input_nodes) for key in storages_of(n)} & written
        writes = {key for operand in written_nodes(node) for key in storages_of(operand)}
        for key in touched:
            if index < last[key]:
                yield f"{_name(node)} touches memory that was written after it in the captured program"
            if key in writes:
                if last[key] <= index < latest[key]:
                    yield f"{_name(node)} writes memory that was touched after it in the captured program"
                last[key] = max(last[key], index)
            latest[key] = max(latest[key], index)


def writes_are_captured(graph: StepGraph) -> Iterator[str]:
    """Only captured calls write what was captured; passes write what they made themselves, and scale gradients in norm.

    Hyperparameters and constants are never written.
    """
    roles = {n: s.role for n, s in zip(graph.placeholders, graph.inputs, strict=True)}
    owner: dict[int, fx.Node] = {}
    for node in reversed(graph.graph.nodes):
        owner.update(dict.fromkeys(storages_of(node), node))
    grads = {key for grad in gradients_of(graph) for key in storages_of(grad)}
    for node in graph.calls:
        if not effects_of(node).writes:
            continue
        for key in {key for operand in written_nodes(node) for key in storages_of(operand)}:
            made_by = owner[key]
            role = roles.get(made_by)
            if role in (InputRole.HYPER, InputRole.CONSTANT):
                yield f"{_name(node)} writes the {role} {made_by.name}"
            elif node.meta["trace_index"] is not None or (key in grads and node.meta["phase"] is Phase.NORM):
                continue
            elif role is not None:
                yield f"{_name(node)} writes the {role} {made_by.name}, which the captured program does not do there"
            elif made_by.meta["trace_index"] is not None:
                yield f"{_name(node)} writes {_name(made_by)}, which the captured program does not do there"


def gradients_own_their_memory(graph: StepGraph) -> Iterator[str]:
    """What norm and update work on in place is shared with no other gradient, input or output."""
    owners: dict[int, fx.Node] = {}
    for node in graph.placeholders:
        owners.update(dict.fromkeys(storages_of(node), node))
    for role in (OutputRole.LOSS, OutputRole.AUX, OutputRole.BUFFER):
        for value in graph.output_nodes(role).values():
            if isinstance(value, fx.Node):
                owners.update(dict.fromkeys(storages_of(value), value))
    for grad in gradients_of(graph):
        for key in storages_of(grad):
            if key in owners:
                yield f"the gradient {_name(grad)} shares memory with {_name(owners[key])}"
            owners[key] = grad


def gradients_of(graph: StepGraph) -> list[fx.Node]:
    """The gradients: outputs before the update is joined, afterwards what it takes from the phases before it."""
    if grads := list(graph.output_nodes(OutputRole.GRAD).values()):
        return grads
    found: dict[fx.Node, None] = {}
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            for operand in node.all_input_nodes:
                if operand.op == "call_function" and operand.meta["phase"] in _CAPTURED:
                    found[operand] = None
    return list(found)


def gradients_pass_norm_and_clip_once(graph: StepGraph) -> Iterator[str]:
    """Each gradient enters the norm once, then is scaled once or clamped on both sides once, under clipping, never without."""
    if graph.output_of(OutputRole.NORM) is None:
        return
    expected = 1 if graph.output_of(OutputRole.CLIP_FACTOR) is not None else 0
    norms: Counter[fx.Node] = Counter()
    scalings: Counter[fx.Node] = Counter()
    clamps: dict[str, Counter[fx.Node]] = defaultdict(Counter)
    grads = gradients_of(graph)
    by_storage = {key: grad for grad in grads for key in storages_of(grad)}
    for node in graph.calls:
        if node.meta["phase"] is not Phase.NORM:
            continue
        if family_of(node.target) in ("_foreach_norm", "linalg_vector_norm"):
            for operand in nodes_in(node.args[0]):
                norms[operand] += 1
                if scalings[operand] or any(counts[operand] for counts in clamps.values()):
                    yield f"{_name(operand)} is clipped before its norm is taken"
        family = family_of(node.target)
        for operand in written_nodes(node):
            for key in set(storages_of(operand)):
                if "clamp" in family:
                    clamps[family][by_storage.get(key, operand)] += 1
                else:
                    scalings[by_storage.get(key, operand)] += 1
    for operand in norms:
        if operand.op == "call_function" and operand.meta["phase"] in _CAPTURED and operand not in grads:
            yield f"{_name(operand)} enters the norm and no update"
    for grad in grads:
        if norms[grad] != 1 and not _is_empty(grad):
            yield f"the gradient {_name(grad)} enters the norm {norms[grad]} times"
        if scalings[grad] != expected:
            yield f"the gradient {_name(grad)} is scaled {scalings[grad]} times between norm and update, not {expected}"
        for family, counts in clamps.items():
            if counts[grad] != 1:
                yield f"the gradient {_name(grad)} goes {counts[grad]} times through {family}, and others do once"
    if clamps and clamps.keys() not in ({"clamp_"}, {"_foreach_clamp_min_", "_foreach_clamp_max_"}):
        yield f"gradients are clipped by value on one side only, or in two ways: {', '.join(sorted(clamps))}"
    if clamps and expected:
        yield "gradients are clipped both by norm and by value"


def _is_empty(node: fx.Node) -> bool:
    """Whether a gradient has no elements; the infinity norm leaves those out."""
    return bool(node.meta["val"].numel() == 0)


def gate_guards_the_update(graph: StepGraph) -> Iterator[str]:
    """There is at most one gate, it sees every gradient, and the whole update comes after it."""
    gates = [n for n in graph.calls if effects_of(n).control]
    if graph.output_of(OutputRole.NONFINITE) is None:
        if gates:
            yield f"{_name(gates[0])} decides over the update but its outcome is no output"
        return
    if len(gates) != 1 or graph.output_of(OutputRole.NONFINITE) is not gates[0]:
        yield f"{len(gates)} gates, and the output must be the only one"
        return
    checked = {n for n in nodes_in(gates[0].args) for n in nodes_in(n.args)}
    for grad in gradients_of(graph):
        if grad not in checked:
            yield f"the gate does not look at the gradient {_name(grad)}"
    for node in graph.calls:
        if node is gates[0]:
            break
        if node.meta["phase"] is Phase.UPDATE:
            yield f"{_name(node)} updates before the gate"


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
            yield f"{_name(node)} cannot run on its operands' fake values: {str(error).splitlines()[0]}"
            continue
        before, after = ([_layout(t) for t in tensors_in(v)] for v in (node.meta["val"], derived))
        if before != after:
            yield f"{_name(node)} is recorded as {before} and computes {after}"


def _flat(value: Any) -> list[Any]:
    return [v for item in value for v in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not isinstance(s, int) for s in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def _name(node: fx.Node) -> str:
    key = node.meta.get("key")
    return key.name if key is not None else node.name


Rule = Callable[[StepGraph], Iterator[str]]
_FOUNDATIONS: tuple[Rule, ...] = (structure, metadata)
RULES: tuple[Rule, ...] = (
    *_FOUNDATIONS,
    phases_in_order,
    captured_effects_happen_once,
    reads_see_the_same_writes,
    writes_are_captured,
    gradients_own_their_memory,
    gradients_pass_norm_and_clip_once,
    gate_guards_the_update,
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
