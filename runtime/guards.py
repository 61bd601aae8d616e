"""What a capture relies on and a call can check cheaply."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import HeldTensor, ModuleTensors
from ..errors import GuardError


class ModelGuard:
    """Watches a model: parameters must stay the same objects; everything else that varies selects a capture.

    ``training`` flags, ``requires_grad``, dtypes, devices and buffer shapes are part of :meth:`signature`, so that toggling
    between two settings goes back and forth between two captures.
    """

    def __init__(self, model: nn.Module, tensors: ModuleTensors) -> None:
        self._modules = list(model.modules())
        self._params = [h.tensor for h in tensors.params]
        self._slots = [(h.owner._parameters, h.attribute, h.tensor, h) for h in tensors.params]
        self._others = tensors.buffers + tensors.attributes
        self._seen: list[Any] = []
        self._others_signature: Hashable = ()

    def check(self) -> None:
        """Raises :class:`GuardError` where a parameter was replaced by another object."""
        for registered, name, tensor, held in self._slots:
            if registered.get(name) is not tensor:
                raise _replaced(held, registered.get(name))

    def signature(self) -> Hashable:
        """Everything about the model that a capture bakes in."""
        params = self._params
        return (
            tuple([m.training for m in self._modules]),
            tuple([p.requires_grad for p in params]),
            tuple([p.dtype for p in params]),
            tuple([p.device for p in params]),
            self._buffer_signature(),
            _ambient_state(),
        )

    def _buffer_signature(self) -> Hashable:
        now = [h.current() for h in self._others]
        if len(now) != len(self._seen) or not all(map(_is, now, self._seen)):
            self._seen = now
            self._others_signature = tuple(
                (t.shape, t.dtype, t.device) if isinstance(t, Tensor) else type(t).__name__ for t in now
            )
        return self._others_signature


def _is(a: Any, b: Any) -> bool:
    return a is b


def _replaced(held: HeldTensor, now: Any) -> GuardError:
    how = "removed" if now is None else f"replaced by another {type(now).__name__}"
    return GuardError(
        f"parameter {held.key!r} was {how} after the step was compiled, while the optimizer still updates the old one "
        "(load_state_dict(assign=True) does this, and so does assigning a new Parameter). Build a new optimizer from "
        "model.parameters() and compile the step again; load_state_dict without assign keeps the parameters."
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
    )
