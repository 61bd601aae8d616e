"""What is known while a trace runs: the module and source line that a node comes from, and its phase."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import StepGraphWarning
from ..graph import Phase
from ..torch_compat import autograd_sequence_number, sequence_number_of, traced_node

_HIDDEN_FRAMES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_TORCH_DIR = _HIDDEN_FRAMES[0] + os.sep
_OWN_DIRS = tuple(
    os.path.join(_HIDDEN_FRAMES[1], name) + os.sep
    for name in ("capture", "graph", "passes", "runtime", "planner", "tools")
) + tuple(os.path.join(_HIDDEN_FRAMES[1], name) for name in ("api.py", "torch_compat.py"))


class TraceContext:
    """Follows a trace of ``model`` and labels every node that it records.

    Backward nodes get the module and line of the forward operation that they differentiate, found through autograd's
    sequence numbers.

    Attributes:
        phase: phase of the nodes recorded next.
        module_path: module whose forward is running.
        failed_module: path of the innermost module that an exception came out of, or None.
        region: number of the checkpointed region that is running, or None.
        companions: modules that ran and do not belong to the model, such as a loss or a teacher.
    """

    def __init__(self, model: nn.Module) -> None:
        self.phase = Phase.FORWARD
        self.failed_module: str | None = None
        self.region: int | None = None
        self.companions: list[nn.Module] = []
        self._companion_ids: set[int] = set()
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._stack: list[str] = []
        self._backward_origin: tuple[str, str | None, int | None] | None = None
        self._origin_by_sequence: dict[int, tuple[str, str | None, int | None]] = {}
        self._count = 0

    @property
    def module_path(self) -> str:
        """Path of the innermost running module that belongs to the model; "" is the root or outside of it."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """Within the context, calls of modules are followed. To be entered inside the trace, which patches them too."""
        original, thread = nn.Module.__call__, threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            if id(module) not in self._paths and id(module) not in self._companion_ids:
                self.companions.append(module)
                self._companion_ids.update(map(id, module.modules()))
            self._stack.append(self._paths.get(id(module), self.module_path))
            try:
                return original(module, *args, **kwargs)
            except BaseException:
                if self.failed_module is None:
                    self.failed_module = self.module_path
                raise
            finally:
                self._stack.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def follow_backward(self, loss: Tensor) -> None:
        """Registers hooks on the autograd graph of ``loss`` so that backward nodes know their origin."""
        self.phase = Phase.BACKWARD
        seen: set[Any] = set()
        pending = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
            origin = self._origin_by_sequence.get(sequence_number_of(node))
            node.register_prehook(self._enter(origin))

    def source_of(self, value: Any) -> str | None:
        """``file:line`` of the code that computed a traced tensor, where that is known."""
        node = traced_node(value)
        return None if node is None else node.meta.get("source")

    def _enter(self, origin: tuple[str, str | None, int | None] | None) -> Any:
        def prehook(grad_outputs: Any) -> None:
            self._backward_origin = origin

        return prehook

    def label(self, node: fx.Node) -> None:
        """Notes where a node comes from; to be called when it is created."""
        if node.op == "placeholder":
            return
        if self.phase is Phase.FORWARD:
            origin = (self.module_path, user_source_line(), self.region)
            self._origin_by_sequence.setdefault(autograd_sequence_number() - 1, origin)
        else:
            origin = self._backward_origin or ("", None, None)
        node.meta["module"], node.meta["source"], node.meta["region"] = origin
        node.meta["phase"] = self.phase
        node.meta["grad_mode"] = torch.is_grad_enabled()
        node.meta["trace_index"] = self._count
        self._count += 1


def user_source_line() -> str | None:
    """``file:line`` of the innermost frame that belongs neither to torch nor to stepgraph."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_internal_file(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def warn_user(text: str) -> None:
    """Warns with the innermost line that belongs neither to torch nor to stepgraph."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and is_internal_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(StepGraphWarning(text), stacklevel=level)


@functools.cache
def is_internal_file(filename: str) -> bool:
    """Whether a source file belongs to torch, to stepgraph, or to Python itself."""
    return filename.startswith((_TORCH_DIR, *_OWN_DIRS, "<")) or filename in _STDLIB_FILES


_STDLIB_FILES = frozenset({contextlib.__file__})
