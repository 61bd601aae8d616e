"""An optimizer whose ``step()`` no graph can hold, as one call of the graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import InputRole, InputSpec, Phase, Rehearsal, StepGraph
from ..torch_compat import FakeTensorMode, has_step_hooks
from .rehearsal import rehearsed, state_bytes

Swap = Callable[[], contextlib.AbstractContextManager[Any]]


class OpaqueStep:
    """The real ``optimizer.step()``, its hooks included, as an operator of a step graph.

    It gets the gradients where eager has them, in ``.grad``, and everything else from the optimizer itself. What ``.grad``
    held before is put back.

    Args:
        params: what it is to update, real or fake, by the identity of the optimizer's own parameters.
        grads: the gradients of those that have one.
        swapped: a context in which the optimizer holds what it is to update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[int, Tensor],
        grads: Mapping[int, Tensor],
        swapped: Swap = contextlib.nullcontext,
    ) -> None:
        self.__name__ = f"{type(optimizer).__name__}.step"
        self._optimizer = optimizer
        self._params, self._grads = params, grads
        self._swapped = swapped

    def rehearsal(self) -> Rehearsal | None:
        """What a step does, found out once, on a copy without memory; None where that fails."""
        if self._rehearsed is not None and has_step_hooks(self._optimizer):
            return replace(self._rehearsed, left_out=f"the hooks of {self.__name__}")
        return self._rehearsed

    @functools.cached_property
    def _rehearsed(self) -> Rehearsal | None:
        return rehearsed(self._optimizer, self._params, self._grads)

    def held_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return state_bytes(self._optimizer)

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
    held: Mapping[str, Tensor],
    mode: FakeTensorMode,
    params: dict[str, Tensor],
    grads: dict[str, Tensor],
    swapped: Swap = contextlib.nullcontext,
) -> StepGraph:
    """An update graph of a single call, for the fake ``grads``, by key, of the fake ``params``, which stand for ``held``."""
    graph = fx.Graph()
    graph.output([])
    update = StepGraph(graph, [], [], fake_mode=mode)
    inputs = [update.add_input(InputSpec(InputRole.PARAM, key), params[key], "param") for key in grads]
    grad_inputs = [update.add_input(InputSpec(InputRole.GRAD, key), grads[key], "grad") for key in grads]
    own_params, own_grads = ({id(held[key]): fake for key, fake in fakes.items()} for fakes in (params, grads))
    target = OpaqueStep(optimizer, own_params, own_grads, swapped)
    with graph.inserting_before(update.output_node):
        call = graph.call_function(target, (inputs, grad_inputs))
    call.meta.update(val=None, source=None, region=None, trace_index=None, grad_mode=False)
    update.assign_key(call, "optimizer", target.__name__, Phase.UPDATE)
    return update
