"""Multiplies the loss that is differentiated by the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..errors import CaptureError, VerificationError
from ..graph import InputRole, InputSpec, OutputRole, Phase, StepGraph
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Starts the backward from the loss scale instead of 1. The loss itself, an output, stays as it is.

    Bitwise what ``GradScaler.scale(loss).backward()`` does: the product of loss and scale is nowhere needed, and its backward
    multiplies the 1 it starts from by the scale, in the dtype that loss and scale promote to, before it is cast to the loss's.
    Adds the scale as an input, 0-dim float32 on the loss's device.
    """

    name: ClassVar[str] = "loss_scale"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS, OutputRole.GRAD)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.BACKWARD})

    def run(self, graph: StepGraph) -> PassResult:
        seed = _seed_of(graph)
        value = seed.meta["val"]
        scale = add_scale_input(graph, value.device)
        with graph.graph.inserting_after(seed):
            scaled = graph.add_call(aten.mul.Tensor, (seed, scale), module="loss_scale", phase=Phase.BACKWARD)
        if scaled.meta["val"].dtype is not value.dtype:
            with graph.graph.inserting_after(scaled):
                cast = {"dtype": value.dtype}
                scaled = graph.add_call(
                    aten._to_copy.default, (scaled,), cast, module="loss_scale", phase=Phase.BACKWARD
                )
        readers = [n for n in seed.users if n.meta.get("trace_index") is not None or n is graph.output_node]
        if not readers:
            raise CaptureError(
                "the backward of the loss does not use the gradient that it is given: a loss scale cannot reach any gradient",
                source_line=graph.output_of(OutputRole.LOSS).meta.get("source"),
                remedy="an autograd.Function whose backward returns gradients that forward computed has to multiply them by "
                "its incoming gradient (under GradScaler they would be divided by the scale and never multiplied); or pass "
                'precision="bf16", which needs no scale',
            )
        for reader in readers:
            reader.replace_input_with(seed, scaled)
        return PassResult(True, intended={"losses": 1}, touched={"losses": int(bool(readers))})


def add_scale_input(graph: StepGraph, device: torch.device) -> fx.Node:
    """The loss scale as an input, 0-dim float32."""
    return graph.add_number_input(InputSpec(InputRole.SCALER, "scale"), torch.float32, device, "loss_scale")


def _seed_of(graph: StepGraph) -> fx.Node:
    """The 1 that the backward starts from: its first call."""
    loss = graph.output_of(OutputRole.LOSS)
    first = next((n for n in graph.calls if n.meta["phase"] is Phase.BACKWARD), None)
    if first is None or first.target is not aten.ones_like.default or first.meta["val"].shape != loss.meta["val"].shape:
        raise VerificationError(f"the backward starts with {first}, not with ones in the shape of the loss")
    return first
