"""Checkpointed regions: captured once, remembered as a wish for the planner.

Tracing through ``torch.utils.checkpoint`` would record a region twice, with two independent draws of every dropout mask: the
loss would be right and the gradients silently wrong. Here a region runs once, draws once and writes its buffers once (eager
updates BatchNorm a second time in recompute), and its nodes carry its number.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from ..errors import CaptureError
from ..graph import tensors_in
from ..torch_compat import TorchDispatchMode, checkpoint_replaced, selective_policy, traced_node
from .context import TraceContext, user_source_line, warn_user
from .module_tensors import ModuleState


@dataclass(frozen=True)
class Region:
    """One call of ``torch.utils.checkpoint.checkpoint``.

    Attributes:
        number: position among the regions of the capture.
        module_path: module that asked for it.
        source: ``file:line`` of the call.
        reentrant: which implementation was asked for.
        preserve_rng_state: whether eager's recompute would draw the same random numbers again.
    """

    number: int
    module_path: str
    source: str | None
    reentrant: bool
    preserve_rng_state: bool


class RegionRecorder:
    """Replaces checkpointing for the time of a capture, and numbers the regions."""

    def __init__(self, context: TraceContext, model: nn.Module) -> None:
        self.regions: list[Region] = []
        self._context = context
        self._model = model

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context, checkpointed regions run once and are recorded."""
        with checkpoint_replaced(self._non_reentrant, self._reentrant):
            yield

    def _non_reentrant(
        self,
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], Any] = noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        with self._region(reentrant=False, preserve_rng_state=preserve_rng_state), _forward_context(context_fn):
            yield

    def _reentrant(self, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with self._region(reentrant=True, preserve_rng_state=preserve_rng_state):
            if any(isinstance(a, Tensor) and a.requires_grad for a in args):
                return run_function(*args)
            warn_user(
                f"reentrant checkpoint at {self.regions[-1].source}: none of its inputs requires grad, so, as in eager, "
                "nothing inside gets a gradient. Use use_reentrant=False, or let an input require grad."
            )
            with torch.no_grad():
                return run_function(*args)

    @contextlib.contextmanager
    def _region(self, *, reentrant: bool, preserve_rng_state: bool) -> Iterator[None]:
        context = self._context
        number, source = len(self.regions), user_source_line()
        region = Region(number, context.module_path, source, reentrant, preserve_rng_state)
        self.regions.append(region)
        outer, context.region = context.region, region.number
        before = ModuleState(self._model)
        try:
            yield
        finally:
            context.region = outer
        if changed := before.changed_attributes():
            raise CaptureError(
                f"the checkpointed region changes Python state outside of it: {', '.join(path for path, _ in changed)}. "
                "Eager changes it once in forward and again in recompute, so no single answer is right.",
                module_path=region.module_path,
                source_line=region.source,
                remedy="move the write out of the region, or keep the value in a buffer",
            )


def _forward_context(context_fn: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
    """What a region's forward runs under: of a selective checkpoint, what notes the results that its policy keeps."""
    context, _ = context_fn()
    keeps = selective_policy(context)
    return context if keeps is None else _NotesKept(keeps)


class _NotesKept(TorchDispatchMode):
    """Marks the nodes whose results a policy keeps, as ``meta["kept"]``."""

    def __init__(self, keeps: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps = keeps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._keeps(func, args, kwargs, result):
            for tensor in tensors_in(result):
                node = traced_node(tensor)
                while node is not None and node.target is operator.getitem:
                    node = node.all_input_nodes[0]
                if node is not None:
                    node.meta["kept"] = True
        return result


@contextlib.contextmanager
def regions_run_once(model: nn.Module) -> Iterator[None]:
    """Within the context, checkpointed regions run like any other code: what eager does without recompute."""
    with RegionRecorder(TraceContext(model), model).recording():
        yield
