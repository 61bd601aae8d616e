"""Gives every gradient memory of its own, laid out as eager's ``.grad`` would be.

``autograd.grad`` may return one tensor for two parameters, a stride-0 view, or another layout than the parameter's. Clipping
works in place, and would then clip twice; and norms of other layouts add up in another order. Eager's AccumulateGrad copies
one tensor that two parameters get, and other layouts (torch/csrc/autograd/functions/accumulate_grad.h). Views of one buffer it
does not copy, and eager's clipping then scales what they share twice; here every gradient is scaled once.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..graph import InputRole, OutputRole, Phase, StepGraph, is_dense, storages_of


def own_gradients(step_graph: StepGraph) -> list[str]:
    """Inserts a copy after each gradient that shares memory or has a layout other than its parameter's.

    Returns the parameters whose gradients share memory.
    """
    shared = []
    owners: dict[int, int] = {}
    for node in step_graph.graph.nodes:
        if node.op == "placeholder":
            owners.update((key, owners.get(key, 0) + 2) for key in storages_of(node))
    for value in step_graph.output_values:
        if isinstance(value, fx.Node):
            for key in storages_of(value):
                owners[key] = owners.get(key, 0) + 1

    params = step_graph.input_nodes(InputRole.PARAM)
    values = step_graph.output_values
    with step_graph.graph.inserting_before(step_graph.output_node):
        for position, spec in enumerate(step_graph.outputs):
            if spec.role is not OutputRole.GRAD:
                continue
            grad, param = values[position].meta["val"], params[spec.key].meta["val"]
            is_shared = any(owners[key] > 1 for key in storages_of(values[position]))
            shared += [spec.key] if is_shared else []
            if is_shared or not _obeys_layout(grad, param):
                values[position] = _copy_like(step_graph, values[position], param, spec.key)
    step_graph.set_outputs(values, step_graph.outputs)
    return shared


def _obeys_layout(grad: Tensor, param: Tensor) -> bool:
    if not is_dense(param):
        return grad.is_contiguous()
    sizes = zip(param.shape, grad.stride(), param.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in sizes if size != 1)


def _copy_like(step_graph: StepGraph, grad: fx.Node, param: Tensor, key: str) -> fx.Node:
    module = key.rpartition(".")[0]
    if param.is_contiguous() or not is_dense(param):
        kwargs = {"memory_format": torch.contiguous_format}
        return step_graph.add_call(torch.ops.aten.clone.default, (grad,), kwargs, module=module, phase=Phase.BACKWARD)
    empty = step_graph.add_call(
        torch.ops.aten.empty_strided.default,
        (list(param.shape), list(param.stride())),
        {"dtype": param.dtype, "device": param.device},
        module=module,
        phase=Phase.BACKWARD,
    )
    return step_graph.add_call(torch.ops.aten.copy_.default, (empty, grad), module=module, phase=Phase.BACKWARD)
