"""The memory simulator: how many bytes are alive at each call of a step, and whose they are.

Every storage is one interval, from the call that makes it to the last call that reads any value on it: views keep their base,
all results of an operator live until the last of them was taken, and what a call reads, makes and needs as workspace is counted
before anything is freed; a result that is written over an operand takes that operand's place. That is what the executor does,
so on the CPU the figure is the allocator's, to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from ..graph import (
    CAPTURED_PHASES,
    InputRole,
    OutputRole,
    Phase,
    StepGraph,
    last_uses,
    name_of,
    overwritten_operands,
    rehearsal_of,
    storage_sizes,
    storages_of,
)

PARAMETERS = "parameters"
BUFFERS = "buffers"
STATE = "optimizer state"
MASTERS = "float32 masters"
BATCH = "batch"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
RECOMPUTED = "recomputed"
TEMPORARIES = "temporaries"
WORKSPACE = "workspace"
CATEGORIES = (
    PARAMETERS, MASTERS, STATE, BUFFERS, BATCH, GRADIENTS, ACTIVATIONS, RECOMPUTED, TEMPORARIES, WORKSPACE,
)  # fmt: skip

_OF_ROLE = {
    InputRole.PARAM: PARAMETERS,
    InputRole.CHUNK: PARAMETERS,
    InputRole.BUFFER: BUFFERS,
    InputRole.CONSTANT: BUFFERS,
    InputRole.STATE: STATE,
    InputRole.MASTER: MASTERS,
    InputRole.BATCH: BATCH,
    InputRole.ACCUMULATOR: GRADIENTS,
    InputRole.GRAD: GRADIENTS,
}


@dataclass(frozen=True)
class Peak:
    """Where a step needs most memory.

    Attributes:
        peak_bytes: everything that is alive at once, inputs of the step included.
        position: of the call, in execution order; -1 where no call needs more than the inputs.
        at: the call's logical key.
        by_category: bytes of each of ``CATEGORIES`` that has any; they add up to ``peak_bytes``.
        largest: names of the storages alive there that the step made, and their bytes, the largest first.
    """

    peak_bytes: int
    position: int
    at: str
    by_category: dict[str, int]
    largest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MemoryTimeline:
    """The storages that a step makes, as intervals of positions in its execution order, and what it starts with.

    Attributes:
        births: position of the call that makes each storage.
        deaths: position of the last call that holds it; the number of calls where it outlives the step.
        sizes: its bytes.
        categories: its category, of ``CATEGORIES``.
        names: the logical key of the value that it was made for.
        workspace: bytes that each call needs while it runs.
        calls: the logical key of each call.
        resident: bytes of the step's inputs by category.
        seeds: of these, constants that only the state is made of which the step creates.
    """

    births: np.ndarray
    deaths: np.ndarray
    sizes: np.ndarray
    categories: tuple[str, ...]
    names: tuple[str, ...]
    workspace: np.ndarray
    calls: tuple[str, ...]
    resident: Mapping[str, int]
    seeds: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the step's inputs."""
        return sum(self.resident.values())

    def live_bytes(self) -> np.ndarray:
        """Bytes alive while each call runs, the step's inputs included; int64, one for each call."""
        live: np.ndarray = live_bytes(self.births, self.deaths, self.sizes, len(self.calls)) + self.workspace
        return live + self.resident_bytes

    def settled(self) -> MemoryTimeline:
        """As in every later step: the optimizer state that this one creates is there from the beginning."""
        created = np.array([category == STATE for category in self.categories], dtype=bool)
        resident = without_seeds(self.resident, self.seeds)
        return replace(self, births=np.where(created, 0, self.births), resident=resident, seeds=0)

    def peak(self, largest: int = 10) -> Peak:
        """The call at which most is alive, the first of equals, and what that is."""
        live = self.live_bytes()
        if not len(live):
            return Peak(self.resident_bytes, -1, "", dict(self.resident), ())
        position = int(live.argmax())
        alive = np.flatnonzero((self.births <= position) & (position <= self.deaths))
        categories: Counter[str] = Counter(self.resident)
        for index in alive:
            categories[self.categories[index]] += int(self.sizes[index])
        categories[WORKSPACE] += int(self.workspace[position])
        order = sorted(alive, key=lambda i: (-self.sizes[i], i))[:largest]
        return Peak(
            int(live[position]),
            position,
            self.calls[position],
            {c: categories[c] for c in CATEGORIES if categories[c]},
            tuple((self.names[i], int(self.sizes[i])) for i in order),
        )


def live_bytes(births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray, calls: int) -> np.ndarray:
    """Bytes alive at each of ``calls`` positions, of intervals that include both their ends; int64."""
    changes = np.zeros(calls + 2, dtype=np.int64)
    np.add.at(changes, births, sizes)
    np.add.at(changes, np.minimum(deaths, calls) + 1, -sizes)
    live: np.ndarray = np.cumsum(changes)[:calls]
    return live


def intervals(held: Iterable[Sequence[int]], last_use: Sequence[int]) -> dict[int, tuple[int, int]]:
    """First and last position of each storage.

    Args:
        held: for each call, the storages behind its value.
        last_use: for each call, the position of the last call that reads its value, or its own.
    """
    found: dict[int, tuple[int, int]] = {}
    for position, storages in enumerate(held):
        for storage in storages:
            birth, death = found.get(storage, (position, position))
            found[storage] = (birth, max(death, last_use[position]))
    return found


def simulate(graph: StepGraph, workspace_bytes: Callable[[fx.Node], int] = lambda node: 0) -> MemoryTimeline:
    """The memory of a rewritten step graph, as the executor runs it.

    Sizes that depend on data are counted as 0.

    Args:
        workspace_bytes: what a call allocates and frees while it runs.
    """
    calls = graph.calls
    given = {key for node in graph.placeholders for key in storages_of(node)}
    sizes = {key: size for node in calls for key, size in storage_sizes(node).items()}
    held = [[key for key in dict.fromkeys(storages_of(n)) if key not in given] for n in calls]
    found = intervals(held, _last_positions(graph))
    overwritten = overwritten_operands(graph)
    for position, node in enumerate(calls):
        if node in overwritten:
            key = storages_of(overwritten[node])[0]
            found[key] = (found[key][0], position - 1)
    makers = [calls[birth] for birth, _ in found.values()]
    category = categories_of(graph)
    kept = [(i, inside.state_bytes) for i, n in enumerate(calls) if (inside := rehearsal_of(n)) is not None]
    return MemoryTimeline(
        births=np.array([birth for birth, _ in found.values()] + [i for i, _ in kept], dtype=np.int64),
        deaths=np.array([death for _, death in found.values()] + [len(calls) for _ in kept], dtype=np.int64),
        sizes=np.array([sizes[key] for key in found] + [size for _, size in kept], dtype=np.int64),
        categories=(
            *(category(node, key) for node, key in zip(makers, found, strict=True)),
            *(STATE for _ in kept),
        ),
        names=(*map(name_of, makers), *(name_of(calls[i]) for i, _ in kept)),
        workspace=np.array([workspace_bytes(n) for n in calls], dtype=np.int64),
        calls=tuple(name_of(node) for node in calls),
        resident=resident_bytes(graph),
        seeds=seed_bytes(graph),
    )


def resident_bytes(graph: StepGraph) -> dict[str, int]:
    """Bytes of the graph's inputs by category, each storage once, and of what model and optimizer hold beside them.

    Hyperparameters and other numbers are left out.
    """
    counted: set[int] = set()
    totals: Counter[str] = Counter()
    for node, spec in zip(graph.placeholders, graph.inputs, strict=True):
        if (category := category_of_input(spec.role)) is not None:
            sizes = storage_sizes(node)
            totals[category] += sum(size for key, size in sizes.items() if key not in counted)
            counted |= sizes.keys()
    totals += unread_bytes(graph)
    return {c: totals[c] for c in CATEGORIES if totals[c]}


def seed_bytes(graph: StepGraph) -> int:
    """Bytes of the constants that a first update makes state of, and no later one needs: counts of steps start from one."""
    created = {key for v in graph.output_nodes(OutputRole.STATE).values() for key in storages_of(v)}
    constants = graph.input_nodes(InputRole.CONSTANT).values()
    seeds = [n for n in constants if n.users and all(created.issuperset(storages_of(user)) for user in n.users)]
    return sum({key: size for node in seeds for key, size in storage_sizes(node).items()}.values())


def without_seeds(resident: Mapping[str, int], seeds: int) -> dict[str, int]:
    """Bytes of a step's inputs by category, as in every later step."""
    later = {**resident, BUFFERS: resident.get(BUFFERS, 0) - seeds}
    return {category: size for category, size in later.items() if size}


def unread_bytes(graph: StepGraph) -> Counter[str]:
    """Bytes of what model and optimizer hold and the step does not read, by category."""
    read = {key for node in graph.placeholders for key in storages_of(node)}
    totals: Counter[str] = Counter()
    for key, (role, size) in graph.unread.items():
        if key not in read:
            totals[_OF_ROLE[role]] += size
    return totals


def _last_positions(graph: StepGraph) -> list[int]:
    position = {node: i for i, node in enumerate(graph.calls)}
    last = [len(position)] * len(position)
    for user, values in last_uses(graph).items():
        for value in values:
            if value in position:
                last[position[value]] = position[user]
    return last


def gradient_storages(graph: StepGraph) -> set[int]:
    """Storages that a call after backward reads, or that outlive the step: gradients, where backward made them."""
    after = [n for n in graph.calls if n.meta["phase"] not in CAPTURED_PHASES]
    return {
        key for node in (*after, graph.output_node) for operand in node.all_input_nodes for key in storages_of(operand)
    }


def categories_of(graph: StepGraph) -> Callable[[fx.Node, int], str]:
    """A function that gives the category of a storage that a call makes."""
    gradients = gradient_storages(graph)
    states = {
        key for v in graph.output_nodes(OutputRole.STATE).values() if isinstance(v, fx.Node) for key in storages_of(v)
    }
    return lambda maker, key: STATE if key in states else category_of(maker, key in gradients)


def category_of_input(role: InputRole) -> str | None:
    """The category of an input of a step; None of hyperparameters and other numbers."""
    return _OF_ROLE.get(role)


def category_of(maker: fx.Node, is_gradient: bool) -> str:
    """The category of what a call allocates; ``is_gradient``: see :func:`gradient_storages`."""
    phase = maker.meta["phase"]
    if maker.meta.get("recomputes") is not None:
        return RECOMPUTED
    if phase is Phase.FORWARD:
        return ACTIVATIONS
    if phase is Phase.BACKWARD and is_gradient:
        return GRADIENTS
    return TEMPORARIES
