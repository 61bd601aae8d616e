"""Blocks of a step: stretches of forward, each with its stretch of backward, and which of them are the same problem.

Boundaries are proposed from structure alone: the longest periodic runs in the sequence of forward operators, whatever modules
they come from, cut where the fewest bytes cross. Two blocks are alike only if they are proven to be: the same operators on the
same layouts, wired alike, in forward and in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from .outline import Operator, Outline
from .schedule import Choice, Use

LONGEST_BLOCK = 60  # operators of forward; longer stretches are cut where it is narrow
WIDEST_CUT = 0.5  # share of what a piece keeps for backward that may cross a cut


@dataclass(frozen=True)
class Block:
    """Operators ``forward`` of an outline and the ``backward`` that differentiates them, as ranges."""

    forward: range
    backward: range


@dataclass(frozen=True)
class Part:
    """A block as an outline of its own, in which what comes from outside is made by operators that take no time.

    Attributes:
        outline: the block's forward, a first operator of backward that makes what backward gets from outside, its backward.
        operators: of the whole outline, the number of each operator of the part; -1 where it stands for the outside.
        storages: of the whole outline, the number of each storage of the part.
        entering: storages of the part that an earlier block made for this one, and that are kept for it.
        leaving: storages of the part that are kept for later blocks, and counted there.
        signature: equal for blocks that are the same problem.
    """

    outline: Outline
    operators: tuple[int, ...]
    storages: tuple[int, ...]
    entering: frozenset[int]
    leaving: frozenset[int]
    signature: Hashable

    def in_whole(self, choice: Choice) -> Choice:
        """A choice for the part in the numbers of the whole step."""
        storages, operators = self.storages, self.operators
        return Choice(
            frozenset(storages[s] for s in choice.kept),
            frozenset(Use(storages[s], operators[i], again) for s, i, again in choice.renewed),
        )


def find_blocks(outline: Outline) -> list[Block]:
    """Cuts forward into blocks, in order, and backward with it; together they hold every operator of both."""
    cuts = [0, *sorted(_cuts(outline)), outline.forward]
    stretches = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    return _with_backward(outline, stretches)


def _cuts(outline: Outline) -> set[int]:
    likeness = np.array([op.likeness for op in outline.operators[: outline.forward]], dtype=np.int64)
    crossing = _crossing_bytes(outline)
    kept = outline.read_in_backward
    made = [sum(outline.sizes[s] for s in op.makes if s in kept) for op in outline.operators[: outline.forward]]
    cuts: set[int] = set()
    waiting = [(0, len(likeness))]
    while waiting:
        start, end = waiting.pop()
        found = longest_periodic_run(likeness[start:end])
        if found is None:
            waiting += _halves(crossing, start, end, cuts)
            continue
        first, period, length = found
        first += start
        offsets = [range(first + o, first + length + 1, period) for o in range(period)]
        widths = [sum(crossing[i] for i in cut) / len(cut) for cut in offsets]
        narrow = min(widths)
        own = max(
            (c for c, w in zip(offsets, widths, strict=True) if w <= 1.2 * narrow), key=lambda c: (len(c), -c.start)
        )
        inside = sum(made[own.start : own[-1]]) / max(len(own) - 1, 1)
        if narrow > WIDEST_CUT * inside:
            waiting += _halves(crossing, start, end, cuts)
            continue
        cuts.update(own)
        waiting += [(start, own[0]), (own[-1], end)]
    return cuts - {0, outline.forward}


def _halves(crossing: list[int], start: int, end: int, cuts: set[int]) -> list[tuple[int, int]]:
    """Cuts a stretch that is too long at the narrowest place of its middle half, and returns the pieces."""
    length = end - start
    if length <= LONGEST_BLOCK:
        return []
    cut = min(range(start + length // 4, end - length // 4), key=lambda i: (crossing[i], abs(2 * i - start - end)))
    cuts.add(cut)
    return [(start, cut), (cut, end)]


def longest_periodic_run(sequence: np.ndarray, shortest: int = 4) -> tuple[int, int, int] | None:
    """Start, period and length of the stretch of two or more equal pieces that covers most; None where nothing repeats.

    Among stretches of equal length, the one with the shortest period.

    Args:
        sequence: 1-dim integers.
        shortest: periods below this are no blocks.
    """
    best: tuple[int, int, int] | None = None
    count = len(sequence)
    for period in range(shortest, count // 2 + 1):
        equal = sequence[period:] == sequence[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
        starts, ends = edges[::2], edges[1::2]
        if not len(starts):
            continue
        longest = int((ends - starts).argmax())
        run = int(ends[longest] - starts[longest])
        if run >= period and (best is None or run + period > best[2]):
            best = (int(starts[longest]), period, run + period)
    return best


def _crossing_bytes(outline: Outline) -> list[int]:
    """For each position in forward, the bytes made before it and read by forward at or after it; one more than operators."""
    crossing = np.zeros(outline.forward + 2, dtype=np.int64)
    last: dict[int, int] = {}
    for i, op in enumerate(outline.operators[: outline.forward]):
        last.update(dict.fromkeys(op.reads, i))
    for storage, reader in last.items():
        crossing[outline.makers[storage] + 1] += outline.sizes[storage]
        crossing[reader + 1] -= outline.sizes[storage]
    return [int(c) for c in np.cumsum(crossing)[: outline.forward + 1]]


def _with_backward(outline: Outline, stretches: list[range]) -> list[Block]:
    """Gives each stretch the backward from where its inner storages begin to be read to where the one before begins."""
    number_of = {i: n for n, stretch in enumerate(stretches) for i in stretch}
    inner: dict[int, int] = {}
    for i, op in enumerate(outline.operators[: outline.forward]):
        inner.update(dict.fromkeys(op.makes, number_of[i]))
        for storage in op.reads:
            if inner.get(storage) != number_of[i]:
                inner.pop(storage, None)  # crosses a boundary
    first_reads: dict[int, int] = {}
    for i in range(outline.forward, outline.backward):
        for storage in outline.operators[i].reads:
            if storage in inner:
                first_reads.setdefault(storage, i)
    reads: dict[int, list[int]] = defaultdict(list)
    for storage, position in first_reads.items():
        reads[inner[storage]].append(position)
    starts: dict[int, int] = {}
    later: list[int] = []
    for number in sorted(reads, reverse=True):
        starts[number] = _first_of(reads[number], later)
        later = reads[number]
    blocks: list[Block] = []
    end, first = outline.backward, stretches[0].start if stretches else 0
    for number, stretch in enumerate(stretches):
        start = starts.get(number)
        is_last = number == len(stretches) - 1
        if is_last:
            start = outline.forward
        if start is None or start >= end:
            continue  # nothing of its own is read in order: the next stretch takes it over
        blocks.append(Block(range(first, stretch.stop), range(start, end)))
        end, first = start, stretch.stop
    return blocks


def _first_of(own: list[int], later: list[int]) -> int:
    """Where the backward of a stretch begins, which comes after that of the ``later`` stretch.

    Most of what a stretch keeps is read in its own backward, but a mask that all stretches share the gradient of may be read
    long before. The place is the one that puts the fewest readings on the wrong side of it.

    Args:
        own: positions at which what the stretch made is first read.
        later: the same of the stretch behind it.
    """
    return min(sorted(own), key=lambda t: sum(i >= t for i in later) + sum(i < t for i in own))


def part_of(outline: Outline, block: Block, shared: frozenset[int]) -> Part:
    """The block on its own.

    Args:
        shared: storages that more than one block reads and that are kept throughout: no concern of any block.
    """
    numbers: dict[int, int] = {}  # of storages in the part
    likenesses: dict[int, int] = {}
    operators: list[Operator] = []
    origin: list[int] = []
    own = {s for i in (*block.forward, *block.backward) for s in outline.operators[i].makes}
    later = {s for op in outline.operators[block.backward.stop :] for s in op.reads} | outline.outputs

    def number(storage: int) -> int:
        return numbers.setdefault(storage, len(numbers))

    def outside(stretch: range) -> list[int]:
        read = dict.fromkeys(s for i in stretch for s in outline.operators[i].reads)
        return [s for s in read if s not in own and s not in numbers and s not in shared]

    def add(op: Operator, where: int) -> None:
        reads = tuple([number(s) for s in op.reads if s not in shared])
        makes = tuple([number(s) for s in op.makes])
        likeness = likenesses.setdefault(op.likeness, len(likenesses)) if where >= 0 else -1
        over = tuple([number(s) for s in op.may_overwrite if s not in shared and s not in later])
        operators.append(Operator(op.name, op.seconds, reads, makes, op.workspace, op.can_repeat, likeness, over))
        origin.append(where)

    def stretch(positions: range) -> list[int]:
        before = outside(positions)
        add(Operator("outside", 0.0, (), tuple(before), can_repeat=False), -1)
        for i in positions:
            add(outline.operators[i], i)
        return before

    entering = stretch(block.forward)
    forward = len(operators)
    stretch(block.backward)
    storages = tuple(numbers)
    outputs = frozenset(n for s, n in numbers.items() if s in later and s in own)
    sizes = tuple(outline.sizes[s] for s in storages)
    inside = {*block.forward, *block.backward}
    elsewhere = {s for i, op in enumerate(outline.operators[: outline.backward]) if i not in inside for s in op.reads}
    leaving = frozenset(
        numbers[s] for i in block.forward for s in outline.operators[i].makes if s in elsewhere and s not in shared
    )
    part = Outline(tuple(operators), sizes, forward=forward, backward=len(operators), outputs=outputs, pinned=leaving)
    key = tuple(
        [
            (op.likeness, op.seconds, op.reads, op.makes, op.workspace, op.can_repeat, op.may_overwrite)
            for op in operators
        ]
    )
    signature = (key, sizes, forward, outputs, leaving)
    return Part(part, tuple(origin), storages, frozenset(numbers[s] for s in entering), leaving, signature)


def shared_storages(outline: Outline, blocks: list[Block]) -> frozenset[int]:
    """Forward storages that operators of more than one block beside the maker's read: masks, position tables."""
    readers: dict[int, set[int]] = {}
    block_of = {i: n for n, b in enumerate(blocks) for positions in (b.forward, b.backward) for i in positions}
    for i, op in enumerate(outline.operators[: outline.backward]):
        for storage in op.reads:
            readers.setdefault(storage, set()).add(block_of[i])
    makers = outline.makers
    return frozenset(
        s for s, who in readers.items() if makers[s] < outline.forward and len(who - {block_of[makers[s]]}) > 1
    )


def classes_of(parts: list[Part]) -> Iterator[list[int]]:
    """Numbers of parts that are the same problem, class by class, in the order of their first."""
    members: dict[Hashable, list[int]] = {}
    for number, part in enumerate(parts):
        members.setdefault(part.signature, []).append(number)
    yield from members.values()
