"""Which calls write their result over an operand that nothing reads any more, instead of over fresh memory."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import fx

from ..torch_compat import has_own_kernel, has_symbolic_shape
from .effects import effects_of
from .liveness import last_uses
from .step_graph import StepGraph
from .storage import layout_of, storages_of


def overwritten_operands(graph: StepGraph) -> dict[fx.Node, fx.Node]:
    """For each call that writes over an operand, that operand.

    It is the first of :func:`overwritable` whose memory the step made and nothing holds after the call: no later reader, no
    output. This is both what the executor does and what the memory simulator counts.
    """
    if has_unknown_calls(graph):
        return {}
    given = {key for node in graph.placeholders for key in storages_of(node)}
    freed_after = last_uses(graph)
    holders: Counter[int] = Counter()
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.calls:
        freed = [key for value in freed_after.get(node, ()) if value is not node for key in set(storages_of(value))]
        for operand in overwritable(node):
            key = storages_of(operand)[0]
            if key not in given and freed.count(key) == holders[key]:
                found[node] = operand
                break
        holders.subtract(freed)
        if node not in freed_after.get(node, ()):
            holders.update(set(storages_of(node)))
    return found


def has_unknown_calls(graph: StepGraph) -> bool:
    """Whether the graph calls what is not torch's or ours: its result might share memory with an operand and not say so."""
    return any(
        effects_of(node).opaque
        and not (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten")
        for node in graph.calls
    )


def overwritable(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that an elementwise call could write its result over, were nothing else to read them.

    Their memory is laid out like the result's and holds nothing else, and all operands are of the result's dtype, so that each
    element is read before it is written and no temporary copy is made.
    """
    result = node.meta.get("val")
    variant = writing_variant(node.target)
    if variant is None or not isinstance(result, torch.Tensor) or not effects_of(node).pure:
        return ()
    operands = [(n, n.meta["val"]) for n in node.all_input_nodes]
    tensors = [(n, t) for n, t in operands if isinstance(t, torch.Tensor)]
    if any(has_symbolic_shape(t) for t in (result, *(t for _, t in tensors))):
        return ()
    if any(t.dtype is not result.dtype for _, t in tensors if t.dim()):
        return ()
    holders = Counter(key for n, _ in operands for key in storages_of(n))
    own = set(storages_of(node))
    if own & holders.keys():
        return ()
    layout, size = layout_of(result), result.untyped_storage().nbytes()
    return tuple(
        n
        for n, t in tensors
        if (variant.out is not None or n is node.args[0])
        and holders[storages_of(n)[0]] == 1
        and t.untyped_storage().nbytes() == size
        and size > 0
        and layout_of(t) == layout
    )


_ON_NUMBERS = frozenset(getattr(torch.ops.aten, name).Scalar for name in ("add", "sub", "mul", "div"))


class WritingVariant(NamedTuple):
    """How an elementwise operator is told where to write.

    Attributes:
        overload: what runs instead.
        out: the argument that is written; None where it is the first.
    """

    overload: torch._ops.OpOverload
    out: str | None


@functools.cache
def writing_variant(target: Any) -> WritingVariant | None:
    """The overload that writes an elementwise operator's result where it is told, or over its first operand; None without one.

    Overloads that torch generates from the functional one, which compute on the side and copy, do not count. Operators on a
    number go by their kernel for tensors, as they do in torch.
    """
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    own = target._overloadname
    packet = target.overloadpacket
    for name in ("out" if own == "default" else f"{own}_out", "out", "grad_input"):
        overload = getattr(packet, name) if name in packet.overloads() else None
        if overload is not None and _computes_the_same(overload, target):
            written = [a.name for a in overload._schema.arguments if a.is_out]
            if len(written) == 1:
                return WritingVariant(overload, written[0])
    in_place = getattr(torch.ops.aten, f"{target._schema.name.partition('::')[2]}_", None)
    if in_place is not None and own in in_place.overloads():
        overload = getattr(in_place, own)
        if _computes_the_same(overload, target):
            return WritingVariant(overload, None)
    return None


def _computes_the_same(overload: torch._ops.OpOverload, target: torch._ops.OpOverload) -> bool:
    read = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    if target in _ON_NUMBERS and overload._overloadname == "out":
        wanted = [(name, "Tensor" if name == "other" else kind) for name, kind in wanted]
    return read == wanted and has_own_kernel(overload)
