"""A comparable record of everything that a capture could disturb."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from . import oracle


def portrait(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Everything that a capture could disturb, in a form that can be compared."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = describe(value)
    if optimizer is not None:
        found["optimizer"] = {k: describe(v) for k, v in optimizer.__dict__.items()}
        found["state"] = [(id(p), describe(entries)) for p, entries in optimizer.state.items()]
        found["groups"] = describe(optimizer.param_groups)
    found["random"] = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(numpy.random.get_state()),
    ]
    found["torch"] = [
        nn.Module.__call__,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.utils.checkpoint.CheckpointFunction.__dict__.get("apply"),
        torch._fused_adamw_,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    ]
    return found


def describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        contents = None if value.is_meta else oracle.bits(value).tolist()
        hooks = [list((h or {}).items()) for h in (value._backward_hooks, value._post_accumulate_grad_hooks)]
        grad = None if not value.is_leaf or value.grad is None else (id(value.grad), describe(value.grad))
        return type(value), id(value), value._version, value.requires_grad, value.stride(), hooks, grad, contents
    if isinstance(value, dict):
        return id(value), type(value), [(key, describe(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return id(value), type(value), [describe(entry) for entry in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return id(value)


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    assert not changed, f"changed: {sorted(changed)}"
