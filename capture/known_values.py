"""Values that a trace can know: those computed from shapes and constants alone.

Models read such values in Python to take a shortcut, for instance to skip a mask when positions count up from 0. Eager takes
the shortcut on every step, so a graph must take it too. Values that depend on the batch or on parameters stay unknown.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import arguments_by_name, tensors_in, writes_of
from ..torch_compat import (
    FakeTensor,
    WeakTensorKeyDictionary,
    dispatch_modes_disabled,
    pytree,
    storage_key,
)

LARGEST_KNOWN_NUMEL = 1 << 20
_UNINITIALISED = ("empty", "new_empty")
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownValues:
    """The real value of every fake tensor of a trace that depends on nothing but constants."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()

    def is_known(self, value: Any) -> bool:
        """Whether ``value`` is a fake tensor whose real value is known."""
        return isinstance(value, FakeTensor) and value in self._values

    def arguments_of(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> Any:
        """The arguments with real values, or None where one is unknown or the operator is not a function of them.

        Args:
            operands: the tensors in ``args`` and ``kwargs``, none of which holds a symbol.
        """
        if not _is_function_of_arguments(func):
            return None
        if func is torch.ops.aten.lift_fresh.default:
            return args, kwargs
        if not all(isinstance(t, FakeTensor) and t in self._values for t in operands):
            return None
        return pytree.tree_map(lambda a: self._values[a] if isinstance(a, Tensor) else a, (args, kwargs))

    def compute(self, func: Any, real_arguments: Any) -> Any:
        """What ``func`` returns for real."""
        with dispatch_modes_disabled():
            return func(*real_arguments[0], **real_arguments[1])

    def learn(self, func: Any, results: list[Tensor], real_arguments: Any) -> None:
        """Computes and keeps the values of ``results``, which ``func`` returned, unless they are large."""
        if results and all(_is_small(t) for t in results):
            for fake, value in zip(results, tensors_in(self.compute(func, real_arguments)), strict=True):
                self._values[fake] = value

    def forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """What ``func`` writes is no longer known, whatever name it has."""
        if not self._values:
            return
        keys = {storage_key(t) for t in written_tensors(func, args, kwargs)}
        for fake in [t for t in self._values if storage_key(t) in keys]:
            del self._values[fake]


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that an operator writes in place."""
    given = arguments_by_name(func, args, kwargs)
    return [t for name in writes_of(func) for t in tensors_in(given.get(name))]


@functools.cache
def _is_function_of_arguments(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and not func._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not func._schema.name[6:].startswith(_UNINITIALISED)
    )


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
