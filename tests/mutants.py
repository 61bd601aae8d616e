"""Valid graphs, and what the tests of the verifier corrupt them with.

A mutant corrupts a copy of a valid graph and returns a text that the rule's message must hold, as a rule the logical key of
the offending value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stepgraph.graph import OutputRole, Phase, StepGraph
from stepgraph.passes import Recompute, SkipOnDevice, run_passes
from stepgraph.planner import Plan
from stepgraph.planner.outline import outline_of
from stepgraph.planner.schedule import Choice, schedule
from stepgraph.runtime import LossScale

from . import fixtures, oracle
from .graphs import Subject, added, own, subject


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


MODELS: dict[str, Callable[[], fixtures.Fixture]] = {
    **fixtures.FIXTURES,
    "reads_statistics": lambda: own(ReadsStatistics()),
    "two_draws": lambda: own(TwoDraws()),
    "picks_indices": lambda: own(PicksIndices()),
    "constant": lambda: own(ClosesOverConstant()),
    "unknown": lambda: own(CallsUnknown()),
    "aux": lambda: fixtures.mlp()._replace(loss_fn=_loss_and_output),
}


class Graphs(NamedTuple):
    """One step as captured, with clipping, without, with clipping under a loss scale, in and at the end of a window.

    Folded: at the end of a window under a loss scale, for a compiler and for fused kernels; and with clipping by value.
    Deferred: a scaled step whose update is left out on the device. Spared: one that may end before its backward.
    Recomputed: with clipping, and everything of forward that may run again does.
    """

    captured: StepGraph
    clipped: StepGraph
    unclipped: StepGraph
    scaled: StepGraph
    micro: StepGraph
    last: StepGraph
    folded: StepGraph
    folded_kernels: StepGraph
    folded_value: StepGraph
    deferred: StepGraph
    spared: StepGraph
    recomputed: StepGraph


@functools.cache
def graphs_of(name: str) -> Graphs:
    """The graphs of a model; never changed, since mutants work on copies."""
    of, of_fused = _subject(name, "sgd_momentum"), _subject(name, "adamw_fused")
    return Graphs(
        of.step.graph,
        of.rewritten(max_norm=1.0),
        of.rewritten(),
        of.rewritten(max_norm=1.0, scales_loss=True),
        of.micro(),
        of.last_of_window(),
        of.last_of_window(scales_loss=True, for_compiler=True, folds=True),
        of_fused.last_of_window(scales_loss=True, folds=True),
        of.rewritten(clip_value=1.0, scales_loss=True, for_compiler=True, folds=True),
        of_fused.rewritten(max_norm=1.0, scales_loss=True, on_device=SkipOnDevice(LossScale().numbers)),
        of.rewritten(max_norm=1.0, spares=True),
        _recomputed(of.rewritten(max_norm=1.0)),
    )


def _recomputed(graph: StepGraph) -> StepGraph:
    """Everything that may run again does."""
    outline = outline_of(graph, lambda node: 1.0)
    run_passes(graph, [Recompute(Plan(repeats=schedule(outline, Choice(outline.always_kept)).repeats()))])
    return graph


def _subject(name: str, optimizer_name: str) -> Subject:
    """A model with an optimizer that has taken a first step, so that there is state to be an input."""
    fixture = MODELS[name]()
    optimizer = oracle.OPTIMIZERS[optimizer_name](fixture.model.parameters())
    for parameter in fixture.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return subject(fixture, optimizer)


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


def scaled_kernel(graph: StepGraph) -> fx.Node:
    """The fused AdamW that takes a number to divide by and one that leaves the update out."""
    return call(graph, "fused_adamw_scaled_", Phase.UPDATE)


def blinded(graph: StepGraph, phase: Phase) -> fx.Node:
    """The gate of a phase, which now looks at zeros."""
    gate = call(graph, "gate", phase)
    nothing = added(graph, gate, phase, torch.ops.aten.zeros_like.default, gate.args[0])
    gate.args = (nothing,)
    return gate
