"""Whether two lists hold the same objects, in a microsecond for hundreds of tensors."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class _Compared(Exception):
    """Two tensors that are not the same object were compared."""


class _NoComparison(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Compared


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether the lists hold the same tensors, in order; what is no tensor may also be equal.

    List comparison looks at identity first and calls ``==`` only where that fails, which for tensors ends it here. Objects
    that cannot be compared differ.
    """
    try:
        with _NoComparison():
            return now == before
    except Exception:
        return False
