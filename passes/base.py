"""What a pass is."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar

from ..graph import OutputRole, Phase, StepGraph


@dataclass(frozen=True)
class PassResult:
    """What one run of a pass did.

    Attributes:
        changed: whether the graph differs from before.
        intended: how many things of each kind the pass was meant to touch.
        touched: how many it did touch; the runner raises where this differs from ``intended``.
    """

    changed: bool
    intended: dict[str, int] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a step graph: a frozen dataclass whose fields are its options, without state between runs.

    Class attributes:
        name: the name in reports, dumps and ``STEPGRAPH_DISABLE``; also that of its file.
        requires: outputs that the graph must have before.
        guarantees: outputs that it has afterwards.
        touches: phases whose nodes the pass may add, remove or change; the runner checks that all others are as before.
        optional: whether leaving it out gives the same numbers.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[OutputRole, ...]] = ()
    guarantees: ClassVar[tuple[OutputRole, ...]] = ()
    touches: ClassVar[frozenset[Phase]] = frozenset()
    optional: ClassVar[bool] = False

    @abc.abstractmethod
    def run(self, graph: StepGraph) -> PassResult:
        """Rewrites ``graph`` in place."""
