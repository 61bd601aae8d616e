"""Values that a trace can know: those computed from shapes and constants alone.

Models read such values in Python to take a shortcut, for instance to skip a mask when positions count up from 0. Eager takes
the shortcut on every step, so a graph must take it too. Values that depend on the batch or on parameters stay unknown.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..graph import tensors_in
from ..torch_compat import (
    FakeTensor,
    TorchDispatchMode,
    WeakTensorKeyDictionary,
    constant_of,
    dispatch_modes_disabled,
    forget_constant,
    pytree,
    storage_key,
)
from .context import user_source_line

LARGEST_KNOWN_NUMEL = 1 << 20
_UNINITIALISED = ("empty", "new_empty")
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownValues(TorchDispatchMode):
    """Follows a trace and keeps the real value of every fake tensor that depends on nothing but constants.

    Attributes:
        made: every tensor that the traced code made, weakly, with the source line that made it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()
        self.made: list[tuple[weakref.ref[Tensor], str | None]] = []

    def is_known(self, value: Any) -> bool:
        """Whether ``value`` is a fake tensor whose real value is known."""
        return isinstance(value, FakeTensor) and value in self._values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        real_args = self._real_arguments(func, args, kwargs, operands)
        if real_args is not None and operands and not _returns_tensors(func):
            with dispatch_modes_disabled():
                return func(*real_args[0], **real_args[1])
        has_symbols = any(isinstance(a, SYMBOLS) for a in pytree.tree_leaves((args, kwargs)))
        self._forget_written(func, args, operands, has_symbols)
        out = func(*args, **kwargs)
        results = tensors_in(out)
        source = user_source_line()
        self.made += [(weakref.ref(t), source) for t in results if not any(t is o for o in operands)]
        if real_args is not None and results and all(_is_small(t) for t in results):
            with dispatch_modes_disabled():
                real = func(*real_args[0], **real_args[1])
            for fake, value in zip(results, tensors_in(real), strict=True):
                self._values[fake] = value
        return out

    def _real_arguments(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Any:
        """The arguments with real values, or None where one is unknown or the operator is not a function of them."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
            return None
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.name[6:].startswith(_UNINITIALISED):
            return None
        if func is torch.ops.aten.lift_fresh.default:
            return args, kwargs
        if not all(t in self._values for t in operands if isinstance(t, FakeTensor)):
            return None
        if any(not isinstance(t, FakeTensor) for t in operands):
            return None
        if any(isinstance(a, SYMBOLS) for a in pytree.tree_leaves((args, kwargs))):
            return None
        return pytree.tree_map(lambda a: self._values[a] if isinstance(a, Tensor) else a, (args, kwargs))

    def _forget_written(self, func: Any, args: Any, operands: list[Tensor], has_symbols: bool) -> None:
        """What is written is no longer known, here and in torch's own record of constants.

        The latter overlooks tensors in lists (torch 2.13), so that a foreach operator over known and unknown tensors would
        leave the known ones at their old values.
        """
        if has_symbols:  # the result depends on a hyperparameter, however constant the tensors are
            for t in operands:
                forget_constant(t)
        if not func._schema.is_mutable:
            return
        written = [
            t
            for a, schema in zip(args, func._schema.arguments, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write
            for t in tensors_in(a)
        ]
        if any(constant_of(t) is None for t in operands):
            for t in written:
                forget_constant(t)
        keys = {storage_key(t) for t in written}
        for fake in [t for t in self._values if storage_key(t) in keys]:
            del self._values[fake]


def _returns_tensors(func: Any) -> bool:
    return any("Tensor" in str(r.type) for r in func._schema.returns)


def _is_small(tensor: Tensor) -> bool:
    return all(isinstance(s, int) for s in tensor.shape) and tensor.numel() <= LARGEST_KNOWN_NUMEL


@contextlib.contextmanager
def libraries_told(known: KnownValues) -> Iterator[None]:
    """Within the context, libraries that ask whether a tensor is fake before reading it hear no for known ones.

    ``transformers.utils.import_utils.is_fake_tensor`` seen in transformers 5.24; without it, a decoder that is called
    without a mask would build one in a trace, and eager would not.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = lambda x: original(x) and not known.is_known(x)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]
