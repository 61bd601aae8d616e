"""Joins the traced optimizer step to the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..graph import InputRole, InputSpec, OutputRole, OutputSpec, Phase, StepGraph
from .base import Pass, PassResult


@dataclass(frozen=True)
class Update(Pass):
    """Appends a captured ``optimizer.step()``, which consumes the gradients.

    Gradients are no outputs afterwards, so each is freed after its update. State that the update creates becomes an output.
    Parameters in ``masters`` are updated through their float32 masters, which are inputs, and rounded from them.
    """

    name: ClassVar[str] = "update"
    requires: ClassVar[tuple[OutputRole, ...]] = (OutputRole.GRAD,)
    touches: ClassVar[frozenset[Phase]] = frozenset({Phase.UPDATE})

    update: StepGraph
    masters: frozenset[str] = frozenset()

    def run(self, graph: StepGraph) -> PassResult:
        grads = graph.output_nodes(OutputRole.GRAD)
        params = graph.input_nodes(InputRole.PARAM)
        mapping: dict[fx.Node, Any] = {}
        masters: dict[str, fx.Node] = {}
        consumed = set()
        for node, spec in zip(self.update.placeholders, self.update.inputs, strict=True):
            if spec.role is InputRole.PARAM and spec.key in self.masters:
                mapping[node] = masters[spec.key] = graph.add_input(
                    InputSpec(InputRole.MASTER, spec.key), node.meta["val"], node.name
                )
            elif spec.role is InputRole.PARAM:
                mapping[node] = params[spec.key]
            elif spec.role is InputRole.GRAD:
                mapping[node] = grads[spec.key]
                consumed.add(spec.key)
            else:
                mapping[node] = self._add_input(graph, node, spec)
        graph.unread.update(self.update.unread)
        with graph.graph.inserting_before(graph.output_node):
            for node in self.update.calls:
                copied = graph.graph.node_copy(node, mapping.__getitem__)
                key = node.meta["key"]
                graph.assign_key(copied, key.module, key.family, Phase.UPDATE)
                mapping[node] = copied
            for name, master in masters.items():
                graph.add_call(torch.ops.aten.copy_.default, (params[name], master), module=name, phase=Phase.UPDATE)
        kept = [
            (value, spec)
            for value, spec in zip(graph.output_values, graph.outputs, strict=True)
            if spec.role is not OutputRole.GRAD
        ]
        created = [
            (mapping[value], OutputSpec(OutputRole.STATE, spec.key))
            for value, spec in zip(self.update.output_values, self.update.outputs, strict=True)
        ]
        values, specs = zip(*(kept + created), strict=True)
        graph.set_outputs(values, specs)
        return PassResult(True, intended={"gradients": len(grads)}, touched={"gradients": len(consumed)})

    def _add_input(self, graph: StepGraph, node: fx.Node, spec: InputSpec) -> fx.Node:
        if spec.role is InputRole.CONSTANT:
            key = f"update.{spec.key}"
            graph.constants[key] = self.update.constants[spec.key]
            spec = InputSpec(InputRole.CONSTANT, key)
        return graph.add_input(spec, node.meta["val"], node.name)
