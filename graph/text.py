"""The stable text form of a step graph: one line a node."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .spec import describe_type, short_dtype, type_of
from .storage import storage_bytes

if TYPE_CHECKING:
    from .step_graph import StepGraph


def format_graph(step_graph: StepGraph) -> str:
    """Inputs, one line for each call grouped by phase, outputs.

    A line reads ``%N = op(operands) : type, bytes  | key``. Values are numbered in execution order, so the text does not depend
    on FX node names. Bytes are those of the storage that the value lives in; a view shows those of its base.
    """
    names = {node: f"%{i}" for i, node in enumerate(n for n in step_graph.graph.nodes if n.op != "output")}
    lines = ["inputs:"]
    for node, spec in zip(step_graph.placeholders, step_graph.inputs, strict=True):
        lines.append(f"  {names[node]} : {_type(node)}  | {spec}")
    phase = None
    for node in step_graph.calls:
        if node.meta["phase"] is not phase:
            phase = node.meta["phase"]
            lines.append(f"{phase}:")
        lines.append("  " + format_node(node, names))
    lines.append("outputs:")
    for value, meaning in zip(step_graph.output_values, step_graph.outputs, strict=True):
        lines.append(f"  {format_operand(value, names)}  | {meaning}")
    return "\n".join(lines)


def format_node(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """One call as a line of the text form."""
    operands = [format_operand(a, names) for a in node.args]
    operands += [f"{name}={format_operand(a, names)}" for name, a in sorted(node.kwargs.items())]
    key = node.meta["key"]
    region = f", region {node.meta['region']}" if node.meta.get("region") is not None else ""
    return (
        f"{names[node]} = {target_name(node.target)}({', '.join(operands)}) : {_type(node)}, "
        f"{storage_bytes(node)} B  | {key.name}{region}"
    )


def target_name(target: Any) -> str:
    """``aten.add.Tensor``; ``getitem`` and the like for Python functions."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target is operator.getitem:
        return "getitem"
    return f"python.{getattr(target, '__name__', target)}"


def format_operand(value: Any, names: dict[fx.Node, str]) -> str:
    """An operand: a value's number, a list of operands, or a constant."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_operand(v, names) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    return str(value)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_type(*type_of(v)) for v in value) + ")"
    return describe_type(*type_of(value))
