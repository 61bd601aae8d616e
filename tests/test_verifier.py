"""Mutation tests of the verifier: graphs corrupted on purpose, each of which one rule must reject by name.

A mutant corrupts a copy of a valid graph and returns a text that the rule's message must hold, as a rule the logical key of
the offending value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

from stepgraph.capture import (
    CapturedStep,
    LossCall,
    capture_forward_backward,
    capture_update,
    flatten_batch,
    tensors_of,
)
from stepgraph.errors import VerificationError
from stepgraph.graph import InputRole, OutputRole, OutputSpec, Phase, StepGraph
from stepgraph.graph.verifier import RULES, metadata_matches_operators, verify
from stepgraph.passes import run_passes, training_passes

from . import fixtures, oracle

aten = torch.ops.aten
ALL_RULES = (*RULES, metadata_matches_operators)


class ReadsStatistics(nn.Module):
    """Reads a running mean before and after BatchNorm writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.exp()
        normed = self.norm(self.linear(x)).square().mean()
        after = self.norm.running_mean.sin()
        return normed + before.sum() + after.sum()


class TwoDraws(nn.Module):
    """Two dropouts, neither of which feeds the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.drop(self.left(x)) + self.drop(self.right(x))).square().mean()


class PicksIndices(nn.Module):
    """A maximum over windows, whose backward follows the indices that forward picked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(self.linear(x)[None], 2).square().mean()


class ClosesOverConstant(nn.Module):
    """Multiplies by a tensor that forward makes from Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.tensor([0.5, 1.0, 2.0, 4.0])).square().mean()


@torch.library.custom_op("verifier_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """An operator of which nothing is known."""
    return x.clone()


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CallsUnknown(nn.Module):
    """Adds the result of an unknown operator to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() + mystery(x).sum()


def _loss_and_output(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(batch[0])
    return nn.functional.mse_loss(output, batch[1]), output.exp()


def _own(model: nn.Module) -> fixtures.Fixture:
    return fixtures.Fixture(model, torch.arange(24.0).reshape(6, 4).sin(), fixtures.own_output)


MODELS: dict[str, Callable[[], fixtures.Fixture]] = {
    **fixtures.FIXTURES,
    "reads_statistics": lambda: _own(ReadsStatistics()),
    "two_draws": lambda: _own(TwoDraws()),
    "picks_indices": lambda: _own(PicksIndices()),
    "constant": lambda: _own(ClosesOverConstant()),
    "unknown": lambda: _own(CallsUnknown()),
    "aux": lambda: fixtures.mlp()._replace(loss_fn=_loss_and_output),
}


class Graphs(NamedTuple):
    """One step as captured, with clipping, and without."""

    captured: StepGraph
    clipped: StepGraph
    unclipped: StepGraph


@functools.cache
def graphs_of(name: str) -> Graphs:
    """The graphs of a model; never changed, since mutants work on copies."""
    model, batch, loss_fn = MODELS[name]()
    optimizer = oracle.OPTIMIZERS["sgd_momentum"](model.parameters())
    for parameter in model.parameters():  # a first step, so that there is state to be an input
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    tensors = tensors_of(model)
    step = capture_forward_backward(
        model, tensors, {id(p) for p in model.parameters()}, LossCall(loss_fn), flatten_batch(batch)
    )
    params = {held.key: held.tensor for held in tensors.params}
    return Graphs(step.graph, *(_whole_step(step, optimizer, params, max_norm) for max_norm in (1.0, None)))


def _whole_step(
    step: CapturedStep, optimizer: torch.optim.Optimizer, params: dict[str, Tensor], max_norm: float | None
) -> StepGraph:
    graph = step.graph.copy()
    update = capture_update(optimizer, params, step).graph
    run_passes(graph, training_passes(max_norm=max_norm, nonfinite="skip", update=update))
    return graph


Mutate = Callable[[StepGraph], str]


class Mutant(NamedTuple):
    """A way to corrupt a graph: of which model, in which form, and how."""

    model: str
    form: str
    mutate: Mutate


MUTANTS: defaultdict[str, list[Mutant]] = defaultdict(list)


def mutant(rule: str, model: str = "MLP", form: str = "clipped") -> Callable[[Mutate], Mutate]:
    """Registers a function that corrupts a graph so that `rule` must reject it."""

    def register(mutate: Mutate) -> Mutate:
        MUTANTS[rule].append(Mutant(model, form, mutate))
        return mutate

    return register


# What mutants are made with.


def calls(graph: StepGraph, family: str, phase: Phase) -> list[fx.Node]:
    """The calls of one operator family in one phase."""
    found = [n for n in graph.calls if n.meta["key"].family == family and n.meta["phase"] is phase]
    assert found, f"no {family} in {phase}:\n{graph}"
    return found


def call(graph: StepGraph, family: str, phase: Phase) -> fx.Node:
    """The first call of an operator family in a phase."""
    return calls(graph, family, phase)[0]


def first_of(graph: StepGraph, phase: Phase) -> fx.Node:
    """The first call of a phase."""
    return next(n for n in graph.calls if n.meta["phase"] is phase)


def key_of(node: fx.Node) -> str:
    """The name of a call's key."""
    name = node.meta["key"].name
    assert isinstance(name, str)
    return name


def rekey(node: fx.Node, **changes: Any) -> None:
    """Replaces fields of a call's key."""
    node.meta["key"] = dataclasses.replace(node.meta["key"], **changes)


def repeat(graph: StepGraph, node: fx.Node, before: fx.Node, phase: Phase) -> fx.Node:
    """A second run of a captured call, as a recompute would make it."""
    with graph.graph.inserting_before(before):
        again = graph.graph.node_copy(node, lambda operand: operand)
    key = node.meta["key"]
    graph.assign_key(again, key.module, key.family, phase)
    return again


def added(graph: StepGraph, before: fx.Node, phase: Phase, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that a pass adds."""
    with graph.graph.inserting_before(before):
        return graph.add_call(target, args, kwargs, module="added", phase=phase)


def gradients(graph: StepGraph) -> list[fx.Node]:
    """The gradients of a whole step, in the order in which the norm takes them."""
    return list(call(graph, "_foreach_norm", Phase.NORM).args[0])  # type: ignore[arg-type]


def replace_gradient(graph: StepGraph, position: int, value: fx.Node) -> None:
    """Makes another value the gradient output at `position` among the gradients."""
    slots = [i for i, spec in enumerate(graph.outputs) if spec.role is OutputRole.GRAD]
    values = graph.output_values
    values[slots[position]] = value
    graph.set_outputs(values, graph.outputs)


def captured_gradients(graph: StepGraph) -> list[fx.Node]:
    """The gradient outputs of a captured graph."""
    return list(graph.output_nodes(OutputRole.GRAD).values())


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
    gate = call(graph, "gate", Phase.NORM)
    nothing = added(graph, gate, Phase.NORM, aten.zeros_like.default, gate.args[0])
    gate.args = (nothing,)
    return f"the gate does not look at the gradient {key_of(gradients(graph)[0])}"


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


# The tests.


CASES = [pytest.param(rule, m, id=f"{rule}-{m.mutate.__name__}") for rule, ms in MUTANTS.items() for m in ms]


@pytest.mark.parametrize(("rule", "mutation"), CASES)
def test_rule_rejects_the_mutant(rule: str, mutation: Mutant) -> None:
    graph: StepGraph = getattr(graphs_of(mutation.model), mutation.form).copy()
    level = 2 if rule == metadata_matches_operators.__name__ else 1
    verify(graph, level=level)
    expected = mutation.mutate(graph)
    with pytest.raises(VerificationError) as error:
        verify(graph, level=level)
    lines = [line for line in str(error.value).splitlines() if line.strip().startswith(f"{rule}: ")]
    assert any(expected in line for line in lines), f"expected {rule}: ...{expected}..., got\n{error.value}"


@pytest.mark.parametrize("rule", [rule.__name__ for rule in ALL_RULES])
def test_every_rule_has_mutants(rule: str) -> None:
    assert MUTANTS[rule], f"no graph is corrupted so that {rule} rejects it"


def test_every_mutant_is_of_a_rule() -> None:
    assert MUTANTS.keys() == {rule.__name__ for rule in ALL_RULES}


@pytest.mark.parametrize("form", Graphs._fields)
@pytest.mark.parametrize("name", MODELS)
def test_valid_graphs_pass_at_level_2(name: str, form: str) -> None:
    graph = getattr(graphs_of(name), form)
    verify(graph, level=2)
    assert graph.calls, "an empty graph breaks no rule"
    assert (graph.output_of(OutputRole.CLIP_FACTOR) is not None) == (form == "clipped")


def test_level_1_does_not_evaluate_operators() -> None:
    graph = graphs_of("MLP").clipped.copy()
    wrong_dtype_of_a_result(graph)
    verify(graph, level=1)
    with pytest.raises(VerificationError, match="metadata_matches_operators"):
        verify(graph, level=2)


def test_verification_changes_nothing() -> None:
    graph = graphs_of("DROP").clipped
    before, random_state = str(graph), torch.get_rng_state()
    verify(graph, level=2)
    assert str(graph) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_broken_foundation_hides_what_depends_on_it() -> None:
    graph = graphs_of("MLP").clipped.copy()
    del call(graph, "tanh", Phase.FORWARD).meta["phase"]  # other rules read it and would crash
    with pytest.raises(VerificationError, match=r"^1 violations") as error:
        verify(graph)
    assert "metadata" in str(error.value)


def test_all_violations_are_counted_and_the_first_ten_shown() -> None:
    graph = graphs_of("MLP").clipped.copy()
    for node in graph.calls[:15]:
        rekey(node, dtype="none")
    with pytest.raises(VerificationError, match=r"^15 violations") as error:
        verify(graph)
    assert str(error.value).count("does not describe") == 10


def test_gradient_outputs_are_required_to_be_their_own_before_any_pass() -> None:
    graph = graphs_of("TIED").captured.copy()
    grads = captured_gradients(graph)
    assert [spec for spec in graph.outputs if spec.role is OutputRole.GRAD] == [
        OutputSpec(OutputRole.GRAD, "embedding.weight")
    ], "a tied parameter has one gradient"
    assert len(grads) == 1
