"""Graphs whose structure, metadata or order of phases is corrupted."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from stepgraph.graph import OutputRole, Phase, StepGraph

from .graphs import added
from .mutants import Mutate, call, calls, captured_gradients, first_of, key_of, mutant, rekey

aten = torch.ops.aten


# structure


@mutant("structure")
def operand_defined_after_its_use(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    tanh.append(call(graph, "addmm", Phase.FORWARD))
    return f"{key_of(tanh)} uses 0/addmm#0@forward"


@mutant("structure")
def operand_of_another_graph(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    tanh.args = (call(graph.copy(), "addmm", Phase.FORWARD),)
    return key_of(tanh)


@mutant("structure")
def output_of_another_graph(graph: StepGraph) -> str:
    foreign = call(graph.copy(), "mse_loss", Phase.FORWARD)
    graph.set_outputs([foreign, *graph.output_values[1:]], graph.outputs)
    return "(root)/mse_loss#0@forward"


@mutant("structure")
def input_without_spec(graph: StepGraph) -> str:
    graph.inputs.pop()
    return "input specs"


@mutant("structure")
def input_spec_without_placeholder(graph: StepGraph) -> str:
    graph.graph.erase_node(added_placeholder(graph))
    return "input specs"


def added_placeholder(graph: StepGraph) -> fx.Node:
    """An input that nothing reads."""
    spec = dataclasses.replace(graph.inputs[-1], key="added")
    return graph.add_input(spec, graph.placeholders[-1].meta["val"], "added")


@mutant("structure")
def output_without_spec(graph: StepGraph) -> str:
    graph.outputs.pop()
    return "output specs"


@mutant("structure")
def output_spec_without_value(graph: StepGraph) -> str:
    graph.set_outputs(graph.output_values[:-1], graph.outputs)
    return "output specs"


@mutant("structure")
def two_inputs_of_one_name(graph: StepGraph) -> str:
    graph.inputs[1] = graph.inputs[0]
    return "2 inputs are param 0.weight"


@mutant("structure")
def call_of_a_method(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    with graph.graph.inserting_before(tanh):
        scaled = graph.graph.call_method("mul_", (tanh.args[0], 2.0))
    scaled.meta["val"] = tanh.meta["val"]
    tanh.args = (scaled,)
    return scaled.name


@mutant("structure")
def no_loss(graph: StepGraph) -> str:
    kept = [(v, s) for v, s in zip(graph.output_values, graph.outputs, strict=True) if s.role is not OutputRole.LOSS]
    graph.set_outputs([v for v, _ in kept], [s for _, s in kept])
    return "no output is the loss"


# metadata


def _without(name: str) -> Mutate:
    def mutate(graph: StepGraph) -> str:
        tanh = call(graph, "tanh", Phase.FORWARD)
        del tanh.meta[name]
        return f"lacks ['{name}']"

    mutate.__name__ = f"call_without_{name}"
    return mutate


for _name in ("val", "phase", "key", "trace_index"):
    mutant("metadata")(_without(_name))


@mutant("metadata")
def key_of_another_call(graph: StepGraph) -> str:
    first, second = calls(graph, "t", Phase.FORWARD)
    rekey(second, module=first.meta["key"].module, ordinal=first.meta["key"].ordinal)
    return f"{key_of(first)} names two values"


@mutant("metadata")
def key_of_another_dtype(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    rekey(tanh, dtype="bf16")
    return f"{key_of(tanh)} bf16[6,16] does not describe"


@mutant("metadata")
def key_of_another_shape(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    rekey(tanh, shape=(6, 17))
    return f"{key_of(tanh)} f32[6,17] does not describe"


@mutant("metadata")
def value_of_another_dtype(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    with graph.fake_mode:
        tanh.meta["val"] = tanh.meta["val"].to(torch.bfloat16)
    return key_of(tanh)


@mutant("metadata")
def key_of_another_phase(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    rekey(tanh, phase=Phase.BACKWARD)
    return f"{key_of(tanh)} is in phase forward"


@mutant("metadata")
def operator_replaced_under_its_key(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    tanh.target = aten.sin.default
    return f"{key_of(tanh)} names another operator than aten.sin.default"


@mutant("metadata")
def gate_under_another_name(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    rekey(gate, family="clone")
    return key_of(gate)


# phases_in_order


@mutant("phases_in_order")
def backward_node_among_forward(graph: StepGraph) -> str:
    loss = call(graph, "mse_loss", Phase.FORWARD)
    loss.prepend(call(graph, "t", Phase.BACKWARD))  # it transposes a weight, which is there from the start
    return f"{key_of(loss)} runs after the backward phase"


@mutant("phases_in_order")
def forward_node_called_update(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    following = tanh.next
    tanh.meta["phase"] = Phase.UPDATE
    rekey(tanh, phase=Phase.UPDATE)
    return f"{key_of(following)} runs after the update phase"


@mutant("phases_in_order")
def forward_node_after_backward(graph: StepGraph) -> str:
    first = first_of(graph, Phase.NORM)
    with graph.graph.inserting_before(first):
        late = graph.add_call(aten.neg.default, (graph.placeholders[0],), module="added", phase=Phase.FORWARD)
    return f"{key_of(late)} runs after the backward phase"


@mutant("phases_in_order")
def gate_after_the_update(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    graph.output_node.prepend(gate)
    return f"{key_of(gate)} runs after the update phase"


# metadata_matches_operators


def _replace_value(node: fx.Node, value: Tensor) -> None:
    """Another fake value, with a key that describes it."""
    from stepgraph.graph.spec import type_of

    node.meta["val"] = value
    shape, dtype = type_of(value)
    rekey(node, shape=shape, dtype=dtype)


@mutant("metadata_matches_operators")
def wrong_dtype_of_a_result(graph: StepGraph) -> str:
    factor = graph.output_of(OutputRole.CLIP_FACTOR)
    with graph.fake_mode:
        _replace_value(factor, factor.meta["val"].double())
    return f"{key_of(factor)} is recorded as"


@mutant("metadata_matches_operators")
def wrong_dtype_of_an_operand(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)  # what reads it could not run on this value
    with graph.fake_mode:
        _replace_value(tanh, tanh.meta["val"].double())
    return f"{key_of(tanh)} is recorded as"


@mutant("metadata_matches_operators")
def wrong_shape_of_an_operand(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    with graph.fake_mode:
        _replace_value(tanh, tanh.meta["val"].new_empty(6, 17))
    return f"{key_of(tanh)} is recorded as"


@mutant("metadata_matches_operators")
def wrong_strides(graph: StepGraph) -> str:
    tanh = call(graph, "tanh", Phase.FORWARD)
    with graph.fake_mode:
        _replace_value(tanh, tanh.meta["val"].t().contiguous().t())
    return f"{key_of(tanh)} is recorded as"


@mutant("metadata_matches_operators")
def argument_changed_under_its_value(graph: StepGraph) -> str:
    total = call(graph, "sum", Phase.BACKWARD)
    total.args = (total.args[0], [1], True)
    return f"{key_of(total)} is recorded as"


@mutant("metadata_matches_operators", form="captured")
def list_result_of_another_length(graph: StepGraph) -> str:
    grads = captured_gradients(graph)
    norms = added(graph, graph.output_node, Phase.NORM, aten._foreach_norm.Scalar, grads, 2.0)
    norms.meta["val"] = norms.meta["val"][:-1]
    return f"{key_of(norms)} is recorded as"
