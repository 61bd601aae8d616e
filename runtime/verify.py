"""Runs eager beside the graph, on copies, and says whether every bit agrees; if not, where they part."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import LossCall, ModuleTensors, flat_leaves, tensors_of
from ..device import rng_state, set_rng_state
from ..graph import OutputRole
from ..torch_compat import pytree
from .binding import Binding
from .compiled import CompiledBatch, Variant
from .localize import first_difference


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of ``step.verify``.

    Attributes:
        equal: whether every compared value has the same bits in eager and in the graph.
        compared: how many values of each kind were compared.
        differences: names of the values that differ, with the largest absolute difference.
        first: logical key of the first graph node whose value differs from eager's, or None.
        detail: what the graph and eager do there.
    """

    equal: bool
    compared: dict[str, int]
    differences: list[str] = field(default_factory=list)
    first: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        what = ", ".join(f"{n} {kind}" for kind, n in self.compared.items() if n)
        if self.equal:
            return f"bitwise equal to eager ({what})"
        lines = [f"differs from eager in {len(self.differences)} of the compared values ({what})"]
        lines += [f"  {line}" for line in self.differences[:10]]
        if self.first is not None:
            lines.append(f"  first difference: {self.first}")
        if self.detail:
            lines.append(f"  {self.detail}")
        return "\n".join(lines)


@dataclass
class Sandbox:
    """Copies of a model, its optimizer and a batch, that share nothing with the originals."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    tensors: ModuleTensors

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Sandbox:
        """Deep copies; shared tensors stay shared among them."""
        copied_model, copied_optimizer, copied_batch = copy.deepcopy((model, optimizer, batch))
        for param in copied_model.parameters():
            param.grad = None
        return cls(copied_model, copied_optimizer, copied_batch, tensors_of(copied_model))


def verify_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    call: LossCall,
    compiled: CompiledBatch,
    variant: Variant,
    batch: Any,
    max_norm: float | None,
) -> VerifyReport:
    """Compares one step of plain eager PyTorch with one run of ``variant``.

    Both start from copies of the same parameters, buffers, optimizer state and random streams. Nothing of the originals
    changes. Needs memory for two copies of model and optimizer.
    """
    devices = {p.device for p in model.parameters()}
    random_state = rng_state(devices)
    try:
        eager = Sandbox.of(model, optimizer, batch)
        eager_values = dict(_eager_values(eager, call, max_norm))
        eager_random = rng_state(devices)
        set_rng_state(random_state)
        graph = Sandbox.of(model, optimizer, batch)
        graph_values = dict(_graph_values(graph, compiled, variant))
        graph_random = rng_state(devices)
        eager_values.update({f"random stream {d}": s for d, s in eager_random.items()})
        graph_values.update({f"random stream {d}": s for d, s in graph_random.items()})
        differences = _differences(eager_values, graph_values)
        compared = _count_kinds(eager_values)
        if not differences:
            return VerifyReport(True, compared)
        set_rng_state(random_state)
        first, detail = first_difference(
            Sandbox.of(model, optimizer, batch), Sandbox.of(model, optimizer, batch), call, compiled, variant, max_norm
        )
        return VerifyReport(False, compared, differences, first, detail)
    finally:
        set_rng_state(random_state)


def eager_step(sandbox: Sandbox, call: LossCall, max_norm: float | None) -> tuple[Tensor, Any, Tensor]:
    """The plain loop that the graph is held against: backward, norm, clip, step. Returns loss, aux and norm."""
    loss, aux = call(sandbox.model, sandbox.batch)
    loss.backward()
    params = [p for p in _trained(sandbox) if p.grad is not None]
    if max_norm:
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    sandbox.optimizer.step()
    return loss.detach(), aux, norm


def _trained(sandbox: Sandbox) -> list[Tensor]:
    held = {id(p) for group in sandbox.optimizer.param_groups for p in group["params"]}
    return [p for p in sandbox.model.parameters() if id(p) in held]


def _eager_values(sandbox: Sandbox, call: LossCall, max_norm: float | None) -> Iterator[tuple[str, Any]]:
    loss, aux, norm = eager_step(sandbox, call, max_norm)
    yield from _named(loss, pytree.tree_leaves(aux), norm)
    yield from _persistent(sandbox)


def _graph_values(sandbox: Sandbox, compiled: CompiledBatch, variant: Variant) -> Iterator[tuple[str, Any]]:
    outputs = run_on(sandbox, compiled, variant)
    aux = [outputs[i] for i in variant.outputs[OutputRole.AUX]]
    for position, value in sorted(compiled.step.aux_constants.items()):
        aux.insert(position, value)
    yield from _named(variant.first(OutputRole.LOSS, outputs), aux, variant.first(OutputRole.NORM, outputs))
    yield from _persistent(sandbox)


def run_on(sandbox: Sandbox, compiled: CompiledBatch, variant: Variant) -> list[Any]:
    """Runs the variant's graph on the sandbox's tensors."""
    leaves, _ = flat_leaves(sandbox.batch)
    binding = Binding(variant.graph, sandbox.tensors, sandbox.optimizer)
    outputs = variant.executor(binding.inputs([leaves[i] for i in compiled.batch_positions]))
    binding.store_created_state(outputs)
    return outputs


def _named(loss: Tensor, aux: list[Any], norm: Tensor) -> Iterator[tuple[str, Any]]:
    yield "loss", loss
    yield "gradient norm", norm
    for i, value in enumerate(aux):
        yield f"aux {i}", value.detach() if isinstance(value, Tensor) else value


def _persistent(sandbox: Sandbox) -> Iterator[tuple[str, Any]]:
    for held in sandbox.tensors.params:
        yield f"parameter {held.key}", held.tensor.detach()
        for name, value in sandbox.optimizer.state.get(held.tensor, {}).items():
            yield f"state {held.key}/{name}", value
    for held in sandbox.tensors.buffers + sandbox.tensors.attributes:
        yield f"buffer {held.key}", held.current()


def _count_kinds(values: dict[str, Any]) -> dict[str, int]:
    kinds = {
        "loss": "loss", "gradient": "gradient norm", "aux": "aux values", "parameter": "parameters", "buffer": "buffers",
        "state": "optimizer state entries", "random": "random streams",
    }  # fmt: skip
    counts = dict.fromkeys(kinds.values(), 0)
    for name in values:
        counts[kinds[name.split(" ")[0]]] += 1
    return counts


def _differences(eager: dict[str, Any], graph: dict[str, Any]) -> list[str]:
    lines = []
    for name in list(dict.fromkeys([*eager, *graph])):
        if name not in graph or name not in eager:
            lines.append(f"{name}: only in {'eager' if name in eager else 'the graph'}")
        elif not same_bits(eager[name], graph[name]):
            lines.append(f"{name}: {_describe_difference(eager[name], graph[name])}")
    return lines


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit (NaN payloads and signed zeros included)."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _describe_difference(a: Any, b: Any) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"eager has {a!r}, the graph {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"eager has {a.dtype}{list(a.shape)}, the graph {b.dtype}{list(b.shape)}"
    if a.dtype.is_floating_point:
        return f"largest difference {(a.double() - b.double()).abs().max().item():.3g}"
    return "values differ"
