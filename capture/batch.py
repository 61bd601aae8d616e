"""How a batch reaches the model, and what of it a capture depends on."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CaptureError, ConfigError
from ..graph import HALF_DTYPES
from ..torch_compat import FakeTensor, pytree, storage_key


@dataclass(frozen=True)
class LossCall:
    """How to get the loss from a model and a batch.

    ``loss_fn(model, batch)``, or ``criterion(model(inputs), targets)`` for ``batch = (inputs, targets)``, or neither:
    the model is called with the batch and its output is, or carries, the loss.

    Attributes:
        autocast_dtype: 16-bit dtype that model and loss run under autocast in, or None.
        device_type: device type of that autocast, the parameters' own.
        fp32_outputs: whether what the model returns in 16 bit reaches loss and aux in float32.
        input_dtype: what floating tensors that the model is called with are cast to; None leaves them.
    """

    loss_fn: Callable[[nn.Module, Any], Any] | None = None
    criterion: Callable[[Any, Any], Any] | None = None
    autocast_dtype: torch.dtype | None = None
    device_type: str = "cpu"
    fp32_outputs: bool = False
    input_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.loss_fn is not None and self.criterion is not None:
            raise ConfigError(
                "loss_fn and criterion were both given. They are two ways to say the same thing: pass loss_fn(model, "
                "batch) or criterion(model(inputs), targets), not both."
            )
        for name, value in (("loss_fn", self.loss_fn), ("criterion", self.criterion)):
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be callable, got {type(value).__name__}")

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Runs the model; returns the loss and the auxiliary output (None where there is none)."""
        with contextlib.ExitStack() as stack:
            if self.autocast_dtype is not None:
                stack.enter_context(torch.autocast(self.device_type, self.autocast_dtype))
            if self.fp32_outputs:
                handle = model.register_forward_hook(lambda _module, _args, output: pytree.tree_map(_widened, output))
                stack.callback(handle.remove)
            if self.input_dtype is not None:
                cast = functools.partial(_cast, self.input_dtype)
                handle = model.register_forward_pre_hook(
                    lambda _module, args, kwargs: (pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)),
                    with_kwargs=True,
                )
                stack.callback(handle.remove)
            return self._run(model, batch)

    def _run(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if self.loss_fn is not None:
            out = self.loss_fn(model, batch)
            if isinstance(out, tuple):
                if len(out) != 2:
                    raise CaptureError(
                        f"loss_fn returned a tuple of {len(out)}; expected the loss, or (loss, aux).",
                        remedy="return the loss, or a pair of the loss and a pytree of tensors",
                    )
                return out
            return out, None
        if self.criterion is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise CaptureError(
                    f"with criterion=, a batch is (inputs, targets), got {_describe(batch)}.",
                    remedy="pass pairs, or use loss_fn=lambda model, batch: ...",
                )
            inputs, targets = batch
            return self.criterion(model(inputs), targets), None
        return _loss_in(_call_model(model, batch)), None


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
    return value.float() if is_half else value


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _call_model(model: nn.Module, batch: Any) -> Any:
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})
    if isinstance(batch, (tuple, list)):
        args = tuple(batch)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"without criterion and loss_fn the model is called with the batch, a {_describe(batch)}, and its forward does not "
            f"take it: {error}.",
            module_path="",
            remedy="pass criterion= for batches (inputs, targets), or loss_fn=lambda model, batch: ...",
        ) from error
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _loss_in(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(
            f"the model's output ({_describe(output)}) is not a tensor and carries no loss.",
            module_path="",
            remedy="pass loss_fn=lambda model, batch: ..., or make the model return a scalar loss, an object with .loss, "
            'or a dict with "loss" (Hugging Face models need labels in the batch)',
        )
    return loss


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {sorted(map(str, value))}"
    return type(value).__name__


@dataclass(frozen=True)
class FlatBatch:
    """A batch as a flat list of leaves.

    Attributes:
        leaves: tensors and constants, in pytree order.
        spec: structure of the batch; hashable.
        source: the batch itself.
    """

    leaves: list[Any]
    spec: Hashable
    source: Any

    @property
    def paths(self) -> list[str]:
        """The pytree path of each leaf, such as ``input_ids`` or ``0``."""
        return [_path_name(path) for path, _ in pytree.tree_flatten_with_path(_plain(self.source))[0]]

    @property
    def tensor_positions(self) -> list[int]:
        """Which leaves are tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def describe(self) -> list[str]:
        """Each leaf in words, such as ``input_ids: int64[2, 8]``."""
        return [f"{path}: {_describe_leaf(leaf)}" for path, leaf in zip(self.paths, self.leaves, strict=True)]

    def rebuilt(self, leaves: list[Any]) -> Any:
        """A batch of the same structure and types that holds ``leaves``."""
        return _with_types_of(self.source, pytree.tree_unflatten(leaves, self.spec[1]))  # type: ignore[index]

    def copied(self) -> Any:
        """A batch with copies of the tensors."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        copies = iter(copy.deepcopy([t.detach() for t in tensors]))  # at once, so that shared memory stays shared
        return self.rebuilt([_copy_of(leaf, copies) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def flatten_batch(batch: Any) -> FlatBatch:
    """Flattens ``batch``. Mappings that are no registered pytree (HF's ``BatchEncoding``) are flattened as dicts are."""
    leaves, spec = pytree.tree_flatten(_plain(batch))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise CaptureError(
                f"the batch holds a sparse tensor ({leaf.layout}, {list(leaf.shape)}), which is not supported.",
                remedy="pass it dense (to_dense())",
            )
    kind = None if isinstance(batch, Tensor) else type(batch)  # a fake tensor stands for a real one
    return FlatBatch(leaves, (kind, spec), batch)


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        items = [_plain(item) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    if type(value) is dict or _is_foreign_mapping(value):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _with_types_of(source: Any, plain: Any) -> Any:
    if type(source) in (tuple, list):
        return type(source)(_with_types_of(s, p) for s, p in zip(source, plain, strict=True))
    if type(source) is dict:
        return {name: _with_types_of(item, plain[name]) for name, item in source.items()}
    if not _is_foreign_mapping(source):
        return plain
    rebuilt = copy.copy(source)
    for name, item in source.items():
        rebuilt[name] = _with_types_of(item, plain[name])
    return rebuilt


def _is_foreign_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, dict)


def _copy_of(tensor: Tensor, copies: Iterator[Tensor]) -> Tensor:
    return next(copies).requires_grad_(tensor.requires_grad)


def _path_name(path: tuple[Any, ...]) -> str:
    names = [str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))) for entry in path]
    return ".".join(names) or "batch"


def batch_signature(batch: FlatBatch, device: torch.device) -> Hashable:
    """What a capture bakes in of a batch: structure, tensor metadata, and the value of everything else.

    A meta tensor, as ``prepare`` may be given, stands for one on ``device``.
    """
    return (batch.spec, tuple([_leaf_signature(leaf, device) for leaf in batch.leaves]), _repeats(batch.leaves))


def _repeats(leaves: list[Any]) -> Hashable:
    """Which tensors share memory, and where: writing one then writes the other."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]
    if len(tensors) < 2:
        return None
    keys = [storage_key(t) for t in tensors]
    if len(set(keys)) == len(keys):
        return None
    return tuple((keys.index(key), t.storage_offset(), t.stride()) for key, t in zip(keys, tensors, strict=True))


def _leaf_signature(leaf: Any, device: torch.device) -> Hashable:
    if isinstance(leaf, Tensor):
        if type(leaf) not in (Tensor, nn.Parameter, FakeTensor):
            raise ConfigError(
                f"the batch holds a {type(leaf).__name__}; pass plain tensors, with x.as_subclass(torch.Tensor)"
            )
        strides = None if leaf.is_contiguous() else leaf.stride()
        bits = (leaf.requires_grad, leaf.is_conj(), leaf.is_neg())
        return (leaf.shape, leaf.dtype, device if leaf.is_meta else leaf.device, strides, bits)
    if isinstance(leaf, (float, complex)):
        return (type(leaf), repr(leaf))  # tells 0.0 from -0.0, and nan equals itself
    if is_plain(leaf):
        return (type(leaf), leaf)
    raise ConfigError(
        f"the batch holds a {type(leaf).__name__}, whose contents the step cannot see. Put tensors, numbers and strings into "
        "the batch, in dicts, lists, tuples or named tuples."
    )


def is_plain(value: Any) -> bool:
    """Whether a leaf that is no tensor is known by its value: numbers, strings, enums and the like."""
    plain = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, range, type(None))
    return isinstance(value, plain)


def varying_leaves(paths: list[str], signatures: list[Hashable]) -> list[str]:
    """Which leaves differ between signatures of equal structure, as ``path: what varies``."""
    per_leaf = list(zip(*[signature[1] for signature in signatures], strict=False))  # type: ignore[index]
    found = []
    for path, seen in zip(paths, per_leaf, strict=False):
        distinct = list(dict.fromkeys(seen))
        if len(distinct) > 1:
            found.append(f"{path}: " + ", ".join(_describe_signature(s) for s in distinct[:6]))
    return found


def _describe_signature(signature: Any) -> str:
    if isinstance(signature[0], torch.Size):
        return f"{str(signature[1]).removeprefix('torch.')}{list(signature[0])}"
    return repr(signature[1])
