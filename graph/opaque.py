"""What a call that is no operator tells of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import fx


@dataclass(frozen=True)
class InnerCall:
    """Calls of one operator, with equal arguments and layouts, within an opaque call.

    Attributes:
        node: one of them; its operands are placeholders.
        beside_bytes: the most that was there when it returned, beside operands and state of the opaque call.
        count: how many there are.
    """

    node: fx.Node
    beside_bytes: int
    count: int


@dataclass(frozen=True)
class Rehearsal:
    """What an opaque call does, found out without running it.

    Attributes:
        state_bytes: what it made and keeps for later steps; it is there from the second step on.
        workspace_bytes: the most that its tensors take at once, beside operands and state.
        calls: of operators, by what they have in common, in the order of their first calls.
        left_out: what could not be looked at, such as hooks; empty where nothing was.
    """

    state_bytes: int
    workspace_bytes: int
    calls: tuple[InnerCall, ...] = ()
    left_out: str = ""


@runtime_checkable
class Rehearses(Protocol):
    """The target of an opaque call that can tell what it does."""

    __name__: str

    def rehearsal(self) -> Rehearsal | None:
        """None where it could not be found out."""

    def held_bytes(self) -> int:
        """Bytes of the state that is kept now."""


def rehearsal_of(node: fx.Node) -> Rehearsal | None:
    """Of an opaque call; None of operators, which tell what they do, and where it could not be found out."""
    return node.target.rehearsal() if isinstance(node.target, Rehearses) else None
