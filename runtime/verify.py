"""Runs eager beside the graph, undoes both, and says whether every bit agrees; if not, where they part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import FlatBatch, LossCall, tensors_of
from ..device import rng_state
from ..graph import OutputRole
from ..torch_compat import pytree
from .closeness import allowance_for, deviations
from .compiled import CompiledBatch, Variant
from .localize import Subject, first_difference, run_eager
from .options import StepOptions
from .result import describe_nonfinite


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of ``step.verify``.

    Attributes:
        equal: whether every compared value has the same bits in eager and in the graph.
        tolerance: largest relative deviation that counts as right; 0 in the exact tier, where only equal bits do.
        deviation: the largest that was found.
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
    tolerance: float = 0.0
    deviation: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the step does what eager does: every bit in the exact tier, within the tolerance in the fast one."""
        return self.equal or not self.differences

    def __str__(self) -> str:
        what = ", ".join(f"{n} {kind}" for kind, n in self.compared.items() if n)
        if self.ok:
            how = (
                "bitwise equal to" if self.equal else f"within {self.deviation:.1e} (allowed: {self.tolerance:.2g}) of"
            )
            return f"{how} eager ({what})" + (f"; {self.detail}" if self.detail else "")
        allowed = f"; {self.tolerance:.2g} is allowed" if self.tolerance else ""
        lines = [f"differs from eager in {len(self.differences)} of the compared values ({what}){allowed}"]
        lines += [f"  {line}" for line in self.differences[:10]]
        if len(self.differences) > 10:
            lines.append(f"  ... and {len(self.differences) - 10} more")
        if self.first is not None:
            lines.append(f"  first difference: {self.first}")
        if self.detail:
            lines.append(f"  {self.detail}")
        return "\n".join(lines)


def verify_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    call: LossCall,
    compiled: CompiledBatch,
    variant: Variant,
    batch: FlatBatch,
    options: StepOptions,
) -> VerifyReport:
    """Compares one step of plain eager PyTorch with one run of ``variant``.

    Both start from the same parameters, buffers, optimizer state and random streams, and both are undone afterwards.
    """
    subject = Subject(model, optimizer, call, compiled, variant, batch, options)
    named = {f"parameter {held.key}": held.tensor for held in tensors_of(model).params} if variant.may_round else {}
    before = {name: _copied(param) for name, param in named.items()}
    with compiled.state.rolled_back(model, optimizer):
        eager = dict(_values(subject, *run_eager(subject)))
        grads = {name: _copied(param.grad) for name, param in named.items() if param.grad is not None}
    with compiled.state.rolled_back(model, optimizer):
        outputs = subject.run_graph()
        graph = dict(_values(subject, *_results(subject, outputs)))
    skipped = _skip_reason(compiled, variant, outputs)
    remarks: list[str] = []
    without: tuple[str, ...] = ()
    if skipped:
        remarks, without = [skipped], _UPDATED if "gradient norm" in graph else (*_UPDATED, "gradient norm")
    elif variant.may_round and _overflows_in_eager_only(eager, graph, call):
        without = (*_UPDATED, "gradient norm")
        remarks.append(
            "in eager a gradient overflows float16, here, rounded less often, none does: neither was compared"
        )
    eager, graph = ({k: v for k, v in values.items() if not k.startswith(without)} for values in (eager, graph))
    compared = _count_kinds(eager)
    differences = _differences(eager, graph)
    if compiled.step.region_writes:
        remarks.append("checkpointed regions that write buffers were run once in eager too")
    if compiled.step.shared_gradients and options.max_norm:
        remarks.append("gradients that share memory were parted in eager too, which would clip them repeatedly")
    if not differences:
        return VerifyReport(True, compared, detail="; ".join(remarks))
    tolerance = deviation = 0.0
    if variant.may_round:
        allowance = allowance_for(list(model.parameters()), call.autocast_dtype)
        tolerance = allowance.tolerance
        found = list(deviations(eager, graph, before, grads, allowance.noise))
        deviation = max(d.relative for d in found)
        judged = {d.name for d in found}
        beyond = [f"{d.name}: deviates by {d.relative:.1e}" for d in found if d.relative > tolerance]
        differences = beyond + [line for line in differences if line.partition(": ")[0] not in judged]
        if not differences:
            return VerifyReport(False, compared, [], None, "; ".join(remarks), tolerance, deviation)
    first, detail = first_difference(subject)
    return VerifyReport(False, compared, differences, first, detail, tolerance, deviation)


_UPDATED = ("parameter ", "master ", "state ")


def _overflows_in_eager_only(eager: dict[str, Any], graph: dict[str, Any], call: LossCall) -> bool:
    """Whether a compiler, which keeps single precision between operators, has a finite norm where eager's float16 has not."""
    norms = (values["gradient norm"] for values in (eager, graph))
    return call.autocast_dtype is torch.float16 and [bool(n.isfinite()) for n in norms] == [False, True]


def _skip_reason(compiled: CompiledBatch, variant: Variant, outputs: list[Any]) -> str:
    code = variant.nonfinite_code(outputs)
    if code is None or not int(code):
        return ""
    reason, _ = describe_nonfinite(int(code), variant.grad_keys, variant.first(OutputRole.LOSS, outputs))
    return f"the update is skipped, since {reason}; eager's update was not compared"


def _results(subject: Subject, outputs: list[Any]) -> tuple[Tensor, Any, Tensor | None]:
    variant = subject.variant
    variant.binding.store(outputs)
    aux = subject.compiled.aux_of(variant, outputs)
    return variant.first(OutputRole.LOSS, outputs), aux, variant.first(OutputRole.NORM, outputs)


def _values(subject: Subject, loss: Tensor, aux: Any, norm: Tensor | None) -> Iterator[tuple[str, Any]]:
    """Copies of everything that a step returns or changes, by name."""
    yield "loss", loss.detach().clone()
    if norm is not None:  # None where the backward was spared
        yield "gradient norm", norm.detach().clone()
    for i, value in enumerate(pytree.tree_leaves(aux)):
        if value is not None:
            yield f"aux {i}", _copied(value)
    tensors = tensors_of(subject.model)
    for held in tensors.params:
        yield f"parameter {held.key}", _copied(held.tensor)
        if (master := subject.compiled.state.masters.tensors.get(held.key)) is not None:
            yield f"master {held.key}", _copied(master)
        for name, value in subject.optimizer.state.get(held.tensor, {}).items():
            yield f"state {held.key}/{name}", _copied(value)
    for held in tensors.buffers + tensors.attributes:
        yield f"buffer {held.key}", _copied(held.tensor)
    for index, group in enumerate(subject.optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f"group {index}.{name}", _copied(value)
    for device, state in rng_state({held.tensor.device for held in tensors.params}).items():
        yield f"random stream {device}", state


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _count_kinds(values: dict[str, Any]) -> dict[str, int]:
    kinds = {
        "loss": "loss", "gradient": "gradient norm", "aux": "aux values", "parameter": "parameters",
        "master": "master weights", "buffer": "buffers",
        "state": "optimizer state entries", "random": "random streams", "group": "hyperparameters",
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
