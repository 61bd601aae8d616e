"""Turns the gradients of parameters that have float32 masters into float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import OutputRole, Phase, StepGraph
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class Fp32Gradients(Pass):
    """Casts each of these gradients as soon as it is there, so that everything after (sums, norm, clip, update) is in float32.

    ``keys``: the parameters that have masters.
    """

    name: ClassVar[str] = "fp32_gradients"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.BACKWARD})

    keys: frozenset[str]

    def run(self, graph: StepGraph) -> PassResult:
        values = graph.output_values
        wanted = [
            position
            for position, spec in enumerate(graph.outputs)
            if spec.role is OutputRole.GRAD and spec.key in self.keys
        ]
        for position in wanted:
            values[position] = _cast(graph, values[position], graph.outputs[position].key)
        graph.set_outputs(values, graph.outputs)
        return PassResult(bool(wanted), intended={"gradients": len(wanted)}, touched={"gradients": len(wanted)})


def _cast(graph: StepGraph, grad: fx.Node, key: str) -> fx.Node:
    with graph.graph.inserting_after(grad):
        kwargs = {"dtype": torch.float32}
        return graph.add_call(
            aten._to_copy.default, (grad,), kwargs, module=key.rpartition(".")[0], phase=Phase.BACKWARD
        )
