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


def _compact(target: Any) -> Callable[..., Any]:
    """An operator whose CPU kernel leaves a small result in a large storage, with the result in one of its own size."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = target(*args, **kwargs)
        return result.clone() if result.untyped_storage().nbytes() > result.nbytes else result

    return run


# Losses are reduced over a buffer that is shrunk to one element and kept: the elementwise loss would live as long as the loss.
# What is folded is the inner part of a padded image.
for _large in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "col2im"):
    KERNELS[getattr(torch.ops.aten, _large).default] = _compact(getattr(torch.ops.aten, _large).default)


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


def loss_code(loss: Tensor) -> Tensor:
    """0-dim int64 on the CPU: ``NONFINITE_LOSS`` where ``loss``, of one element, is not finite, else 0."""
    return torch.tensor(0 if math.isfinite(loss.item()) else NONFINITE_LOSS)


def nonfinite_code_on_device(loss: Tensor, norm: Tensor, norms: Tensor) -> Tensor:
    """The same from the norms alone, without reading anything on the host: a norm that overflows counts as non-finite.

    Args:
        loss: one element.
        norm: 0-dim, the total norm.
        norms: 1-dim, the norm of each gradient.

    Returns:
        0-dim int64 on the norm's device: 0, ``NONFINITE_LOSS``, ``NONFINITE_NORM``, or ``NONFINITE_GRAD`` + index of the first
        norm that is not finite.
    """
    bad = norms.isfinite().logical_not()
    of_gradients = torch.where(bad.any(), bad.to(torch.int64).argmax() + NONFINITE_GRAD, NONFINITE_NORM)
    of_loss = torch.where(loss.isfinite().all(), 0, NONFINITE_LOSS)
    return torch.where(norm.isfinite(), of_loss, of_gradients)


def _fake_code_on_device(loss: Tensor, norm: Tensor, norms: Tensor) -> Tensor:
    return norm.new_empty((), dtype=torch.int64)


def move_scale_(
    scale: Tensor,
    trackers: Tensor,
    code: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """Moves a loss scale after an update, as ``runtime.loss_scale.Scaler.update`` does on the host, without reading anything.

    Args:
        scale: 0-dim float32, changed in place.
        trackers: int32 ``[good updates in a row, skips left before it backs off]``, changed in place.
        code: 0-dim int64, not 0 where the update was skipped.
    """
    skipped = code != 0
    good, left = trackers.unbind(0)
    good = torch.where(skipped, 0, good + 1)
    left = torch.where(skipped, left - 1, left)
    backed_off = (scale.double() * backoff_factor).float().clamp(min=min_scale)
    grown = (scale.double() * growth_factor).float().clamp(max=max_scale)
    grown = torch.where(grown.isfinite(), grown, scale)
    grows = good >= growth_interval
    moved = torch.where(skipped, torch.where(left <= 0, backed_off, scale), torch.where(grows, grown, scale))
    left = torch.where(grows, hysteresis, left)
    good = torch.where(grows, 0, good)
    scale.copy_(moved)
    trackers.copy_(torch.stack([good, left]))


def gate(code: Tensor) -> Tensor:
    """Marks where the step ends if ``code`` (0-dim int64) is not 0; executors jump to the outputs there."""
    return code.clone()


_define(
    "nonfinite_code(Tensor loss, Tensor norm, Tensor[] grads, bool norm_decides) -> Tensor", nonfinite_code, _fake_code
)
_define("gate(Tensor code) -> Tensor", gate, torch.empty_like)
_define("loss_code(Tensor loss) -> Tensor", loss_code, lambda loss: torch.empty((), dtype=torch.int64))
_define(
    "nonfinite_code_on_device(Tensor loss, Tensor norm, Tensor norms) -> Tensor",
    nonfinite_code_on_device,
    _fake_code_on_device,
)
_define(
    "move_scale_(Tensor(a!) scale, Tensor(b!) trackers, Tensor code, float growth_factor, float backoff_factor, "
    "int growth_interval, int hysteresis, float min_scale, float max_scale) -> ()",
    move_scale_,
    lambda *args: None,
)


def pack(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """Python numbers as a vector on the CPU."""
    return torch.tensor(numbers, dtype=dtype)


def _fake_pack(numbers: list[float], dtype: torch.dtype) -> Tensor:
    return torch.empty(len(numbers), dtype=dtype)


_define("pack(Scalar[] numbers, ScalarType dtype) -> Tensor", pack, _fake_pack)
_define("reciprocals(Tensor numbers) -> Tensor", torch.reciprocal, torch.empty_like)


# Eight bytes of 0 or 1, as one integer, times _GATHER have their lowest bits in the highest byte; a byte times _SPREAD is in
# all eight, of which _PICK leaves another bit in each. (Little-endian, as every machine that torch runs on.)
_GATHER, _SPREAD, _PICK = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - 2**64
_CARRY = 0x7F7F7F7F7F7F7F7F


def pack_bits(values: Tensor) -> Tensor:
    """Zeros and ones, one bit each, in the order in which they lie in memory.

    Args:
        values: of any dtype and shape; dense.

    Returns:
        uint8, 1-dim: an eighth of the elements, rounded up.
    """
    flat = values.as_strided((values.numel(),), (1,))
    ones = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.bool, device=values.device)
    ones[: flat.numel()] = flat
    return ((ones.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """What :func:`pack_bits` was given, with that size, stride and dtype."""
    spread = ((packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_PICK).add_(_CARRY)) >> 7).bitwise_and_(_SPREAD)
    result = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    count = result.numel()
    result.as_strided((count,), (1,)).copy_(spread.view(torch.uint8)[:count])
    return result


def _fake_pack_bits(values: Tensor) -> Tensor:
    return torch.empty(-(-values.numel() // 8), dtype=torch.uint8, device=values.device)


def _fake_unpack_bits(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)


_define("pack_bits(Tensor values) -> Tensor", pack_bits, _fake_pack_bits)
_define(
    "unpack_bits(Tensor packed, int[] size, int[] stride, ScalarType dtype) -> Tensor", unpack_bits, _fake_unpack_bits
)


# torch's fused optimizer kernels take Python floats, which specialises a symbolic hyperparameter to its value. Each twin
# takes the same arguments as `Scalar`, which stays symbolic, and calls torch's kernel when it runs. A second twin of each also
# takes what torch's kernels take from a GradScaler, 0-dim float32 each: a number to divide gradients by, after which torch's
# kernel writes the quotients over the gradients, and one that is not 0 where nothing is to be updated.
_SCALER_ARGUMENTS = ("grad_scale", "found_inf")
FUSED_KERNELS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _define_twin(kernel: str, *, scales: bool) -> Any:
    overload = getattr(torch.ops.aten, kernel).default
    arguments = [a for a in overload._schema.arguments if a.name not in _SCALER_ARGUMENTS]
    declared = [_declaration(a, position, scales) for position, a in enumerate(arguments)]
    declared += [f"Tensor? {name}" for name in _SCALER_ARGUMENTS] if scales else []
    name = kernel.removeprefix("_").removesuffix("_") + ("_scaled_" if scales else "_")
    positional = sum(not a.kwarg_only for a in arguments)
    names = [a.name for a in arguments[positional:]] + (list(_SCALER_ARGUMENTS) if scales else [])

    def run(*args: Any) -> None:
        overload(*args[:positional], **dict(zip(names, args[positional:], strict=True)))

    _define(f"{name}({', '.join(declared)}) -> ()", run, lambda *args: None)
    return getattr(torch.ops.stepgraph, name)


def _replacement(kernel: str, twin: Any) -> Callable[..., None]:
    """What takes the place of torch's kernel in a trace."""
    schema = getattr(torch.ops.aten, kernel).default._schema
    arguments = [a for a in schema.arguments if a.name not in _SCALER_ARGUMENTS]

    def replacement(*args: Any, grad_scale: None = None, found_inf: None = None, **kwargs: Any) -> None:
        if grad_scale is not None or found_inf is not None:
            raise ValueError(f"{kernel} was given a gradient scaler; stepgraph scales losses itself")
        by_name = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        twin(*[_as_scalar(by_name[a.name]) if str(a.type) == "float" else by_name[a.name] for a in arguments])

    return replacement


def _as_scalar(value: Any) -> Any:
    """A hyperparameter that the user keeps as a tensor is read where eager's kernel reads it."""
    return value.item() if isinstance(value, Tensor) else value


def _declaration(argument: Any, position: int, scales: bool) -> str:
    kind = str(argument.type)
    if kind == "float":
        return f"Scalar {argument.name}"
    if kind == "List[Tensor]":
        is_read_only = argument.name == "grads" and not scales
        return f"Tensor[] {argument.name}" if is_read_only else f"Tensor(a{position}!)[] {argument.name}"
    return f"{kind} {argument.name}"


_KERNELS_HERE = [kernel for kernel in FUSED_KERNELS if hasattr(torch.ops.aten, kernel)]
_TWINS = {kernel: _define_twin(kernel, scales=False) for kernel in _KERNELS_HERE}
FUSED_TWINS: dict[str, Callable[..., None]] = {kernel: _replacement(kernel, twin) for kernel, twin in _TWINS.items()}
SCALED_TWINS: dict[Any, Any] = {
    twin.default: _define_twin(kernel, scales=True).default for kernel, twin in _TWINS.items()
}
