"""Measured seconds of an operator by its size, and what lies between the sizes that were measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Table:
    """Seconds on a grid of sizes, such as bytes moved, or the three dimensions of a matrix product.

    Between grid points the logarithm of the seconds is linear in the logarithms of the sizes. Beyond the largest size seconds
    grow in proportion; below the smallest they stay, since a launch is what is left of them.

    Attributes:
        axes: for each dimension, the measured sizes, rising.
        seconds: of each combination, the last dimension fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(not axis or list(axis) != sorted(set(axis)) or axis[0] <= 0 for axis in self.axes):
            raise ConfigError(f"the sizes of a table must rise and be above 0, got {self.axes}")
        if len(self.seconds) != math.prod(map(len, self.axes)) or not all(s > 0 for s in self.seconds):
            raise ConfigError(f"a table needs seconds above 0 for each of {math.prod(map(len, self.axes))} sizes")

    def at(self, *sizes: float) -> float:
        """Seconds at these sizes, one for each axis."""
        corners: list[list[tuple[int, float]]] = []  # for each axis, positions and their weights
        beyond = 1.0
        for axis, size in zip(self.axes, sizes, strict=True):
            beyond *= max(size / axis[-1], 1.0)
            corners.append(_between(axis, min(max(size, axis[0]), axis[-1])))
        total = 0.0
        for picked in itertools.product(*corners):
            position, weight = 0, 1.0
            for (index, share), axis in zip(picked, self.axes, strict=True):
                position, weight = position * len(axis) + index, weight * share
            total += weight * math.log(self.seconds[position])
        return math.exp(total) * beyond

    @property
    def least(self) -> float:
        """Seconds of the smallest sizes, which is a launch."""
        return min(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"axes": [list(axis) for axis in self.axes], "seconds": list(self.seconds)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Table:
        """What :meth:`as_json` gave."""
        return Table(tuple(tuple(map(float, axis)) for axis in data["axes"]), tuple(map(float, data["seconds"])))


def _between(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    upper = next(i for i, value in enumerate(axis) if value >= size)
    if axis[upper] == size or upper == 0:
        return [(upper, 1.0)]
    share = math.log(size / axis[upper - 1]) / math.log(axis[upper] / axis[upper - 1])
    return [(upper - 1, 1 - share), (upper, share)]
