"""Runs an opaque ``optimizer.step()`` without memory, to see how much it would take."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..device import autocast_off, same_random_numbers, stands_for
from ..graph import InnerCall, Phase, Rehearsal, likeness_of, tensors_in
from ..graph.ops import FUSED_TWINS
from ..torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fused_optimizers_replaced,
    pytree,
    step_without_hooks,
)
from .ambient import CAPTURE_LOCK
from .fake_results import fake_on
from .scratch import scratch_copy

_STEPS = 8  # RAdam's variance counts from the sixth on
_NUMBER_BYTES = 16  # at most, of a number among an operator's operands: in double, and in the dtype of the others


def rehearsed(
    optimizer: torch.optim.Optimizer,
    params: Mapping[int, Tensor],
    grads: Mapping[int, Tensor],
) -> Rehearsal | None:
    """What ``optimizer.step()`` takes, over several steps of a copy of it on fake tensors; no hooks run.

    Numbers that are kept as tensors of one element, such as a count of steps, are real and on the host, so that what branches
    on them does. What is read of other tensors reads as 1.

    Args:
        params: what the optimizer updates, real or fake, by the identity of its own parameters.
        grads: the same for the gradients of those that have one.

    Returns:
        None where the step fails without values.
    """
    devices = {stands_for(p.device) for p in params.values()}
    watch = _Watch()
    run = step_without_hooks(type(optimizer))
    with CAPTURE_LOCK, same_random_numbers(devices), torch.enable_grad(), autocast_off():
        try:
            with fused_optimizers_replaced(FUSED_TWINS), watch:
                scratch = _fake_copy(optimizer, params, grads)
                given = watch.live_bytes - state_bytes(scratch)
                for step in range(_STEPS):
                    watch.is_recording = step == _STEPS - 1
                    run(scratch)
                kept = watch.live_bytes - given
        except Exception:
            return None
    beside = given + kept
    calls = tuple(InnerCall(call.node, call.beside_bytes - beside, call.count) for call in watch.calls.values())
    return Rehearsal(kept, max(watch.peak_bytes - beside, 0), calls)


def _fake_copy(
    optimizer: torch.optim.Optimizer, params: Mapping[int, Tensor], grads: Mapping[int, Tensor]
) -> torch.optim.Optimizer:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stand_ins = {id(p): _empty_like(params.get(id(p), p)) for p in held}
    for identity, grad in grads.items():
        stand_ins[identity].grad = _empty_like(grad)

    def copied(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: stand_ins[id(t)] if id(t) in stand_ins else _copied(t), value)

    scratch = scratch_copy(optimizer, stand_ins, [p for p in held if id(p) in grads])
    for name, value in scratch.__dict__.items():
        if name not in ("state", "param_groups"):
            scratch.__dict__[name] = copied(value)
    for group in scratch.param_groups:
        group.update({name: copied(value) for name, value in group.items() if name != "params"})
    for key, entries in optimizer.state.items():
        scratch.state[stand_ins.get(id(key), key)] = copied(entries)
    return scratch


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimizer keeps, in its state or in itself, beside parameters and gradients."""
    own = [value for name, value in optimizer.__dict__.items() if name not in ("state", "param_groups")]
    tensors = [t for t in pytree.tree_leaves([*optimizer.state.values(), own]) if isinstance(t, Tensor)]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = {t.untyped_storage()._cdata for p in params for t in (p, p.grad) if t is not None}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(size for storage, size in sizes.items() if storage not in known)


def _empty_like(tensor: Tensor) -> Tensor:
    """Fake under the watch."""
    device = stands_for(tensor.device)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )


def _copied(tensor: Tensor) -> Tensor:
    is_number = tensor.numel() == 1 and not tensor.is_meta
    return tensor.detach().to("cpu", copy=True) if is_number else _empty_like(tensor)


class _Watch(TorchDispatchMode):
    """Makes fake tensors, but for those of one element, and counts the bytes of the storages that are alive.

    Attributes:
        live_bytes: now.
        peak_bytes: the most so far.
        is_recording: whether ``calls`` are noted.
        calls: by what they have in common; ``beside_bytes`` is everything that was alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.is_recording = False
        self.calls: dict[Hashable, InnerCall] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._graph = fx.Graph()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(t, FakeTensor) for t in operands)
        if func is torch.ops.aten._local_scalar_dense.default and is_fake:
            return torch.ones((), dtype=args[0].dtype).item()
        with self._fakes if is_fake or not operands else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if not operands and isinstance(result, Tensor) and result.numel() == 1:
            result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._count(tensor.untyped_storage())
        if any(isinstance(a, (int, float)) for a in (*args, *kwargs.values())):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + _NUMBER_BYTES)
        if self.is_recording and operands and (result is None or tensors_in(result)):
            self._note(func, args, kwargs, operands)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.live_bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _note(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> None:
        fakes = {id(t): fake_on(self._fakes, t.detach(), t.device) for t in operands}
        nodes = {key: self._graph.placeholder("operand") for key in fakes}
        for key, node in nodes.items():
            node.meta["val"] = fakes[key]
        node = self._graph.call_function(func, *_replaced(args, kwargs, nodes))
        fake_args, fake_kwargs = _replaced(args, kwargs, fakes)
        with self._fakes, torch.no_grad():
            value = func(*fake_args, **fake_kwargs)
        node.meta.update(val=value, phase=Phase.UPDATE, grad_mode=False)
        likeness = likeness_of(node)
        before = self.calls.get(likeness, InnerCall(node, 0, 0))
        self.calls[likeness] = InnerCall(before.node, max(before.beside_bytes, self.live_bytes), before.count + 1)


def _replaced(args: Any, kwargs: Any, stand_ins: Mapping[int, Any]) -> Any:
    """Arguments with others in the places of their tensors, by identity."""
    return pytree.tree_map_only(Tensor, lambda tensor: stand_ins[id(tensor)], (args, kwargs))
