"""The vocabulary of a step graph: roles of inputs, meanings of outputs, phases, logical keys."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch


class Phase(str, enum.Enum):
    """The part of the training step that a node belongs to, in execution order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    NORM = "norm"
    UPDATE = "update"

    def __str__(self) -> str:
        return self.value


CAPTURED_PHASES = (Phase.FORWARD, Phase.BACKWARD)


class InputRole(str, enum.Enum):
    """What a placeholder stands for."""

    PARAM = "param"
    BUFFER = "buffer"
    CHUNK = "chunk"
    STATE = "state"
    BATCH = "batch"
    HYPER = "hyper"
    CONSTANT = "constant"
    SCALER = "scaler"  # the loss scale
    MASTER = "master"  # float32 copy of a parameter held in 16 bit
    ACCUMULATOR = "accumulator"  # gradient of a parameter, summed over the micro-batches before
    WINDOW = "window"  # a number of the accumulation window
    GRAD = "grad"  # only in an update graph, before it is joined to a step graph

    def __str__(self) -> str:
        return self.value


class OutputRole(str, enum.Enum):
    """What an output means."""

    LOSS = "loss"
    AUX = "aux"
    GRAD = "grad"
    NORM = "norm"
    CLIP_FACTOR = "clip_factor"
    CLIPPED_NORM = "clipped_norm"  # the norm once more, of gradients that were clipped by value
    NONFINITE = "nonfinite"
    SPARED = "spared"  # not 0 where the step ended before its backward, since the loss is not finite
    LOSS_SUM = "loss_sum"  # weighted sum of the losses of the window so far
    BUFFER = "buffer"  # the tensor that forward bound to a buffer or attribute, to be bound by the runtime
    STATE = "state"  # optimizer state that the step created, to be stored by the runtime

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class InputSpec:
    """Role and name of one placeholder.

    Attributes:
        role: what it stands for.
        key: FQN for parameters, their masters and accumulators, and buffers, ``FQN/name`` for optimizer state, the pytree
            path for batch leaves, ``group.I.name`` for hyperparameters, ``scale`` for the loss scale, ``loss_sum``,
            ``weight`` and ``weight_sum`` for the window.
        aliases: the further names of a tied parameter or buffer.
    """

    role: InputRole
    key: str
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = " = ".join((self.key, *self.aliases))
        return f"{self.role} {names}"


@dataclass(frozen=True)
class OutputSpec:
    """Meaning of one output; ``key`` is a parameter's FQN, ``FQN/name`` of a state entry, or a path in ``aux``."""

    role: OutputRole
    key: str = ""

    def __str__(self) -> str:
        return f"{self.role} {self.key}".rstrip()


@dataclass(frozen=True)
class LogicalKey:
    """Names a value independently of FX node names: stable under unrelated changes of the model.

    Attributes:
        module: path of the module whose call produced it ("" is the root); for the norm and update phases the
            parameter or the stage that it belongs to.
        family: operator name without overload, such as ``addmm``.
        ordinal: counts equal (module, family, phase) in execution order.
        phase: see :class:`Phase`.
        shape: sizes; a symbolic size is its expression.
        dtype: short name such as ``f32``; "-" for what is not a tensor.
    """

    module: str
    family: str
    ordinal: int
    phase: Phase
    shape: tuple[int | str, ...]
    dtype: str

    @functools.cached_property
    def name(self) -> str:
        """The key without shape and dtype."""
        return f"{self.module or '(root)'}/{self.family}#{self.ordinal}@{self.phase}"

    def __str__(self) -> str:
        return f"{self.name} {describe_type(self.shape, self.dtype)}"


HALF_DTYPES = (torch.float16, torch.bfloat16)
_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def short_dtype(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``f32``; dtypes without a short name keep torch's."""
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def describe_type(shape: tuple[int | str, ...], dtype: str) -> str:
    """``f32[2,3]``, or "-" for what is not a tensor."""
    return "-" if dtype == "-" else f"{dtype}[{','.join(map(str, shape))}]"


def type_of(value: Any) -> tuple[tuple[int | str, ...], str]:
    """Shape and short dtype of a fake value; of the first tensor where the value is a list of them."""
    if isinstance(value, torch.Tensor):
        return tuple(s if isinstance(s, int) else str(s) for s in value.shape), short_dtype(value.dtype)
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                return type_of(item)
    return (), "-"
