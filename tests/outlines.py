"""Small steps as the planner sees them, made at random or by rule, and the best that can be done about them."""

from __future__ import annotations

import heapq
import itertools
import random

from stepgraph.planner.outline import Operator, Outline


def random_outline(seed: int, operators: int = 6, *, largest: int = 8) -> Outline:
    """A forward of operators with one result each, and a backward of one operator for each, in reverse order.

    Forward operators read one or two earlier results; backward operators read the gradient that came before and some of the
    results that their forward operator read or made.
    """
    draw = random.Random(seed)
    sizes: list[int] = []
    ops: list[Operator] = []

    def add(name: str, reads: set[int], size: int, *, can_repeat: bool) -> int:
        is_elementwise = bool(reads) and draw.random() < 0.4
        if is_elementwise:
            size = sizes[draw.choice(sorted(reads))]
        over = tuple(s for s in sorted(reads) if is_elementwise and sizes[s] == size)
        sizes.append(size)
        seconds = draw.choice((1.0, 2.0, 3.0, 5.0, 8.0))
        ops.append(
            Operator(
                name,
                seconds,
                tuple(sorted(reads)),
                (len(sizes) - 1,),
                can_repeat=can_repeat,
                likeness=len(ops),
                may_overwrite=over,
            )
        )
        return len(sizes) - 1

    for i in range(operators):
        earlier = range(max(0, i - 3), i)
        reads = set(draw.sample(earlier, min(len(earlier), draw.choice((1, 1, 2)))))
        add(f"f{i}", reads, draw.randint(1, largest), can_repeat=draw.random() < 0.9)
    gradient: int | None = None
    for i in reversed(range(operators)):
        reads = {gradient} if gradient is not None else {operators - 1}
        for storage in (i, *ops[i].reads):
            if draw.random() < 0.6:
                reads.add(storage)
        gradient = add(f"b{i}", reads, draw.randint(1, 3), can_repeat=False)
    return Outline(
        tuple(ops),
        tuple(sizes),
        operators,
        2 * operators,
        frozenset({len(sizes) - 1}),
        categories=("activations",) * len(sizes),
    )


def chain(length: int, *, inner: int = 3, size: int = 4, inner_size: int = 4) -> Outline:
    """Equal blocks in a row: each makes ``inner`` results that its backward reads, and a result for the next."""
    sizes: list[int] = []
    ops: list[Operator] = []

    def add(name: str, reads: tuple[int, ...], size: int, likeness: int, *, can_repeat: bool = True) -> int:
        sizes.append(size)
        ops.append(Operator(name, 1.0, reads, (len(sizes) - 1,), can_repeat=can_repeat, likeness=likeness))
        return len(sizes) - 1

    entering = add("input", (), size, 0, can_repeat=False)
    blocks = []
    for b in range(length):
        made, last = [], entering
        for k in range(inner):
            last = add(f"block{b}.inner{k}", (last,), inner_size, 1 + k)
            made.append(last)
        leaving = add(f"block{b}.out", (last, entering), size, 1 + inner)
        blocks.append((entering, made))
        entering = leaving
    forward = len(ops)
    gradient = add("loss", (entering,), size, 100, can_repeat=False)
    for b, (entering, made) in reversed(list(enumerate(blocks))):
        for k, storage in reversed(list(enumerate(made))):
            gradient = add(f"block{b}.grad{k}", (gradient, storage), inner_size, 101 + k, can_repeat=False)
        gradient = add(f"block{b}.grad", (gradient, entering), size, 100 + inner + 1, can_repeat=False)
    return Outline(
        tuple(ops), tuple(sizes), forward, len(ops), frozenset({gradient}), categories=("activations",) * len(sizes)
    )


def least_seconds(outline: Outline, budget: int) -> float | None:
    """The least time within ``budget`` bytes of any order of runs: every operator once, in its order, and forward ones again.

    Dijkstra's algorithm over how far the step is and which results of forward are alive. Those may be freed at any time, and
    made again in backward as often as needed. None where nothing keeps to the budget. For a dozen results at most.
    """
    operators, sizes, makers = outline.operators, outline.sizes, outline.makers
    of_forward = frozenset(s for s, maker in makers.items() if maker < outline.forward)
    last = {
        s: len(operators) if s in outline.outputs else i
        for i, op in enumerate(operators)
        for s in (*op.makes, *op.reads)
    }
    last.update(dict.fromkeys(outline.outputs, len(operators)))

    def later(position: int, *, running: bool) -> int:
        """Bytes of what backward made and still needs, while an operator runs or right before it."""
        made = position if not running else position + 1
        return sum(sizes[s] for s, m in makers.items() if s not in of_forward and m < made and last[s] >= position)

    start = (0, frozenset[int]())
    best = {start: 0.0}
    queue: list[tuple[float, int, tuple[int, frozenset[int]]]] = [(0.0, 0, start)]
    ticket = itertools.count(1)
    while queue:
        seconds, _, state = heapq.heappop(queue)
        position, alive = state
        if best[state] < seconds:
            continue
        if position == len(operators):
            return seconds
        found = [(0.0, (position, alive - {s})) for s in alive if s not in outline.outputs]
        repeats = [i for i in range(outline.forward) if operators[i].can_repeat] if position >= outline.forward else []
        for number in (position, *repeats):
            op, advances = operators[number], number == position
            if not alive.issuperset(of_forward.intersection(op.reads)):
                continue
            made = of_forward.intersection(op.makes)
            again = sum(sizes[s] for s in made & alive)
            taken = later(position, running=advances) + sum(sizes[s] for s in alive | made) + again + op.workspace
            dying = [s for s in op.may_overwrite if s not in of_forward and last[s] == position]
            taken += outline.given_bytes - (sizes[dying[0]] if dying else 0)
            if taken <= budget:
                found.append((op.seconds, (position + advances, alive | made)))
            for s in () if dying else op.may_overwrite:
                if s in alive and s not in outline.outputs and taken - sizes[s] <= budget:
                    found.append((op.seconds, (position + advances, (alive - {s}) | made)))
        for cost, new in found:
            if seconds + cost < best.get(new, float("inf")):
                best[new] = seconds + cost
                heapq.heappush(queue, (seconds + cost, next(ticket), new))
    return None
