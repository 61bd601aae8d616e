"""Graphs whose update scales gradients itself, in the wrong way."""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.graph import InputRole, OutputRole, Phase, StepGraph, family_of, gradients_of

from .graphs import added
from .mutants import call, calls, first_of, key_of, mutant, scaled_kernel

aten = torch.ops.aten
RULE = "folded_gradients_are_scaled_once"


def _multiple(graph: StepGraph, position: int = 0) -> fx.Node:
    """What the update reads of a gradient."""
    grad = gradients_of(graph)[position]
    return next(n for n in grad.users if n.meta["phase"] is Phase.NORM and family_of(n.target) == "mul")


def _replace_factor(graph: StepGraph, factor: fx.Node) -> str:
    multiple = _multiple(graph)
    multiple.args = (multiple.args[0], factor)
    return f"the gradient {key_of(gradients_of(graph)[0])} reaches {key_of(multiple)} multiplied by"


def _inverse_scale(graph: StepGraph) -> fx.Node:
    """The reciprocal of the loss scale, in single precision."""
    return call(graph, "reciprocal", Phase.NORM).next


@mutant(RULE, form="folded")
def only_unscaled(graph: StepGraph) -> str:
    return _replace_factor(graph, _inverse_scale(graph))


@mutant(RULE, form="folded")
def only_clipped(graph: StepGraph) -> str:
    return _replace_factor(graph, graph.output_of(OutputRole.CLIP_FACTOR))


@mutant(RULE, form="folded")
def scaled_once_more_instead_of_unscaled(graph: StepGraph) -> str:
    scale = graph.input_nodes(InputRole.SCALER)["scale"]
    return _replace_factor(graph, added(graph, call(graph, "gate", Phase.NORM), Phase.NORM, aten.clone.default, scale))


@mutant(RULE, form="folded")
def clipped_twice(graph: StepGraph) -> str:
    factor, gate = _multiple(graph).args[1], call(graph, "gate", Phase.NORM)
    clip = graph.output_of(OutputRole.CLIP_FACTOR)
    return _replace_factor(graph, added(graph, gate, Phase.NORM, aten.mul.Tensor, factor, clip))


@mutant(RULE, form="folded")
def divided_where_it_should_be_multiplied(graph: StepGraph) -> str:
    factor, gate = _multiple(graph).args[1], call(graph, "gate", Phase.NORM)
    return _replace_factor(graph, added(graph, gate, Phase.NORM, aten.reciprocal.default, factor))


@mutant(RULE, form="folded")
def multiplied_by_a_number_too(graph: StepGraph) -> str:
    factor, gate = _multiple(graph).args[1], call(graph, "gate", Phase.NORM)
    return _replace_factor(graph, added(graph, gate, Phase.NORM, aten.mul.Tensor, factor, 2.0))


@mutant(RULE, form="folded")
def multiplied_by_a_gradient(graph: StepGraph) -> str:
    return _replace_factor(graph, gradients_of(graph)[0])


@mutant(RULE, form="folded")
def one_gradient_read_as_it_came(graph: StepGraph) -> str:
    multiple, grad = _multiple(graph, 1), gradients_of(graph)[1]
    multiple.replace_all_uses_with(grad)
    graph.graph.erase_node(multiple)
    return f"reads the gradient {key_of(grad)} as it came"


@mutant(RULE, form="folded")
def scaled_in_place_as_well(graph: StepGraph) -> str:
    grad, gate = gradients_of(graph)[2], call(graph, "gate", Phase.NORM)
    scaling = added(graph, gate, Phase.NORM, aten.mul_.Tensor, grad, graph.output_of(OutputRole.CLIP_FACTOR))
    return f"{key_of(scaling)} writes the gradient {key_of(grad)}, which the update scales"


@mutant(RULE, form="folded")
def multiple_before_the_gate(graph: StepGraph) -> str:
    multiple = _multiple(graph)
    call(graph, "gate", Phase.NORM).prepend(multiple)
    return f"{key_of(multiple)} is computed before the gate"


@mutant(RULE, form="folded")
def norm_not_unscaled(graph: StepGraph) -> str:
    norm = graph.output_of(OutputRole.NORM)
    unscaled = norm.args[0]
    norm.args = (unscaled.args[0], *norm.args[1:])  # type: ignore[union-attr]
    return "the norm is"


@mutant(RULE, form="folded")
def norm_not_averaged(graph: StepGraph) -> str:
    norm = graph.output_of(OutputRole.NORM)
    norm.replace_all_uses_with(norm.args[0])  # type: ignore[arg-type]
    return "the norm is"


@mutant(RULE, form="folded")
def norm_of_a_multiple(graph: StepGraph) -> str:
    norms, grad = call(graph, "_foreach_norm", Phase.NORM), gradients_of(graph)[0]
    copy = added(graph, norms, Phase.NORM, aten.mul.Tensor, grad, _inverse_scale(graph))
    norms.args = ([copy, *norms.args[0][1:]], *norms.args[1:])  # type: ignore[index]
    return f"the gradient {key_of(grad)} enters the norm 0 times"


@mutant(RULE, form="folded")
def norm_misses_a_folded_gradient(graph: StepGraph) -> str:
    norms, grad = call(graph, "_foreach_norm", Phase.NORM), gradients_of(graph)[3]
    kept = [n for n in norms.args[0] if n is not grad]  # type: ignore[union-attr]
    norms.args = ([*kept, kept[0]], *norms.args[1:])
    return f"the gradient {key_of(grad)} enters the norm 0 times"


@mutant(RULE, form="folded_kernels")
def kernel_takes_the_factor_itself(graph: StepGraph) -> str:
    kernel = scaled_kernel(graph)
    scale = kernel.args[-2]
    kernel.args = (*kernel.args[:-2], scale.args[0], None)  # type: ignore[union-attr]
    return f"{key_of(kernel)} divides gradients by"


@mutant(RULE, form="folded_kernels")
def kernel_takes_the_loss_scale_alone(graph: StepGraph) -> str:
    kernel = scaled_kernel(graph)
    kernel.args = (*kernel.args[:-2], graph.input_nodes(InputRole.SCALER)["scale"], None)
    return f"{key_of(kernel)} divides gradients by"


@mutant(RULE, form="folded_kernels")
def gradients_scaled_ahead_of_the_kernel(graph: StepGraph) -> str:
    grad, gate = gradients_of(graph)[0], call(graph, "gate", Phase.NORM)
    scaling = added(graph, gate, Phase.NORM, aten.mul_.Tensor, grad, 0.5)
    return f"{key_of(scaling)} writes the gradient {key_of(grad)}"


@mutant(RULE, form="folded_value")
def clamp_gone(graph: StepGraph) -> str:
    clamp = next(n for n in calls(graph, "clamp", Phase.NORM) if n.meta["val"].ndim)
    clamp.replace_all_uses_with(clamp.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(clamp)
    return "is clamped 0 times, not 1"


@mutant(RULE, form="folded_value")
def clamped_before_it_is_scaled(graph: StepGraph) -> str:
    clamp = next(n for n in calls(graph, "clamp", Phase.NORM) if n.meta["val"].ndim)
    multiple = clamp.args[0]
    assert isinstance(multiple, fx.Node)
    readers = list(clamp.users)
    clamp.args = (multiple.args[0], *clamp.args[1:])
    late = added(graph, clamp.next, Phase.NORM, aten.mul.Tensor, clamp, multiple.args[1])
    for reader in readers:
        reader.replace_input_with(clamp, late)
    return f"{key_of(clamp)} clamps before the gradient is scaled"


@mutant(RULE, form="folded_kernels")
def kernel_before_the_gate_reads_nothing_scaled(graph: StepGraph) -> str:
    kernel, first = scaled_kernel(graph), first_of(graph, Phase.UPDATE)
    grad = gradients_of(graph)[1]
    late = added(graph, first, Phase.UPDATE, aten.neg.default, grad)
    grads = [late if n is grad else n for n in kernel.args[1]]  # type: ignore[union-attr]
    kernel.args = (kernel.args[0], grads, *kernel.args[2:])
    return f"{key_of(late)} reads the gradient {key_of(grad)} as it came"
