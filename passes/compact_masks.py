"""Keeps dropout masks as one bit an element, so that the mask itself can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import Phase, StepGraph, is_dense, is_view
from ..torch_compat import has_symbolic_shape
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class CompactMasks(Pass):
    """Keeps what each dropout drew, a bit each, and reads masks that are computed from that.

    On the CPU a dropout draws zeros and ones in the input's dtype and divides them by the probability to keep. Draws and writes
    are never made again, so the result would stay, and so would all that reads it. The mask from the bits is the same, and can
    be made again, with what reads it. The division in place stays where it is, as every write of the captured program does.
    """

    name: ClassVar[str] = "compact_masks"
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD, Phase.BACKWARD})
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> PassResult:
        found = list(_masks(graph))
        for drawn, scaled in found:
            value = drawn.meta["val"]
            layout = (list(value.shape), list(value.stride()), value.dtype)
            readers = list(scaled.users)
            with graph.graph.inserting_before(scaled):
                bits = _add(graph, scaled, torch.ops.stepgraph.pack_bits.default, (drawn,))
            with graph.graph.inserting_after(scaled):
                again = _add(graph, scaled, torch.ops.stepgraph.unpack_bits.default, (bits, *layout))
            with graph.graph.inserting_after(again):
                mask = _add(graph, scaled, aten.div.Scalar, (again, *scaled.args[1:]))
            for reader in readers:
                reader.replace_input_with(scaled, mask)
        return PassResult(bool(found), {"masks": len(found)}, {"masks": len(found)})


def _masks(graph: StepGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Draws of zeros and ones into memory of their own, each with the division in place that reads it."""
    for drawn in graph.calls:
        if drawn.target is not aten.bernoulli_.float or drawn.meta["phase"] is not Phase.FORWARD:
            continue
        memory = drawn.args[0]
        scaled = next(iter(drawn.users), None)
        if (
            isinstance(memory, fx.Node)
            and memory.target is aten.empty_like.default
            and list(memory.users) == [drawn]
            and len(drawn.users) == 1
            and scaled is not None
            and scaled.target is aten.div_.Scalar
            and scaled.args[0] is drawn
            and not has_symbolic_shape(drawn.meta["val"])
            and is_dense(drawn.meta["val"])
            and scaled.users
            and graph.output_node not in scaled.users
            and not any(is_view(user) for user in scaled.users)
        ):
            yield drawn, scaled


def _add(graph: StepGraph, like: fx.Node, target: object, args: tuple[object, ...]) -> fx.Node:
    node = graph.add_call(target, args, {}, module=like.meta["key"].module, phase=Phase.FORWARD)
    for name in ("grad_mode", "source", "region"):
        node.meta[name] = like.meta[name]
    return node
