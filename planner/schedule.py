"""The order in which a step computes: every operator once, and some of forward again in backward, just before first use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .memory import RECOMPUTED, MemoryTimeline, live_bytes
from .outline import Outline, Run
from .plan import Repeat


class Use(NamedTuple):
    """A reading of a storage.

    Attributes:
        storage: what is read.
        operator: who reads it.
        is_repeat: whether this is the operator's run in backward, where it belongs to forward.
    """

    storage: int
    operator: int
    is_repeat: bool


@dataclass(frozen=True)
class Choice:
    """Which results of forward stay in memory.

    Attributes:
        kept: forward storages that backward may read as forward left them. The others are freed after their last use in
            forward, and made again before their first use in backward.
        renewed: uses in backward before which a storage is made again although it was there: it is freed after the use before.
        forgotten: for operators of backward, storages that are not there any more when it runs: freed after the use before, and
            made again before the next.
    """

    kept: frozenset[int]
    renewed: frozenset[Use] = frozenset()
    forgotten: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Schedule:
    """Runs in order.

    Attributes:
        outline: the step.
        runs: in execution order.
        storages: of which storage each copy is one.
        spans: position of the run that makes each copy, and of the last that makes or reads it, where that is known.
    """

    outline: Outline
    runs: tuple[Run, ...]
    storages: tuple[int, ...]
    spans: tuple[list[int], list[int]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last position of each copy; the last before it is overwritten, where it is."""
        outline, storages, runs = self.outline, self.storages, self.runs
        births, last = self.spans or _spans(runs, len(storages))
        deaths = list(last)
        outputs = outline.outputs
        for copy, storage in enumerate(storages):
            if storage in outputs and not runs[births[copy]].is_repeat:
                deaths[copy] = len(runs)
        operators = outline.operators
        for position, run in enumerate(runs):
            over = operators[run.operator].may_overwrite
            if over:
                dying = {storages[copy]: copy for copy in run.reads if deaths[copy] == position}
                first = next((dying[s] for s in over if s in dying), None)
                if first is not None:
                    deaths[first] = position - 1
        return np.array(births, dtype=np.int64), np.array(deaths, dtype=np.int64)

    @property
    def _sizes(self) -> np.ndarray:
        return np.array([self.outline.sizes[s] for s in self.storages], dtype=np.int64)

    @property
    def _workspace(self) -> np.ndarray:
        return np.array([self.outline.operators[run.operator].workspace for run in self.runs], dtype=np.int64)

    @cached_property
    def live(self) -> np.ndarray:
        """Bytes alive during each run, without the step's inputs; int64."""
        births, deaths = self._spans
        live: np.ndarray = live_bytes(births, deaths, self._sizes, len(self.runs)) + self._workspace
        return live

    def timeline(self) -> MemoryTimeline:
        """The same as the simulator has it of a graph; of whole steps, since parts have no categories."""
        outline, (births, deaths) = self.outline, self._spans
        makers = [self.runs[birth] for birth in births]
        return MemoryTimeline(
            births,
            deaths,
            self._sizes,
            tuple(
                RECOMPUTED if m.is_repeat else outline.categories[s] for m, s in zip(makers, self.storages, strict=True)
            ),
            tuple(outline.operators[maker.operator].name for maker in makers),
            self._workspace,
            tuple(outline.operators[run.operator].name for run in self.runs),
            outline.given,
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, the step's inputs included."""
        return int(self.live.max(initial=0)) + self.outline.given_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of all runs, one after the other."""
        return sum(self.outline.operators[run.operator].seconds for run in self.runs) + self.outline.beside_seconds

    def repeats(self) -> tuple[Repeat, ...]:
        """The runs in backward of what belongs to forward, by logical key."""
        names = [op.name for op in self.outline.operators]
        repeats: list[Repeat] = []
        waiting: list[Run] = []
        for run in self.runs:
            if run.is_repeat:
                waiting.append(run)
            else:
                repeats += [Repeat(names[w.operator], names[run.operator], w.results) for w in waiting]
                waiting.clear()
        return tuple(repeats)


def _spans(runs: tuple[Run, ...], copies: int) -> tuple[list[int], list[int]]:
    births, deaths = [0] * copies, [0] * copies
    for position, run in enumerate(runs):
        for copy in run.makes:
            births[copy] = deaths[copy] = position
        for copy in run.reads:
            deaths[copy] = position
    return births, deaths


def everything_kept(outline: Outline) -> Schedule:
    """The step without running anything again."""
    return schedule(outline, Choice(outline.always_kept.union(outline.candidates)))


def schedule(outline: Outline, choice: Choice) -> Schedule:
    """The order of execution under ``choice``: what a run needs and is not there is made right before it, in order of need."""
    operators, makers, renewed = outline.operators, outline.makers, choice.renewed
    given = outline.forward_runs
    runs, storages, current = list(given.runs), list(given.storages), list(given.current)
    births, deaths = list(given.births), list(given.deaths)
    for storage in outline.candidates:
        if storage not in choice.kept:
            current[storage] = -1

    def run(number: int, is_repeat: bool) -> None:
        operator = operators[number]
        makes = operator.makes
        reads = tuple([current[s] for s in operator.reads])
        position = len(runs)
        for copy in reads:
            deaths[copy] = position
        first = len(storages)
        if not makes:
            runs.append(Run(number, is_repeat, reads, (), ()))
            return
        storages.extend(makes)
        births.extend([position] * len(makes))
        deaths.extend([position] * len(makes))
        if len(makes) == 1 and current[makes[0]] < 0:
            current[makes[0]] = first
            runs.append(Run(number, is_repeat, reads, (first,), (0,)))
            return
        results = tuple([i for i, storage in enumerate(makes) if current[storage] < 0])
        for i in results:
            current[makes[i]] = first + i
        runs.append(Run(number, is_repeat, reads, tuple(range(first, len(storages))), results))

    def provide(number: int) -> None:
        """Makes what an operator of backward reads."""
        stack: list[tuple[int, bool, Iterator[int]]] = [(number, False, iter(operators[number].reads))]
        while stack:
            reader, is_repeat, waiting = stack[-1]
            for storage in waiting:
                if renewed and Use(storage, reader, is_repeat) in renewed:
                    current[storage] = -1
                if current[storage] < 0:
                    maker = makers[storage]
                    stack.append((maker, True, iter(operators[maker].reads)))
                    break
            else:
                stack.pop()
                if is_repeat:
                    run(reader, True)

    forgotten: dict[int, list[int]] = defaultdict(list)
    for number, storage in choice.forgotten:
        forgotten[number].append(storage)
    for number in range(outline.forward, len(operators)):
        for storage in forgotten.get(number, ()):
            current[storage] = -1
        if renewed or not all(current[s] >= 0 for s in operators[number].reads):
            provide(number)
        run(number, False)
    return Schedule(outline, tuple(runs), tuple(storages), (births, deaths))
