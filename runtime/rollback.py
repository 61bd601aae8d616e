"""Undoing everything that one training step changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import ModuleState, tensors_of
from ..device import rng_state, set_rng_state


@contextmanager
def rolled_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context, steps may run on the user's own objects; afterwards all is as before, also after an error.

    Covers parameters, ``.grad``, buffers, tensors in plain attributes, Python state of modules and of the optimizer,
    optimizer state and random streams. Tensors keep their identity: their values are copied back. Needs memory for one
    copy of parameters, buffers and optimizer state.
    """
    tensors: list[Tensor] = [held.tensor for held in tensors_of(model).all]
    owned = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    saved = [(t, t.detach().clone()) for t in tensors + owned]
    grads = [(p, p.grad) for p in model.parameters()]
    modules = ModuleState(model)
    state = {param: dict(entries) for param, entries in optimizer.state.items()}
    entries_of = dict(optimizer.state)
    attributes = dict(optimizer.__dict__)
    groups = [copy.copy(group) for group in optimizer.param_groups]
    random = rng_state({t.device for t in tensors})
    for owner, _ in grads:
        owner.grad = None
    try:
        yield
    finally:
        modules.restore()
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        for owner, grad in grads:
            owner.grad = grad
        optimizer.__dict__.clear()
        optimizer.__dict__.update(attributes)
        optimizer.state.clear()
        for key, entries in entries_of.items():
            _refill(entries, state[key])
            optimizer.state[key] = entries
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            _refill(group, values)
        set_rng_state(random)


def _refill(target: dict[str, Any], values: dict[str, Any]) -> None:
    target.clear()
    target.update(values)
