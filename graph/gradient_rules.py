"""The verifier's rules about gradients: from the backward through norm and clip, behind the gate, to the update."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import fx

from .effects import effects_of, written_nodes
from .operands import nodes_in
from .spec import InputRole, OutputRole, Phase
from .step_graph import StepGraph, family_of
from .storage import storages_of

CAPTURED_PHASES = (Phase.FORWARD, Phase.BACKWARD)


def name_of(node: fx.Node) -> str:
    """The node's logical key in messages; its FX name where it has none."""
    key = node.meta.get("key")
    return key.name if key is not None else node.name


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
                yield f"the gradient {name_of(grad)} shares memory with {name_of(owners[key])}"
            owners[key] = grad


def gradients_of(graph: StepGraph) -> list[fx.Node]:
    """The gradients: outputs before the update is joined, afterwards what it takes from the phases before it."""
    if grads := list(graph.output_nodes(OutputRole.GRAD).values()):
        return grads
    found: dict[fx.Node, None] = {}
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            for operand in node.all_input_nodes:
                if operand.op == "call_function" and operand.meta["phase"] in CAPTURED_PHASES:
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
    origins = _origins_of_factors(graph)
    for node in graph.calls:
        if node.meta["phase"] is not Phase.NORM:
            continue
        if family_of(node.target) in ("_foreach_norm", "linalg_vector_norm"):
            for operand in nodes_in(node.args[0]):
                norms[operand] += 1
                if scalings[operand] or any(counts[operand] for counts in clamps.values()):
                    yield f"{name_of(operand)} is clipped before its norm is taken"
        family = family_of(node.target)
        if _SCALE in origins[node]:
            continue  # the rule below
        for operand in written_nodes(node):
            for key in set(storages_of(operand)):
                if "clamp" in family:
                    clamps[family][by_storage.get(key, operand)] += 1
                else:
                    scalings[by_storage.get(key, operand)] += 1
    for operand in norms:
        if operand.op == "call_function" and operand.meta["phase"] in CAPTURED_PHASES and operand not in grads:
            yield f"{name_of(operand)} enters the norm and no update"
    for grad in grads:
        if norms[grad] != 1 and not _is_empty(grad):
            yield f"the gradient {name_of(grad)} enters the norm {norms[grad]} times"
        if scalings[grad] != expected:
            yield f"the gradient {name_of(grad)} is scaled {scalings[grad]} times between norm and update, not {expected}"
        for family, counts in clamps.items():
            if counts[grad] != 1:
                yield f"the gradient {name_of(grad)} goes {counts[grad]} times through {family}, and others do once"
    if clamps and clamps.keys() not in ({"clamp_"}, {"_foreach_clamp_min_", "_foreach_clamp_max_"}):
        yield f"gradients are clipped by value on one side only, or in two ways: {', '.join(sorted(clamps))}"
    if clamps and expected:
        yield "gradients are clipped both by norm and by value"


def gradients_are_unscaled_once(graph: StepGraph) -> Iterator[str]:
    """Under a loss scale the backward starts from it, once, and each gradient is divided by it, once, before its norm."""
    scale = graph.input_nodes(InputRole.SCALER).get("scale")
    starts = [] if scale is None else [n for n in scale.users if n.meta["phase"] is Phase.BACKWARD]
    if scale is not None and len(starts) != 1:
        yield f"the backward is multiplied {len(starts)} times by the loss scale"
    norm = graph.output_of(OutputRole.NORM)
    if norm is None:
        return
    grads = gradients_of(graph)
    by_storage = {key: grad for grad in grads for key in storages_of(grad)}
    origins = _origins_of_factors(graph)
    counts: Counter[fx.Node] = Counter()
    seen: set[fx.Node] = set()
    for node in graph.calls:
        if node.meta["phase"] is not Phase.NORM:
            continue
        written = [by_storage[k] for o in written_nodes(node) for k in storages_of(o) if k in by_storage]
        if _SCALE not in origins[node]:
            seen.update(written, nodes_in(node.args))
            continue
        counts.update(written)
        for grad in seen.intersection(written):
            yield f"the gradient {name_of(grad)} is unscaled after its norm is taken or it is clipped"
    expected = int(scale is not None)
    for grad in grads:
        if counts[grad] != expected:
            yield f"the gradient {name_of(grad)} is unscaled {counts[grad]} times, not {expected}"


_SCALE, _NORM = "loss scale", "norm"


def _origins_of_factors(graph: StepGraph) -> dict[fx.Node, set[str]]:
    """For each call of the norm phase, what the numbers in it derive from besides gradients: the loss scale, the norm."""
    norm, scale = graph.output_of(OutputRole.NORM), graph.input_nodes(InputRole.SCALER).get("scale")
    origins: dict[fx.Node, set[str]] = defaultdict(set)
    if scale is not None:
        origins[scale] = {_SCALE}
    for node in graph.calls:
        if node.meta["phase"] is Phase.NORM:
            origins[node] = {_NORM} if node is norm else set().union(*(origins[n] for n in node.all_input_nodes))
    return origins


def _is_empty(node: fx.Node) -> bool:
    """Whether a gradient has no elements; the infinity norm leaves those out."""
    return bool(node.meta["val"].numel() == 0)


def gate_guards_the_update(graph: StepGraph) -> Iterator[str]:
    """There is at most one gate, it sees every gradient, and the whole update comes after it."""
    gates = [n for n in graph.calls if effects_of(n).control]
    if graph.output_of(OutputRole.NONFINITE) is None:
        if gates:
            yield f"{name_of(gates[0])} decides over the update but its outcome is no output"
        return
    if len(gates) != 1 or graph.output_of(OutputRole.NONFINITE) is not gates[0]:
        yield f"{len(gates)} gates, and the output must be the only one"
        return
    checked = {n for n in nodes_in(gates[0].args) for n in nodes_in(n.args)}
    for grad in gradients_of(graph):
        if grad not in checked:
            yield f"the gate does not look at the gradient {name_of(grad)}"
    for node in graph.calls:
        if node is gates[0]:
            break
        if node.meta["phase"] is Phase.UPDATE:
            yield f"{name_of(node)} updates before the gate"
