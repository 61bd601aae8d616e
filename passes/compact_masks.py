"""Keeps dropout masks as one bit an element, so that the mask itself can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..graph import Phase, StepGraph, is_view
from .base import Pass, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class CompactMasks(Pass):
    """Keeps for backward what each dropout drew, a bit each, and computes the scaled mask from that before its first use there.

    On the CPU a dropout draws zeros and ones in the input's dtype and divides them by the probability to keep; backward reads
    the result. Draws are never made again, so that result would stay. From the bits it comes out as it was.
    """

    name: ClassVar[str] = "compact_masks"
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD, Phase.BACKWARD})
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> PassResult:
        position = {node: i for i, node in enumerate(graph.calls)}
        found = list(_masks(graph))
        for drawn, scaled in found:
            value = drawn.meta["val"]
            with graph.graph.inserting_before(scaled):
                bits = _add(graph, scaled, torch.ops.stepgraph.pack_bits.default, (drawn,), Phase.FORWARD)
            later = sorted(_backward_readers(scaled), key=position.__getitem__)
            with graph.graph.inserting_before(later[0]):
                layout = (list(value.shape), list(value.stride()), value.dtype)
                again = _add(graph, scaled, torch.ops.stepgraph.unpack_bits.default, (bits, *layout), Phase.BACKWARD)
                mask = _add(graph, scaled, aten.div.Scalar, (again, *scaled.args[1:]), Phase.BACKWARD)
            for reader in later:
                reader.replace_input_with(scaled, mask)
        return PassResult(bool(found), {"masks": len(found)}, {"masks": len(found)})


def _masks(graph: StepGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Draws of zeros and ones into memory of their own, each with the division in place that backward reads."""
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
            and _is_dense(drawn.meta["val"])
            and _backward_readers(scaled)
            and not any(is_view(user) for user in scaled.users)
        ):
            yield drawn, scaled


def _backward_readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op == "call_function" and user.meta["phase"] is Phase.BACKWARD]


def _add(graph: StepGraph, like: fx.Node, target: object, args: tuple[object, ...], phase: Phase) -> fx.Node:
    node = graph.add_call(target, args, {}, module=like.meta["key"].module, phase=phase)
    node.meta["source"] = like.meta["source"]
    return node


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in some order."""
    sizes = (*value.shape, *value.stride(), value.untyped_storage().nbytes())
    return all(isinstance(s, int) for s in sizes) and value.numel() * value.element_size() == sizes[-1]
