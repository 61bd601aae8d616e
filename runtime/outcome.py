"""What became of each update: read at once, or, where reading waits for the device, later and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import StepResult

LARGEST_DELAY = 2  # updates that a host may be ahead of what it has read


class Outcome:
    """Whether an update was applied; known at once, or when somebody asks.

    Args:
        read_code: gives that of ``stepgraph::nonfinite_code``; None where there was no update, or nothing was checked.
        reason: why there was none, where there should have been one.
        describe: text and offending parameter for a code that is not 0.
        moves_scale: whether the graph moved the loss scale.
    """

    def __init__(
        self,
        read_code: Callable[[], int] | None = None,
        reason: str | None = None,
        describe: Callable[[int], tuple[str, str | None]] | None = None,
        *,
        moves_scale: bool = False,
    ) -> None:
        self.read_code = read_code
        self.describe = describe
        self.moves_scale = moves_scale
        self.applied = False
        self.reason = reason
        self.loss_scale: float | None = None
        self.settle: Callable[[], None] | None = None

    def ask(self) -> Outcome:
        """Itself, once it is known; waits for the device."""
        if self.settle is not None:
            self.settle()
        return self


class Outcomes:
    """Results whose outcomes are not known yet, oldest first.

    Args:
        learn: is told each result, in order, with its code.
    """

    def __init__(self, learn: Callable[[StepResult, int], Any]) -> None:
        self._learn = learn
        self._unknown: deque[StepResult] = deque()

    def __len__(self) -> int:
        return len(self._unknown)

    def add(self, result: StepResult) -> None:
        """Takes a result whose outcome is to be learned later."""
        result.outcome.settle = lambda: self.settle(result.outcome)
        self._unknown.append(result)

    def settle(self, last: Outcome | None = None, *, keep: int = 0) -> None:
        """Learns outcomes, oldest first: up to ``last``, or all but the newest ``keep``."""
        while len(self._unknown) > keep:
            result = self._unknown.popleft()
            outcome, read_code = result.outcome, result.outcome.read_code
            outcome.settle, outcome.read_code = None, None
            self._learn(result, 0 if read_code is None else read_code())
            if outcome is last:
                return
