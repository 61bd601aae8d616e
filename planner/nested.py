"""Nested plans of a step: its blocks as a chain, and what the chain's solutions keep, drop and make again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .blocks import Block, Part
from .chain import Chain, Kept, Restart, Stage, Way
from .options import Option
from .schedule import Choice, Use

PLANS = 24  # of those that the chain gives, at most
MOST_WAYS = 12  # options of a block that the chain looks at


class NestedChoices:
    """The choices that the chain of a step's blocks leads to.

    Args:
        fixed: for each block, bytes alive at the peak of its backward that no option changes.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        blocks: Sequence[Block],
        shared: frozenset[int],
        options: Sequence[list[Option]],
        fixed: np.ndarray,
    ) -> None:
        self._parts, self._blocks, self._shared, self._options = parts, blocks, shared, options
        entering = [_bytes(part, part.entering) for part in parts]
        always = [_bytes(part, _always_kept(part)) for part in parts]
        given = [_bytes(part, frozenset(part.outline.operators[part.outline.forward].makes)) for part in parts]
        earlier = np.concatenate(([0], np.cumsum(given)[:-1]))  # options count what backward gets among what is kept
        beside = fixed + np.cumsum(always) + earlier
        self._base = int(beside.min(initial=0))
        self._stages = [
            Stage(
                entering[j],
                sum(op.seconds for op in part.outline.operators[: part.outline.forward] if op.can_repeat),
                max(min(o.forward_bytes for o in offered) - entering[j] - always[j], 0),
                int(beside[j]) - self._base,
                _ways(offered, entering[j] + always[j], given[j]),
            )
            for j, (part, offered) in enumerate(zip(parts, options, strict=True))
        ]

    def choices(self) -> Iterator[Choice]:
        """One for each of a few budgets, from the least that the chain can do with."""
        stages = self._stages
        most = sum(s.entering_bytes for s in stages) + max(
            s.beside_bytes + max(w.peak_bytes for w in s.ways) for s in stages
        )
        for solution in Chain(stages, most).solutions(PLANS):
            yield self._realised(solution)

    def _realised(self, solution: tuple[Kept | Restart, ...]) -> Choice:
        kept: set[int] = set()
        renewed: set[Use] = set()
        forgotten: set[tuple[int, int]] = set()
        for done in solution:
            first = done.stage if isinstance(done, Kept) else done.start
            part = self._parts[first]
            kept.update(part.storages[s] for s in part.entering)
            if isinstance(done, Kept):
                choice = self._chosen(done)
                kept.update(choice.kept)
                renewed.update(choice.renewed)
            else:
                self._restart(done, renewed, forgotten)
        return Choice(frozenset(kept), frozenset(renewed), frozenset(forgotten))

    def _restart(self, stretch: Restart, renewed: set[Use], forgotten: set[tuple[int, int]]) -> None:
        """Before the backward of a stretch, nothing of its blocks is there; what its parts keep, they keep on the way."""
        when = self._blocks[stretch.end - 1].backward.start
        for j in range(stretch.start, stretch.end):
            forgotten.update((when, s) for s in self._made(self._parts[j]))
        for done in stretch.parts:
            if isinstance(done, Restart):
                self._restart(done, renewed, forgotten)
                continue
            choice = self._chosen(done)
            when = self._blocks[done.stage].backward.start
            forgotten.update((when, s) for s in self._made(self._parts[done.stage]) if s not in choice.kept)
            renewed.update(choice.renewed)

    def _chosen(self, done: Kept) -> Choice:
        """A block's option, by the step's numbers."""
        return self._parts[done.stage].in_whole(self._options[done.stage][done.way.option].choice)

    def _made(self, part: Part) -> Iterator[int]:
        """What the block's forward makes and can make again, by the step's numbers."""
        own = part.outline.candidates
        return (part.storages[s] for s in own if part.storages[s] not in self._shared and s not in part.leaving)


def _always_kept(part: Part) -> frozenset[int]:
    """What the block's forward makes and its backward reads that cannot be made again."""
    outline = part.outline
    return outline.always_kept & outline.read_in_backward - part.entering - part.leaving


def _bytes(part: Part, storages: frozenset[int]) -> int:
    return sum(part.outline.sizes[s] for s in storages)


def _ways(options: list[Option], always_bytes: int, given_bytes: int) -> tuple[Way, ...]:
    """A few of a block's options, both ends among them; the one that keeps least counts as keeping nothing."""
    nothing_kept = max(min(o.kept_bytes for o in options), always_bytes + given_bytes)
    found = [
        Way(number, o.extra_seconds, max(o.kept_bytes - nothing_kept, 0), max(o.peak_bytes - always_bytes, 0))
        for number, o in enumerate(options)
    ]
    nothing = sorted((w for w in found if not w.kept_bytes), key=lambda w: (w.peak_bytes, w.seconds))
    some = sorted((w for w in found if w.kept_bytes), key=lambda w: (w.kept_bytes, w.seconds))
    picked = [*nothing[:: max(len(nothing) // (MOST_WAYS // 2), 1)], *some[:: max(len(some) // (MOST_WAYS // 2), 1)]]
    return tuple(dict.fromkeys(picked))
