"""Finds the first node of a graph whose value differs from what eager computes there.

Eager runs under a dispatch mode that notes each ATen call and a hash of what it produced; the graph then runs node by node.
Captured nodes are compared with the eager call at their place in the captured program, the norm and the update with the calls
of eager's clipping and ``optimizer.step()``. Hashes keep the memory at that of one ordinary step.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..capture import FlatBatch, LossCall, flatten_batch, regions_run_once
from ..device import autocast_off
from ..graph import UNINITIALISED, InputRole, Phase, StepGraph, arguments_by_name, family_of, tensors_in, writes_of
from ..torch_compat import TorchDispatchMode, storage_key
from .clipping import total_norm
from .interpret import run_nodes

if TYPE_CHECKING:
    from .compiled import CompiledBatch, Variant
    from .loss_scale import Scaler
    from .options import StepOptions


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
        self.calls.append(_Call(_family(func), digest(family_of(func), out, _written(func, args, kwargs or {}))))
        return out


def _written(target: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Values of the arguments that a call writes, in the schema's order; a fused kernel and its twin have the same."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    schema_arguments = target._schema.arguments
    given = arguments_by_name(target, args, kwargs)
    names = writes_of(target)
    if "fused_" in target._schema.name:
        names = {a.name for a in schema_arguments if str(a.type) == "List[Tensor]" and a.name != "grads"}
    return [given[a.name] for a in schema_arguments if a.name in names and given.get(a.name) is not None]


def digest(family: str, out: Any, written: list[Any]) -> int | None:
    """Hash of the bytes of every tensor in ``out`` and ``written``; None for memory that nobody has written yet."""
    if family in UNINITIALISED:
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


@dataclass(frozen=True)
class Subject:
    """What is verified: the user's objects, the batch, and the graph that is held against eager."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    call: LossCall
    compiled: CompiledBatch
    variant: Variant
    batch: FlatBatch
    options: StepOptions

    def inputs(self) -> list[Any]:
        """The graph's inputs, with a copy of the batch."""
        return self.compiled.inputs(self.variant, flatten_batch(self.batch.copied()))

    def captured_inputs(self) -> list[Any]:
        """The inputs of forward and backward as they were captured, with a copy of the batch."""
        program = self.compiled.micro(None)
        values = self.compiled.inputs(program, flatten_batch(self.batch.copied()))
        by_spec = dict(zip(program.graph.inputs, values, strict=True))
        return [by_spec[spec] for spec in self.compiled.step.graph.inputs]

    def run_graph(self) -> list[Any]:
        """The graph's outputs; under accumulation those of the last of a window of equal micro-batches."""
        window = self.compiled.state.window
        if window is None:
            return self.variant.executor(self.inputs())
        for _ in range(window.size - 1):
            window.expect(1.0)
            program = self.compiled.micro(window.part(weighted=False))
            outputs = program.executor(self.compiled.inputs(program, flatten_batch(self.batch.copied())))
            program.binding.store(outputs)
            window.take(None, program.gradients(outputs))
        window.expect(1.0)
        outputs = self.variant.executor(self.inputs())
        window.clear()
        return outputs

    def trained(self) -> list[Tensor]:
        """The model's parameters that the optimizer holds and that require grad, in the model's order."""
        held = self._held()
        return [p for p in self.model.parameters() if id(p) in held and p.requires_grad]

    def updated(self) -> list[Tensor]:
        """The same with masters, which the optimizer holds, in the places of their parameters."""
        held, masters = self._held(), self.compiled.state.masters.tensors
        targets = [masters.get(key, p) for key, p in self.model.named_parameters() if p.requires_grad]
        return [p for p in targets if id(p) in held]

    def _held(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}


def run_eager(subject: Subject) -> tuple[Tensor, Any, Tensor]:
    """The plain loop: backward, norm, clip, step. Returns loss, aux and norm."""
    once = subject.compiled.step.region_writes  # eager's recompute would write a second time
    masters, scaler = subject.compiled.state.masters, _scaler_like(subject.compiled.state.scaler)
    size = subject.options.accumulate
    with regions_run_once(subject.model) if once else contextlib.nullcontext():
        for _ in range(size):
            loss, aux = subject.call(subject.model, subject.batch.copied())
            with autocast_off():
                scaler.scale(loss).backward()
                masters.take_gradients()
    with autocast_off():
        _own_gradients(subject.trained())
        with masters.in_optimizer(subject.optimizer):
            scaler.unscale_(subject.optimizer)
            for param in subject.updated():
                if size > 1 and param.grad is not None:
                    param.grad.div_(size)
            norm = _clip(subject)
            subject.optimizer.step()
        masters.give_values()
    return loss, aux, norm


def _scaler_like(scaler: Scaler | None) -> torch.amp.GradScaler:
    """Torch's scaler at the same scale; one that does nothing where losses are not scaled."""
    if scaler is None:
        return torch.amp.GradScaler(enabled=False)
    return torch.amp.GradScaler(scaler.scale.device.type, init_scale=scaler.value)


def _own_gradients(params: list[Tensor]) -> None:
    """Parts gradients that share memory, which eager's in-place clipping would scale once for each of them."""
    seen: set[int] = set()
    for param in params:
        if param.grad is not None:
            if storage_key(param.grad) in seen:
                param.grad = param.grad.clone()
            seen.add(storage_key(param.grad))


def _clip(subject: Subject) -> Tensor:
    params, options = subject.updated(), subject.options
    norm = total_norm(params, options.norm_type)
    if options.max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, options.max_norm, norm)
    if options.clip_value:
        torch.nn.utils.clip_grad_value_(params, options.clip_value)
    return norm


def first_difference(subject: Subject) -> tuple[str | None, str]:
    """Key of the first differing node, and what eager does in its place. (None, reason) where no node can be named.

    Under accumulation only forward and backward of one micro-batch are looked at.
    """
    with subject.compiled.state.rolled_back(subject.model, subject.optimizer):
        captured, clipped, updated = _record_eager(subject)
    compiled, variant = subject.compiled, subject.variant
    is_window = compiled.state.window is not None
    graph = compiled.step.graph if is_window else variant.graph
    expected = _expected(compiled.step.graph, captured, (Phase.FORWARD, Phase.BACKWARD))
    if not variant.may_round and not is_window:
        expected |= _expected(variant.graph, clipped, (Phase.NORM,))
        expected |= _expected(variant.update.graph, updated, (Phase.UPDATE,))
    with subject.compiled.state.rolled_back(subject.model, subject.optimizer):
        inputs = subject.captured_inputs() if is_window else subject.inputs()
        for node, values in run_nodes(graph, inputs):
            eager_call = expected.get(node.meta["key"].name)
            if eager_call is None or eager_call.digest is None:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = digest(family_of(node.target), values[node], _written(node.target, args, kwargs))
            if value in (None, eager_call.digest):
                continue
            return str(node.meta["key"]), _describe(node, eager_call)
    if is_window:
        return (
            None,
            "every node of a micro-batch that eager has too agrees; what differs is the window, norm, clip or update",
        )
    if variant.may_round:
        return None, (
            "the graph's forward and backward agree with eager node by node; what differs is clip, update, or compiled code, "
            'which lowering="eager" does without'
        )
    return (
        None,
        "every node that eager has too agrees; what differs is Python state, or an operator that only eager runs",
    )


def _describe(node: fx.Node, eager_call: _Call) -> str:
    where = f" ({node.meta['source']})" if node.meta.get("source") else ""
    theirs = (
        "eager gets another value from the same operator"
        if eager_call.family == _family(node.target)
        else f"eager runs {eager_call.family} there"
    )
    return f"the graph runs {node.target}{where}; {theirs}"


def _record_eager(subject: Subject) -> tuple[list[_Call], list[_Call], list[_Call]]:
    trained = subject.trained()
    is_window = subject.compiled.state.window is not None
    scaler = _scaler_like(None if is_window else subject.compiled.state.scaler)
    with regions_run_once(subject.model), _Recorder() as forward_backward:
        loss, _ = subject.call(subject.model, subject.batch.copied())
        with autocast_off():
            grads = torch.autograd.grad(scaler.scale(loss), trained, allow_unused=True)
    for param, grad in zip(trained, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    masters = subject.compiled.state.masters
    masters.take_gradients()
    with autocast_off(), masters.in_optimizer(subject.optimizer):
        with _Recorder() as clipping:
            scaler.unscale_(subject.optimizer)
            _clip(subject)
        with _Recorder() as update:
            subject.optimizer.step()
    masters.give_values()
    return forward_backward.calls, clipping.calls, update.calls


def _expected(program: StepGraph, calls: list[_Call], phases: tuple[Phase, ...]) -> dict[str, _Call]:
    """Pairs the nodes of a program with eager's calls, in order; runs of equal length that differ are paired too."""
    nodes = [n for n in program.calls if n.meta["phase"] in phases and not _is_ours_alone(n, program)]
    mine, theirs = [_family(n.target) for n in nodes], [c.family for c in calls]
    pairs: dict[str, _Call] = {}
    for tag, a, b, c, d in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and b - a == d - c):
            pairs.update((n.meta["key"].name, t) for n, t in zip(nodes[a:b], calls[c:d], strict=True))
    return pairs


def _is_ours_alone(node: fx.Node, program: StepGraph) -> bool:
    """Whether eager has no call for the node: it unpacks a list, looks for non-finite values, or reads a hyperparameter."""
    if node.target is operator.getitem or family_of(node.target) in ("nonfinite_code", "gate"):
        return True
    hypers = program.input_nodes(InputRole.HYPER).values()
    return family_of(node.target) == "_local_scalar_dense" and node.args[0] in hypers
