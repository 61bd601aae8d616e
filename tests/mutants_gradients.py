"""Graphs whose gradients, clipping or gate are corrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.graph import InputRole, OutputRole, Phase, StepGraph

from .graphs import added
from .mutants import (
    blinded,
    call,
    calls,
    captured_gradients,
    first_of,
    gradients,
    key_of,
    mutant,
    repeat,
    replace_gradient,
)

aten = torch.ops.aten


# gradients_own_their_memory


@mutant("gradients_own_their_memory", form="captured")
def two_gradients_in_one_node(graph: StepGraph) -> str:
    first = captured_gradients(graph)[0]
    replace_gradient(graph, 2, first)
    return key_of(first)


@mutant("gradients_own_their_memory", form="captured")
def gradient_is_a_view_of_another(graph: StepGraph) -> str:
    view = added(graph, graph.output_node, Phase.BACKWARD, aten.t.default, captured_gradients(graph)[0])
    replace_gradient(graph, 2, view)
    return f"the gradient {key_of(view)} shares memory"


@mutant("gradients_own_their_memory", form="captured")
def gradient_is_a_view_of_a_parameter(graph: StepGraph) -> str:
    view = added(graph, graph.output_node, Phase.BACKWARD, aten.alias.default, graph.placeholders[0])
    replace_gradient(graph, 0, view)
    return f"the gradient {key_of(view)} shares memory"


@mutant("gradients_own_their_memory", form="captured")
def gradient_is_a_view_of_the_batch(graph: StepGraph) -> str:
    batch = next(iter(graph.input_nodes(InputRole.BATCH).values()))
    view = added(graph, graph.output_node, Phase.BACKWARD, aten.t.default, batch)
    replace_gradient(graph, 0, view)
    return f"the gradient {key_of(view)} shares memory"


@mutant("gradients_own_their_memory", form="captured")
def gradient_is_a_view_of_the_loss(graph: StepGraph) -> str:
    loss = graph.output_of(OutputRole.LOSS)
    view = added(graph, graph.output_node, Phase.BACKWARD, aten.expand.default, loss, [4])
    replace_gradient(graph, 3, view)
    return f"the gradient {key_of(view)} shares memory"


@mutant("gradients_own_their_memory", "aux", "captured")
def gradient_is_a_view_of_aux(graph: StepGraph) -> str:
    view = added(graph, graph.output_node, Phase.BACKWARD, aten.t.default, graph.output_of(OutputRole.AUX))
    replace_gradient(graph, 0, view)
    return f"the gradient {key_of(view)} shares memory"


@mutant("gradients_own_their_memory")
def updates_share_a_gradient(graph: StepGraph) -> str:
    first, other = gradients(graph)[0], gradients(graph)[2]
    view = added(graph, first_of(graph, Phase.NORM), Phase.BACKWARD, aten.t.default, first)
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            node.replace_input_with(other, view)
    return f"{key_of(view)}"


@mutant("gradients_own_their_memory")
def update_takes_a_parameter_for_a_gradient(graph: StepGraph) -> str:
    view = added(graph, first_of(graph, Phase.NORM), Phase.BACKWARD, aten.alias.default, graph.placeholders[0])
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            node.replace_input_with(gradients(graph)[0], view)
    return f"the gradient {key_of(view)} shares memory"


# gradients_pass_norm_and_clip_once


def _edit_list(node: fx.Node, edit: Callable[[list[fx.Node]], list[fx.Node]]) -> None:
    node.args = (edit(list(node.args[0])), *node.args[1:])  # type: ignore[arg-type]


@mutant("gradients_pass_norm_and_clip_once")
def clip_misses_a_gradient(graph: StepGraph) -> str:
    missed = gradients(graph)[1]
    _edit_list(call(graph, "_foreach_mul_", Phase.NORM), lambda grads: [g for g in grads if g is not missed])
    return f"the gradient {key_of(missed)} is scaled 0 times"


@mutant("gradients_pass_norm_and_clip_once")
def clip_takes_a_gradient_twice(graph: StepGraph) -> str:
    _edit_list(call(graph, "_foreach_mul_", Phase.NORM), lambda grads: [*grads, grads[1]])
    return f"the gradient {key_of(gradients(graph)[1])} is scaled 2 times"


@mutant("gradients_pass_norm_and_clip_once")
def clip_runs_twice(graph: StepGraph) -> str:
    clip = call(graph, "_foreach_mul_", Phase.NORM)
    repeat(graph, clip, clip, Phase.NORM)
    return f"the gradient {key_of(gradients(graph)[0])} is scaled 2 times"


@mutant("gradients_pass_norm_and_clip_once")
def gradient_clipped_once_more_on_its_own(graph: StepGraph) -> str:
    factor, grad = graph.output_of(OutputRole.CLIP_FACTOR), gradients(graph)[3]
    added(graph, call(graph, "gate", Phase.NORM), Phase.NORM, aten.mul_.Tensor, grad, factor)
    return f"the gradient {key_of(grad)} is scaled 2 times"


@mutant("gradients_pass_norm_and_clip_once")
def gradient_clipped_once_more_through_a_view(graph: StepGraph) -> str:
    factor, grad, gate = graph.output_of(OutputRole.CLIP_FACTOR), gradients(graph)[0], call(graph, "gate", Phase.NORM)
    view = added(graph, gate, Phase.NORM, aten.t.default, grad)
    added(graph, gate, Phase.NORM, aten.mul_.Tensor, view, factor)
    return f"the gradient {key_of(grad)} is scaled 2 times"


@mutant("gradients_pass_norm_and_clip_once")
def gradient_that_reaches_no_update(graph: StepGraph) -> str:
    grad = gradients(graph)[0]
    for node in graph.calls:
        if node.meta["phase"] is Phase.UPDATE:
            node.replace_input_with(grad, graph.placeholders[0])
    return key_of(grad)


@mutant("gradients_pass_norm_and_clip_once")
def clip_gone(graph: StepGraph) -> str:
    graph.graph.erase_node(call(graph, "_foreach_mul_", Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is scaled 0 times"


@mutant("gradients_pass_norm_and_clip_once")
def norm_after_clip(graph: StepGraph) -> str:
    grads = gradients(graph)
    added(graph, first_of(graph, Phase.NORM), Phase.NORM, aten._foreach_mul_.Scalar, grads, 0.5)
    graph.graph.erase_node(calls(graph, "_foreach_mul_", Phase.NORM)[-1])
    return f"{key_of(grads[0])} is clipped before its norm is taken"


@mutant("gradients_pass_norm_and_clip_once")
def norm_misses_a_gradient(graph: StepGraph) -> str:
    missed = gradients(graph)[1]
    _edit_list(call(graph, "_foreach_norm", Phase.NORM), lambda grads: [grads[0], grads[0], *grads[2:]])
    return f"the gradient {key_of(missed)} enters the norm 0 times"


@mutant("gradients_pass_norm_and_clip_once")
def norm_counts_a_gradient_twice(graph: StepGraph) -> str:
    _edit_list(call(graph, "_foreach_norm", Phase.NORM), lambda grads: [*grads, grads[1]])
    return f"the gradient {key_of(gradients(graph)[1])} enters the norm 2 times"


@mutant("gradients_pass_norm_and_clip_once")
def two_gradients_merged_before_the_norm(graph: StepGraph) -> str:
    first, other = gradients(graph)[0], gradients(graph)[2]
    other.replace_all_uses_with(first)
    return f"the gradient {key_of(first)} enters the norm 2 times"


@mutant("gradients_pass_norm_and_clip_once", form="unclipped")
def scaled_although_clipping_is_off(graph: StepGraph) -> str:
    grad = gradients(graph)[0]
    added(graph, call(graph, "gate", Phase.NORM), Phase.NORM, aten.mul_.Tensor, grad, 0.5)
    return f"the gradient {key_of(grad)} is scaled 1 times"


@mutant("gradients_pass_norm_and_clip_once", form="unclipped")
def norm_of_other_values(graph: StepGraph) -> str:
    grad = gradients(graph)[0]
    copy = added(graph, first_of(graph, Phase.NORM), Phase.BACKWARD, aten.clone.default, grad)
    _edit_list(call(graph, "_foreach_norm", Phase.NORM), lambda grads: [copy, *grads[1:]])
    return f"the gradient {key_of(grad)} enters the norm 0 times"


# gradients_are_unscaled_once


_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_gone(graph: StepGraph) -> str:
    graph.graph.erase_node(call(graph, _UNSCALE, Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is unscaled 0 times, not 1"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_runs_twice(graph: StepGraph) -> str:
    unscale = call(graph, _UNSCALE, Phase.NORM)
    repeat(graph, unscale, unscale, Phase.NORM)
    return f"the gradient {key_of(gradients(graph)[0])} is unscaled 2 times, not 1"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_misses_a_gradient(graph: StepGraph) -> str:
    missed = gradients(graph)[1]
    _edit_list(call(graph, _UNSCALE, Phase.NORM), lambda grads: [g for g in grads if g is not missed])
    return f"the gradient {key_of(missed)} is unscaled 0 times, not 1"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_takes_a_gradient_twice(graph: StepGraph) -> str:
    _edit_list(call(graph, _UNSCALE, Phase.NORM), lambda grads: [*grads, grads[1]])
    return f"the gradient {key_of(gradients(graph)[1])} is unscaled 2 times, not 1"


@mutant("gradients_are_unscaled_once", form="scaled")
def gradient_unscaled_once_more_on_its_own(graph: StepGraph) -> str:
    unscale, grad = call(graph, _UNSCALE, Phase.NORM), gradients(graph)[2]
    added(graph, unscale.next, Phase.NORM, aten.mul_.Tensor, grad, unscale.args[2])
    return f"the gradient {key_of(grad)} is unscaled 2 times, not 1"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_after_the_norm(graph: StepGraph) -> str:
    graph.output_of(OutputRole.NORM).append(call(graph, _UNSCALE, Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is unscaled after its norm is taken or it is clipped"


@mutant("gradients_are_unscaled_once", form="scaled")
def unscale_after_the_clip(graph: StepGraph) -> str:
    call(graph, "_foreach_mul_", Phase.NORM).append(call(graph, _UNSCALE, Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is unscaled after its norm is taken or it is clipped"


@mutant("gradients_are_unscaled_once", form="scaled")
def loss_not_scaled(graph: StepGraph) -> str:
    scaled = next(n for n in graph.input_nodes(InputRole.SCALER)["scale"].users if n.meta["phase"] is Phase.BACKWARD)
    scaled.replace_all_uses_with(scaled.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(scaled)
    return "the backward is multiplied 0 times by the loss scale"


@mutant("gradients_are_unscaled_once", form="scaled")
def loss_scaled_twice(graph: StepGraph) -> str:
    scale = graph.input_nodes(InputRole.SCALER)["scale"]
    scaled = next(n for n in scale.users if n.meta["phase"] is Phase.BACKWARD)
    readers = list(scaled.users)
    again = added(graph, scaled.next, Phase.BACKWARD, aten.mul.Tensor, scaled, scale)
    for reader in readers:
        reader.replace_input_with(scaled, again)
    return "the backward is multiplied 2 times by the loss scale"


# gradients_are_averaged_once


@mutant("gradients_are_averaged_once", form="last")
def average_gone(graph: StepGraph) -> str:
    graph.graph.erase_node(call(graph, "_foreach_div_", Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is averaged 0 times, not 1"


@mutant("gradients_are_averaged_once", form="last")
def average_runs_twice(graph: StepGraph) -> str:
    average = call(graph, "_foreach_div_", Phase.NORM)
    repeat(graph, average, average, Phase.NORM)
    return f"the gradient {key_of(gradients(graph)[0])} is averaged 2 times, not 1"


@mutant("gradients_are_averaged_once", form="last")
def average_misses_a_gradient(graph: StepGraph) -> str:
    missed = gradients(graph)[1]
    _edit_list(call(graph, "_foreach_div_", Phase.NORM), lambda grads: [g for g in grads if g is not missed])
    return f"the gradient {key_of(missed)} is averaged 0 times, not 1"


@mutant("gradients_are_averaged_once", form="last")
def average_after_the_clip(graph: StepGraph) -> str:
    call(graph, "_foreach_mul_", Phase.NORM).append(call(graph, "_foreach_div_", Phase.NORM))
    return f"the gradient {key_of(gradients(graph)[0])} is averaged after its norm is taken or it is clipped"


# accumulators_are_added_to_once


@mutant("accumulators_are_added_to_once", form="micro")
def gradient_added_twice(graph: StepGraph) -> str:
    add = _accumulation(graph)
    repeat(graph, add, add, Phase.BACKWARD)
    return "2 gradients are added to the accumulator"


@mutant("accumulators_are_added_to_once", form="micro")
def accumulator_is_overwritten(graph: StepGraph) -> str:
    add = _accumulation(graph)
    copy = added(graph, add.next, Phase.BACKWARD, aten.copy_.default, *add.args)
    add.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    graph.graph.erase_node(add)
    return f"{key_of(copy)} writes the accumulator"


@mutant("accumulators_are_added_to_once", form="micro")
def gradient_not_added(graph: StepGraph) -> str:
    add = _accumulation(graph)
    held, grad = add.args
    add.replace_all_uses_with(grad)  # type: ignore[arg-type]
    graph.graph.erase_node(add)
    return f"the accumulator {held.name} becomes no gradient"  # type: ignore[union-attr]


@mutant("accumulators_are_added_to_once", form="micro")
def clip_per_micro_batch(graph: StepGraph) -> str:
    clip = added(graph, graph.output_node, Phase.NORM, aten._foreach_mul_.Scalar, captured_gradients(graph), 0.5)
    return f"{key_of(clip)} takes a norm or clips before the window is averaged"


@mutant("accumulators_are_added_to_once", form="micro")
def norm_per_micro_batch(graph: StepGraph) -> str:
    norm = added(graph, graph.output_node, Phase.NORM, aten._foreach_norm.Scalar, captured_gradients(graph), 2.0)
    return f"{key_of(norm)} takes a norm or clips before the window is averaged"


def _accumulation(graph: StepGraph) -> fx.Node:
    """The call that adds the first gradient to its accumulator."""
    accumulator = next(iter(graph.input_nodes(InputRole.ACCUMULATOR).values()))
    return next(iter(accumulator.users))


# gate_guards_the_update


@mutant("gate_guards_the_update")
def gate_gone(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    gate.replace_all_uses_with(gate.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(gate)
    return "0 gates"


@mutant("gate_guards_the_update")
def two_gates(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    repeat(graph, gate, gate, Phase.NORM)
    return "2 gates"


@mutant("gate_guards_the_update")
def output_is_not_the_gate(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    values = [gate.args[0] if value is gate else value for value in graph.output_values]
    graph.set_outputs(values, graph.outputs)
    return "the output must be the only one"


@mutant("gate_guards_the_update")
def gate_without_output(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    kept = [(v, s) for v, s in zip(graph.output_values, graph.outputs, strict=True) if v is not gate]
    graph.set_outputs([v for v, _ in kept], [s for _, s in kept])
    return f"{key_of(gate)} decides over the update but its outcome is no output"


@mutant("gate_guards_the_update")
def update_before_the_gate(graph: StepGraph) -> str:
    gate, first = call(graph, "gate", Phase.NORM), first_of(graph, Phase.UPDATE)
    gate.prepend(first)
    return f"{key_of(first)} updates before the gate"


@mutant("gate_guards_the_update", form="unclipped")
def gate_misses_a_gradient(graph: StepGraph) -> str:
    code = call(graph, "nonfinite_code", Phase.NORM)
    grads: Any = code.args[2]
    code.args = (*code.args[:2], grads[1:], code.args[3])
    return f"the gate does not look at the gradient {key_of(grads[0])}"


@mutant("gate_guards_the_update")
def gate_looks_at_something_else(graph: StepGraph) -> str:
    blinded(graph, Phase.NORM)
    return f"the gate does not look at the gradient {key_of(gradients(graph)[0])}"


@mutant("gate_guards_the_update", form="spared")
def backward_depends_on_something_else(graph: StepGraph) -> str:
    return f"{key_of(blinded(graph, Phase.FORWARD))} decides over the backward and does not look at the loss"


@mutant("gate_guards_the_update", form="spared")
def gate_amid_the_backward(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.FORWARD)
    late = repeat(graph, gate, first_of(graph, Phase.NORM), Phase.BACKWARD)
    gate.replace_all_uses_with(late)
    graph.graph.erase_node(gate)
    return f"{key_of(late)} decides over the backward within it"
