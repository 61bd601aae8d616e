"""Leaves the update out where the loss or a gradient is not finite."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..graph import OutputRole, OutputSpec, Phase, StepGraph, effects_of, loss_that_decides
from .base import Pass, PassResult
from .grad_norm import add_norm_call


@dataclass(frozen=True)
class Skip(Pass):
    """Adds the check for non-finite values and a gate, before anything clips or consumes a gradient.

    The output ``nonfinite`` says what was found (see ``stepgraph::nonfinite_code``). Where it is not 0, executors end the
    step at the gate, so that parameters and optimizer state keep their bits. Reading the gate waits for the device.
    ``norm_decides``: whether finite gradients whose norm overflows count as non-finite.
    """

    name: ClassVar[str] = "skip"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS, OutputRole.GRAD, OutputRole.NORM)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.NONFINITE,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    norm_decides: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        norm = graph.output_of(OutputRole.NORM)
        grads = list(graph.output_nodes(OutputRole.GRAD).values())
        after_norm = itertools.dropwhile(lambda n: n is not norm, graph.calls)
        scalings = (n for n in after_norm if n.meta["phase"] is Phase.NORM and effects_of(n).writes)
        with graph.graph.inserting_before(next(scalings, graph.output_node)):
            code = add_norm_call(
                graph,
                torch.ops.stepgraph.nonfinite_code.default,
                (loss_that_decides(graph), norm, grads, self.norm_decides),
            )
            gate = add_norm_call(graph, torch.ops.stepgraph.gate.default, (code,))
        graph.set_outputs([*graph.output_values, gate], [*graph.outputs, OutputSpec(OutputRole.NONFINITE)])
        return PassResult(True, intended={"gates": 1}, touched={"gates": 1})
