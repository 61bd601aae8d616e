"""The clock: when each call of a step runs, on a channel for computing, one for communication and one for copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import fx

from ..graph import StepGraph, effects_of

AGAIN = "computing again"


class Channel(Enum):
    """What a call occupies while it runs. Calls of one channel run in order; channels run beside each other."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


class Task(NamedTuple):
    """One call.

    Attributes:
        channel: that it occupies.
        seconds: that it takes.
        after: positions of the tasks that must have ended.
        stage: what it belongs to, for sums.
    """

    channel: Channel
    seconds: float
    after: tuple[int, ...]
    stage: str


@dataclass(frozen=True)
class Timeline:
    """Tasks with the time at which each starts.

    Attributes:
        tasks: in the order in which they are issued.
        starts: seconds from the start of the step.
    """

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Until the last task ends."""
        return max((start + task.seconds for start, task in zip(self.starts, self.tasks, strict=True)), default=0.0)

    def seconds_by_stage(self) -> dict[str, float]:
        """For each stage, in the order of their first tasks, the seconds of its tasks."""
        totals: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            totals[task.stage] += task.seconds
        return dict(totals)


def timeline(tasks: Iterable[Task]) -> Timeline:
    """Starts each task as soon as its channel is free and what it waits for has ended."""
    issued = tuple(tasks)
    free = dict.fromkeys(Channel, 0.0)
    starts: list[float] = []
    ends: list[float] = []
    for task in issued:
        start = max([free[task.channel], *(ends[i] for i in task.after)])
        starts.append(start)
        ends.append(start + task.seconds)
        free[task.channel] = ends[-1]
    return Timeline(issued, tuple(starts))


def timeline_of(graph: StepGraph, seconds: Callable[[fx.Node], float]) -> Timeline:
    """The timeline of a step graph, as the executor issues it."""
    position = {node: i for i, node in enumerate(graph.calls)}
    return timeline(
        Task(
            channel_of(node),
            seconds(node),
            tuple(position[n] for n in node.all_input_nodes if n in position),
            stage_of(node),
        )
        for node in graph.calls
    )


def channel_of(node: fx.Node) -> Channel:
    """The channel that a call occupies."""
    effects = effects_of(node)
    if effects.collective and not waits(node):
        return Channel.COMMUNICATION
    return Channel.COPY if effects.moves else Channel.COMPUTE


def waits(node: fx.Node) -> bool:
    """Whether a call does nothing but wait for a collective."""
    return getattr(node.target, "_opname", "") == "wait_tensor"


def stage_of(node: fx.Node) -> str:
    """The phase of a call, or that it computes again."""
    return AGAIN if node.meta.get("recomputes") is not None else str(node.meta["phase"])
