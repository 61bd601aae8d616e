"""Removes what computes nothing new."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..graph import UNINITIALISED, Phase, StepGraph, StorageMap, effects_of, family_of, freeze, layout_of, storages_of
from .base import Pass, PassResult


@dataclass(frozen=True)
class Clean(Pass):
    """No-ops, common subexpressions and dead code.

    Keeps numerics bitwise: a random draw, a write and everything unknown stays, also when nothing reads its result, and
    only calls that touch no written memory are merged. Values are merged within a phase only, since sharing one between
    forward and backward would keep it alive and undo a recompute that the user wrote by hand.
    """

    name: ClassVar[str] = "clean"
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD, Phase.BACKWARD})
    optional: ClassVar[bool] = True

    merge: bool = True

    def run(self, graph: StepGraph) -> PassResult:
        before = len(graph.graph.nodes)
        _bypass_noops(graph)
        if self.merge:
            _merge_equal(graph)
        _drop_dead(graph)
        return PassResult(changed=len(graph.graph.nodes) != before)


def _bypass_noops(graph: StepGraph) -> None:
    for node in graph.calls:
        base = node.args[0] if node.args else None
        if graph.output_node in node.users and isinstance(base, fx.Node) and base.op == "placeholder":
            continue  # a result must not be the parameter itself
        if not isinstance(base, fx.Node) or storages_of(node) != storages_of(base):
            continue
        if effects_of(node).pure and _is_same_view(node.meta["val"], base.meta["val"]):
            node.replace_all_uses_with(base)
            graph.graph.erase_node(node)


def _is_same_view(value: Any, base: Any) -> bool:
    """Whether two values on the same memory are the same elements in the same order."""
    if not (isinstance(value, torch.Tensor) and isinstance(base, torch.Tensor)):
        return False
    if not all(isinstance(s, int) for t in (value, base) for s in (*t.shape, *t.stride(), t.storage_offset())):
        return False
    return (
        layout_of(value) == layout_of(base)
        and value.storage_offset() == base.storage_offset()
        and value.is_conj() == base.is_conj()
        and value.is_neg() == base.is_neg()
    )


def _merge_equal(graph: StepGraph) -> None:
    storages = StorageMap(graph.graph)
    returned = {key for value in graph.output_values if isinstance(value, fx.Node) for key in storages_of(value)}
    seen: dict[Hashable, fx.Node] = {}
    moved: set[int] = set()
    for node in graph.calls:
        if not effects_of(node).pure or storages.touches_written(node) or family_of(node.target) in UNINITIALISED:
            continue
        if any(key in returned for key in storages_of(node)):
            continue
        signature = (node.meta["phase"], node.target, freeze(node.args), freeze(node.kwargs))
        try:
            first = seen.setdefault(signature, node)
        except TypeError:  # an argument that cannot be hashed, such as a generator
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
            moved.update(storages_of(node))
        elif moved.intersection(storages_of(node)):
            _rederive(graph, node)  # a view of a call that is gone is now a view of the call that stayed


def _rederive(graph: StepGraph, node: fx.Node) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with graph.fake_mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _drop_dead(graph: StepGraph) -> None:
    for node in reversed(graph.calls):
        if not node.users and effects_of(node).pure:
            graph.graph.erase_node(node)
