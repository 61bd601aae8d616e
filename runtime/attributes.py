"""Attributes of modules that a capture bakes in."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy
from torch import Tensor, nn

from ..capture import MODULE_INTERNALS, is_plain
from .identity import same_objects

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_LARGEST_CONTAINER = 64  # items; of larger ones the length alone is watched
_DEEPEST_CONTAINER = 4
_UNREAD: dict[type[nn.Module], tuple[str, ...]] = {  # attributes that forward of these very classes does not read
    nn.Linear: ("in_features", "out_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
}


class AttributeWatch:
    """Buffers and plain attributes of modules: numbers, strings and the like by value, functions by identity, containers by
    their items.

    Args:
        modules: with their paths.
        of_companions: the modules do not belong to the model (a loss, a teacher). The graph holds their tensors as constants,
            so that each counts by identity, and so do their parameters, submodules and modes.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]], *, of_companions: bool = False) -> None:
        self._modules = modules
        self._of_companions = of_companions
        self._dicts: list[dict[str, Any]] = [m.__dict__ for _, m in modules] + [m._buffers for _, m in modules]
        if of_companions:
            self._dicts += [d for _, m in modules for d in (m._parameters, m._modules)]
        self._ignored: set[str] = set()
        self._watched: list[tuple[dict[str, Any], str, str]] = []
        self._sizes: list[int] = []
        self._seen: list[Any] = []
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._signature: tuple[Any, ...] = ((), ())
        self._numbers: dict[Hashable, int] = {}
        self._number = -1

    def ignore(self, paths: Iterable[str]) -> None:
        """Leaves attributes out from now on."""
        self._ignored.update(paths)
        self._sizes = []

    def signature(self) -> tuple[Any, ...]:
        """The values in a fixed order, and which tensors are one; the same object where nothing has changed."""
        sizes = list(map(len, self._dicts))
        if sizes != self._sizes:
            self._sizes, self._seen = sizes, []
            self._watched = list(self._find())
        now = [d.get(name) for d, name, _ in self._watched]
        if not same_objects(now, self._seen) or not same_objects(self._containers, self._copies):
            self._seen = now
            small = [v for v in now if isinstance(v, (list, dict, set)) and len(v) <= _LARGEST_CONTAINER]
            self._containers, self._copies = small, [v.copy() for v in small]
            first: dict[int, int] = {}
            tied = tuple(first.setdefault(id(v), i) for i, v in enumerate(now) if isinstance(v, Tensor))
            self._signature = (tuple(map(self._value, now)), tied)
            self._number = self._numbers.setdefault(self._signature, len(self._numbers))
        return self._signature

    def number(self) -> int:
        """A number that stands for the signature."""
        self.signature()
        return self._number

    def changed(self, values: tuple[Any, ...], others: tuple[Any, ...]) -> list[str]:
        """Paths of plain values by which two signatures' values differ; empty where anything else differs too."""
        if not len(values) == len(others) == len(self._watched):
            return []
        differ = [
            (path, is_plain(d.get(name)))
            for (d, name, path), a, b in zip(self._watched, values, others, strict=True)
            if a != b
        ]
        return [path for path, _ in differ] if all(plain for _, plain in differ) else []

    def _find(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        for path, module in self._modules:
            registered = [module._buffers]
            if self._of_companions:
                registered += [module._parameters, module._modules]  # type: ignore[list-item]
                yield module.__dict__, "training", f"{path}.training"
            for values in registered:
                for name in values:
                    yield values, name, f"{path}.{name}"
            for name, value in module.__dict__.items():
                full = f"{path}.{name}" if path else name
                is_unread = name in MODULE_INTERNALS or name in _UNREAD.get(type(module), ()) or full in self._ignored
                if not is_unread and (is_plain(value) or isinstance(value, _WATCHED)):
                    yield module.__dict__, name, full

    def _value(self, value: Any, depth: int = 0) -> Hashable:
        if isinstance(value, Tensor):
            if self._of_companions:
                return _Same(value)
            return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        if isinstance(value, (float, complex)):
            return repr(value)
        if isinstance(value, nn.Module):
            return _Same(value)
        if isinstance(value, _FUNCTIONS):
            return value if isinstance(value, Hashable) else _Same(value)
        if isinstance(value, _CONTAINERS):
            if depth == _DEEPEST_CONTAINER or len(value) > _LARGEST_CONTAINER:
                tensors = [v for v in _items(value) if isinstance(v, Tensor)]
                return (type(value), len(value), *(self._value(t) for t in tensors))
            if isinstance(value, (set, frozenset)):
                return (type(value), frozenset(self._value(v, depth + 1) for v in value))
            return (type(value), *(self._value(v, depth + 1) for v in _items(value)))
        if is_plain(value) or isinstance(value, numpy.generic):
            return (type(value), value)
        return type(value).__name__


_WATCHED = (*_FUNCTIONS, *_CONTAINERS, Tensor, numpy.generic)


def _items(container: Any) -> Iterable[Any]:
    return (part for item in container.items() for part in item) if isinstance(container, dict) else container


class _Same:
    """Equal to itself only: an object by identity, kept alive so that no other gets its address."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)
