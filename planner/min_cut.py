"""What to keep at a price of memory, exactly, where peaks within backward are left aside."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from .outline import Outline

_UNBOUNDED = 2**30
_FINEST = 2**21  # capacities are integers: the sum of all seconds in these units
_DEAREST = 2**25  # far more than making everything again costs, and dozens of it fit a flow of 32 bits


def cheapest_kept(outline: Outline, price: float) -> frozenset[int]:
    """The forward storages to keep such that seconds of recomputing plus ``price`` times bytes kept is least.

    A cut separates what is there in backward from what is not. Whatever backward reads is there: kept, which costs its bytes,
    or made again, which costs the operator's seconds and wants all that it reads there too. torch's
    ``min_cut_rematerialization_partition`` cuts for least bytes; with seconds on the other side, the solutions over all prices
    are the convex frontier of time against bytes kept.

    Args:
        price: seconds per byte, 0 or more.
    """
    count = outline.forward
    total = sum(op.seconds for op in outline.operators[:count]) or 1.0
    units = _FINEST / total
    source, sink, first_storage = 0, 1, 2 + count
    arcs: list[tuple[int, int, int]] = []
    candidates = frozenset(outline.candidates)
    for i, op in enumerate(outline.operators[:count]):
        arcs.append((2 + i, sink, 1 + int(op.seconds * units) if op.can_repeat else _UNBOUNDED))
        arcs += [(2 + i, first_storage + s, _UNBOUNDED) for s in op.reads]
        for s in op.makes:
            bytes_cost = 1 + min(int(price * outline.sizes[s] * units), _DEAREST)
            if s in candidates:
                arcs.append((first_storage + s, 2 + i, bytes_cost))
            elif s not in outline.outputs and s not in outline.read_in_backward:
                arcs.append(
                    (first_storage + s, sink, bytes_cost)
                )  # alive in backward only if something is made from it
    arcs += [(source, first_storage + s, _UNBOUNDED) for s in outline.read_in_backward if s in candidates]
    size = first_storage + len(outline.sizes)
    starts, ends, capacities = np.array(arcs, dtype=np.int32).reshape(-1, 3).T
    network = csr_array((np.minimum(capacities, _UNBOUNDED), (starts, ends)), shape=(size, size), dtype=np.int32)
    flow = maximum_flow(network, source, sink).flow
    residual = network - flow
    residual.eliminate_zeros()
    there = np.zeros(size, dtype=bool)
    there[breadth_first_order(residual, source, return_predecessors=False)] = True
    kept = {s for s in candidates if there[first_storage + s] and not there[2 + outline.makers[s]]}
    return frozenset(kept) | outline.always_kept


class Point(NamedTuple):
    """A point of the convex frontier.

    Attributes:
        extra_seconds: of what is made again.
        kept_bytes: of what backward, or what is made again, reads as forward left it.
        kept: the storages that may be read so.
    """

    extra_seconds: float
    kept_bytes: int
    kept: frozenset[int]


def convex_frontier(outline: Outline, most: int = 40) -> list[Point]:
    """Time against bytes kept, from keeping all that backward reads to the least: a point for each price that changes the best.

    Between two that are found, the price at which both cost the same tells whether there is another between them.

    Args:
        most: of cuts that are made.
    """
    everything = _point(outline, outline.read_in_backward | outline.always_kept)
    total = sum(op.seconds for op in outline.operators[: outline.forward]) or 1.0
    smallest = min((outline.sizes[s] for s in outline.candidates if outline.sizes[s]), default=1)
    least = _point(outline, cheapest_kept(outline, total / smallest))
    found = {everything, least}
    waiting = [(everything, least)]
    while waiting and most > 0:
        upper, lower = waiting.pop(max(range(len(waiting)), key=lambda i: _area(*waiting[i])))
        if _area(upper, lower) <= 0:
            break
        most -= 1
        price = (lower.extra_seconds - upper.extra_seconds) / (upper.kept_bytes - lower.kept_bytes)
        between = _point(outline, cheapest_kept(outline, price))
        if between not in found:
            found.add(between)
            waiting += [(upper, between), (between, lower)]
    return sorted(found, key=lambda p: (p.extra_seconds, p.kept_bytes, sorted(p.kept)))


def _area(upper: Point, lower: Point) -> float:
    """Of the rectangle between two points: what another point between them can gain at most."""
    return (upper.kept_bytes - lower.kept_bytes) * (lower.extra_seconds - upper.extra_seconds)


def _point(outline: Outline, kept: frozenset[int]) -> Point:
    repeated: set[int] = set()
    used = set(outline.read_in_backward & kept)
    waiting = list(outline.read_in_backward - kept)
    while waiting:
        maker = outline.makers[waiting.pop()]
        if maker not in repeated:
            repeated.add(maker)
            used.update(kept.intersection(outline.operators[maker].reads))
            waiting += [s for s in outline.operators[maker].reads if s not in kept]
    seconds = sum(outline.operators[i].seconds for i in sorted(repeated))
    return Point(seconds, sum(outline.sizes[s] for s in used - outline.outputs), kept)
