"""Undoing everything that one training step changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import ModuleState, tensors_of
from ..device import rng_state, set_rng_state
from ..torch_compat import storage_key


@contextmanager
def rolled_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context, steps may run on the user's own objects; afterwards all is as before, also after an error.

    Covers parameters, ``.grad``, buffers, tensors in plain attributes, Python state of modules and of the optimizer,
    optimizer state and random streams. Tensors keep their identity: the bytes of their storages are copied back. Needs
    memory for one copy of parameters, buffers and optimizer state. One thing that cannot be undone keeps no other from it.
    """
    tensors: list[Tensor] = [held.tensor for held in tensors_of(model).all]
    owned = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    with ExitStack() as undo:
        undo.callback(set_rng_state, rng_state({t.device for t in tensors}))
        _undo_optimizer(undo, optimizer)
        for param in model.parameters():
            undo.callback(setattr, param, "grad", param.grad)
        for storage in {storage_key(t): t.untyped_storage() for t in tensors + owned}.values():
            undo.callback(storage.copy_, storage.clone())
        undo.callback(ModuleState(model).restore)
        for param in model.parameters():
            param.grad = None
        yield


def _undo_optimizer(undo: ExitStack, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        undo.callback(_refill, group, copy.copy(group))
    undo.callback(_refill, optimizer.state, dict(optimizer.state))
    for entries in optimizer.state.values():
        undo.callback(_refill, entries, dict(entries))
    undo.callback(_refill, optimizer.__dict__, dict(optimizer.__dict__))


def _refill(target: dict[Any, Any], values: dict[Any, Any]) -> None:
    target.clear()
    target.update(values)
