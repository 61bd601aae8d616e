"""The arguments of a call: by name, the nodes in them, and in a form that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx


def argument(node: fx.Node, name: str) -> Any:
    """Value of the schema argument ``name`` in this call, its default where the call leaves it out, None if unknown."""
    if name in node.kwargs:
        return node.kwargs[name]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    for position, schema_argument in enumerate(target._schema.arguments):
        if schema_argument.name == name:
            if position < len(node.args):
                return node.args[position]
            return schema_argument.default_value if schema_argument.has_default_value() else None
    return None


def arguments_by_name(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives, by their names in the operator's schema."""
    return dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The nodes in an argument, which may be a nested list."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)


def freeze(value: Any, name_of: Callable[[fx.Node], Hashable] = lambda node: node) -> Hashable:
    """Arguments as something hashable that is equal only for equal calls: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return name_of(value)
    if isinstance(value, (list, tuple)):
        return tuple([freeze(v, name_of) for v in value])
    if isinstance(value, dict):
        return tuple([(k, freeze(v, name_of)) for k, v in sorted(value.items())])
    if isinstance(value, (bool, int, float, complex)):
        return (type(value), repr(value))
    return value  # type: ignore[no-any-return]
