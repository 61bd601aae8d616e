"""A step as the planner sees it: operators with their seconds, and the storages that they read and make.

Views cost no bytes and next to no time, so they are folded into the operators that read them. Everything else about a graph,
such as what may be computed twice, is decided here once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ..graph import (
    OutputRole,
    Phase,
    StepGraph,
    allocated_by,
    can_repeat,
    has_unknown_calls,
    is_view,
    likeness_of,
    name_of,
    overwritable,
    rehearsal_of,
    storage_sizes,
    storages_of,
    written_before_update,
)
from .memory import CATEGORIES, STATE, category_of, gradient_storages, resident_bytes, seed_bytes, without_seeds


@dataclass(frozen=True)
class Operator:
    """One call that computes something.

    Attributes:
        name: its logical key.
        seconds: predicted time.
        reads: the storages behind its operands that the step made, by number.
        makes: the storages that it allocates.
        workspace: bytes that it needs while it runs.
        can_repeat: whether running it a second time in backward gives the same bits and changes nothing.
        may_overwrite: storages among ``reads``, as large as the only result, which is written over the first of them that
            nothing else needs any more.
        likeness: equal for operators that compute the same on operands of the same layout.
        stage: the phase that it belongs to.
    """

    name: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace: int = 0
    can_repeat: bool = True
    likeness: int = 0
    may_overwrite: tuple[int, ...] = ()
    stage: str = ""


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


class ForwardRuns(NamedTuple):
    """The runs of forward.

    Attributes:
        runs: in execution order.
        storages: of which storage each copy is one.
        current: the copy of each storage, -1 for none.
        births: position of the run that makes each copy.
        deaths: of the last run that makes or reads it.
    """

    runs: tuple[Run, ...]
    storages: tuple[int, ...]
    current: tuple[int, ...]
    births: tuple[int, ...]
    deaths: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """Operators in execution order: the forward ones, then those of backward, then the rest.

    Attributes:
        operators: in execution order.
        sizes: bytes of each storage.
        forward: number of forward operators.
        backward: number of forward and backward operators.
        outputs: storages that outlive the step.
        pinned: further forward storages that are never dropped.
        categories: of each storage, of :data:`memory.CATEGORIES`.
        given: bytes of the step's inputs, alive throughout, by category.
        beside_seconds: that the step takes beside its operators.
    """

    operators: tuple[Operator, ...]
    sizes: tuple[int, ...]
    forward: int
    backward: int
    outputs: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    categories: tuple[str, ...] = ()
    given: Mapping[str, int] = field(default_factory=dict)
    beside_seconds: float = 0.0

    @cached_property
    def given_bytes(self) -> int:
        """Bytes of the step's inputs."""
        return sum(self.given.values())

    @cached_property
    def makers(self) -> dict[int, int]:
        """The operator that makes each storage."""
        return {storage: i for i, op in enumerate(self.operators) for storage in op.makes}

    @cached_property
    def read_in_backward(self) -> frozenset[int]:
        """Forward storages that an operator of backward, or one after it, reads."""
        later = {s for op in self.operators[self.forward :] for s in op.reads}
        return frozenset(s for s in later if self.makers[s] < self.forward)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """Forward storages that may be dropped and made again, in the order in which they are made."""
        fixed = self.outputs | self.pinned
        repeatable = [op for op in self.operators[: self.forward] if op.can_repeat]
        return tuple(s for op in repeatable for s in op.makes if s not in fixed)

    @cached_property
    def always_kept(self) -> frozenset[int]:
        """Forward storages that may not be dropped."""
        made = {s for op in self.operators[: self.forward] for s in op.makes}
        return frozenset(made.difference(self.candidates))

    @cached_property
    def forward_runs(self) -> ForwardRuns:
        """What no plan changes."""
        runs: list[Run] = []
        storages: list[int] = []
        births: list[int] = []
        deaths: list[int] = []
        current = [-1] * len(self.sizes)
        for number, operator in enumerate(self.operators[: self.forward]):
            reads = tuple(current[s] for s in operator.reads)
            for copy in reads:
                deaths[copy] = number
            makes = tuple(range(len(storages), len(storages) + len(operator.makes)))
            storages.extend(operator.makes)
            births.extend([number] * len(makes))
            deaths.extend([number] * len(makes))
            for storage, copy in zip(operator.makes, makes, strict=True):
                current[storage] = copy
            runs.append(Run(number, False, reads, makes, tuple(range(len(makes)))))
        return ForwardRuns(tuple(runs), tuple(storages), tuple(current), tuple(births), tuple(deaths))

    @property
    def seconds(self) -> float:
        """Time of a step in which nothing runs again."""
        return sum(op.seconds for op in self.operators) + self.beside_seconds


def outline_of(
    graph: StepGraph,
    seconds: Callable[[fx.Node], float],
    workspace_bytes: Callable[[fx.Node], int] = lambda node: 0,
    beside_seconds: float = 0.0,
) -> Outline:
    """The outline of a step graph, before anything is recomputed.

    Naming memory is counted with the operator that made it, since what is made again is named again.

    Optimizer state that the step creates counts as given: it is there in every later step.
    """
    fixed = written_before_update(graph)
    allocated = allocated_by(graph.graph)
    numbers: dict[int, int] = {}
    sizes: list[int] = []
    categories: list[str] = []
    gradients = gradient_storages(graph)
    likenesses: dict[Hashable, int] = {}
    operators: list[Operator] = []
    counts: Counter[Phase] = Counter()
    overwrites = not has_unknown_calls(graph)
    naming: dict[int, float] = defaultdict(float)
    for node in graph.calls:
        if is_view(node):
            key = storages_of(node)[0]
            if key in numbers:
                naming[numbers[key]] += seconds(node)
            else:
                beside_seconds += seconds(node)
            continue
        made, own_sizes = allocated[node], storage_sizes(node)
        for key in made:
            numbers[key] = len(sizes)
            sizes.append(own_sizes[key])
            categories.append(category_of(node, key in gradients))
        read = {key for operand in node.all_input_nodes for key in storages_of(operand)}
        operators.append(
            Operator(
                name=name_of(node),
                seconds=seconds(node),
                reads=tuple(sorted(numbers[key] for key in read if key in numbers)),
                makes=tuple(numbers[key] for key in made),
                workspace=workspace_bytes(node),
                can_repeat=node.meta["phase"] is Phase.FORWARD and can_repeat(node, fixed),
                likeness=likenesses.setdefault(likeness_of(node), len(likenesses)),
                may_overwrite=tuple(
                    numbers[key] for n in overwritable(node) for key in storages_of(n) if key in numbers and overwrites
                ),
                stage=str(node.meta["phase"]),
            )
        )
        counts[node.meta["phase"]] += 1
    operators = [replace(op, seconds=op.seconds + sum(naming[s] for s in op.makes)) for op in operators]
    created = {key for v in graph.output_nodes(OutputRole.STATE).values() for key in storages_of(v)}
    given = Counter(without_seeds(resident_bytes(graph), seed_bytes(graph)))
    for key in created & numbers.keys():
        given[STATE] += sizes[numbers[key]]
        sizes[numbers[key]] = 0
    given[STATE] += sum(inside.state_bytes for n in graph.calls if (inside := rehearsal_of(n)) is not None)
    outputs = {key for v in graph.output_values if isinstance(v, fx.Node) for key in storages_of(v)}
    return Outline(
        tuple(operators),
        tuple(sizes),
        forward=counts[Phase.FORWARD],
        backward=counts[Phase.FORWARD] + counts[Phase.BACKWARD],
        outputs=frozenset(numbers[key] for key in outputs if key in numbers),
        categories=tuple(categories),
        given={c: given[c] for c in CATEGORIES if given[c]},
        beside_seconds=beside_seconds,
    )
