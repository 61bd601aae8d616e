"""Clipping by the total norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..graph import OutputRole, OutputSpec, Phase, StepGraph
from .base import Pass, PassResult
from .grad_norm import add_norm_call, change_gradients

aten = torch.ops.aten


@dataclass(frozen=True)
class Clip(Pass):
    """Multiplies every gradient by min(1, max_norm / (norm + 1e-6)), in place, once.

    Bitwise what ``torch.nn.utils.clip_grad_norm_`` does: the multiplication takes place below the threshold too, by 1.
    Adds the factor as the output ``clip_factor``. With ``separate`` (fast tier) each gradient is multiplied on its own.
    """

    name: ClassVar[str] = "clip"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD, OutputRole.NORM)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.CLIP_FACTOR,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    max_norm: float
    separate: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        norm = graph.output_of(OutputRole.NORM)
        with graph.graph.inserting_before(graph.output_node):
            padded = add_norm_call(graph, aten.add.Tensor, (norm, 1e-6))
            inverse = add_norm_call(graph, aten.reciprocal.default, (padded,))
            ratio = add_norm_call(graph, aten.mul.Tensor, (inverse, self.max_norm))
            factor = add_norm_call(graph, aten.clamp.default, (ratio,), {"max": 1.0})
        result = change_gradients(
            graph,
            separate=self.separate,
            together=lambda group: add_norm_call(graph, aten._foreach_mul_.Tensor, (group, factor)),
            alone=lambda grad: add_norm_call(graph, aten.mul_.Tensor, (grad, factor)),
        )
        graph.set_outputs([*graph.output_values, factor], [*graph.outputs, OutputSpec(OutputRole.CLIP_FACTOR)])
        return result
