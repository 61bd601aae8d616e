"""Frees results of forward and computes them again in backward, as a plan says."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..errors import PlanMismatchError
from ..graph import (
    Phase,
    StepGraph,
    allocated_by,
    arguments_without_writes,
    can_repeat,
    is_view,
    storages_of,
    written_before_update,
)
from ..planner import Plan
from .base import Pass, PassResult


@dataclass(frozen=True)
class Recompute(Pass):
    """Runs operators of forward again right before the operators of backward that need their results.

    Whatever reads a recomputed result later reads the latest copy, through views made anew; the forward's own result is freed
    after its last reader there.
    """

    plan: Plan

    name: ClassVar[str] = "recompute"
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.FORWARD, Phase.BACKWARD})
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> PassResult:
        nodes = {node.meta["key"].name: node for node in graph.calls}
        missing = [k for r in self.plan.repeats for k in (r.operator, r.before) if k not in nodes]
        if missing:
            raise PlanMismatchError(
                f"the plan names {missing[0]}, which the graph does not have", dict.fromkeys(missing)
            )
        self._check(graph, nodes)
        before: dict[fx.Node, list[tuple[fx.Node, tuple[int, ...]]]] = {}
        for repeat in self.plan.repeats:
            before.setdefault(nodes[repeat.before], []).append((nodes[repeat.operator], repeat.results))
        rewriter = _Rewriter(graph)
        for node in graph.calls:
            if node in before or node.meta["phase"] is not Phase.FORWARD:
                rewriter.visit(node, before.get(node, []))
        rewriter.erase_unread_views()
        repeated = rewriter.repeated
        return PassResult(bool(repeated), {"repeats": len(self.plan.repeats)}, {"repeats": repeated})

    def _check(self, graph: StepGraph, nodes: dict[str, fx.Node]) -> None:
        """Refuses what no plan of this graph asks for."""
        written, allocated = written_before_update(graph), allocated_by(graph.graph)
        for repeat in self.plan.repeats:
            node = nodes[repeat.operator]
            made = allocated.get(node, ())
            if node.meta["phase"] is not Phase.FORWARD or is_view(node) or not can_repeat(node, written):
                why = (
                    "which cannot: it draws, picks indices or works on memory that is written, or it is not of forward"
                )
            elif nodes[repeat.before].meta["phase"] is not Phase.BACKWARD:
                why = f"before {repeat.before}, which is not of backward"
            elif not all(0 <= position < len(made) for position in repeat.results):
                why = f"and takes results {list(repeat.results)} of {len(made)}"
            else:
                continue
            raise PlanMismatchError(f"the plan runs {repeat.operator} again, {why}", [repeat.operator])


class _Rewriter:
    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.repeated = 0
        self._allocated = allocated_by(graph.graph)
        self._latest: dict[int, fx.Node] = {}  # of a forward storage, the run that made its latest copy
        self._views: dict[tuple[fx.Node, frozenset[fx.Node]], fx.Node] = {}

    def visit(self, node: fx.Node, repeats: list[tuple[fx.Node, tuple[int, ...]]]) -> None:
        with self.graph.graph.inserting_before(node):
            for repeated, results in repeats:
                self._repeat(repeated, results)
            if not is_view(node) and self._reads_copies(node):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._current)

    def erase_unread_views(self) -> None:
        for node in reversed(self.graph.calls):
            if not node.users and is_view(node):
                self.graph.graph.erase_node(node)

    def _repeat(self, node: fx.Node, results: tuple[int, ...]) -> None:
        copy = self._copied(node)
        self.repeated += 1
        made = self._allocated[node]
        taken = [made[i] for i in results]
        self._latest.update(dict.fromkeys(taken, copy))
        for user in list(node.users):
            if user.target is operator.getitem and not set(taken).isdisjoint(storages_of(user)):
                self._current(user)  # at once, since the tuple holds all results

    def _current(self, value: fx.Node) -> fx.Node:
        """What stands for ``value`` now: itself, the latest run that made it, or the same view of that."""
        copies = frozenset(self._latest[key] for key in storages_of(value) if key in self._latest)
        if not copies:
            return value
        if not is_view(value):
            (copy,) = copies
            return copy
        key = (value, copies)
        if key not in self._views:
            self._views[key] = self._copied(value, self._base_of(value))
        return self._views[key]

    def _base_of(self, view: fx.Node) -> dict[fx.Node, fx.Node]:
        """For a view of one of several results of an operator, the run that this result is from; others are from other runs."""
        keys = storages_of(view)
        makers = [n for n in view.all_input_nodes if not is_view(n) and len(storages_of(n)) > 1]
        return {maker: self._latest[keys[0]] for maker in makers if keys and keys[0] in self._latest}

    def _copied(self, node: fx.Node, known: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
        chosen = known or {}
        arguments = arguments_without_writes(node)
        args, kwargs = fx.map_arg(arguments, lambda n: chosen[n] if n in chosen else self._current(n))
        copy = self.graph.add_call(node.target, args, kwargs, module=node.meta["key"].module, phase=Phase.BACKWARD)
        for name in ("grad_mode", "source", "trace_index"):
            copy.meta[name] = node.meta[name]
        copy.meta["recomputes"] = node.meta["key"].name
        return copy

    def _reads_copies(self, node: fx.Node) -> bool:
        return any(key in self._latest for operand in node.all_input_nodes for key in storages_of(operand))
