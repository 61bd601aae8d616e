"""Everything that differs between devices. The rest of the package asks here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError
from .knobs import keeps_heap
from .torch_compat import default_foreach, foreach_norm_by_default, recorded_allocations

SUPPORTED_DEVICE_TYPES = ("cpu", "cuda")


def stands_for(device: torch.device) -> torch.device:
    """The device that tensors on ``device`` stand for: a model on meta is planned for the CPU."""
    return torch.device("cpu") if device.type == "meta" else device


def require_supported(device: torch.device, where: str) -> None:
    """Raises :class:`ConfigError` for a device type that stepgraph does not run on."""
    if device.type not in SUPPORTED_DEVICE_TYPES:
        raise ConfigError(
            f"{where} is on device {str(device)!r}. stepgraph runs on {' and '.join(SUPPORTED_DEVICE_TYPES)}; "
            "move the model there before compiling the step."
        )


def norm_uses_foreach(device: torch.device) -> bool:
    """Whether eager's total norm and clipping run as foreach kernels on ``device``."""
    return foreach_norm_by_default(device)


def optimizer_uses_foreach(params: list[Tensor]) -> bool:
    """Whether an eager optimizer left to its default takes the foreach implementation for ``params``."""
    return default_foreach(params)


def compiles_updates(device: torch.device) -> bool:
    """Whether the fast tier compiles clip and update; where it does not, fused kernels over all parameters are faster."""
    return device.type == "cpu"


def reads_are_cheap(device: torch.device) -> bool:
    """Whether a value on ``device`` can be read in Python without waiting for work that was queued before it."""
    return device.type == "cpu"


def read_later(value: Tensor) -> Callable[[], int]:
    """A function that returns an integer, 0-dim, once it is computed, without waiting for what is queued after it."""
    if value.device.type == "cpu":
        return lambda: int(value)
    host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> int:
        copied.synchronize()
        return int(host)

    return read


def autocast_off() -> contextlib.AbstractContextManager[Any]:
    """Within the context no operator is cast: a graph holds the casts of its capture already, and backward has none."""
    enabled = [device_type for device_type in SUPPORTED_DEVICE_TYPES if torch.is_autocast_enabled(device_type)]
    if not enabled:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device_type in enabled:
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def allocation_peak(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What ``run`` returns, and the most bytes that it had allocated at once on ``device``, of its own.

    On the CPU this is what the allocator was asked for, as an operator sees it; allocations of several threads are added up at
    their highest.
    """
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    result, threads = recorded_allocations(run)
    return result, sum(max(itertools.accumulate(events), default=0) for events in threads)


def synchronize(device: torch.device) -> None:
    """Waits for what was queued on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> str:
    """What the device is, with what else its speed depends on: of the CPU, the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found[1].strip() if found else model
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the CPU, physical memory of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_NEVER, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 2**25  # what the two accept at most, on 64 bit


@functools.cache
def keep_freed_memory() -> bool:
    """Lets the C library keep what a step frees, for the next one; whether it does. Once in a process, for all of it.

    A step frees nearly all that it allocated when it ends. glibc then gives the top of the heap back to the system and large
    blocks always, and the next step faults every page in anew, zeroed: tens of thousands of faults in a step of 300 MB. Eager
    training is spared part of that by the gradients that stay at the top of the heap. A GPU's caching allocator does the same.
    """
    if not keeps_heap():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def rng_state(devices: set[torch.device]) -> dict[torch.device, Tensor]:
    """States of the default generators of the CPU and of ``devices``."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices:
        if device.type == "cuda":
            states[device] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[torch.device, Tensor]) -> None:
    """Restores what :func:`rng_state` returned."""
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


@contextlib.contextmanager
def same_random_numbers(devices: set[torch.device]) -> Iterator[None]:
    """What is drawn within the context, on the CPU or on ``devices``, is drawn again after it. Without any, nothing is."""
    states = rng_state(devices) if devices else {}
    try:
        yield
    finally:
        set_rng_state(states)
