"""The verifier's rules about gradients that are scaled where the update reads them, as the pass ``fold`` leaves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from .effects import effects_of, written_nodes
from .operands import argument, nodes_in
from .spec import CAPTURED_PHASES, InputRole, OutputRole, Phase
from .step_graph import StepGraph, family_of, name_of
from .storage import storages_of

Powers = Counter[Any]  # factors of a product, each with its exponent

_CASTS = ("_to_copy", "convert_element_type")
NORM_FAMILIES = ("_foreach_norm", "linalg_vector_norm")
_CHAIN = ("mul", "clamp", *_CASTS)


def gradient_behind(node: fx.Node) -> fx.Node | None:
    """The gradient that a call of the norm phase multiplies, clamps or casts for the update, or None."""
    start = node
    while node.op == "call_function" and node.meta["phase"] is Phase.NORM and family_of(node.target) in _CHAIN:
        node = node.args[0]  # type: ignore[assignment]
    is_gradient = node is not start and node.op == "call_function" and node.meta["phase"] in CAPTURED_PHASES
    return node if is_gradient else None


def is_folded(graph: StepGraph) -> bool:
    """Whether the update reads multiples of gradients, or scales them itself, not gradients that were scaled in place."""
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            if argument(node, "grad_scale") is not None:
                return True
            if any(gradient_behind(operand) is not None for operand in node.all_input_nodes):
                return True
    return False


def folded_gradients_are_scaled_once(graph: StepGraph) -> Iterator[str]:
    """What the update reads is the gradient, unscaled, averaged and clipped once each; its norm is unscaled and averaged once.

    Gradients themselves stay as they are, so that the norm is taken of all of them as they came.
    """
    if not is_folded(graph):
        return
    inputs = graph.input_nodes(InputRole.SCALER) | graph.input_nodes(InputRole.WINDOW)
    divided = Counter({inputs[key]: -1 for key in ("scale", "weight_sum") if key in inputs})
    factor = graph.output_of(OutputRole.CLIP_FACTOR)
    wanted = Counter({**divided, **({} if factor is None else {factor: 1})})
    clamps = int(graph.output_of(OutputRole.CLIPPED_NORM) is not None)
    reads: Counter[fx.Node] = Counter()
    for node in graph.calls:
        if node.meta["phase"] is not Phase.UPDATE:
            continue
        scale = argument(node, "grad_scale")
        scaled = set(nodes_in(argument(node, "grads"))) if scale is not None else set()
        for operand in node.all_input_nodes:
            grad = gradient_behind(operand)
            if grad is not None:
                reads[grad] += 1
                yield from _chain_problems(operand, wanted, clamps)
            elif operand in scaled:
                reads[operand] += 1
                if inverted(powers_of(scale)) != wanted:
                    yield f"{name_of(node)} divides gradients by {_described(powers_of(scale))}"
            elif operand.op == "call_function" and operand.meta["phase"] in CAPTURED_PHASES:
                yield f"{name_of(node)} reads the gradient {name_of(operand)} as it came"
    yield from _norm_problems(graph, reads, divided)
    storages = {key: grad for grad in reads for key in storages_of(grad)}
    is_behind_gate = not any(effects_of(n).control for n in graph.calls if n.meta["phase"] is Phase.NORM)
    for node in graph.calls:
        if node.meta["phase"] is Phase.NORM:
            for key in (key for operand in written_nodes(node) for key in storages_of(operand)):
                if key in storages:
                    yield f"{name_of(node)} writes the gradient {name_of(storages[key])}, which the update scales"
            is_behind_gate |= effects_of(node).control
        if gradient_behind(node) in reads and not is_behind_gate:
            yield f"{name_of(node)} is computed before the gate"


def _chain_problems(node: fx.Node, wanted: Powers, clamps: int) -> Iterator[str]:
    start, powers, clamped = node, Counter[Any](), 0
    while node.meta["phase"] is Phase.NORM:
        family = family_of(node.target)
        if family == "mul":
            powers.update(powers_of(node.args[1]))
        elif family == "clamp":
            clamped += 1
            if powers:
                yield f"{name_of(node)} clamps before the gradient is scaled"
        node = node.args[0]  # type: ignore[assignment]
    if powers != wanted:
        yield f"the gradient {name_of(node)} reaches {name_of(start)} multiplied by {_described(powers)}"
    if clamped != clamps:
        yield f"the gradient {name_of(node)} is clamped {clamped} times, not {clamps}"


def _norm_problems(graph: StepGraph, reads: Counter[fx.Node], divided: Powers) -> Iterator[str]:
    taken: Counter[fx.Node] = Counter()
    total = None
    for node in graph.calls:
        if node.meta["phase"] is Phase.NORM and family_of(node.target) in NORM_FAMILIES:
            if any(n.op == "call_function" and n.meta["phase"] in CAPTURED_PHASES for n in nodes_in(node.args[0])):
                taken.update(nodes_in(node.args[0]))
            elif total is None:
                total = node
    for grad in reads:
        if taken[grad] != 1 and grad.meta["val"].numel():
            yield f"the gradient {name_of(grad)} enters the norm {taken[grad]} times"
    norm = graph.output_of(OutputRole.NORM)
    powers = powers_of(norm)
    if total is not None and powers != Counter({total: 1, **divided}):
        yield f"the norm is {_described(powers)}"


def powers_of(value: Any) -> Powers:
    """A product of numbers as its factors, each with its exponent. What is no product is its own only factor."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or value.meta["phase"] is not Phase.NORM:
        return Counter({value: 1})
    family = family_of(value.target)
    if family in _CASTS:
        return powers_of(value.args[0])
    if family == "reciprocal":
        return inverted(powers_of(value.args[0]))
    if family in ("mul", "div") and all(map(_is_number, value.args)):
        other = powers_of(value.args[1])
        result = powers_of(value.args[0])
        result.update(inverted(other) if family == "div" else other)
        return Counter({factor: power for factor, power in result.items() if power})
    return Counter({value: 1})


def _is_number(value: Any) -> bool:
    return not isinstance(value, fx.Node) or value.meta["val"].ndim == 0


def inverted(powers: Powers) -> Powers:
    """The factors of the reciprocal."""
    return Counter({factor: -power for factor, power in powers.items()})


def _described(powers: Powers) -> str:
    texts = [f"{name_of(f) if isinstance(f, fx.Node) else f}^{power}" for f, power in powers.items()]
    return " ".join(texts) or "nothing"
