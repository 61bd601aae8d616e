"""Undoing everything that one training step changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import ModuleState, containers_in, refill, tensors_of
from ..device import rng_state, set_rng_state
from ..torch_compat import storage_key


@contextmanager
def rolled_back(model: nn.Module, optimizer: torch.optim.Optimizer, further: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within the context, steps may run on the user's own objects; afterwards all is as before, also after an error.

    Covers parameters, ``.grad``, buffers, tensors in plain attributes, Python state of modules and of the optimizer,
    optimizer state and random streams. Tensors keep their identity: the bytes of their storages are copied back. Needs
    memory for one copy of parameters, buffers and optimizer state. One thing that cannot be undone keeps no other from it.

    Args:
        further: tensors that belong neither to the model nor to the optimizer.
    """
    tensors: list[Tensor] = [held.tensor for held in tensors_of(model).all]
    owned = [
        v for container, _ in containers_in((optimizer.__dict__,)) for v in _items(container) if isinstance(v, Tensor)
    ]
    with ExitStack() as undo:
        undo.callback(set_rng_state, rng_state({t.device for t in tensors}))
        _undo_optimizer(undo, optimizer)
        for param in model.parameters():
            undo.callback(setattr, param, "grad", param.grad)
        for storage, copied in _copied_storages([*tensors, *owned, *further]):
            undo.callback(storage.copy_, copied)
        for tensor in tensors:
            undo.callback(_put_data_back, tensor, tensor.detach())
        undo.callback(ModuleState(model).restore)
        for param in model.parameters():
            param.grad = None
        yield


@contextmanager
def restored_on_error(written: list[Tensor], devices: set[torch.device], room_bytes: float) -> Iterator[None]:
    """An error leaves the given tensors and the random streams as they were.

    Args:
        written: what may be written in place; its storages are copied.
        room_bytes: for the copies; where they need more, there are none, and an error says so.
    """
    # as bytes, so as not to be among the tensors that a budget counts
    states = {device: bytes(state.numpy()) for device, state in rng_state(devices).items()}
    fits = sum({storage_key(t): t.untyped_storage().nbytes() for t in written}.values()) <= room_bytes
    copies = _copied_storages(written) if fits else []
    try:
        yield
    except Exception as error:
        for storage, copied in copies:
            storage.copy_(copied)
        set_rng_state({d: torch.frombuffer(bytearray(b), dtype=torch.uint8) for d, b in states.items()})
        if not fits and hasattr(error, "add_note"):
            error.add_note("buffers may hold what this step wrote: memory_budget had no room for a copy of them")
        raise


def _copied_storages(tensors: list[Tensor]) -> list[tuple[Any, Any]]:
    """Each storage behind the tensors once, with a copy of it."""
    storages = {storage_key(t): t.untyped_storage() for t in tensors}
    return [(storage, storage.clone()) for storage in storages.values()]


def _put_data_back(tensor: Tensor, data: Tensor) -> None:
    """Undoes ``tensor.data = ...``."""
    if storage_key(tensor) != storage_key(data) or tensor.stride() != data.stride():
        tensor.data = data


def _undo_optimizer(undo: ExitStack, optimizer: torch.optim.Optimizer) -> None:
    for container, contents in containers_in((optimizer.__dict__,)):
        undo.callback(refill, container, contents)


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)
