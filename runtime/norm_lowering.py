"""How a compiler for the CPU is given the 2-norms of gradients."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence

import torch
from torch import fx

from ..graph import argument, family_of

aten = torch.ops.aten

STREAMS = 4
FEWEST_ELEMENTS = 2**16

_VIEWS = frozenset({"t", "transpose", "view", "_unsafe_view", "alias", "permute"})
_RUNS_ALONE = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution_backward", "embedding_dense_backward"})
_DTYPES = (torch.float32, torch.float64)


def norm_operands(node: fx.Node) -> list[fx.Node]:
    """The tensors on the CPU of which a call takes 2-norms, each as a whole; none where it does something else."""
    if family_of(node.target) == "_foreach_norm":
        operands: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        order = argument(node, "ord")
    elif family_of(node.target) == "linalg_vector_norm" and argument(node, "dim") is None:
        operands, order = [node.args[0]], argument(node, "ord")  # type: ignore[list-item]
    else:
        return []
    if order != 2 or argument(node, "dtype") is not None or argument(node, "keepdim"):
        return []
    return list(operands) if all(n.meta["val"].device.type == "cpu" for n in operands) else []


def is_large_in_memory(node: fx.Node, inside: Container[fx.Node]) -> bool:
    """Whether a value is large, and in memory already when a norm within ``inside`` reads it.

    A value that a compiler computes in the loop that reads it is not: the norm then costs no read at all.
    """
    value = node.meta["val"]
    if value.dtype not in _DTYPES or value.numel() < FEWEST_ELEMENTS or value.numel() % STREAMS:
        return False
    if not value.is_contiguous():
        return False
    while node in inside and (family_of(node.target) in _VIEWS or node.target is operator.getitem):
        node = node.args[0]  # type: ignore[assignment]
    return node not in inside or family_of(node.target) in _RUNS_ALONE


def add_norm(graph: fx.Graph, value: fx.Node, *, in_streams: bool) -> fx.Node:
    """Adds the 2-norm of ``value``. ``in_streams`` reads it in several places at once, which is up to a third faster on one
    core, and adds their squares before it accumulates them."""
    if not in_streams:
        return graph.call_function(aten.linalg_vector_norm.default, (value, 2))
    rows = graph.call_function(aten.view.default, (value, [STREAMS, -1]))
    squares = []
    for number in range(STREAMS):
        row = graph.call_function(aten.select.int, (rows, 0, number))
        squares.append(graph.call_function(aten.mul.Tensor, (row, row)))
    total = squares[0]
    for square in squares[1:]:
        total = graph.call_function(aten.add.Tensor, (total, square))
    return graph.call_function(aten.sqrt.default, (graph.call_function(aten.sum.default, (total,)),))
