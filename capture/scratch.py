"""Copies of an optimizer that hold other tensors in the places of its parameters: to trace or rehearse its ``step()`` on."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..device import optimizer_uses_foreach
from ..torch_compat import OPTIMIZER_BOOKKEEPING, storage_key

_ABSENT = object()


def scratch_copy(
    optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, Tensor], trained: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """The optimizer's attributes and groups, without its state; containers are its own, what is in them is shared.

    Where a group leaves the choice of foreach kernels to torch, it is made as for the real parameters.

    Args:
        stand_ins: for each parameter, by identity, the tensor that is held in its place.
        trained: the parameters that have a gradient.
    """
    scratch = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name != "step":  # schedulers wrap it on the instance
            scratch.__dict__[name] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    scratch.state = defaultdict(dict)
    scratch.param_groups = [dict(group) for group in optimizer.param_groups]
    with_gradient = set(map(id, trained))
    for group in scratch.param_groups:
        params = group["params"]
        group["params"] = [stand_ins[id(p)] for p in params]
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            members = [p for p in params if id(p) in with_gradient]
            group["foreach"] = bool(members) and optimizer_uses_foreach(members)
    return scratch


class ScratchRecord:
    """What a scratch optimizer held before its step, to find changes that a graph cannot carry."""

    def __init__(self, scratch: torch.optim.Optimizer, params: list[Tensor]) -> None:
        self._params = params
        self._storages = [storage_key(p) for p in params]
        self._groups = [dict(group) for group in scratch.param_groups]
        self._attributes = dict(scratch.__dict__)
        self._contents = {k: copy.copy(v) for k, v in scratch.__dict__.items() if k in self._containers(scratch)}

    @staticmethod
    def _containers(scratch: torch.optim.Optimizer) -> set[str]:
        own = {k for k, v in scratch.__dict__.items() if isinstance(v, (list, dict, set))}
        return own - {"state", "param_groups"}

    def changes(self, scratch: torch.optim.Optimizer) -> list[str]:
        """What the step changed of the optimizer itself, its groups or a parameter's memory."""
        now = scratch.__dict__
        changed = [f"self.{k}" for k, v in now.items() if k not in OPTIMIZER_BOOKKEEPING and self._has_changed(k, v)]
        for index, (group, before) in enumerate(zip(scratch.param_groups, self._groups, strict=True)):
            names = dict.fromkeys([*before, *group])
            changed += [f"group {index}[{n!r}]" for n in names if group.get(n, _ABSENT) is not before.get(n, _ABSENT)]
        if [storage_key(p) for p in self._params] != self._storages:
            changed.append("param.data, by assignment")
        return changed

    def _has_changed(self, name: str, value: Any) -> bool:
        if self._attributes.get(name, _ABSENT) is not value:
            return True
        before = self._contents.get(name)
        if before is None:
            return False
        items = (list(c.items()) if isinstance(c, dict) else list(c) for c in (before, value))
        old, new = ([part for item in c for part in (item if isinstance(item, tuple) else (item,))] for c in items)
        return len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True))
