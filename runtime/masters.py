"""Master weights: what the optimizer updates where parameters are held in 16 bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..capture import HeldTensor
from ..errors import ConfigError, some_of
from ..graph import HALF_DTYPES
from .options import StepOptions


class Masters:
    """A float32 copy of each parameter that is held in 16 bit.

    An update reads the gradient in float32, changes the master with moments in float32, and rounds it into the parameter. Small
    updates are not lost that way. Assigning a parameter in place (``load_state_dict``) makes its master anew at the next step;
    ``.data`` escapes this, as it escapes autograd.

    Args:
        params: parameters that may have one; those that are not held in 16 bit have none.

    Attributes:
        tensors: those that were asked for, by the parameter's key.
    """

    def __init__(self, params: list[HeldTensor]) -> None:
        self._params = {h.key: h.tensor for h in params if h.tensor.dtype in HALF_DTYPES}
        self.tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def of(self, keys: list[str]) -> dict[str, Tensor]:
        """The masters of these parameters, made where they are not there yet."""
        for key in keys:
            if key in self._params and key not in self.tensors:
                self.tensors[key] = _float32(self._params[key])
                self._versions[key] = self._params[key]._version
        return {key: self.tensors[key] for key in keys if key in self.tensors}

    def may_have(self, key: str) -> bool:
        """Whether the parameter is held in 16 bit, and masters are wanted."""
        return key in self._params

    def fits(self, key: str, master: Any) -> bool:
        """Whether ``master`` can be the parameter's."""
        if not isinstance(master, Tensor) or not self.may_have(key):
            return False
        return master.dtype is torch.float32 and master.shape == self._params[key].shape

    def load(self, saved: dict[str, Tensor]) -> None:
        """Takes over saved masters, those of parameters that may have one."""
        self.follow()
        known = [key for key in saved if key in self._params]
        for key, master in self.of(known).items():
            master.copy_(saved[key])
        self.note()

    def follow(self) -> None:
        """Takes over parameters that were written since the last :meth:`note`."""
        for key, version in self._versions.items():
            param = self._params[key]
            if param._version != version:
                self.tensors[key].copy_(param.detach())
                self._versions[key] = param._version

    def note(self) -> None:
        """The parameters' present values are those of their masters."""
        for key in self._versions:
            self._versions[key] = self._params[key]._version

    def check_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizer state in 16 bit, which belongs to an optimizer that updates parameters as they are.

        State that an optimizer makes when it is built (Adagrad does) and no update has changed becomes float32.

        Raises:
            ConfigError: naming the parameter and the entry.
        """
        for key in self.tensors:
            entries = optimizer.state.get(self._params[key], {})
            for name, value in entries.items():
                if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
                    continue
                if not _is_untouched(entries):
                    raise ConfigError(
                        f"the optimizer's state of {key} holds {name} in {value.dtype}, and master weights are updated with "
                        "moments in float32. optimizer.load_state_dict casts state to the parameters' dtype: load through "
                        "step.load, start with fresh state, or pass master_weights=False."
                    )
                entries[name] = _float32(value)

    @contextmanager
    def in_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within the context the optimizer holds the masters in the places of their parameters, with the same state."""
        stand_ins = {id(self._params[key]): master for key, master in self.tensors.items()}
        if not stand_ins:
            yield
            return
        state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [stand_ins.get(id(p), p) for p in group["params"]]
        optimizer.state = defaultdict(dict, {stand_ins.get(id(p), p): entries for p, entries in state.items()})
        try:
            yield
        finally:
            originals = {id(master): self._params[key] for key, master in self.tensors.items()}
            found, optimizer.state = optimizer.state, state
            state.clear()
            state.update((originals.get(id(p), p), entries) for p, entries in found.items())
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = members

    def take_gradients(self) -> None:
        """Adds the gradient of each parameter to that of its master, in float32, and takes it away."""
        for key, master in self.tensors.items():
            param = self._params[key]
            if param.grad is not None:
                master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
                param.grad = None

    def give_values(self) -> None:
        """Rounds each master into its parameter, and takes its gradient away."""
        with torch.no_grad():
            for key, master in self.tensors.items():
                self._params[key].copy_(master)
                master.grad = None


def refuse_16_bit_parameters(params: list[HeldTensor], options: StepOptions) -> None:
    """For steps without masters.

    Raises:
        ConfigError: gradients in the parameters' 16-bit dtype would lose what the options ask for.
    """
    halves = (torch.float16,) if options.accumulate == 1 else HALF_DTYPES
    if options.accumulate == 1 and options.loss_scale is None:
        return
    held = [h.key for h in params if h.tensor.dtype in halves]
    if held:
        lost = "what the loss scale is for" if options.accumulate == 1 else "most of what micro-batches add"
        raise ConfigError(
            f"parameters are held in 16 bit ({some_of(held)}), so their gradients are "
            f"too, and would lose {lost}. Pass master_weights=True, which makes float32 gradients of them, or keep the model "
            "in float32, which autocast casts."
        )


def _is_untouched(entries: dict[str, Any]) -> bool:
    """Whether no update was counted yet."""
    count = entries.get("step")
    return count is not None and float(count) == 0


def _float32(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
