"""An optimizer whose ``step()`` no graph can hold, as one call of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import InputRole, InputSpec, Phase, StepGraph
from ..torch_compat import FakeTensorMode

Swap = Callable[[], contextlib.AbstractContextManager[Any]]


class OpaqueStep:
    """The real ``optimizer.step()``, its hooks included, as an operator of a step graph.

    It gets the gradients where eager has them, in ``.grad``, and everything else from the optimizer itself. What ``.grad``
    held before is put back.

    Args:
        swapped: a context in which the optimizer holds what it is to update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, swapped: Swap = contextlib.nullcontext) -> None:
        self.__name__ = f"{type(optimizer).__name__}.step"
        self._optimizer = optimizer
        self._swapped = swapped

    def __call__(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Updates ``params`` with ``grads``, both of the shapes of the parameters; others of the optimizer get none."""
        with self._swapped():
            self._step(params, grads)

    def _step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in held]
        for param in held:
            param.grad = None
        try:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            with torch.enable_grad():  # as in eager: a step that wants no graph says so itself
                self._optimizer.step()
        finally:
            for param, grad in zip(held, before, strict=True):
                param.grad = grad


def opaque_update_graph(
    optimizer: torch.optim.Optimizer,
    mode: FakeTensorMode,
    params: dict[str, Tensor],
    grads: dict[str, Tensor],
    swapped: Swap = contextlib.nullcontext,
) -> StepGraph:
    """An update graph of a single call, for the fake ``grads``, by key, of the fake ``params``."""
    graph = fx.Graph()
    graph.output([])
    update = StepGraph(graph, [], [], fake_mode=mode)
    inputs = [update.add_input(InputSpec(InputRole.PARAM, key), params[key], "param") for key in grads]
    grad_inputs = [update.add_input(InputSpec(InputRole.GRAD, key), grads[key], "grad") for key in grads]
    target = OpaqueStep(optimizer, swapped)
    with graph.inserting_before(update.output_node):
        call = graph.call_function(target, (inputs, grad_inputs))
    call.meta.update(val=None, source=None, region=None, trace_index=None, grad_mode=False)
    update.assign_key(call, "optimizer", target.__name__, Phase.UPDATE)
    return update
