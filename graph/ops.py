"""stepgraph's own operators. Importing this module registers them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NONFINITE_LOSS = 1
NONFINITE_NORM = 2
NONFINITE_GRAD = 3  # 3 + i: the i-th gradient is the first that is not finite


_library = torch.library.Library("stepgraph", "FRAGMENT")
KERNELS: dict[Any, Callable[..., Any]] = {}  # what each operator runs, for executors that need no dispatcher


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator without autograd: cheaper to call than ``torch.library.custom_op``."""
    name = _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stepgraph::{name}", fake, lib=_library)
    KERNELS[getattr(torch.ops.stepgraph, name).default] = run


def nonfinite_code(loss: Tensor, norm: Tensor, grads: list[Tensor], norm_decides: bool) -> Tensor:
    """0 where everything is finite, else what is not.

    A finite norm proves that every gradient is finite, so gradients are scanned only where the norm is not.

    Args:
        loss: one element.
        norm: 0-dim, the total norm of ``grads``.
        grads: any shapes.
        norm_decides: whether finite gradients whose norm overflows count as non-finite (they do under clipping,
            which would multiply them by zero).

    Returns:
        0-dim int64 on the CPU: 0, ``NONFINITE_LOSS``, ``NONFINITE_NORM``, or ``NONFINITE_GRAD`` + index of the first
        gradient.
    """
    if math.isfinite(norm.item()):
        return torch.tensor(0 if math.isfinite(loss.item()) else NONFINITE_LOSS)
    for index, grad in enumerate(grads):
        if not bool(torch.isfinite(grad).all()):
            return torch.tensor(NONFINITE_GRAD + index)
    if not math.isfinite(loss.item()):
        return torch.tensor(NONFINITE_LOSS)
    return torch.tensor(NONFINITE_NORM if norm_decides else 0)


def _fake_code(loss: Tensor, norm: Tensor, grads: list[Tensor], norm_decides: bool) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def gate(code: Tensor) -> Tensor:
    """Marks where the step ends if ``code`` (0-dim int64) is not 0; executors jump to the outputs there."""
    return code.clone()


_define(
    "nonfinite_code(Tensor loss, Tensor norm, Tensor[] grads, bool norm_decides) -> Tensor", nonfinite_code, _fake_code
)
_define("gate(Tensor code) -> Tensor", gate, torch.empty_like)


def pack(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """Python numbers as a vector on the CPU."""
    return torch.tensor(numbers, dtype=dtype)


def _fake_pack(numbers: list[float], dtype: torch.dtype) -> Tensor:
    return torch.empty(len(numbers), dtype=dtype)


_define("pack(Scalar[] numbers, ScalarType dtype) -> Tensor", pack, _fake_pack)


# torch's fused optimizer kernels take Python floats, which specialises a symbolic hyperparameter to its value. Each twin
# takes the same arguments as `Scalar`, which stays symbolic, and calls torch's kernel when it runs.
_SCALER_ARGUMENTS = ("grad_scale", "found_inf")
FUSED_KERNELS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _define_twin(kernel: str) -> Callable[..., None]:
    overload = getattr(torch.ops.aten, kernel).default
    arguments = [a for a in overload._schema.arguments if a.name not in _SCALER_ARGUMENTS]
    declared = ", ".join(_declaration(a, position) for position, a in enumerate(arguments))
    name = kernel.removeprefix("_")
    positional = sum(not a.kwarg_only for a in arguments)

    def run(*args: Any) -> None:
        names = [a.name for a in arguments[positional:]]
        overload(*args[:positional], **dict(zip(names, args[positional:], strict=True)))

    _define(f"{name}({declared}) -> ()", run, lambda *args: None)
    twin = getattr(torch.ops.stepgraph, name)

    def replacement(*args: Any, grad_scale: None = None, found_inf: None = None, **kwargs: Any) -> None:
        if grad_scale is not None or found_inf is not None:
            raise ValueError(f"{kernel} was given a gradient scaler; stepgraph scales losses itself")
        by_name = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        twin(*[_as_scalar(by_name[a.name]) if str(a.type) == "float" else by_name[a.name] for a in arguments])

    return replacement


def _as_scalar(value: Any) -> Any:
    """A hyperparameter that the user keeps as a tensor is read where eager's kernel reads it."""
    return value.item() if isinstance(value, Tensor) else value


def _declaration(argument: Any, position: int) -> str:
    kind = str(argument.type)
    if kind == "float":
        return f"Scalar {argument.name}"
    if kind == "List[Tensor]":
        is_read_only = argument.name == "grads"  # written by torch's kernels only under grad_scale
        return f"Tensor[] {argument.name}" if is_read_only else f"Tensor(a{position}!)[] {argument.name}"
    return f"{kind} {argument.name}"


FUSED_TWINS: dict[str, Callable[..., None]] = {
    kernel: _define_twin(kernel) for kernel in FUSED_KERNELS if hasattr(torch.ops.aten, kernel)
}
