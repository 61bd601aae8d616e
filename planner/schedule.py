"""The order in which a step computes: every operator once, and some of forward again in backward, just before first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .memory import CATEGORIES, RECOMPUTED, WORKSPACE, live_bytes
from .outline import Outline
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
    """

    kept: frozenset[int]
    renewed: frozenset[Use] = frozenset()


class Run(NamedTuple):
    """One run of an operator.

    Attributes:
        operator: by number.
        is_repeat: whether it ran before.
        reads: the copies of storages that it reads, by number.
        makes: the copies that it allocates.
        results: positions in ``makes`` of the copies that what follows reads.
    """

    operator: int
    is_repeat: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Runs in order.

    Attributes:
        outline: the step.
        runs: in execution order.
        storages: of which storage each copy is one.
    """

    outline: Outline
    runs: tuple[Run, ...]
    storages: tuple[int, ...]

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last position of each copy."""
        outline = self.outline
        count = len(self.runs)
        births, deaths = np.zeros((2, len(self.storages)), dtype=np.int64)
        for position, run in enumerate(self.runs):
            for copy in run.makes:
                births[copy] = deaths[copy] = position
                if not run.is_repeat and self.storages[copy] in outline.outputs:
                    deaths[copy] = count
            for copy in run.reads:
                if deaths[copy] < position:
                    deaths[copy] = position
        return births, deaths

    @cached_property
    def live(self) -> np.ndarray:
        """Bytes alive during each run, without the step's inputs; int64."""
        outline, (births, deaths) = self.outline, self._spans
        sizes = np.array(outline.sizes, dtype=np.int64)[list(self.storages)]
        workspace = np.array([outline.operators[run.operator].workspace for run in self.runs], dtype=np.int64)
        return live_bytes(births, deaths, sizes, len(self.runs)) + workspace

    def peak_by_category(self) -> dict[str, int]:
        """What is alive at the peak, by category; adds up to ``peak_bytes``."""
        outline, (births, deaths) = self.outline, self._spans
        totals = Counter(outline.given)
        if self.runs:
            position = int(self.live.argmax())
            for copy in np.flatnonzero((births <= position) & (position <= deaths)):
                storage = self.storages[copy]
                again = self.runs[births[copy]].is_repeat
                totals[RECOMPUTED if again else outline.categories[storage]] += outline.sizes[storage]
            totals[WORKSPACE] += outline.operators[self.runs[position].operator].workspace
        return {c: totals[c] for c in CATEGORIES if totals[c]}

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, the step's inputs included."""
        return int(self.live.max(initial=0)) + self.outline.given_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of all runs, one after the other."""
        return sum(self.outline.operators[run.operator].seconds for run in self.runs)

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


def schedule(outline: Outline, choice: Choice) -> Schedule:
    """The order of execution under ``choice``: what a run needs and is not there is made right before it, in order of need."""
    operators, makers, renewed = outline.operators, outline.makers, choice.renewed
    runs, storages, current = _forward(outline)
    for storage in outline.candidates:
        if storage not in choice.kept:
            current[storage] = -1

    def run(number: int, is_repeat: bool) -> None:
        operator = operators[number]
        makes = operator.makes
        reads = tuple([current[s] for s in operator.reads])
        first = len(storages)
        if not makes:
            runs.append(Run(number, is_repeat, reads, (), ()))
            return
        storages.extend(makes)
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

    for number in range(outline.forward, len(operators)):
        if renewed or not all(current[s] >= 0 for s in operators[number].reads):
            provide(number)
        run(number, False)
    return Schedule(outline, tuple(runs), tuple(storages))


def _forward(outline: Outline) -> tuple[list[Run], list[int], list[int]]:
    """The runs of forward, which no choice changes, the storages they make, and the copy that is current of each storage."""
    remembered = outline.__dict__.get("forward_runs")
    if remembered is None:
        runs: list[Run] = []
        storages: list[int] = []
        current = [-1] * len(outline.sizes)
        for number, operator in enumerate(outline.operators[: outline.forward]):
            reads = tuple([current[s] for s in operator.reads])
            makes = tuple(range(len(storages), len(storages) + len(operator.makes)))
            storages.extend(operator.makes)
            for storage, copy in zip(operator.makes, makes, strict=True):
                current[storage] = copy
            runs.append(Run(number, False, reads, makes, tuple(range(len(makes)))))
        remembered = outline.__dict__["forward_runs"] = (runs, storages, current)
    runs, storages, current = remembered
    return runs.copy(), storages.copy(), current.copy()
