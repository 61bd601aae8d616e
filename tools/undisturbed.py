"""Whether the machine did something else while something was measured."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from ..device import synchronize

Name = TypeVar("Name", bound=Hashable)
_EDGE = 256
_WARM_UPS, _REPEATS = 20, 3
_MOST_SLOWER = 1.12  # than the least that the control ever took; beside another program it is 1.3


class Control:
    """A fixed matrix product that is run before and after each measurement.

    On a shared machine a core runs at two thirds of its speed for half a second at a time, whenever its other half is busy. A
    measurement counts as undisturbed when the product took about its least on both sides of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.ones(_EDGE, _EDGE, device=device)
        self._device = device
        self._least = math.inf
        for _ in range(_WARM_UPS):
            self._product_seconds()

    def watch(self, measure: Callable[[], float]) -> tuple[float, bool]:
        """What ``measure`` returns, and whether it was undisturbed as far as is known by now."""
        before = self._seconds()
        found = measure()
        return found, max(before, self._seconds()) <= _MOST_SLOWER * self._least

    def _seconds(self) -> float:
        seconds = min(self._product_seconds() for _ in range(_REPEATS))
        self._least = min(self._least, seconds)
        return seconds

    def _product_seconds(self) -> float:
        return call_seconds(lambda: torch.mm(self._matrix, self._matrix), self._device)


def call_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, with what it queues on the device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def seconds_in_turns(
    calls: Mapping[Name, Callable[[], Any]], turns: int, turn_seconds: float, device: torch.device
) -> dict[Name, float]:
    """For each call the median of the faster half of its undisturbed turns; of all of them, where those are fewer than three.

    Args:
        calls: what to measure, by name; they take turns.
        turns: undisturbed ones that are wanted of each; three times as many are tried at most.
        turn_seconds: how long one call is repeated in a turn, of which the median counts.
    """
    control = Control(device)
    every: dict[Name, list[float]] = {name: [] for name in calls}
    undisturbed: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(3 * turns):
        for name, call in calls.items():
            if len(undisturbed[name]) < turns:
                seconds, is_undisturbed = control.watch(functools.partial(_turn, call, turn_seconds, device))
                every[name].append(seconds)
                if is_undisturbed:
                    undisturbed[name].append(seconds)
    return {name: _faster_half(kept if len(kept) >= 3 else every[name]) for name, kept in undisturbed.items()}


def _turn(call: Callable[[], Any], turn_seconds: float, device: torch.device) -> float:
    seconds: list[float] = []
    while sum(seconds) < turn_seconds:
        seconds.append(call_seconds(call, device))
    return statistics.median(seconds)


def _faster_half(seconds: list[float]) -> float:
    """Its median: a turn can be disturbed in between and not around."""
    return statistics.median(sorted(seconds)[: (len(seconds) + 1) // 2])
