"""Beyond √L: which inputs of blocks to keep, on the way to each block's backward again and again, by dynamic programming.

Keeping the input of every block takes memory in proportion to their number. Here a stretch of blocks may keep its first input
only: when its backward comes, it runs forward up to some block in the midst, keeps that block's input, does the blocks from
there on, frees what they needed and starts from its first input again for the rest. Where several such choices nest, a chain of
L blocks needs as little as log L inputs. Blocks are not equal, and each has options of its own.

The recursion is rotor's (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory", 2019), with several ways to keep a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

SLOTS = 400  # memory is counted in this many steps, sizes rounded up


class Way(NamedTuple):
    """One way to keep a stage, from its forward to its backward.

    Attributes:
        option: what the caller calls it.
        seconds: of what its backward computes again.
        kept_bytes: that it holds, beside the stage's input.
        peak_bytes: most within its backward, beside the input.
    """

    option: int
    seconds: float
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Stage:
    """One block of a chain.

    Attributes:
        entering_bytes: its input.
        seconds: of its forward.
        passing_bytes: most within its forward where nothing of it is kept, beside the input.
        beside_bytes: alive during its backward whatever is chosen.
        ways: to keep it. Those that keep nothing can also serve a stage whose forward was only passed through.
    """

    entering_bytes: int
    seconds: float
    passing_bytes: int
    beside_bytes: int
    ways: tuple[Way, ...]


class Kept(NamedTuple):
    """A stage of which something is kept when its forward runs in the time before; its forward in that is free at the top."""

    stage: int
    way: Way


class Restart(NamedTuple):
    """A stretch of stages of which the first input is kept alone, while what comes after them runs backward.

    Attributes:
        start: first stage.
        end: behind the last.
        parts: what is done when its own backward comes.
    """

    start: int
    end: int
    parts: tuple[Kept | Restart, ...]


class Chain:
    """Solves a chain for all budgets up to the largest.

    Args:
        stages: in order of forward.
        most_bytes: the largest budget, beside the first stage's input.
    """

    def __init__(self, stages: Sequence[Stage], most_bytes: int, slots: int = SLOTS) -> None:
        self.stages = stages
        self.slots = slots
        self.unit = max(most_bytes / slots, 1.0)
        self._passed = np.concatenate(([0.0], np.cumsum([s.seconds for s in stages])))

    def seconds(self, budget_bytes: float) -> float:
        """Least seconds of what is computed again; infinite where nothing keeps to the budget."""
        return float(self._top[0][-1][self._slot(budget_bytes)])

    def solution(self, budget_bytes: float) -> tuple[Kept | Restart, ...] | None:
        """What is done within a budget, in order of the stages; None where nothing keeps to it."""
        return self._solution(self._slot(budget_bytes))

    def solutions(self, most: int) -> Iterator[tuple[Kept | Restart, ...]]:
        """Different solutions at budgets at which the least seconds change, the least memory first.

        Args:
            most: of these budgets that are looked at.
        """
        seconds = self._top[0][-1]
        changes = [i for i, s in enumerate(seconds) if np.isfinite(s) and (i == 0 or s < seconds[i - 1])]
        picked = (self._solution(slot) for slot in changes[:: max(math.ceil(len(changes) / most), 1)])
        yield from dict.fromkeys(solution for solution in picked if solution is not None)

    def _solution(self, slot: int) -> tuple[Kept | Restart, ...] | None:
        if not np.isfinite(self._top[0][-1][slot]):
            return None
        return tuple(self._unfold(0, len(self.stages), slot, is_top=True))

    def _slot(self, budget_bytes: float) -> int:
        return min(max(int(budget_bytes / self.unit), 0), self.slots)

    def _slots(self, size: float) -> int:
        return int(np.ceil(size / self.unit))

    @cached_property
    def _again(self) -> list[list[np.ndarray]]:
        """By first stage and number of stages: seconds at each budget, where only the first input is there."""
        count = len(self.stages)
        found = [[np.full(self.slots + 1, np.inf)] for _ in range(count + 1)]
        for length in range(1, count + 1):
            for start in range(count - length + 1):
                best = np.full(self.slots + 1, np.inf)
                for cost, _ in self._moves(start, start + length, found, found, is_top=False):
                    np.minimum(best, cost, out=best)
                found[start].append(best)
        return found

    @cached_property
    def _top(self) -> list[list[np.ndarray]]:
        """The same for stretches up to the last stage, where forward comes by for the first time; any number of stages."""
        count = len(self.stages)
        found: list[list[np.ndarray]] = [[] for _ in range(count + 1)]
        for start in reversed(range(count)):
            best = np.full(self.slots + 1, np.inf)
            for cost, _ in self._moves(start, count, self._again, found, is_top=True):
                np.minimum(best, cost, out=best)
            found[start] = [best] * (count - start + 1)
        return found

    def _moves(
        self, start: int, end: int, again: list[list[np.ndarray]], later: list[list[np.ndarray]], *, is_top: bool
    ) -> Iterator[tuple[np.ndarray, Kept | int]]:
        """What can be done with a stretch first, with the seconds at each budget: keep a stage, or restart up to one."""
        stage = self.stages[start]
        forward = 0.0 if is_top else stage.seconds
        is_last = end == start + 1
        for way in stage.ways:
            if is_last:
                # Nothing is passed through before a single stage: what is not there is made when its backward wants it.
                again_first = 0.0 if is_top or not way.kept_bytes else stage.seconds
                cost = np.full(self.slots + 1, again_first + way.seconds)
                yield self._from(cost, way.peak_bytes + stage.beside_bytes), Kept(start, way)
                continue
            held = way.kept_bytes + self.stages[start + 1].entering_bytes
            rest = self._less(later[start + 1][end - start - 1], held)
            yield self._from(forward + way.seconds + rest, way.peak_bytes + stage.beside_bytes), Kept(start, way)
        passing = 0
        for middle in range(start + 1, end):
            passing = max(passing, self.stages[middle - 1].passing_bytes)
            rest = self._less(later[middle][end - middle], self.stages[middle].entering_bytes)
            seconds = 0.0 if is_top else self._passed[middle] - self._passed[start]
            cost = seconds + rest + again[start][middle - start]
            yield (cost if is_top else self._from(cost, passing + self.stages[end - 1].beside_bytes)), middle

    def _from(self, cost: np.ndarray, least_bytes: float) -> np.ndarray:
        """Infinite below a budget."""
        first = self._slots(least_bytes)
        result: np.ndarray = cost.copy()
        result[:first] = np.inf
        return result

    def _less(self, cost: np.ndarray, held_bytes: float) -> np.ndarray:
        """What is left of each budget once some bytes are held."""
        shift = self._slots(held_bytes)
        result = np.full(self.slots + 1, np.inf)
        if shift <= self.slots:
            result[shift:] = cost[: self.slots + 1 - shift]
        return result

    def _unfold(self, start: int, end: int, slot: int, *, is_top: bool) -> Iterator[Kept | Restart]:
        later = self._top if is_top else self._again
        while start < end:
            moves = self._moves(start, end, self._again, later, is_top=is_top)
            _, _, move = min(
                ((cost[slot], n, move) for n, (cost, move) in enumerate(moves)), key=lambda found: found[:2]
            )
            if isinstance(move, Kept):
                yield move
                if end - start > 1:
                    slot -= self._slots(move.way.kept_bytes + self.stages[start + 1].entering_bytes)
                start += 1
            else:
                yield Restart(start, move, tuple(self._unfold(start, move, slot, is_top=False)))
                slot -= self._slots(self.stages[move].entering_bytes)
                start = move
