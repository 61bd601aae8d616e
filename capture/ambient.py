"""The surroundings of a trace: random streams, autocast's cache, and calls that would take effect at capture only."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import CaptureError
from .context import warn_user

CAPTURE_LOCK = threading.RLock()  # a capture replaces functions of torch for its time

_capturing = threading.local()


def is_capturing() -> bool:
    """Whether this thread is in the middle of a capture."""
    return getattr(_capturing, "now", False)


@contextlib.contextmanager
def random_state_kept(notes: list[str]) -> Iterator[None]:
    """Fake operators draw nothing, but the code under trace may seed a generator, or draw from Python's or numpy's."""
    cpu = torch.get_rng_state()
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        drawn = ["random"] if random.getstate() != python else []
        if numpy is not None and not _same_numpy_state(numpy.random.get_state(), numpy_state):
            drawn.append("numpy.random")
        if drawn:
            note = f"the step draws from {' and '.join(drawn)}: what it drew at capture is a constant of the graph"
            notes.append(note)
            warn_user(note + ". Draw with torch, or put the number into the batch.")
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _same_numpy_state(a: Any, b: Any) -> bool:
    return bool(a[2:] == b[2:] and (a[1] == b[1]).all())


@contextlib.contextmanager
def autocast_cache() -> Iterator[None]:
    """Turns autocast's weight cache on, which is a property of the thread, and clears it afterwards: it would hold fakes.

    With it off, a layer that is used twice under autocast gets its gradients summed in fp32 instead of 16 bit.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Within the context, Python frees by reference counts alone.

    A capture makes so many objects that the collector walks the whole heap, a third of a second where large libraries are
    loaded, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compiled_code_in_eager() -> contextlib.AbstractContextManager[Any]:
    """Within the context, what the user gave to ``torch.compile`` runs uncompiled, so that a trace sees into it."""
    return cast("contextlib.AbstractContextManager[Any]", torch.compiler.set_stance("force_eager"))


_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        torch.autograd,
        "backward",
        "return the sum of the losses and let the step differentiate it, or use torch.autograd.grad",
    ),
    (torch, "manual_seed", "seed before the step; random numbers are drawn from the default generator"),
    (torch.random, "manual_seed", "seed before the step; random numbers are drawn from the default generator"),
    (torch, "set_rng_state", "set random states outside of the step; draw fixed noise once and keep it in a buffer"),
    (
        torch.random,
        "set_rng_state",
        "set random states outside of the step; draw fixed noise once and keep it in a buffer",
    ),
    *(
        (scheduler, "step", "step schedulers after the compiled step; hyperparameters are read at every step")
        for scheduler in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    ),
)


@contextlib.contextmanager
def refused_calls() -> Iterator[None]:
    """Refuses what takes effect at capture only: gradients would go to the stand-ins, and seeds would be forgotten.

    :func:`is_capturing` is true within.
    """
    thread = threading.get_ident()

    def refusal(original: Any, name: str, remedy: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            owner = f"{type(args[0]).__name__}." if name == "step" and args else ""
            raise CaptureError(f"{owner}{name}() is called inside the step.", remedy=remedy)

        return call

    def refuse_update(optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == thread:
            name = f"{type(optimizer).__name__}.step()"
            raise CaptureError(f"{name} is called inside the step.", remedy="leave it out: the compiled step updates")

    _capturing.now = True
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in _REFUSED]
    handle = register_optimizer_step_pre_hook(refuse_update)
    try:
        for owner, name, remedy in _REFUSED:
            setattr(owner, name, refusal(getattr(owner, name), name, remedy))
        yield
    finally:
        _capturing.now = False
        handle.remove()
        for module, name, original in originals:
            setattr(module, name, original)
