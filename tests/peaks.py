"""Peaks of steps, measured by torch's record of allocations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepgraph.device import allocation_peak


def held_bytes(*holders: Any) -> int:
    """Bytes of all tensors in modules, optimizers and containers, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(holders)}
    return sum(storages.values())


def _tensors(holders: Iterable[Any]) -> Iterable[Tensor]:
    for holder in holders:
        if isinstance(holder, torch.nn.Module):
            yield from (*holder.parameters(), *holder.buffers())
            yield from (v for module in holder.modules() for v in vars(module).values() if isinstance(v, Tensor))
        elif isinstance(holder, torch.optim.Optimizer):
            yield from (v for state in holder.state.values() for v in state.values() if isinstance(v, Tensor))
        else:
            yield from (leaf for leaf in tree_leaves(holder) if isinstance(leaf, Tensor))


def peak_of_step(step: Any, batch: Any, run: Callable[[], Any] | None = None) -> tuple[Any, int]:
    """What a step returns, and its peak: what model, optimizer and batch hold before it, and what it allocates."""
    step.prepare(batch)
    gc.collect()  # what it frees amid the step would be taken off the peak
    before = held_bytes(step.model, step.optimizer, batch)
    result, allocated = allocation_peak(run or (lambda: step(batch)), torch.device("cpu"))
    return result, before + allocated
