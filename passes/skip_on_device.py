"""Leaves the update out without asking the host whether everything was finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..graph import (
    InputRole,
    InputSpec,
    OutputRole,
    OutputSpec,
    Phase,
    StepGraph,
    effects_of,
    family_of,
    loss_that_decides,
    nodes_in,
    written_nodes,
)
from .base import Pass, PassResult
from .fused_kernels import is_fused_kernel, with_scaler_arguments
from .grad_norm import add_norm_call

aten = torch.ops.aten

Policy = tuple[float, float, int, int, float, float]


@dataclass(frozen=True)
class SkipOnDevice(Pass):
    """Lets fused kernels do nothing where the loss or the norm is not finite, takes back the counts of their steps, and moves
    the loss scale: nothing waits for the device.

    Bitwise what a gated update does. For updates of fused kernels alone (:func:`is_skippable`), with clipping, under which a
    norm that overflows skips in any case. The output ``nonfinite`` is a tensor on the device.

    Attributes:
        policy: growth factor, backoff factor, growth interval, hysteresis, smallest and largest scale of a dynamic loss scale.
    """

    name: ClassVar[str] = "skip_on_device"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.LOSS, OutputRole.NORM, OutputRole.CLIP_FACTOR)
    guarantees: ClassVar[tuple[OutputRole, ...]] = (OutputRole.NONFINITE,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.NORM, Phase.UPDATE})

    policy: Policy | None = None

    def run(self, graph: StepGraph) -> PassResult:
        code, found = _add_code(graph)
        kernels = [n for n in graph.calls if is_fused_kernel(n)]
        guarded = [with_scaler_arguments(graph, node, found_inf=found) for node in kernels]
        with graph.graph.inserting_before(graph.output_node):
            for counting in [n for n in graph.calls if _counts_steps(n, graph)]:
                counts = list(nodes_in(counting.args[0]))
                taken_back = (counts, [found] * len(counts))
                graph.add_call(aten._foreach_sub_.List, taken_back, module="optimizer", phase=Phase.UPDATE)
            if self.policy is not None:
                scale = graph.input_nodes(InputRole.SCALER)["scale"]
                trackers = _add_trackers(graph, scale)
                target = torch.ops.stepgraph.move_scale_.default
                graph.add_call(target, (scale, trackers, code, *self.policy), module="loss_scale", phase=Phase.UPDATE)
        graph.set_outputs([*graph.output_values, code], [*graph.outputs, OutputSpec(OutputRole.NONFINITE)])
        return PassResult(True, intended={"kernels": len(kernels)}, touched={"kernels": len(guarded)})


def is_skippable(update: StepGraph) -> bool:
    """Whether a captured update writes through fused kernels alone, besides counting steps, and creates no state."""
    if update.outputs or not any(map(is_fused_kernel, update.calls)):
        return False
    writers = [n for n in update.calls if effects_of(n).writes or effects_of(n).opaque]
    return all(is_fused_kernel(n) or _counts_steps(n, update) for n in writers)


def _counts_steps(node: fx.Node, graph: StepGraph) -> bool:
    """Whether a call adds 1 to counts of steps, each a state entry ``step``."""
    if family_of(node.target) not in ("_foreach_add_", "add_") or node.args[1] != 1 or node.kwargs:
        return False
    specs = dict(zip(graph.placeholders, graph.inputs, strict=True))
    written = [specs.get(n) for n in written_nodes(node)]
    return all(s is not None and s.role is InputRole.STATE and s.key.endswith("/step") for s in written)


def _add_code(graph: StepGraph) -> tuple[fx.Node, fx.Node]:
    norm = graph.output_of(OutputRole.NORM)
    with graph.graph.inserting_before(norm.next):
        args: tuple[Any, ...] = (loss_that_decides(graph), norm, norm.args[0])
        code = add_norm_call(graph, torch.ops.stepgraph.nonfinite_code_on_device.default, args)
        is_bad = add_norm_call(graph, aten.ne.Scalar, (code, 0))
        found = add_norm_call(graph, aten._to_copy.default, (is_bad,), {"dtype": torch.float32})
    return code, found


def _add_trackers(graph: StepGraph, scale: fx.Node) -> fx.Node:
    with graph.fake_mode:
        fake = torch.empty(2, dtype=torch.int32, device=scale.meta["val"].device)
    return graph.add_input(InputSpec(InputRole.SCALER, "trackers"), fake, "trackers")
