"""What a capture relies on and a call can check cheaply.

Checks are comparisons of flat lists with those of the last call, since every microsecond here is paid on every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import CapturedUpdate, ModuleTensors, group_constants, hypers_of, state_signature
from ..errors import GuardError
from ..torch_compat import has_step_hooks, metadata_guard
from .attributes import AttributeWatch
from .hooks import HookWatch
from .identity import same_objects


class ModelGuard:
    """Watches a model: its modules and parameters must stay the same objects; what else varies selects a capture.

    ``training`` flags, ``requires_grad``, the parameters' memory layout, hooks and buffer shapes make up :meth:`signature`,
    so that toggling between two settings goes back and forth between two captures.
    """

    def __init__(self, model: nn.Module, tensors: ModuleTensors) -> None:
        self._named = list(model.named_modules())
        self._modules = [module for _, module in self._named]
        self._children = [m._modules for m in self._modules]
        self._registered = [m._parameters for m in self._modules]
        self._structure = self._children + self._registered
        self._structure_sizes = list(map(len, self._structure))
        self._filled = [d for d in self._structure if d]
        self._seen = _values_of(self._filled)
        self._params = [h.tensor for h in tensors.params]
        self._hooks = HookWatch(self._modules, self._params)
        self._attributes = AttributeWatch(self._named)
        self._params_unchanged: Callable[..., bool] = lambda *params: False
        self._params_metadata: Hashable = ()
        self._last: list[Any] = []
        self._last_number = -1
        self._numbers: dict[Hashable, int] = {}
        self._before = [dict(d) for d in self._children + self._registered]

    def check(self) -> None:
        """Raises :class:`GuardError` where a module or a parameter was replaced, added or removed."""
        sizes = list(map(len, self._structure))
        if sizes == self._structure_sizes and same_objects(_values_of(self._filled), self._seen):
            return
        watched = list(
            zip([p for p, _ in self._named] * 2, self._children + self._registered, self._before, strict=True)
        )
        for path, now, before in watched:
            for name in dict.fromkeys([*before, *now]):
                if now.get(name) is not before.get(name):
                    raise _replaced(f"{path}.{name}" if path else name, before.get(name), now.get(name))

    def signature(self) -> int:
        """A number that stands for everything about the model that a capture bakes in."""
        now = [
            [m.training for m in self._modules],
            self._params_signature(),
            self._hooks.signature(),
            self._attributes.signature(),
            _ambient_state(),
        ]
        if now != self._last:
            key = tuple(tuple(part) if isinstance(part, list) else part for part in now)
            self._last, self._last_number = now, self._numbers.setdefault(key, len(self._numbers))
        return self._last_number

    def _params_signature(self) -> Hashable:
        """Dtypes, devices, shapes, strides and ``requires_grad``, read again only where one of them differs from before."""
        if not self._params_unchanged(*self._params):
            self._params_unchanged = metadata_guard(self._params)
            self._params_metadata = tuple(
                (p.dtype, p.device, p.shape, p.stride(), p.requires_grad) for p in self._params
            )
        return self._params_metadata

    def ignore(self, paths: Iterable[str]) -> None:
        """Leaves attributes that forward itself changes out of the signature."""
        self._attributes.ignore(paths)

    def differing_attributes(self, number: int, other: int) -> list[str]:
        """Numbers and strings in plain attributes by which two signatures differ; empty where anything else differs."""
        keys = {n: key for key, n in self._numbers.items()}
        mine, theirs = list(keys[number]), list(keys[other])  # type: ignore[call-overload]
        (values, tied), (other_values, other_tied) = mine.pop(_ATTRIBUTES), theirs.pop(_ATTRIBUTES)
        if mine != theirs or tied != other_tied:
            return []
        return self._attributes.changed(values, other_values)


_ATTRIBUTES = 3  # position in a signature


def _replaced(path: str, before: Any, now: Any) -> GuardError:
    kind = "parameter" if isinstance(before if now is None else now, Tensor) else "module"
    how = "removed" if now is None else "added" if before is None else "replaced by another object"
    why = (
        "The captured step does not contain it, and the optimizer may not hold its parameters."
        if before is None
        else "The step would go on with what was there before, and so would the optimizer (load_state_dict(assign=True), "
        "assigning a Parameter and replacing a submodule do this; load_state_dict without assign keeps the parameters)."
    )
    return GuardError(
        f"{kind} {path!r} was {how} after the step was compiled. {why} Build a new optimizer from model.parameters() and "
        "compile the step again."
    )


def _ambient_state() -> Hashable:
    """Global settings that operators depend on."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


class MembershipGuard:
    """Watches which parameters an optimizer holds, and in which groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._members: list[list[Tensor]] = []
        self._number = -1
        self._numbers: dict[Hashable, int] = {}

    def signature(self) -> int:
        """A number that stands for the membership; equal where every group holds the same parameters."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        if not same_objects(groups, self._members):
            self._members = [list(params) for params in groups]
            key = tuple(tuple(id(p) for p in params) for params in groups)
            self._number = self._numbers.setdefault(key, len(self._numbers))
        return self._number


class OptimizerGuard:
    """Whether a traced update still fits the optimizer: its state, flags and hyperparameters.

    Args:
        params: the parameters that the update trains, by key.

    Attributes:
        state_version: counts up whenever another tensor is found in the optimizer's state.
    """

    def __init__(self, update: CapturedUpdate, optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> None:
        self._update = update
        self._optimizer = optimizer
        self._params = params
        self._state_signature = state_signature(optimizer, params)
        self.state_version = 0
        self._entries: list[Any] = []
        self._options: list[tuple[int, str, Any]] = []
        self._hypers: dict[str, float] = {}
        self._watch_state()

    def matches(self) -> bool:
        """Whether the update graph is right for the optimizer as it is now."""
        if self._update.has_hooks or has_step_hooks(self._optimizer):
            return self._update.has_hooks and has_step_hooks(self._optimizer)
        if self._update.opaque_reason:
            return self._groups_match()
        return self._state_matches() and self._groups_match()

    def _watch_state(self) -> None:
        self._entries = _values_of(self._optimizer.state.values())
        self.state_version += 1

    def _state_matches(self) -> bool:
        if same_objects(_values_of(self._optimizer.state.values()), self._entries):
            return True
        if state_signature(self._optimizer, self._params) != self._state_signature:
            return False
        self._watch_state()
        return True

    def _groups_match(self) -> bool:
        options = [
            (index, name, value)
            for index, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        ]
        if same_objects(options, self._options):
            return True
        hypers = self._changed_floats(options)
        if hypers is None:
            rule = self._update.integers_are_constants
            if group_constants(self._optimizer, integers_are_constants=rule) != self._update.constants:
                return False
            found = hypers_of(self._optimizer, integers_are_constants=rule)
            hypers = {key: float(v) for key, _, _, _, v in found if not isinstance(v, Tensor)}
        changed = {key for key, value in hypers.items() if self._hypers.get(key) != value}
        now = self._hypers | hypers
        if not all(guard.holds(now) for guard in self._update.guards if not changed.isdisjoint(guard.keys.values())):
            return False
        self._options, self._hypers = options, now
        return True

    def _changed_floats(self, options: list[tuple[int, str, Any]]) -> dict[str, float] | None:
        """What a schedule changed since the last call; None where something else than single floats differs."""
        changed = {}
        if len(options) != len(self._options):
            return None
        for option, before in zip(options, self._options, strict=True):
            if option[:2] != before[:2]:
                return None
            index, name, value = option
            if value is before[2]:
                continue
            if not type(value) is type(before[2]) is float:
                return None
            changed[f"group.{index}.{name}"] = value
        return changed


def _values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))
