"""Which results of forward to keep and which to compute again: one option for each block, under one peak.

Each block has options (:mod:`options`), solved once for blocks that are alike. The bytes alive while block ``j`` runs backward
are those that earlier blocks keep, the block's own peak, and what does not depend on the choice: a multiple-choice problem with
a row for each block. A linear program over it gives the price of memory and a bound; its solutions over a grid of budgets,
rounded to whole options, and the plans on the way from one to the next make the frontier. The grid does not depend on the
budget asked for, and that is why a smaller budget never gets a plan with a larger peak.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, lil_array

from .blocks import Part, classes_of, find_blocks, part_of, shared_storages
from .exact import exact_frontier, is_small
from .min_cut import convex_frontier
from .nested import NestedChoices
from .options import Option, options_of
from .outline import Outline
from .schedule import Choice, Schedule, schedule

SHORTEST_CHAIN = 4  # blocks; of fewer, nothing is gained by starting again
MOST_COLUMNS = 4000  # of the linear program; beyond, it looks at those options only that are cheapest at some prices
GRID = 24  # budgets at which the linear program is solved, from the least that can be kept to what keeping everything takes


BLOCKS = "one way to run each block"
NESTED = "stretches of blocks that start again from their first input"
EXACT = "all orders of a small step"


class Pick(NamedTuple):
    """A plan of the frontier.

    Attributes:
        peak_bytes: predicted by the rows, the step's inputs included.
        extra_seconds: of what runs again.
        options: of :data:`BLOCKS`, for each block the number of its option; of the others, the number of the plan alone.
        found_by: what it was found by.
    """

    peak_bytes: int
    extra_seconds: float
    options: tuple[int, ...]
    found_by: str = BLOCKS


@dataclass(frozen=True)
class Relaxed:
    """The linear program at one budget.

    Attributes:
        price: of memory, in seconds per byte at the peak.
        shares: for each block, how much of each option.
    """

    price: float
    shares: list[np.ndarray]


class _Program(NamedTuple):
    """A linear program in units of its own, one column for each option and then one for each block."""

    seconds: np.ndarray
    peaks: csr_array
    equalities: csr_array
    right: np.ndarray
    bounds: list[tuple[float | None, None]]
    starts: np.ndarray
    unit: float
    clock: float


_KNOWN: dict[Hashable, list[Option]] = {}
_MOST_KNOWN = 256


def _options(part: Part) -> list[Option]:
    """The options of a block, remembered in this process: plans for other budgets have the same blocks."""
    if part.signature not in _KNOWN:
        while len(_KNOWN) >= _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[part.signature] = options_of(part.outline, part.leaving)
    return _KNOWN[part.signature]


class RecomputeProblem:
    """The choice for one step.

    Args:
        others: plans that stand in the frontier as well, by what they were found by.

    Attributes:
        outline: the step.
        blocks: its blocks, in order of forward.
        options: for each block, the ways to run it, the fastest first, which keeps everything.
    """

    def __init__(self, outline: Outline, others: Mapping[str, Schedule] | None = None) -> None:
        self.outline = outline
        self._others = others or {}
        self._exact = exact_frontier(outline) if is_small(outline) else []
        self.blocks = find_blocks(outline)
        self._shared = shared_storages(outline, self.blocks)
        self._parts = [part_of(outline, block, self._shared) for block in self.blocks]
        self.options: list[list[Option]] = [[] for _ in self.blocks]
        if self._exact:
            return
        for members in classes_of(self._parts):
            options = _options(self._parts[members[0]])
            for number in members:
                self.options[number] = options
        self._kept = [np.array([o.kept_bytes for o in options]) for options in self.options]
        self._peaks = [np.array([(o.forward_bytes, o.peak_bytes) for o in options]) for options in self.options]
        self._seconds = [np.array([o.extra_seconds for o in options]) for options in self.options]

    def realised(self, pick: Pick) -> Schedule:
        """The order of execution of a plan."""
        return self.schedule(pick.options) if pick.found_by == BLOCKS else self._whole[pick.found_by][pick.options[0]]

    @cached_property
    def _whole(self) -> dict[str, list[Schedule]]:
        """Plans that are no options of blocks, by what they were found by."""
        if self._exact:
            return {EXACT: self._exact}
        nested = self._nested if len(self.blocks) >= SHORTEST_CHAIN else []
        return {NESTED: nested, **{found_by: [plan] for found_by, plan in self._others.items()}}

    @cached_property
    def _nested(self) -> list[Schedule]:
        """Plans in which stretches of blocks start again from their first input, by falling memory."""
        chain = NestedChoices(self._parts, self.blocks, self._shared, self.options, self._fixed[:, 1])
        return sorted(map(self._scheduled, chain.choices()), key=lambda plan: -plan.peak_bytes)

    def _scheduled(self, choice: Choice) -> Schedule:
        """The step under what the blocks chose."""
        return schedule(self.outline, replace(choice, kept=choice.kept | self.outline.always_kept | self._shared))

    def schedule(self, options: tuple[int, ...]) -> Schedule:
        """The step with one option for each block."""
        chosen = [
            part.in_whole(offered[number].choice)
            for part, offered, number in zip(self._parts, self.options, options, strict=True)
        ]
        return self._scheduled(
            Choice(
                frozenset().union(*(choice.kept for choice in chosen)),
                frozenset().union(*(choice.renewed for choice in chosen)),
            )
        )

    @cached_property
    def _fastest(self) -> Schedule:
        """The step with the first option of each block."""
        return self.schedule((0,) * len(self.blocks))

    @cached_property
    def _fixed(self) -> np.ndarray:
        """Bytes alive at the peak of each block's forward and of its backward that no option changes; shape (blocks, 2)."""
        whole = self._fastest
        numbers = np.array([run.operator for run in whole.runs])
        fixed = np.zeros((len(self.blocks), 2), dtype=np.int64)
        earlier = 0
        for j, block in enumerate(self.blocks):
            for column, span in enumerate((block.forward, block.backward)):
                within = (numbers >= span.start) & (numbers < span.stop)
                fixed[j, column] = int(whole.live[within].max(initial=0)) - earlier - int(self._peaks[j][0, column])
            earlier += int(self._kept[j][0])
        return fixed + self.outline.given_bytes

    @cached_property
    def _floor(self) -> int:
        """The peak after backward, which no option changes."""
        runs, live = self._fastest.runs, self._fastest.live
        after = [bytes_ for run, bytes_ in zip(runs, live, strict=True) if run.operator >= self.outline.backward]
        return int(max(after, default=0)) + self.outline.given_bytes

    def _rows(self, options: tuple[int, ...]) -> np.ndarray:
        """Bytes alive at the peak of each block's forward and of its backward; shape (blocks, 2)."""
        kept = np.array([k[o] for k, o in zip(self._kept, options, strict=True)])
        peaks = np.array([p[o] for p, o in zip(self._peaks, options, strict=True)])
        earlier = np.concatenate(([0], np.cumsum(kept)[:-1]))
        rows: np.ndarray = self._fixed + earlier[:, None] + peaks
        return rows

    def _pick(self, options: tuple[int, ...]) -> Pick:
        seconds = sum(float(s[o]) for s, o in zip(self._seconds, options, strict=True))
        return Pick(max(int(self._rows(options).max(initial=0)), self._floor), seconds, options)

    def relaxed(self, budget_bytes: float) -> Relaxed | None:
        """The linear program at a budget; None where it has no solution, and for small steps, which are solved otherwise."""
        if self._exact:
            return None
        program = self._program
        solved = linprog(
            program.seconds,
            A_ub=program.peaks,
            b_ub=(budget_bytes - self._fixed).ravel() / program.unit,
            A_eq=program.equalities,
            b_eq=program.right,
            bounds=program.bounds,
            method="highs",
        )
        if solved.status != 0 or budget_bytes < self._floor:
            return None
        price = -float(solved.ineqlin.marginals.sum()) * program.clock / program.unit
        found = np.split(solved.x[: program.starts[-1]], program.starts[1:-1])
        shares = [np.zeros(len(options)) for options in self.options]
        for share, columns, taken in zip(shares, self._columns, found, strict=True):
            share[columns] = taken
        return Relaxed(max(price, 0.0), shares)

    @cached_property
    def _columns(self) -> list[np.ndarray]:
        """For each block, the options that the linear program looks at."""
        if sum(map(len, self.options)) <= MOST_COLUMNS:
            return [np.arange(len(options)) for options in self.options]
        known: dict[int, np.ndarray] = {}
        for options, kept, peaks, seconds in zip(self.options, self._kept, self._peaks, self._seconds, strict=True):
            if id(options) not in known:
                known[id(options)] = _supported(seconds, np.column_stack([kept, peaks]))
        return [known[id(options)] for options in self.options]

    @cached_property
    def _program(self) -> _Program:
        """The linear program but for the budget: shares of options, and the bytes that each block and those before it keep."""
        count = len(self.blocks)
        starts = np.concatenate(([0], np.cumsum([len(picked) for picked in self._columns])))
        columns = int(starts[-1])
        unit = float(max(self._fixed.max(initial=1), 1) + sum(int(k.max(initial=0)) for k in self._kept))
        clock = self.outline.seconds or 1.0
        peaks = lil_array((2 * count, columns + count))
        equalities = lil_array((2 * count, columns + count))
        for j in range(count):
            own, picked = slice(int(starts[j]), int(starts[j + 1])), self._columns[j]
            for column in range(2):
                peaks[2 * j + column, own] = self._peaks[j][picked, column] / unit
                if j:
                    peaks[2 * j + column, columns + j - 1] = 1.0
            equalities[j, own] = 1.0
            equalities[count + j, own] = -self._kept[j][picked] / unit
            equalities[count + j, columns + j] = 1.0
            if j:
                equalities[count + j, columns + j - 1] = -1.0
        return _Program(
            np.concatenate([*(s[c] for s, c in zip(self._seconds, self._columns, strict=True)), np.zeros(count)])
            / clock,
            peaks.tocsr(),
            equalities.tocsr(),
            np.concatenate([np.ones(count), np.zeros(count)]),
            [(0.0, None)] * columns + [(None, None)] * count,
            starts,
            unit,
            clock,
        )

    def _smallest(self, shares: list[np.ndarray]) -> list[int]:
        """For each block, of the options that have a share the one that takes least."""
        sizes = [kept + peaks.max(axis=1) for kept, peaks in zip(self._kept, self._peaks, strict=True)]
        supports = [np.flatnonzero(share > 1e-6) for share in shares]
        return [int(support[size[support].argmin()]) for support, size in zip(supports, sizes, strict=True)]

    def _rounded(self, shares: list[np.ndarray], budget_bytes: float) -> tuple[int, ...]:
        """Whole options: of those that have a share the one that takes least, then the fastest that still fit."""
        picked = self._smallest(shares)
        while True:
            best: tuple[float, int, int] | None = None
            rows = self._rows(tuple(picked))
            room = budget_bytes - rows
            least_room = np.minimum.accumulate(room.min(axis=1)[::-1])[::-1]
            behind = np.concatenate((least_room[1:], [math.inf]))
            for j, current in enumerate(picked):
                more_kept = self._kept[j] - self._kept[j][current]
                more_peak = self._peaks[j] - self._peaks[j][current]
                gain = self._seconds[j][current] - self._seconds[j]
                fits = (more_peak <= room[j]).all(axis=1) & (more_kept <= behind[j]) & (gain > 1e-12)
                if fits.any():
                    option = int(np.where(fits, gain, -1).argmax())
                    if best is None or gain[option] > best[0]:
                        best = (float(gain[option]), j, option)
            if best is None:
                return tuple(picked)
            picked[best[1]] = best[2]

    @cached_property
    def frontier(self) -> list[Pick]:
        """Plans by rising peak and falling time, independent of any budget."""
        plain = self.outline.seconds
        found = {
            Pick(plan.peak_bytes, plan.seconds - plain, (number,), found_by)
            for found_by, plans in self._whole.items()
            for number, plan in enumerate(plans)
        }
        if not self._exact:
            corners = self._corners()
            found.update(corners)
            for lower, upper in zip(corners, corners[1:], strict=False):
                found.update(self._between(lower, upper))
        ordered: list[Pick] = []
        for pick in sorted(found, key=lambda p: (p.peak_bytes, p.extra_seconds, p.found_by, p.options)):
            if not ordered or pick.extra_seconds < ordered[-1].extra_seconds:
                ordered.append(pick)
        return ordered

    @cached_property
    def simulated_frontier(self) -> list[tuple[Pick, Schedule]]:
        """The plans of the frontier by their simulated peaks and times, without those that others are below in both."""
        plans = sorted(
            ((pick, self.realised(pick)) for pick in self.frontier), key=lambda p: (p[1].peak_bytes, p[1].seconds)
        )
        ordered: list[tuple[Pick, Schedule]] = []
        for pick, plan in plans:
            if not ordered or plan.seconds < ordered[-1][1].seconds:
                ordered.append((pick, plan))
        return ordered

    def _corners(self) -> list[Pick]:
        """Plans that the linear program leads to over a grid of budgets, by rising peak."""
        most = self._pick((0,) * len(self.blocks))
        least = self._pick(self._least())
        steps = np.linspace(0, 1, GRID)[1:-1] ** 2  # finer where memory is short
        found = [least]
        for budget in least.peak_bytes + steps * (most.peak_bytes - least.peak_bytes):
            relaxed = self.relaxed(float(budget))
            if relaxed is not None:
                found.append(self._pick(self._rounded(relaxed.shares, float(budget))))
        return [*found, most]

    def _between(self, lower: Pick, upper: Pick) -> list[Pick]:
        """Plans on the way from one plan to another, one block after the other, the last blocks first."""
        options = list(lower.options)
        found = []
        for j in reversed(range(len(options))):
            if options[j] != upper.options[j]:
                options[j] = upper.options[j]
                found.append(self._pick(tuple(options)))
        return found

    def _least(self) -> tuple[int, ...]:
        """The plan of least peak, by bisection over budgets that the linear program can keep."""
        high = float(self._pick((0,) * len(self.blocks)).peak_bytes)
        low = float(self._floor)
        best = self.relaxed(high)
        for _ in range(12):
            middle = (low + high) / 2
            relaxed = self.relaxed(middle)
            if relaxed is None:
                low = middle
            else:
                best, high = relaxed, middle
        assert best is not None
        return tuple(self._smallest(best.shares))

    def bound_seconds(self, budget_bytes: int) -> float:
        """Least recomputing that any plan at all needs within a budget, whatever its options.

        What backward reads and is not made again is alive when backward begins. The least seconds at that many bytes, on the
        convex frontier of the min-cut, is a lower bound (Lagrangian duality).
        """
        outline = self.outline
        first = outline.operators[outline.forward] if outline.backward > outline.forward else None
        made = () if first is None or first.may_overwrite else first.makes
        beside = outline.given_bytes + sum(outline.sizes[s] for s in made)
        points = sorted((p.kept_bytes, p.extra_seconds) for p in convex_frontier(outline))
        return float(np.interp(budget_bytes - beside, [p[0] for p in points], [p[1] for p in points]))


def _supported(seconds: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Numbers of the options that are the cheapest at some price of each kind of bytes.

    A linear program needs no others. The prices tried are powers of two and their roots, around seconds per byte.

    Args:
        seconds: of each option.
        sizes: bytes kept, and peaks within forward and backward, of each option; shape (options, 3).
    """
    scale = float(np.ptp(seconds)) / max(float(np.ptp(sizes)), 1.0)
    prices = np.concatenate(([0.0], scale * 2.0 ** np.arange(-8, 8.5, 0.5)))
    combinations = np.array([(a, b, c) for a in prices for b in prices[::8] for c in prices])
    cheapest = np.unique((seconds[:, None] + sizes @ combinations.T).argmin(axis=0))
    ends = [int(seconds.argmin()), *(int(column.argmin()) for column in sizes.T)]
    result: np.ndarray = np.union1d(cheapest, ends)
    return result
