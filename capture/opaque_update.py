"""An optimizer whose ``step()`` no graph can hold, as one call of the graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..graph import InputRole, InputSpec, OutputRole, Phase, StepGraph
from .forward_backward import CapturedStep


class OpaqueStep:
    """The real ``optimizer.step()``, its hooks included, as an operator of a step graph.

    It gets the gradients where eager has them, in ``.grad``, and everything else from the optimizer itself. What ``.grad``
    held before is put back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__name__ = f"{type(optimizer).__name__}.step"
        self._optimizer = optimizer

    def __call__(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Updates ``params`` with ``grads``, both of the shapes of the parameters; others of the optimizer get none."""
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


def opaque_update_graph(optimizer: torch.optim.Optimizer, step: CapturedStep) -> StepGraph:
    """An update graph of a single call, for the parameters that got a gradient in ``step``."""
    fakes = {key: node.meta["val"] for key, node in step.graph.output_nodes(OutputRole.GRAD).items()}
    graph = fx.Graph()
    graph.output([])
    update = StepGraph(graph, [], [], fake_mode=step.graph.fake_mode)
    params = [update.add_input(InputSpec(InputRole.PARAM, key), step.fakes[key], "param") for key in step.grad_keys]
    grads = [update.add_input(InputSpec(InputRole.GRAD, key), fakes[key], "grad") for key in step.grad_keys]
    target = OpaqueStep(optimizer)
    with graph.inserting_before(update.output_node):
        call = graph.call_function(target, (params, grads))
    call.meta.update(val=None, source=None, region=None, trace_index=None, grad_mode=False)
    update.assign_key(call, "optimizer", target.__name__, Phase.UPDATE)
    return update
