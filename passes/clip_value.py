"""Clipping each element of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import OutputRole, OutputSpec, Phase, StepGraph
from .base import Pass, PassResult
from .grad_norm import add_norm_call, add_total_norm, change_gradients

aten = torch.ops.aten


@dataclass(frozen=True)
class ClipValue(Pass):
    """Clamps every element of every gradient to [-clip_value, clip_value], in place, after the norm was taken.

    Bitwise what ``torch.nn.utils.clip_grad_value_`` does. The norm of type ``norm_type`` is taken once more, as the output
    ``clipped_norm``. With ``separate`` (fast tier) each gradient is clamped on its own.
    """

    name: ClassVar[str] = "clip_value"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD, OutputRole.NORM)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.CLIPPED_NORM,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    clip_value: float
    norm_type: float = 2.0
    separate: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        limit = self.clip_value

        def together(group: list[fx.Node]) -> None:
            add_norm_call(graph, aten._foreach_clamp_min_.Scalar, (group, -limit))
            add_norm_call(graph, aten._foreach_clamp_max_.Scalar, (group, limit))

        result = change_gradients(
            graph,
            separate=self.separate,
            together=together,
            alone=lambda grad: add_norm_call(graph, aten.clamp_.default, (grad, -limit, limit)),
        )
        clipped, _ = add_total_norm(graph, self.norm_type)
        graph.set_outputs([*graph.output_values, clipped], [*graph.outputs, OutputSpec(OutputRole.CLIPPED_NORM)])
        return result
