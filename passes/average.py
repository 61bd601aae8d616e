"""Divides the gradients that a window summed by the sum of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import OutputRole, Phase, StepGraph
from .accumulate import add_window_input
from .base import Pass, PassResult
from .grad_norm import add_norm_call, change_gradients

aten = torch.ops.aten


@dataclass(frozen=True)
class Average(Pass):
    """Divides every gradient by the input ``weight_sum``, in place, once, after it was unscaled and before norm and clip.

    With ``separate`` (fast tier) each gradient is divided on its own.
    """

    name: ClassVar[str] = "average"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM})

    separate: bool = False

    def run(self, graph: StepGraph) -> PassResult:
        total = add_window_input(graph, "weight_sum")

        divisors: dict[torch.dtype, fx.Node] = {}

        def divisor(grad: fx.Node) -> fx.Node:
            """In the gradient's dtype: divided by a float64, one without dimensions would become a float64."""
            dtype = grad.meta["val"].dtype
            if dtype not in divisors:
                divisors[dtype] = add_norm_call(graph, aten._to_copy.default, (total,), {"dtype": dtype})
            return divisors[dtype]

        return change_gradients(
            graph,
            separate=self.separate,
            together=lambda group: add_norm_call(graph, aten._foreach_div_.Tensor, (group, divisor(group[0]))),
            alone=lambda grad: add_norm_call(graph, aten.div_.Tensor, (grad, divisor(grad))),
        )
