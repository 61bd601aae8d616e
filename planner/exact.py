"""The best order of runs for small steps, exactly: what may be made again, when, and how often is left to the search."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from .outline import Outline, Run
from .schedule import Schedule

MOST_STORAGES = 8
MOST_OPERATORS = 40
_State = tuple[int, frozenset[int]]


class _Step(NamedTuple):
    before: _State
    operator: int | None  # None where something is freed


def is_small(outline: Outline) -> bool:
    """Whether :func:`fastest_order` is quick: few results of forward, few operators."""
    made = sum(len(op.makes) for op in outline.operators[: outline.forward])
    return made <= MOST_STORAGES and len(outline.operators) <= MOST_OPERATORS


def exact_frontier(outline: Outline) -> list[Schedule]:
    """For each peak at which the fastest order changes, that order; by rising peak."""
    found: list[Schedule] = []
    budget = outline.given_bytes + sum(outline.sizes) * 2 + max((op.workspace for op in outline.operators), default=0)
    while (order := fastest_order(outline, budget)) is not None:
        found.append(order)
        budget = order.peak_bytes - 1
    fastest: list[Schedule] = []
    for order in reversed(found):
        if not fastest or order.seconds < fastest[-1].seconds - 1e-12:
            fastest.append(order)
    return fastest


def fastest_order(outline: Outline, budget_bytes: int) -> Schedule | None:
    """The fastest order within a budget, None where there is none.

    Dijkstra's algorithm over how far the step is and which results of forward are alive. Running the next operator or, in
    backward, one of forward again costs its seconds; freeing costs nothing, and neither does writing over what is freed. Of
    equally fast orders, one of least peak is not sought.
    """
    operators, sizes, makers = outline.operators, outline.sizes, outline.makers
    own = [frozenset(s for s in op.makes if makers[s] < outline.forward) for op in operators]
    needs = [frozenset(s for s in op.reads if makers[s] < outline.forward) for op in operators]
    again = [i for i, op in enumerate(operators[: outline.forward]) if op.can_repeat and op.makes]
    before, while_running = _later_bytes(outline)
    overwritable = [_overwritable_of_forward(outline, i) for i in range(len(operators))]
    start: _State = (0, frozenset())
    seconds: dict[_State, float] = {start: 0.0}
    came: dict[_State, _Step] = {}
    queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
    tickets = itertools.count(1)
    while queue:
        spent, _, state = heapq.heappop(queue)
        position, alive = state
        if spent > seconds[state]:
            continue
        if position == len(operators):
            return _schedule(outline, _path(came, state))
        steps: list[tuple[float, _State, int | None]] = [
            (0.0, (position, alive - {s}), None) for s in sorted(alive) if s not in outline.outputs
        ]
        there = sum(sizes[s] for s in alive) + outline.given_bytes
        for number in (position, *(again if position >= outline.forward else ())):
            op, advances = operators[number], number == position
            if not needs[number] <= alive:
                continue
            made = sum(sizes[s] for s in own[number])
            beside = while_running[number] if advances else before[position]
            room = budget_bytes - (there + made + beside + op.workspace)
            if room >= 0:
                steps.append((op.seconds, (position + advances, alive | own[number]), number))
            for s in alive.intersection(overwritable[number]):
                if room + sizes[s] >= 0:
                    steps.append((op.seconds, (position + advances, (alive - {s}) | own[number]), number))
        for cost, new, number in steps:
            total = spent + cost
            if total < seconds.get(new, float("inf")) - 1e-12:
                seconds[new] = total
                came[new] = _Step(state, number)
                heapq.heappush(queue, (total, next(tickets), new))
    return None


def _later_bytes(outline: Outline) -> tuple[list[int], list[int]]:
    """Bytes of what operators after forward made and still need: before each operator, and while it runs."""
    count = len(outline.operators)
    last = {s: i for i, op in enumerate(outline.operators) for s in (*op.makes, *op.reads)}
    last.update(dict.fromkeys(outline.outputs, count))
    before, running = [0] * (count + 1), [0] * count
    for storage, maker in outline.makers.items():
        if maker >= outline.forward:
            for i in range(maker, min(last[storage] + 1, count)):
                running[i] += outline.sizes[storage]
            for i in range(maker + 1, min(last[storage] + 1, count + 1)):
                before[i] += outline.sizes[storage]
    for i in range(count):
        over = _overwritten_later(outline, i)
        running[i] -= outline.sizes[over[0]] if over else 0
    return before, running


def _overwritten_later(outline: Outline, number: int) -> list[int]:
    """What operators after forward made that an operator is the last to read, and may write over."""
    still_read = {s for op in outline.operators[number + 1 :] for s in op.reads} | outline.outputs
    over = outline.operators[number].may_overwrite
    return [s for s in over if outline.makers[s] >= outline.forward and s not in still_read]


def _overwritable_of_forward(outline: Outline, number: int) -> frozenset[int]:
    """What operators of forward made that an operator may write over, unless it does so over something else."""
    over = frozenset(outline.operators[number].may_overwrite)
    return frozenset() if _overwritten_later(outline, number) else over - outline.outputs


def _path(came: dict[_State, _Step], state: _State) -> list[tuple[int, int, frozenset[int]]]:
    """Operators in order, each with the position that it runs at and what is alive before it."""
    path: list[tuple[int, int, frozenset[int]]] = []
    while state in came:
        step = came[state]
        if step.operator is not None:
            path.append((step.operator, *step.before))
        state = step.before
    return path[::-1]


def _schedule(outline: Outline, path: list[tuple[int, int, frozenset[int]]]) -> Schedule:
    current = [-1] * len(outline.sizes)
    storages: list[int] = []
    runs: list[Run] = []
    for number, position, alive in path:
        operator, is_repeat = outline.operators[number], number != position
        reads = tuple(current[s] for s in operator.reads)
        makes = tuple(range(len(storages), len(storages) + len(operator.makes)))
        storages.extend(operator.makes)
        results = tuple(i for i, s in enumerate(operator.makes) if not is_repeat or s not in alive)
        for i in results:
            current[operator.makes[i]] = makes[i]
        runs.append(Run(number, is_repeat, reads, makes, results))
    return Schedule(outline, tuple(runs), tuple(storages))
