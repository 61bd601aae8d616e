"""Graphs whose draws, writes or reads are corrupted."""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.graph import InputRole, Phase, StepGraph

from .graphs import added
from .mutants import call, calls, first_of, key_of, mutant, repeat

aten = torch.ops.aten


# captured_effects_happen_once


@mutant("captured_effects_happen_once", "DROP")
def draw_repeated_in_backward(graph: StepGraph) -> str:
    draw = call(graph, "bernoulli_", Phase.FORWARD)
    again = repeat(graph, draw, first_of(graph, Phase.BACKWARD), Phase.BACKWARD)
    return f"{key_of(again)} would run 2 times"


@mutant("captured_effects_happen_once", "DROP", "captured")
def draw_repeated_in_forward(graph: StepGraph) -> str:
    draw = call(graph, "bernoulli_", Phase.FORWARD)
    return f"{key_of(repeat(graph, draw, draw, Phase.FORWARD))} would run 2 times"


@mutant("captured_effects_happen_once", "BN")
def batch_norm_repeated_in_backward(graph: StepGraph) -> str:
    norm = call(graph, "native_batch_norm", Phase.FORWARD)
    again = repeat(graph, norm, first_of(graph, Phase.BACKWARD), Phase.BACKWARD)
    return f"{key_of(again)} would run 2 times"


@mutant("captured_effects_happen_once", "BN")
def counter_increased_twice(graph: StepGraph) -> str:
    counter = call(graph, "add_", Phase.FORWARD)
    again = repeat(graph, counter, counter, Phase.FORWARD)
    return f"{key_of(again)} would run 2 times"


@mutant("captured_effects_happen_once", "picks_indices")
def indices_picked_twice(graph: StepGraph) -> str:
    pool = call(graph, "max_pool2d_with_indices", Phase.FORWARD)
    again = repeat(graph, pool, first_of(graph, Phase.BACKWARD), Phase.BACKWARD)
    return f"{key_of(again)} would run 2 times"


@mutant("captured_effects_happen_once", "unknown")
def unknown_operator_repeated(graph: StepGraph) -> str:
    unknown = call(graph, "mystery", Phase.FORWARD)
    again = repeat(graph, unknown, first_of(graph, Phase.BACKWARD), Phase.BACKWARD)
    return f"{key_of(again)} would run 2 times"


@mutant("captured_effects_happen_once", "two_draws")
def draw_dropped(graph: StepGraph) -> str:
    draw = calls(graph, "bernoulli_", Phase.FORWARD)[1]
    draw.replace_all_uses_with(draw.args[0])
    graph.graph.erase_node(draw)
    return f"{key_of(draw)} draws, writes or checks in the captured program and is gone"


@mutant("captured_effects_happen_once", "BN")
def counter_never_increased(graph: StepGraph) -> str:
    counter = call(graph, "add_", Phase.FORWARD)
    counter.replace_all_uses_with(counter.args[0])
    graph.graph.erase_node(counter)
    return f"{key_of(counter)} draws, writes or checks in the captured program and is gone"


@mutant("captured_effects_happen_once")
def draw_that_nobody_asked_for(graph: StepGraph) -> str:
    first = first_of(graph, Phase.BACKWARD)
    draw = added(graph, first, Phase.FORWARD, aten.rand_like.default, graph.placeholders[0])
    return f"{key_of(draw)} draws random numbers that the model did not ask for"


@mutant("captured_effects_happen_once")
def draw_in_the_norm_phase(graph: StepGraph) -> str:
    gate = call(graph, "gate", Phase.NORM)
    draw = added(graph, gate, Phase.NORM, aten.rand_like.default, graph.placeholders[0])
    return f"{key_of(draw)} draws random numbers that the model did not ask for"


@mutant("captured_effects_happen_once", "two_draws")
def draws_swapped(graph: StepGraph) -> str:
    first, second = calls(graph, "bernoulli_", Phase.FORWARD)
    _move_with_operands(second, first)
    return f"{key_of(first)} runs later than it did"


def _move_with_operands(node: fx.Node, before: fx.Node) -> None:
    """Moves a call, and what it is computed from, to a place further up."""
    for operand in node.all_input_nodes:
        if operand.op == "call_function" and before < operand:
            _move_with_operands(operand, before)
    before.prepend(node)


@mutant("captured_effects_happen_once", "two_draws", "captured")
def draw_after_a_later_draw(graph: StepGraph) -> str:
    first, second = calls(graph, "bernoulli_", Phase.FORWARD)
    end = first_of(graph, Phase.BACKWARD)
    for node in _in_forward_from(graph, first):
        end.prepend(node)
    assert second < first
    return f"{key_of(first)} runs later than it did"


def _in_forward_from(graph: StepGraph, source: fx.Node) -> list[fx.Node]:
    """A call and all of forward that is computed from it, in order."""
    return [n for n in graph.calls if n.meta["phase"] is Phase.FORWARD and _reads(n, source)]


def _reads(node: fx.Node, source: fx.Node) -> bool:
    return node is source or any(_reads(operand, source) for operand in node.all_input_nodes)


@mutant("captured_effects_happen_once", "BN")
def batch_norm_before_the_counter(graph: StepGraph) -> str:
    counter = call(graph, "add_", Phase.FORWARD)
    call(graph, "native_batch_norm", Phase.FORWARD).append(counter)
    return f"{key_of(counter)} runs later than it did"


# reads_see_the_same_writes


@mutant("reads_see_the_same_writes", "reads_statistics")
def read_moved_after_the_write(graph: StepGraph) -> str:
    early = call(graph, "exp", Phase.FORWARD)
    call(graph, "native_batch_norm", Phase.FORWARD).append(early)
    return key_of(early)


@mutant("reads_see_the_same_writes", "reads_statistics")
def write_moved_before_the_read(graph: StepGraph) -> str:
    early = call(graph, "exp", Phase.FORWARD)
    _move_with_operands(call(graph, "native_batch_norm", Phase.FORWARD), early)
    return key_of(early)


@mutant("reads_see_the_same_writes", "reads_statistics")
def read_moved_before_the_write(graph: StepGraph) -> str:
    norm = call(graph, "native_batch_norm", Phase.FORWARD)
    norm.prepend(call(graph, "sin", Phase.FORWARD))
    return key_of(norm)


@mutant("reads_see_the_same_writes", "reads_statistics", "captured")
def write_moved_after_the_read(graph: StepGraph) -> str:
    norm, end = call(graph, "native_batch_norm", Phase.FORWARD), first_of(graph, Phase.BACKWARD)
    for node in _in_forward_from(graph, norm):
        end.prepend(node)
    assert call(graph, "sin", Phase.FORWARD) < norm
    return key_of(norm)


@mutant("reads_see_the_same_writes", "reads_statistics")
def read_repeated_after_the_write(graph: StepGraph) -> str:
    early = call(graph, "exp", Phase.FORWARD)
    return key_of(repeat(graph, early, first_of(graph, Phase.BACKWARD), Phase.BACKWARD))


@mutant("reads_see_the_same_writes", "DROP")
def mask_read_before_it_is_scaled(graph: StepGraph) -> str:
    draw, scale = call(graph, "bernoulli_", Phase.FORWARD), call(graph, "div_", Phase.FORWARD)
    product = next(n for n in scale.users if n.meta["phase"] is Phase.FORWARD)
    product.replace_input_with(scale, draw)  # the same memory, not scaled yet
    scale.prepend(product)
    return key_of(scale)


# writes_are_captured


@mutant("writes_are_captured")
def parameter_written_in_forward(graph: StepGraph) -> str:
    node = added(graph, first_of(graph, Phase.BACKWARD), Phase.FORWARD, aten.mul_.Tensor, graph.placeholders[0], 1.0)
    return f"{key_of(node)} writes the param"


@mutant("writes_are_captured")
def parameter_written_through_a_view(graph: StepGraph) -> str:
    view = call(graph, "t", Phase.FORWARD)
    node = added(graph, first_of(graph, Phase.NORM), Phase.BACKWARD, aten.zero_.default, view)
    return f"{key_of(node)} writes the param"


@mutant("writes_are_captured")
def parameter_written_where_the_schema_denies_it(graph: StepGraph) -> str:
    hidden, bias = call(graph, "addmm", Phase.FORWARD), graph.input_nodes(InputRole.PARAM)["0.bias"]
    end = first_of(graph, Phase.BACKWARD)
    arguments = (hidden, None, None, bias, None, True, 0.1, 1e-5)
    node = added(graph, end, Phase.FORWARD, aten.native_batch_norm.default, *arguments)
    return f"{key_of(node)} writes the param"


@mutant("writes_are_captured")
def state_written_in_the_norm_phase(graph: StepGraph) -> str:
    state = next(iter(graph.input_nodes(InputRole.STATE).values()))
    node = added(graph, call(graph, "gate", Phase.NORM), Phase.NORM, aten.zero_.default, state)
    return f"{key_of(node)} writes the state"


@mutant("writes_are_captured")
def all_parameters_written_in_the_norm_phase(graph: StepGraph) -> str:
    params = list(graph.input_nodes(InputRole.PARAM).values())
    node = added(graph, call(graph, "gate", Phase.NORM), Phase.NORM, aten._foreach_mul_.Scalar, params, 1.0)
    return f"{key_of(node)} writes the param"


@mutant("writes_are_captured")
def hyperparameter_written(graph: StepGraph) -> str:
    hyper = next(iter(graph.input_nodes(InputRole.HYPER).values()))
    node = added(graph, graph.output_node, Phase.UPDATE, aten.zero_.default, hyper)
    return f"{key_of(node)} writes the hyper"


@mutant("writes_are_captured", "BN")
def buffer_written_by_a_pass(graph: StepGraph) -> str:
    buffer = next(iter(graph.input_nodes(InputRole.BUFFER).values()))
    node = added(graph, first_of(graph, Phase.NORM), Phase.BACKWARD, aten.zero_.default, buffer)
    return f"{key_of(node)} writes the buffer"


@mutant("writes_are_captured")
def activation_written_by_a_pass(graph: StepGraph) -> str:
    activation = call(graph, "tanh", Phase.FORWARD)
    node = added(graph, first_of(graph, Phase.BACKWARD), Phase.FORWARD, aten.mul_.Tensor, activation, 2.0)
    return f"{key_of(node)} writes {key_of(activation)}"


@mutant("writes_are_captured")
def gradient_scaled_in_the_update_phase(graph: StepGraph) -> str:
    grads = next(n for n in graph.calls if "norm" in n.meta["key"].family).args[0]
    first_update = first_of(graph, Phase.UPDATE)
    node = added(graph, first_update, Phase.UPDATE, aten.mul_.Tensor, grads[0], 0.5)
    return f"{key_of(node)} writes"


@mutant("writes_are_captured", "constant")
def constant_written(graph: StepGraph) -> str:
    constant = next(iter(graph.input_nodes(InputRole.CONSTANT).values()))
    node = added(graph, graph.output_node, Phase.UPDATE, aten.zero_.default, constant)
    return f"{key_of(node)} writes the constant"
