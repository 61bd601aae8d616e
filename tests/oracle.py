"""The eager oracle: what plain PyTorch computes, and the comparison with it, bit for bit.

`eager_steps` runs the loop that users write; `graph_steps` runs a compiled step over the same batches. Both return
snapshots of everything a step may change, and `assert_bitwise` compares two of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

CHECKPOINTS = (1, 2, 5)


@dataclass
class Snapshot:
    """Copies of all that one step reports or changes. Tied parameters appear once, under their first name."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    rng: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every value with its logical name, such as `param head.weight` or `state head.weight.exp_avg`."""
        yield "loss", self.loss
        yield "grad_norm", self.grad_norm
        for kind, table in (("param", self.params), ("buffer", self.buffers), ("rng", self.rng), ("name", self.names)):
            for name, value in table.items():
                yield f"{kind} {name}", value
        for name, entries in self.state.items():
            for key, value in entries.items():
                yield f"state {name}.{key}", value
        for index, group in enumerate(self.groups):
            for key, value in group.items():
                yield f"group {index}.{key}", value


def snapshot(model: nn.Module, optimizer: Optimizer, step: int, loss: Tensor, grad_norm: Tensor) -> Snapshot:
    """Copies the present state of a training run."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    labels = dict(first)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            labels.setdefault(id(parameter), f"group{index}.param{position}")
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        rng |= {f"cuda:{index}": torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
    return Snapshot(
        step=step,
        loss=_copy(loss),
        grad_norm=_copy(grad_norm),
        params={name: _copy(parameter) for name, parameter in model.named_parameters()},
        buffers={name: _copy(buffer) for name, buffer in model.named_buffers()},
        state={
            labels.get(id(owner), str(owner)): _copy(dict(entries))
            for owner, entries in optimizer.state.items()
            if entries
        },
        groups=[
            {
                **_copy({key: value for key, value in group.items() if key != "params"}),
                "params": [labels[id(parameter)] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
        rng=rng,
        names=names,
    )


def eager_steps(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    scheduler: Any = None,
    checkpoints: Sequence[int] = CHECKPOINTS,
    seed: int | None = 0,
) -> dict[int, Snapshot]:
    """The plain PyTorch loop over all batches; snapshots after the steps named in `checkpoints`, counted from 1.

    The random state is set to `seed` first, unless that is None.
    """

    def step(batch: Any) -> tuple[Tensor, Tensor, bool]:
        loss = loss_fn(model, batch)
        loss.backward()
        if max_norm:
            norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
        else:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norm = get_total_norm(gradients, norm_type)
        if clip_value:
            clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)  # also what no group holds: a gradient never outlives its step
        return loss.detach(), norm, True

    return _run(step, model, optimizer, batches, scheduler, checkpoints, seed)


def graph_steps(
    step: Callable[[Any], Any],
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    scheduler: Any = None,
    checkpoints: Sequence[int] = CHECKPOINTS,
    seed: int | None = 0,
) -> dict[int, Snapshot]:
    """The same run with a compiled step, which has the model and the optimizer bound; see `eager_steps`."""

    def run(batch: Any) -> tuple[Tensor, Tensor, bool]:
        result = step(batch)
        return result.loss, result.grad_norm, bool(result.applied)

    return _run(run, model, optimizer, batches, scheduler, checkpoints, seed)


def _run(
    step: Callable[[Any], tuple[Tensor, Tensor, bool]],
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    scheduler: Any,
    checkpoints: Sequence[int],
    seed: int | None,
) -> dict[int, Snapshot]:
    if seed is not None:
        torch.manual_seed(seed)
    taken: dict[int, Snapshot] = {}
    for number, batch in enumerate(batches, start=1):
        loss, norm, applied = step(batch)
        if scheduler is not None and applied:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
        if number in checkpoints:
            taken[number] = snapshot(model, optimizer, number, loss, norm)
    missing = set(checkpoints) - set(taken)
    if missing:
        raise ValueError(f"no batch for step {sorted(missing)}: pass more batches or fewer checkpoints")
    return taken


def differences(a: Snapshot, b: Snapshot) -> list[str]:
    """One line for each value that is not the same in both, bit for bit; empty when all are."""
    lines = [] if a.step == b.step else [f"step: {a.step} against {b.step}"]
    left, right = dict(a.values()), dict(b.values())
    for name in [*left, *(name for name in right if name not in left)]:
        if name not in right:
            lines.append(f"{name}: only in the first")
        elif name not in left:
            lines.append(f"{name}: only in the second")
        elif reason := _difference(left[name], right[name]):
            lines.append(f"{name}: {reason}")
    return lines


def assert_bitwise(a: Snapshot | Mapping[int, Snapshot], b: Snapshot | Mapping[int, Snapshot]) -> None:
    """Fails unless two snapshots, or two runs' snapshots, agree in every bit; names every value that differs."""
    if isinstance(a, Snapshot) and isinstance(b, Snapshot):
        pairs = [(a, b)]
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys() or not a:
            raise AssertionError(f"snapshots after steps {sorted(a)} against {sorted(b)}")
        pairs = [(a[step], b[step]) for step in sorted(a)]
    else:
        raise TypeError("compare a snapshot with a snapshot, or a run with a run")
    lines = [f"after step {left.step}, {line}" for left, right in pairs for line in differences(left, right)]
    if lines:
        raise AssertionError("not bitwise equal:\n  " + "\n  ".join(lines))


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers, in its own shape (complex: one more dimension), so that NaN equals itself."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer)


def twin(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Builds a model twice from one seed, and checks that both came out the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = build()
        torch.manual_seed(seed)
        second = build()
    left, right = first.state_dict(), second.state_dict()
    unequal = [name for name in left.keys() | right.keys() if _difference(left.get(name), right.get(name))]
    if unequal:
        raise AssertionError(f"building from one seed gave different values of {sorted(unequal)}")
    shared = {id(tensor) for tensor in (*first.parameters(), *first.buffers())}
    if any(id(tensor) in shared for tensor in (*second.parameters(), *second.buffers())):
        raise AssertionError("both models hold the same tensors: `build` has to make new ones")
    return first, second


def assert_same(a: Any, b: Any) -> None:
    """Fails where two nested values differ in any bit."""
    assert (reason := _difference(a, b)) is None, reason


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(entry) for entry in value)
    return value


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that address anything: those of dimensions longer than one."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _difference(a: Any, b: Any) -> str | None:
    """What distinguishes two values, or None."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b)
    if type(a) is not type(b):
        return f"{type(a).__name__} {a!r} against {type(b).__name__} {b!r}"
    if isinstance(a, Mapping):
        if a.keys() != b.keys():
            return f"keys {list(a)} against {list(b)}"
        return next((f"[{key!r}] {reason}" for key in a if (reason := _difference(a[key], b[key]))), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"length {len(a)} against {len(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next((f"[{index}] {reason}" for index, (x, y) in pairs if (reason := _difference(x, y))), None)
    same = struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else bool(a == b)
    return None if same else f"{a!r} against {b!r}"


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    for what, left, right in (
        ("dtype", a.dtype, b.dtype),
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("device", a.device, b.device),
        ("strides", _strides(a), _strides(b)),
    ):
        if left != right:
            return f"{what} {left} against {right}"
    unequal = bits(a) != bits(b)
    count = int(unequal.sum())
    if count == 0:
        return None
    if unequal.ndim > a.ndim:
        unequal = unequal.any(-1)
        count = int(unequal.sum())
    wide = torch.complex128 if a.is_complex() else torch.float64
    left, right = a.detach().cpu()[unequal].to(wide), b.detach().cpu()[unequal].to(wide)
    gaps = (left - right).abs()
    largest = float(gaps.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    place = tuple(int(index) for index in unequal.nonzero()[0])
    return (
        f"{count} of {a.numel()} elements differ, max abs difference {largest:.3g}, "
        f"first at {place}: {left[0].item()!r} against {right[0].item()!r}"
    )


def two_groups(model: nn.Module, *, lr: float = 0.01, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two parameter groups by dimension: matrices decay, vectors and scalars do not and learn at half the rate.

    A tied parameter is in one group, once; frozen parameters are in none; a group without parameters is left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "lr": lr / 2, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _builder(kind: type[Optimizer], **options: Any) -> Callable[[Iterable[Any]], Optimizer]:
    def build(params: Iterable[Any]) -> Optimizer:
        return kind(params, **options)

    return build


IMPLEMENTATIONS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
"""The options that choose among torch's implementations of one optimizer: a loop, foreach operators, one fused operator."""

_LOOP: dict[str, Any] = {"foreach": False, "fused": False}
_FOREACH: dict[str, Any] = {"foreach": True}
_FUSED: dict[str, Any] = {"fused": True}
_ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
_ADAMW: dict[str, Any] = {**_ADAM, "weight_decay": 0.1}
_NESTEROV: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": _builder(torch.optim.SGD, lr=0.1),
    "sgd_momentum": _builder(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sgd_dampening": _builder(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, maximize=True),
    "sgd_nesterov": _builder(torch.optim.SGD, **_NESTEROV),
    "sgd_nesterov_foreach": _builder(torch.optim.SGD, **_NESTEROV, **_FOREACH),
    "sgd_nesterov_fused": _builder(torch.optim.SGD, **_NESTEROV, **_FUSED),
    "adamw_forloop": _builder(torch.optim.AdamW, **_ADAMW, **_LOOP),
    "adamw_foreach": _builder(torch.optim.AdamW, **_ADAMW, **_FOREACH),
    "adamw_fused": _builder(torch.optim.AdamW, **_ADAMW, **_FUSED),
    "adamw_amsgrad_fused": _builder(torch.optim.AdamW, **_ADAMW, amsgrad=True, **_FUSED),
    "adam": _builder(torch.optim.Adam, **_ADAM),
    "adam_l2": _builder(torch.optim.Adam, **_ADAM, weight_decay=0.1),
    "adam_maximize": _builder(torch.optim.Adam, **_ADAM, maximize=True),
    "adam_amsgrad": _builder(torch.optim.Adam, **_ADAM, amsgrad=True),
    "adam_amsgrad_foreach": _builder(torch.optim.Adam, **_ADAM, amsgrad=True, **_FOREACH),
    "adam_foreach": _builder(torch.optim.Adam, **_ADAM, **_FOREACH),
    "adam_fused": _builder(torch.optim.Adam, **_ADAM, **_FUSED),
}
"""The optimizers that are compared throughout."""

OTHER_OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "nadam": _builder(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "nadam_decoupled": _builder(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": _builder(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "adamax_foreach": _builder(torch.optim.Adamax, lr=0.01, weight_decay=0.1, **_FOREACH),
    "adagrad": _builder(torch.optim.Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.1),
    "adagrad_foreach": _builder(torch.optim.Adagrad, lr=0.05, weight_decay=0.1, **_FOREACH),
    "adagrad_fused": _builder(torch.optim.Adagrad, lr=0.05, weight_decay=0.1, **_FUSED),
    "adadelta": _builder(torch.optim.Adadelta, lr=0.5, weight_decay=0.1),
    "rmsprop": _builder(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "rmsprop_foreach": _builder(torch.optim.RMSprop, lr=0.01, weight_decay=0.1, **_FOREACH),
    "rprop": _builder(torch.optim.Rprop, lr=0.01),
    "muon": _builder(torch.optim.Muon, lr=0.01, weight_decay=0.1),
    "radam": _builder(torch.optim.RAdam, lr=0.01, weight_decay=0.1),
    "asgd": _builder(torch.optim.ASGD, lr=0.01, t0=2.0, weight_decay=0.1),
    "adafactor": _builder(torch.optim.Adafactor, lr=0.01, weight_decay=0.1),
}
"""The rest of torch's optimizers, some with state that does not start at zero or updates that branch on data."""
