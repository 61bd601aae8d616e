"""What operators return on fake tensors, remembered by the metadata that they were called with.

Models call the same operators on the same shapes in every layer. Torch takes about 0.2 ms for such a call, also with its own
cache (torch 2.13), which is most of a capture's time. Remembered here, for one capture, is what is plain: strided tensors of
fixed shape that are new, or an operand, or a view of one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..device import stands_for
from ..graph import filled_like
from ..torch_compat import (
    FakeTensor,
    FakeTensorMode,
    dispatch_modes_disabled,
    fake_kernel,
    fake_snapshot,
    grad_mode_below_autograd,
    has_symbolic_shape,
    like_fake,
    storage_key,
)

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_NORMS = frozenset(
    {
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten.native_batch_norm_backward.default,
    }
)


def _is_misjudged(func: Any, operands: list[FakeTensor]) -> bool:
    """Whether the fake kernel is known to be wrong; seen in torch 2.13.

    That of oneDNN's LSTM does not know how much is packed for its backward; that of its backward returns one tensor twice, at
    least at its first call in a process, where the kernel returns two; those of BatchNorm and GroupNorm on the CPU have their
    statistics in the dtype of the input, also where the kernel has them in the wider one of the weights, and that of BatchNorm
    lays its result out as its input, where the kernel makes it contiguous.
    """
    if func in _NORMS:
        is_plain = len({t.dtype for t in operands}) == 1 and all(t.is_contiguous() for t in operands)
        return operands[0].fake_device.type == "cpu" and not is_plain
    return func in (_LSTM, _LSTM_BACKWARD)


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """The stand-in of ``tensor``; that of a tensor on meta is on the device that it stands for."""
    if tensor.is_meta:
        return fake_on(mode, tensor, stands_for(tensor.device))
    return mode.from_tensor(tensor, static_shapes=True)


def fake_on(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """A stand-in on ``device`` with the layout of ``tensor``, which may be fake or on meta."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )


@dataclass(frozen=True)
class _Plain:
    """One tensor of a result. ``base`` is the position of the operand whose memory it has, None where it has its own."""

    base: int | None
    is_base: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class FakeResults:
    """Calls operators on the fake tensors of ``mode``, and remembers what they returned."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._remembered: dict[Hashable, tuple[type | None, tuple[_Plain, ...]]] = {}
        self._templates: dict[torch.device, FakeTensor] = {}

    def call(
        self, func: Any, args: Any, kwargs: Any, operands: list[FakeTensor], arguments: list[Hashable] | None
    ) -> tuple[Any, Any]:
        """What ``func`` returns, and the same outside of autograd.

        Args:
            operands: the tensors among the arguments, in order.
            arguments: what determines the result: :func:`metadata_of` for tensors, type and value for the rest. None where
                something else does.
        """
        if _only_writes_lists(func):
            return None, None
        if arguments is None:
            out = func(*args, **kwargs)
            return out, snapshot_of(out)
        key = (func, torch.get_default_dtype(), torch.is_grad_enabled(), *arguments)
        remembered = self._remembered.get(key)
        if remembered is None:
            pair = self._from_meta(func, args, kwargs, operands) if _is_alike_on_every_device(func) else None
            if pair is None:
                out = func(*args, **kwargs)
                if _is_misjudged(func, operands):
                    out = self._as_real(func, args, kwargs, out)
                pair = out, snapshot_of(out)
            if _is_remembered(func):
                self._remember(key, pair[0], operands)
            return pair
        container, plains = remembered
        pairs = [self._rebuilt(plain, operands) for plain in plains]
        if container is None:
            return pairs[0]
        return container([out for out, _ in pairs]), container([value for _, value in pairs])

    def _as_real(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The results laid out as those of the kernel on zeros, each in memory of its own."""
        if func is _LSTM_BACKWARD:  # ends the process on zeros
            return type(out)([fake_on(self._mode, fake, fake.device) for fake in out])

        def zeros(value: Any) -> Any:
            return filled_like(value, 0) if isinstance(value, FakeTensor) else value

        with dispatch_modes_disabled(), grad_mode_below_autograd() if torch.is_grad_enabled() else torch.no_grad():
            try:
                real = func(*map(zeros, args), **{name: zeros(value) for name, value in kwargs.items()})
            except Exception:
                return out  # the first run fails the same way, and says where
        pairs = zip(real, out, strict=True)
        return type(out)(
            [fake if kept is None or fake is None else fake_on(self._mode, kept, fake.device) for kept, fake in pairs]
        )

    def _remember(self, key: Hashable, out: Any, operands: list[FakeTensor]) -> None:
        is_list = isinstance(out, (list, tuple))
        plains = _described(list(out) if is_list else [out], operands)
        if plains is not None:
            self._remembered[key] = (type(out) if is_list else None, plains)

    def _from_meta(
        self, func: Any, args: Any, kwargs: Any, operands: list[FakeTensor]
    ) -> tuple[FakeTensor, FakeTensor] | None:
        device = operands[0].fake_device
        if any(t.fake_device != device or t.is_conj() or t.is_neg() for t in operands):
            return None
        with fake_kernel(self._mode):
            meta = func(*args, **kwargs)
        return None if meta.is_conj() or meta.is_neg() else self._pair(meta, device)

    def _rebuilt(self, plain: _Plain, operands: list[FakeTensor]) -> tuple[FakeTensor, FakeTensor]:
        if plain.is_base:
            base = operands[plain.base]  # type: ignore[index]
            return base, fake_snapshot(base)
        storage = operands[plain.base].untyped_storage() if plain.base is not None else None
        with fake_kernel(self._mode):
            meta = torch.empty_strided(plain.shape, plain.stride, dtype=plain.dtype, device="meta")
            if storage is not None:
                meta.set_(storage, plain.offset, plain.shape, plain.stride)
        return self._pair(meta, plain.device)

    def _pair(self, meta: Tensor, device: torch.device) -> tuple[FakeTensor, FakeTensor]:
        template = self._templates.get(device)
        if template is None:
            template = self._templates[device] = FakeTensor(self._mode, meta, device)
        return like_fake(template, meta), like_fake(template, meta)


@functools.cache
def _only_writes_lists(func: Any) -> bool:
    """Whether an operator updates lists of tensors in place and returns nothing: there is nothing to compute."""
    name = func._schema.name.split("::")[1]
    return not func._schema.returns and func._schema.is_mutable and name.startswith(("_foreach_", "_fused_", "fused_"))


@functools.cache
def _is_alike_on_every_device(func: Any) -> bool:
    """Whether an operator's only result has the meta kernel's shape and strides on every device: views and products."""
    aten = torch.ops.aten
    gives_one = [str(r.type) for r in func._schema.returns] == ["Tensor"]
    return gives_one and (func.is_view or func in (aten._unsafe_view.default, aten.mm.default, aten.bmm.default))


def metadata_of(fake: FakeTensor) -> Hashable:
    """Everything about a strided fake tensor of fixed shape that the result of an operator may depend on."""
    return (
        fake.dtype,
        fake.shape,
        fake.stride(),
        fake.storage_offset(),
        fake.fake_device,
        fake.is_conj(),
        fake.is_neg(),
    )


def snapshot_of(out: Any) -> Any:
    """A fake result, outside of autograd, on the same memory."""
    if isinstance(out, FakeTensor):
        return fake_snapshot(out)
    return type(out)([snapshot_of(t) for t in out]) if isinstance(out, (list, tuple)) else out


@functools.cache
def _is_remembered(func: Any) -> bool:
    """Whether the arguments' metadata determine the result's, and a call has no effect on metadata."""
    return (
        torch.Tag.inplace_view not in func.tags
        and (torch.Tag.dynamic_output_shape not in func.tags or func is torch.ops.aten.index.Tensor)
        and not any(a.is_out for a in func._schema.arguments)
    )


def _described(tensors: list[Any], operands: list[FakeTensor]) -> tuple[_Plain, ...] | None:
    bases = {storage_key(t): position for position, t in enumerate(operands)}
    is_ambiguous = len(bases) < len(operands)  # which operand a result has its memory from
    plains, own = [], set()
    for t in tensors:
        if (
            type(t) is not FakeTensor
            or has_symbolic_shape(t)
            or t.layout is not torch.strided
            or t.is_conj()
            or t.is_neg()
        ):
            return None
        key = storage_key(t)
        base = next((i for i, operand in enumerate(operands) if operand is t), bases.get(key))
        is_new = base is None and key not in own and _fills_its_memory(t)
        if not is_new and (base is None or is_ambiguous):
            return None
        own.add(key)
        is_base = base is not None and operands[base] is t
        plains.append(
            _Plain(base, is_base, tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype, t.fake_device)
        )
    return tuple(plains)


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether the memory is what ``empty_strided`` would allocate for this shape."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    numel = last + 1 if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == numel * tensor.element_size()
