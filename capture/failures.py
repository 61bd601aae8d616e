"""Turning what goes wrong inside a trace into a :class:`CaptureError` that says where and what to do."""

from __future__ import annotations

import re
import traceback

from ..errors import CaptureError, StepGraphError
from ..torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedFakeTensorException,
)
from .context import TraceContext, is_internal_file, user_source_line

_SYMBOL_IN_TEXT = re.compile(r"unsupported format string passed to Sym|must be real number, not Sym")
_DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode, DynamicOutputShapeException)


def capture_error(error: Exception, context: TraceContext, during: str) -> StepGraphError:
    """The error to raise instead of ``error``, which came out of a trace."""
    line = source_line_of(error) or user_source_line()
    module = context.failed_module if context.failed_module is not None else context.module_path
    if isinstance(error, CaptureError):
        if error.module_path is None or error.source_line is None:
            return CaptureError(
                str(error.args[0]).split("\n")[0],
                module_path=error.module_path if error.module_path is not None else module,
                source_line=error.source_line or line,
                remedy=error.remedy,
            )
        return error
    if isinstance(error, StepGraphError):
        return error
    if (operator := _unsupported_operator(error)) is not None:
        return CaptureError(
            f"{during} calls {operator}, whose result has a shape or value that only real data determine.",
            module_path=module,
            source_line=line,
            remedy="use an operator whose output shape follows from its inputs' shapes, or compute it outside of the step",
        )
    if is_data_dependent(error):
        return CaptureError(
            f"{during} needs the value of a tensor in Python: it branches on it, takes a shape from it, formats it, or "
            f"converts it with float() or int(), which one graph cannot follow: {_first_line(error)}",
            module_path=module,
            source_line=line,
            remedy="express the choice with torch.where or a mask; compute with the tensor itself instead of a number made "
            "of it (BatchNorm: with a number for momentum, not None); take numbers from the batch as Python values, which are "
            "guarded; move the decision out of the step; and to log a value, return the tensor as aux",
        )
    if isinstance(error, NotImplementedError) and (found := re.search(r"HigherOrderOperator (\w+)", str(error))):
        return CaptureError(
            f"{during} calls the higher-order operator {found[1]}, which takes functions and is not supported.",
            module_path=module,
            source_line=line,
            remedy="use plain operators: torch.where for torch.cond, a Python loop for torch.scan and the like",
        )
    if isinstance(error, UnsupportedFakeTensorException):
        return CaptureError(
            f"{during} does something that cannot be traced without real data: {_first_line(error)}",
            module_path=module,
            source_line=line,
            remedy="keep tensors in parameters, buffers or attributes of modules, or in the batch, and compute with torch "
            "operators only",
        )
    return CaptureError(
        f"{during} failed: {type(error).__name__}: {_first_line(error)}",
        module_path=module,
        source_line=line,
        remedy=(
            "check that optimizer.step() works in eager, with the state and the groups that it has"
            if during.endswith("step()")
            else "run the same batch in eager: what fails there too is in the model; what works there is something that a "
            "trace cannot follow, such as numpy(), packed sequences, or an operator without register_fake"
        )
        + "; the original error is chained below",
    )


_READS_A_VALUE = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal")


def _unsupported_operator(error: BaseException | None) -> str | None:
    """The operator that fake tensors cannot run, where that is not just a read of a value in Python."""
    while error is not None:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            name = str(getattr(error, "func", error))
            return None if name.startswith(_READS_A_VALUE) else name
        error = error.__cause__ or error.__context__
    return None


def is_data_dependent(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a trace came upon the value of a tensor."""
    while error is not None:
        if isinstance(error, _DATA_DEPENDENT) or (isinstance(error, TypeError) and _SYMBOL_IN_TEXT.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def source_line_of(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of the user's code that an error passed through, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_internal_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
