"""The verifier's rules about gradients: from the backward through norm and clip, behind the gate, to the update."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import fx

from .effects import effects_of, written_nodes
from .folded_rules import NORM_FAMILIES, gradient_behind, is_folded, powers_of
from .operands import argument, nodes_in
from .spec import CAPTURED_PHASES, InputRole, InputSpec, OutputRole, Phase
from .step_graph import StepGraph, family_of, name_of
from .storage import storages_of


def gradients_own_their_memory(graph: StepGraph) -> Iterator[str]:
    """What norm and update work on in place is shared with no other gradient, input or output."""
    owners: dict[int, fx.Node] = {}
    for node, spec in zip(graph.placeholders, graph.inputs, strict=True):
        if spec.role is not InputRole.ACCUMULATOR:  # which is there to become a gradient
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
    """The gradients: outputs before the update is joined, afterwards what it takes of the captured phases, or multiples of."""
    if grads := list(graph.output_nodes(OutputRole.GRAD).values()):
        return grads
    found: dict[fx.Node, None] = {}
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            for operand in node.all_input_nodes:
                grad = gradient_behind(operand) or operand
                if grad.op == "call_function" and grad.meta["phase"] in CAPTURED_PHASES:
                    found[grad] = None
    return list(found)


def loss_that_decides(graph: StepGraph) -> fx.Node:
    """What says whether the losses of an update are finite: their sum over a window, of which one bad loss makes a bad one."""
    loss_sum = graph.output_of(OutputRole.LOSS_SUM)
    loss: fx.Node = graph.output_of(OutputRole.LOSS) if loss_sum is None else loss_sum
    return loss


def gradients_pass_norm_and_clip_once(graph: StepGraph) -> Iterator[str]:
    """Each gradient enters the norm once, then is scaled once or clamped on both sides once, under clipping, never without."""
    if graph.output_of(OutputRole.NORM) is None or is_folded(graph):
        return
    expected = 1 if graph.output_of(OutputRole.CLIP_FACTOR) is not None else 0
    is_taken_again = graph.output_of(OutputRole.CLIPPED_NORM) is not None
    norms: Counter[fx.Node] = Counter()
    norms_again: Counter[fx.Node] = Counter()
    scalings: Counter[fx.Node] = Counter()
    clamps: dict[str, Counter[fx.Node]] = defaultdict(Counter)
    grads = gradients_of(graph)
    by_storage = {key: grad for grad in grads for key in storages_of(grad)}
    origins = _origins_of_factors(graph)
    for node in graph.calls:
        if node.meta["phase"] is not Phase.NORM:
            continue
        if family_of(node.target) in NORM_FAMILIES:
            for operand in nodes_in(node.args[0]):
                if is_taken_again and norms[operand] and clamps and all(counts[operand] for counts in clamps.values()):
                    norms_again[operand] += 1
                    continue
                norms[operand] += 1
                if scalings[operand] or any(counts[operand] for counts in clamps.values()):
                    yield f"{name_of(operand)} is clipped before its norm is taken"
        family = family_of(node.target)
        if not origins[node].isdisjoint((_SCALE, _WEIGHTS)):
            continue  # the rules below
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
        if is_taken_again and norms_again[grad] != 1 and not _is_empty(grad):
            yield f"the gradient {name_of(grad)} enters the norm {norms_again[grad]} times after it was clipped by value"
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
    has_backward = any(n.meta["phase"] is Phase.BACKWARD and n.meta["trace_index"] is not None for n in graph.calls)
    if scale is not None and has_backward:
        starts = [n for n in scale.users if n.meta["phase"] is Phase.BACKWARD]
        if len(starts) != 1:
            yield f"the backward is multiplied {len(starts)} times by the loss scale"
    yield from _divided_once(graph, scale, _SCALE, "unscaled")


def gradients_are_averaged_once(graph: StepGraph) -> Iterator[str]:
    """The sums of a window are divided by the sum of its weights, once, before their norm, and in no other graph."""
    yield from _divided_once(graph, graph.input_nodes(InputRole.WINDOW).get("weight_sum"), _WEIGHTS, "averaged")


def _divided_once(graph: StepGraph, divisor: fx.Node | None, origin: str, done: str) -> Iterator[str]:
    """Without the input ``divisor`` no call can derive from it."""
    if divisor is None or graph.output_of(OutputRole.NORM) is None or is_folded(graph):
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
        if origin in origins[node]:
            counts.update(written)
            for grad in seen.intersection(written):
                yield f"the gradient {name_of(grad)} is {done} after its norm is taken or it is clipped"
        elif origins[node].isdisjoint((_SCALE, _WEIGHTS)):
            seen.update(written, nodes_in(node.args))
    for grad in grads:
        if counts[grad] != 1:
            yield f"the gradient {name_of(grad)} is {done} {counts[grad]} times, not 1"


def accumulators_are_added_to_once(graph: StepGraph) -> Iterator[str]:
    """What a window holds of a gradient gets one gradient added, or stays as it is, and becomes the gradient.

    Norm and clip are for the average over the window, not for a micro-batch.
    """
    if graph.output_of(OutputRole.LOSS_SUM) is None and not graph.input_nodes(InputRole.ACCUMULATOR):
        return
    specs = zip(graph.placeholders, graph.inputs, strict=True)
    accumulators = {key: n for n, s in specs if s.role is InputRole.ACCUMULATOR for key in storages_of(n)}
    writes: Counter[fx.Node] = Counter()
    gradients = {key for grad in gradients_of(graph) for key in storages_of(grad)}
    is_average = "weight_sum" in graph.input_nodes(InputRole.WINDOW)
    adds_only = graph.output_of(OutputRole.LOSS_SUM) is not None and not is_average
    origins = _origins_of_factors(graph)
    for node in graph.calls:
        touched = [key for operand in node.all_input_nodes for key in storages_of(operand) if key in gradients]
        if adds_only and touched and node.meta["phase"] is Phase.NORM and _SCALE not in origins[node]:
            yield f"{name_of(node)} takes a norm or clips before the window is averaged"
        if node.meta["phase"] not in CAPTURED_PHASES:
            continue
        for operand in written_nodes(node):
            for accumulator in {accumulators[key] for key in storages_of(operand) if key in accumulators}:
                writes[accumulator] += 1
                if family_of(node.target) != "add_":
                    yield f"{name_of(node)} writes the accumulator {accumulator.name}"
    for key, accumulator in accumulators.items():
        if writes[accumulator] > 1:
            yield f"{writes[accumulator]} gradients are added to the accumulator {accumulator.name}"
        if key not in gradients:
            yield f"the accumulator {accumulator.name} becomes no gradient"


_SCALE, _WEIGHTS = "loss scale", "weights of the window"


def _origins_of_factors(graph: StepGraph) -> dict[fx.Node, set[str]]:
    """For each call of the norm phase, which of these its numbers derive from, other than through gradients and their norm."""
    norm = graph.output_of(OutputRole.NORM)
    origins: dict[fx.Node, set[str]] = defaultdict(set)
    for node in graph.input_nodes(InputRole.SCALER).values():
        origins[node] = {_SCALE}
    if (weights := graph.input_nodes(InputRole.WINDOW).get("weight_sum")) is not None:
        origins[weights] = {_WEIGHTS}
    if not origins:
        return origins
    for node in graph.calls:
        if node.meta["phase"] is Phase.NORM:
            origins[node] = set() if node is norm else set().union(*(origins[n] for n in node.all_input_nodes))
    return origins


def _is_empty(node: fx.Node) -> bool:
    """Whether a gradient has no elements; the infinity norm leaves those out."""
    return bool(node.meta["val"].numel() == 0)


def gate_guards_the_update(graph: StepGraph) -> Iterator[str]:
    """There is at most one gate after the backward, it sees every gradient, and the whole update comes after it.

    One before the backward sees the loss.
    """
    gates = [n for n in graph.calls if effects_of(n).control]
    spared = graph.output_of(OutputRole.SPARED)
    if spared is not None:
        yield from _gate_before_backward(graph, spared)
        gates = [n for n in gates if n is not spared]
    if graph.output_of(OutputRole.NONFINITE) is None:
        if gates:
            yield f"{name_of(gates[0])} decides over the update but its outcome is no output"
        return
    if not gates and _is_decided_on_the_device(graph):
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


def _gate_before_backward(graph: StepGraph, gate: fx.Node) -> Iterator[str]:
    code = gate.args[0]
    if not effects_of(gate).control or not isinstance(code, fx.Node) or code.args != (loss_that_decides(graph),):
        yield f"{name_of(gate)} decides over the backward and does not look at the loss"
    if gate.meta["phase"] is not Phase.FORWARD:
        yield f"{name_of(gate)} decides over the backward within it"


def _is_decided_on_the_device(graph: StepGraph) -> bool:
    code = graph.output_of(OutputRole.NONFINITE)
    return code is not None and family_of(code.target) == "nonfinite_code_on_device"


def takes_back_counts(node: fx.Node) -> bool:
    """Whether a call of the update subtracts 1 from counts where the update was left out."""
    if node.meta["phase"] is not Phase.UPDATE or family_of(node.target) != "_foreach_sub_":
        return False
    return all(_found_of(n) is not None for n in nodes_in(node.args[1]))


def _found_of(node: fx.Node) -> fx.Node | None:
    """The code that ``node`` is 1 or 0 for, in float32."""
    if node.op != "call_function" or family_of(node.target) != "_to_copy":
        return None
    is_bad = node.args[0]
    if not isinstance(is_bad, fx.Node) or family_of(is_bad.target) != "ne" or is_bad.args[1] != 0:
        return None
    code = is_bad.args[0]
    if isinstance(code, fx.Node) and family_of(code.target) == "nonfinite_code_on_device":
        return code
    return None


def updates_are_left_out_on_the_device(graph: StepGraph) -> Iterator[str]:
    """Without a gate, each call of the update that writes is told whether to, or is taken back, by the code of this step."""
    if not _is_decided_on_the_device(graph):
        return
    code, norm = graph.output_of(OutputRole.NONFINITE), graph.output_of(OutputRole.NORM)
    specs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    if code.args[0] is not loss_that_decides(graph):
        yield f"{name_of(code)} does not look at the loss"
    if code.args[1] not in (norm, *_factors_of(norm)):
        yield f"{name_of(code)} does not look at the norm"
    added: Counter[fx.Node] = Counter()
    for node in graph.calls:
        if node.meta["phase"] is not Phase.UPDATE or not effects_of(node).writes:
            continue
        found = argument(node, "found_inf")
        if found is not None:
            if _found_of(found) is not code:
                yield f"{name_of(node)} is left out for another reason"
        elif takes_back_counts(node):
            for counts, amount in zip(nodes_in(node.args[0]), nodes_in(node.args[1]), strict=True):
                added[counts] -= 1
                if _found_of(amount) is not code:
                    yield f"{name_of(node)} takes counts back for another reason"
        elif family_of(node.target) in ("_foreach_add_", "add_") and node.args[1] == 1:
            added.update(written_nodes(node))
        elif family_of(node.target) != "move_scale_" and not takes_over_master(node, specs):
            yield f"{name_of(node)} writes whether or not the update is left out"
    for count, number in added.items():
        if number:
            yield f"the count {name_of(count)} is not taken back where the update is left out"


def takes_over_master(node: fx.Node, specs: dict[fx.Node, InputSpec]) -> bool:
    """Whether a call of the update rounds a master into its parameter, which changes neither where the update was left out."""
    if node.meta["phase"] is not Phase.UPDATE or family_of(node.target) != "copy_":
        return False
    param, master = (specs.get(n) for n in node.args[:2])  # type: ignore[arg-type]
    if param is None or master is None or param.key != master.key:
        return False
    return param.role is InputRole.PARAM and master.role is InputRole.MASTER


def _factors_of(norm: fx.Node) -> list[fx.Node]:
    return [factor for factor in powers_of(norm) if isinstance(factor, fx.Node)]
