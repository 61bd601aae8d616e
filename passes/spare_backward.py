"""Ends a step before its backward where the loss is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import (
    InputRole,
    OutputRole,
    OutputSpec,
    Phase,
    StepGraph,
    effects_of,
    loss_that_decides,
    storages_of,
    written_nodes,
)
from .base import Pass, PassResult


@dataclass(frozen=True)
class SpareBackward(Pass):
    """Adds a gate between forward and backward, which reads the loss; where a window sums losses, their sum.

    Adds the output ``spared``: not 0 where the step ended there. Nothing is changed where the backward does more than compute
    gradients: draws, or writes that are not undone with the window.
    """

    name: ClassVar[str] = "spare_backward"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD})
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> PassResult:
        first = next((n for n in graph.calls if n.meta["phase"] is Phase.BACKWARD), None)
        if first is None or not _only_computes(graph):
            return PassResult(False)
        with graph.graph.inserting_before(first):
            code = _call(graph, torch.ops.stepgraph.loss_code.default, loss_that_decides(graph))
            gate = _call(graph, torch.ops.stepgraph.gate.default, code)
        graph.set_outputs([*graph.output_values, gate], [*graph.outputs, OutputSpec(OutputRole.SPARED)])
        return PassResult(True, intended={"gates": 1}, touched={"gates": 1})


def _only_computes(graph: StepGraph) -> bool:
    specs = zip(graph.placeholders, graph.inputs, strict=True)
    kept = {key for node, spec in specs if spec.role is not InputRole.ACCUMULATOR for key in storages_of(node)}
    forward = (n for n in graph.calls if n.meta["phase"] is Phase.FORWARD)
    kept.update(key for node in forward for key in storages_of(node))
    for node in graph.calls:
        effects = effects_of(node)
        if node.meta["phase"] is not Phase.BACKWARD or effects.pure:
            continue
        written = {key for operand in written_nodes(node) for key in storages_of(operand)}
        if effects.random or effects.opaque or effects.collective or not kept.isdisjoint(written):
            return False
    return True


def _call(graph: StepGraph, target: torch._ops.OpOverload, operand: fx.Node) -> fx.Node:
    return graph.add_call(target, (operand,), module="loss", phase=Phase.FORWARD)
