"""The ways to run one block that are worth considering: time against bytes kept against the peak within its backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .min_cut import Point, convex_frontier
from .outline import Outline
from .schedule import Choice, Schedule, Use, schedule

PEAK_PRICES = (0.0, 0.3, 3.0)  # of a byte at the block's peak, in prices of a byte kept
MOST_STEPS = 40
LONGEST_DESCENT = 300_000  # runs of operators that are simulated to find options of one block
LONGEST_SEARCH = 100_000  # and to look beside them
MOST_ENUMERATED = 9  # candidates of a block of which every subset is looked at
_SHARPNESS = 24


class Option(NamedTuple):
    """One way to run a block.

    Attributes:
        extra_seconds: predicted time of what runs again.
        kept_bytes: alive between the block's forward and its backward.
        peak_bytes: most that is alive at once within its backward, of what the block makes or gets.
        forward_bytes: the same within its forward.
        choice: in the block's own numbers.
    """

    extra_seconds: float
    kept_bytes: int
    peak_bytes: int
    forward_bytes: int
    choice: Choice


@dataclass(frozen=True)
class _Evaluation:
    option: Option
    soft_peak: float  # follows the peak, and falls also where one of several equal peaks does
    position: int
    schedule: Schedule


def options_of(outline: Outline, leaving: frozenset[int] = frozenset()) -> list[Option]:
    """Options of which none is better in all respects, the fastest first.

    Starts from the convex frontier of time against bytes kept (:mod:`min_cut`), and descends from each of its points by single
    changes, such as to keep one storage less or to make one again amid backward, at prices of both kinds of bytes. Blocks with
    few candidates are enumerated beside that.

    Args:
        leaving: storages that are kept for later blocks, and are not counted among the bytes that this one keeps.
    """
    search = _Search(outline, leaving)
    points = convex_frontier(outline)
    for point, price in zip(points, _prices(outline, points), strict=True):
        for ratio in PEAK_PRICES:
            search.descend(Choice(point.kept), price, price * ratio)
    candidates = [s for s in outline.candidates if s in outline.read_in_backward]
    if len(candidates) <= MOST_ENUMERATED:
        for count in range(len(candidates) + 1):
            for kept in itertools.combinations(candidates, count):
                search.evaluate(Choice(outline.always_kept.union(kept)))
    search.explore(LONGEST_SEARCH // max(len(outline.operators), 1))
    return undominated([e.option for e in search.seen.values()])


def undominated(options: list[Option]) -> list[Option]:
    """Those for which no other is as good or better in time, bytes kept and peaks; of equals the first."""
    kept: list[Option] = []
    shapes = np.empty((0, 3), dtype=np.int64)
    for option in sorted(options, key=lambda o: o[:4]):
        shape = np.array(option[1:4], dtype=np.int64)
        if not np.any(np.all(shapes <= shape, axis=1)):
            kept.append(option)
            shapes = np.vstack([shapes, shape])
    return kept


def _prices(outline: Outline, points: list[Point]) -> list[float]:
    """For each point of a convex frontier, a price at which it is the cheapest: the mean of the slopes beside it."""
    slopes = []
    for upper, lower in zip(points, points[1:], strict=False):
        saved = max(upper.kept_bytes - lower.kept_bytes, 1)
        slopes.append((lower.extra_seconds - upper.extra_seconds) / saved)
    beside = [0.0, *slopes, 4 * slopes[-1] if slopes else outline.seconds / max(sum(outline.sizes), 1)]
    return [(a + b) / 2 for a, b in zip(beside, beside[1:], strict=False)]


class _Search:
    def __init__(self, outline: Outline, leaving: frozenset[int]) -> None:
        self._leaving_bytes = sum(outline.sizes[s] for s in leaving & outline.read_in_backward)
        self.seen: dict[Choice, _Evaluation] = {}
        self._outline = outline
        self._candidates = frozenset(outline.candidates)

    def evaluate(self, choice: Choice) -> _Evaluation:
        found = self.seen.get(choice)
        if found is None:
            result = schedule(self._outline, choice)
            backward = result.live[self._outline.forward :]
            peak = int(backward.max(initial=0))
            position = self._outline.forward + int(backward.argmax()) if len(backward) else 0
            soft = peak * float(np.mean((backward / peak) ** _SHARPNESS)) ** (1 / _SHARPNESS) if peak else 0.0
            extra = result.seconds - self._outline.seconds
            kept = int(backward[0]) - self._leaving_bytes if len(backward) else 0
            forward = int(result.live[: self._outline.forward].max(initial=0))
            option = Option(extra, kept, peak, forward, choice)
            found = self.seen[choice] = _Evaluation(option, soft, position, result)
        return found

    def descend(self, choice: Choice, kept_price: float, peak_price: float) -> Choice:
        """Takes the best single change until none is better."""

        def cost(of: Choice) -> float:
            found = self.evaluate(of)
            option = found.option
            peak = (option.peak_bytes + found.soft_peak) / 2
            return option.extra_seconds + kept_price * option.kept_bytes + peak_price * peak

        lowest = cost(choice)
        for _ in range(MOST_STEPS):
            if len(self.seen) * len(self._outline.operators) > LONGEST_DESCENT:
                break
            best = min(
                ((cost(other), number, other) for number, other in enumerate(self._changed(choice))), default=None
            )
            if best is None or best[0] >= lowest * (1 - 1e-9):
                break
            lowest, _, choice = best
        return choice

    def explore(self, most: int) -> None:
        """Looks at every single change of every undominated option, until none leads to another; Pareto local search.

        Args:
            most: choices that are looked at.
        """
        explored: set[Choice] = set()
        limit = len(self.seen) + most
        while True:
            options = [o for o in undominated([e.option for e in self.seen.values()]) if o.choice not in explored]
            if not options:
                return
            for option in options:
                explored.add(option.choice)
                for other in self._changed(option.choice, everywhere=True):
                    if len(self.seen) >= limit:
                        return
                    self.evaluate(other)

    def _changed(self, choice: Choice, *, everywhere: bool = False) -> Iterator[Choice]:
        """Every choice that differs by one storage kept or dropped, or one made again.

        Args:
            everywhere: whether it may be made again before any use in backward, or only before the first after the peak.
        """
        for storage in self._outline.candidates:
            renewed = frozenset(u for u in choice.renewed if u.storage != storage)
            if storage in choice.kept:
                yield Choice(choice.kept - {storage}, renewed)
            elif storage in self._outline.read_in_backward or choice.renewed:
                yield Choice(choice.kept | {storage}, renewed)
        for use in sorted(choice.renewed):
            yield Choice(choice.kept, choice.renewed - {use})
        found = self.evaluate(choice)
        seen: set[int] = set()
        first = self._outline.forward if everywhere else found.position + 1
        for run in found.schedule.runs[first:]:
            for storage in self._outline.operators[run.operator].reads:
                use = Use(storage, run.operator, run.is_repeat)
                if storage in self._candidates and storage not in seen and use not in choice.renewed:
                    yield Choice(choice.kept, choice.renewed | {use})
                if not everywhere:
                    seen.add(storage)
