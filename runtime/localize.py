"""Finds the first node of a graph whose value differs from what eager computes there.

Eager runs under a dispatch mode that notes each ATen call and a hash of what it produced; the graph then runs node by node.
Captured nodes are compared with the eager call at their place in the captured program, the norm and the update with the calls
of eager's clipping and ``optimizer.step()``. Hashes keep the memory at that of one ordinary step.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..capture import LossCall, flat_leaves, regions_run_once
from ..device import rng_state, set_rng_state
from ..graph import Phase, StepGraph, effects_of, family_of, tensors_in, written_nodes
from ..torch_compat import TorchDispatchMode
from .binding import Binding

if TYPE_CHECKING:
    from .compiled import CompiledBatch, Variant
    from .verify import Sandbox


@dataclass(frozen=True)
class _Call:
    """One ATen call of eager: operator family, and a hash of results and written arguments."""

    family: str
    digest: int | None


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = [
            args[i]
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write and i < len(args)
        ]
        self.calls.append(_Call(_family(func), digest(family_of(func), out, written)))
        return out


_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


def digest(family: str, out: Any, written: list[Any]) -> int | None:
    """Hash of the bytes of every tensor in ``out`` and ``written``; None for memory that nobody has written yet."""
    if family in _UNINITIALISED:
        return None
    tensors = tensors_in(out) + tensors_in(written)
    return hash(tuple((tuple(t.shape), t.dtype, _bytes(t)) for t in tensors)) if tensors else hash(repr(out))


def _bytes(tensor: Tensor) -> int:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hash(flat.view(torch.uint8).cpu().numpy().tobytes()) if flat.numel() else 0


def _family(target: Any) -> str:
    """Operator family; stepgraph's twins of fused kernels go by torch's names."""
    name = family_of(target)
    is_twin = isinstance(target, torch._ops.OpOverload) and target.namespace == "stepgraph"
    return "_" + name if is_twin else name


def first_difference(
    eager: Sandbox,
    graph: Sandbox,
    call: LossCall,
    compiled: CompiledBatch,
    variant: Variant,
    max_norm: float | None,
) -> tuple[str | None, str]:
    """Key of the first differing node, and what eager does in its place. (None, reason) where no node can be named."""
    random_state = rng_state({p.device for p in eager.model.parameters()})
    captured, clipped, updated = _record_eager(eager, call, max_norm)
    set_rng_state(random_state)
    expected = {
        **_expected(compiled.step.graph, captured, (Phase.FORWARD, Phase.BACKWARD)),
        **_expected(variant.graph, clipped, (Phase.NORM,)),
        **_expected(variant.update.graph, updated, (Phase.UPDATE,)),
    }
    for node, value in _run_nodes(graph, compiled, variant):
        eager_call = expected.get(node.meta["key"].name)
        if eager_call is None or eager_call.digest is None or value is None or eager_call.digest == value:
            continue
        where = f" ({node.meta['source']})" if node.meta.get("source") else ""
        theirs = eager_call.family
        mine = _family(node.target)
        detail = f"the graph runs {node.target}{where}; " + (
            f"eager runs {theirs} there" if theirs != mine else "eager gets another value from the same operator"
        )
        return str(node.meta["key"]), detail
    return (
        None,
        "every node that eager has too agrees; what differs is Python state, or an operator that only eager runs",
    )


def _record_eager(
    sandbox: Sandbox, call: LossCall, max_norm: float | None
) -> tuple[list[_Call], list[_Call], list[_Call]]:
    held = {id(p) for group in sandbox.optimizer.param_groups for p in group["params"]}
    trained = [p for p in sandbox.model.parameters() if id(p) in held]
    with regions_run_once(sandbox.model), _Recorder() as forward_backward:
        loss, _ = call(sandbox.model, sandbox.batch)
        grads = torch.autograd.grad(loss, [p for p in trained if p.requires_grad], allow_unused=True)
    for param, grad in zip([p for p in trained if p.requires_grad], grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    with _Recorder() as clipping:
        with_grad = [p for p in trained if p.grad is not None]
        if max_norm:
            torch.nn.utils.clip_grad_norm_(with_grad, max_norm)
        else:
            torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    with _Recorder() as update:
        sandbox.optimizer.step()
    return forward_backward.calls, clipping.calls, update.calls


def _expected(program: StepGraph, calls: list[_Call], phases: tuple[Phase, ...]) -> dict[str, _Call]:
    """Pairs the nodes of a program with eager's calls, in order; runs of equal length that differ are paired too."""
    nodes = [n for n in program.calls if n.meta["phase"] in phases and n.target is not operator.getitem]
    mine, theirs = [_family(n.target) for n in nodes], [c.family for c in calls]
    pairs: dict[str, _Call] = {}
    for tag, a, b, c, d in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and b - a == d - c):
            pairs.update((n.meta["key"].name, t) for n, t in zip(nodes[a:b], calls[c:d], strict=True))
    return pairs


def _run_nodes(sandbox: Sandbox, compiled: CompiledBatch, variant: Variant) -> Iterator[tuple[fx.Node, int | None]]:
    """Runs the variant's graph on the sandbox; yields each call with the hash of what it produced."""
    graph = variant.graph
    leaves, _ = flat_leaves(sandbox.batch)
    binding = Binding(graph, sandbox.tensors, sandbox.optimizer)
    inputs = binding.inputs([leaves[i] for i in compiled.batch_positions])
    values: dict[fx.Node, Any] = dict(zip(graph.placeholders, inputs, strict=True))
    remaining = {node: len(node.users) for node in graph.graph.nodes}
    for node in graph.calls:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            out = node.target(*args, **kwargs)  # type: ignore[operator]
        values[node] = out
        yield node, digest(family_of(node.target), out, [values[w] for w in written_nodes(node)])
        if effects_of(node).control and int(out):
            return
        for operand in node.all_input_nodes:
            remaining[operand] -= 1
            if not remaining[operand]:
                del values[operand]
