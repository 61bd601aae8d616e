"""stepgraph's own operators. Importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NONFINITE_LOSS = 1
NONFINITE_NORM = 2
NONFINITE_GRAD = 3  # 3 + i: the i-th gradient is the first that is not finite


@torch.library.custom_op("stepgraph::nonfinite_code", mutates_args=())
def nonfinite_code(loss: Tensor, norm: Tensor, grads: list[Tensor], norm_decides: bool) -> Tensor:
    """0 where everything is finite, else what is not.

    A finite norm proves that every gradient is finite, so gradients are scanned only where the norm is not.

    Args:
        loss: 0-dim.
        norm: 0-dim, the total norm of ``grads``.
        grads: any shapes.
        norm_decides: whether finite gradients whose norm overflows count as non-finite (they do under clipping,
            which would multiply them by zero).

    Returns:
        0-dim int64: 0, ``NONFINITE_LOSS``, ``NONFINITE_NORM``, or ``NONFINITE_GRAD`` + index of the first gradient.
    """
    if bool(torch.isfinite(norm)):
        return torch.tensor(0 if bool(torch.isfinite(loss)) else NONFINITE_LOSS)
    for index, grad in enumerate(grads):
        if not bool(torch.isfinite(grad).all()):
            return torch.tensor(NONFINITE_GRAD + index)
    if not bool(torch.isfinite(loss)):
        return torch.tensor(NONFINITE_LOSS)
    return torch.tensor(NONFINITE_NORM if norm_decides else 0)


@nonfinite_code.register_fake
def _(loss: Tensor, norm: Tensor, grads: list[Tensor], norm_decides: bool) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("stepgraph::gate", mutates_args=())
def gate(code: Tensor) -> Tensor:
    """Marks where the step ends if ``code`` (0-dim int64) is not 0; executors jump to the outputs there."""
    return code.clone()


@gate.register_fake
def _(code: Tensor) -> Tensor:
    return torch.empty_like(code)


# torch's fused optimizer kernels take Python floats, which specialises a symbolic hyperparameter to its value. Each twin
# takes the same arguments as `Scalar`, which stays symbolic, and calls torch's kernel when it runs.
_library = torch.library.Library("stepgraph", "FRAGMENT")
_SCALER_ARGUMENTS = ("grad_scale", "found_inf")
FUSED_KERNELS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _define_twin(kernel: str) -> Callable[..., None]:
    overload = getattr(torch.ops.aten, kernel).default
    arguments = [a for a in overload._schema.arguments if a.name not in _SCALER_ARGUMENTS]
    declared = ", ".join(_declaration(a, position) for position, a in enumerate(arguments))
    name = kernel.removeprefix("_")
    _library.define(f"{name}({declared}) -> ()")

    positional = sum(not a.kwarg_only for a in arguments)

    def run(*args: Any) -> None:
        names = [a.name for a in arguments[positional:]]
        overload(*args[:positional], **dict(zip(names, args[positional:], strict=True)))

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, lambda *args: None, "Meta")  # or else a fake run would read the symbols
    twin = getattr(torch.ops.stepgraph, name)

    def replacement(*args: Any, grad_scale: None = None, found_inf: None = None, **kwargs: Any) -> None:
        if grad_scale is not None or found_inf is not None:
            raise ValueError(f"{kernel} was given a gradient scaler; stepgraph scales losses itself")
        by_name = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        twin(*[by_name[a.name] for a in arguments])

    return replacement


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
