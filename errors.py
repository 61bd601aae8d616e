"""What stepgraph raises. Each message says what went wrong, where, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StepGraphError(Exception):
    """Base of everything that stepgraph raises on purpose."""


class StepGraphWarning(UserWarning):
    """Base of everything that stepgraph warns about."""


class ConfigError(StepGraphError, ValueError):
    """An argument, or a combination of model, optimizer and arguments, that cannot work."""


class NotYetError(ConfigError, NotImplementedError):
    """An argument that is part of the contract and that this version does not implement."""


class NotYetAttributeError(NotYetError, AttributeError):
    """The same for a method or property, so that ``hasattr`` says no."""


class CaptureError(StepGraphError, RuntimeError):
    """The model, loss or optimizer could not be turned into a graph. Nothing real was changed.

    Attributes:
        module_path: path of the innermost module that was running, "" for the root, None outside the model.
        source_line: ``file:line`` of the user's code, or None where there is none.
        remedy: what to do about it.
    """

    def __init__(
        self, what: str, *, module_path: str | None = None, source_line: str | None = None, remedy: str = ""
    ) -> None:
        self.module_path = module_path
        self.source_line = source_line
        self.remedy = remedy
        lines = [what]
        if module_path is not None:
            lines.append(f"  module: {module_path or '(root)'}")
        if source_line is not None:
            lines.append(f"  source: {source_line}")
        if remedy:
            lines.append(f"  remedy: {remedy}")
        super().__init__("\n".join(lines))


class GuardError(StepGraphError, RuntimeError):
    """Something the compiled step relies on was changed in a way that it cannot follow."""


class PlanError(StepGraphError, ValueError):
    """No plan keeps to the budget. Nothing was run.

    Attributes:
        least_bytes: the least budget that can be kept.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        super().__init__(message)


class PlanMismatchError(StepGraphError, ValueError):
    """A plan belongs to another step.

    Attributes:
        differing: the logical keys, or the parts of the fingerprint, that differ.
    """

    def __init__(self, message: str, differing: Iterable[str]) -> None:
        self.differing = tuple(differing)
        super().__init__(message)


class NonFiniteError(StepGraphError, ArithmeticError):
    """A loss or a gradient is not finite and ``nonfinite="raise"`` was asked for. Nothing was updated.

    Attributes:
        parameter: name of the first offending parameter, or None where the loss or the norm is to blame.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        self.parameter = parameter
        super().__init__(message)


class VerificationError(StepGraphError, AssertionError):
    """A graph broke a rule of the verifier: a defect of stepgraph, or of a pass that was added to it."""


def some_of(names: Sequence[str]) -> str:
    """The first three names, for messages."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
