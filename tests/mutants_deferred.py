"""Graphs that leave an update out on the device, in the wrong way."""

from __future__ import annotations

import torch

from stepgraph.graph import InputRole, OutputRole, Phase, StepGraph, gradients_of

from .graphs import added
from .mutants import call, first_of, key_of, mutant, scaled_kernel

aten = torch.ops.aten
RULE = "updates_are_left_out_on_the_device"


@mutant(RULE, form="deferred")
def kernel_updates_in_any_case(graph: StepGraph) -> str:
    kernel = scaled_kernel(graph)
    kernel.args = (*kernel.args[:-1], None)
    return f"{key_of(kernel)} writes whether or not the update is left out"


@mutant(RULE, form="deferred")
def kernel_is_left_out_for_another_reason(graph: StepGraph) -> str:
    kernel = scaled_kernel(graph)
    kernel.args = (*kernel.args[:-1], graph.output_of(OutputRole.CLIP_FACTOR))
    return f"{key_of(kernel)} is left out for another reason"


@mutant(RULE, form="deferred")
def kernel_updates_where_it_should_not(graph: StepGraph) -> str:
    kernel, code = scaled_kernel(graph), graph.output_of(OutputRole.NONFINITE)
    is_good = added(graph, first_of(graph, Phase.UPDATE), Phase.NORM, aten.eq.Scalar, code, 0)
    wrong = added(graph, first_of(graph, Phase.UPDATE), Phase.NORM, aten.abs.default, is_good)
    kernel.args = (*kernel.args[:-1], wrong)
    return f"{key_of(kernel)} is left out for another reason"


@mutant(RULE, form="deferred")
def counts_not_taken_back(graph: StepGraph) -> str:
    graph.graph.erase_node(call(graph, "_foreach_sub_", Phase.UPDATE))
    return "is not taken back where the update is left out"


@mutant(RULE, form="deferred")
def one_count_not_taken_back(graph: StepGraph) -> str:
    taken_back = call(graph, "_foreach_sub_", Phase.UPDATE)
    counts, amounts = taken_back.args
    taken_back.args = (counts[1:], amounts[1:])  # type: ignore[index]
    return f"the count {counts[0].name} is not taken back"  # type: ignore[index, union-attr]


@mutant(RULE, form="deferred")
def a_parameter_written_beside_the_kernel(graph: StepGraph) -> str:
    param, grad = next(iter(graph.input_nodes(InputRole.PARAM).values())), gradients_of(graph)[0]
    decay = added(graph, graph.output_node, Phase.UPDATE, aten.mul_.Tensor, param, 0.5)
    assert grad is not param
    return f"{key_of(decay)} writes whether or not the update is left out"


@mutant(RULE, form="deferred")
def a_parameter_overwritten_by_something_else(graph: StepGraph) -> str:
    params = list(graph.input_nodes(InputRole.PARAM).values())
    copied = added(graph, graph.output_node, Phase.UPDATE, aten.copy_.default, params[0], params[0])
    return f"{key_of(copied)} writes whether or not the update is left out"


@mutant(RULE, form="deferred")
def code_of_another_norm(graph: StepGraph) -> str:
    code = graph.output_of(OutputRole.NONFINITE)
    other = added(graph, code, Phase.NORM, aten.zeros_like.default, code.args[1])
    code.args = (code.args[0], other, code.args[2])
    return f"{key_of(code)} does not look at the norm"


@mutant(RULE, form="deferred")
def code_of_another_loss(graph: StepGraph) -> str:
    code = graph.output_of(OutputRole.NONFINITE)
    other = added(graph, code, Phase.NORM, aten.zeros_like.default, code.args[0])
    code.args = (other, *code.args[1:])
    return f"{key_of(code)} does not look at the loss"
