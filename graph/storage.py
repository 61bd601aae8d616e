"""Which nodes share memory, and who writes it, from the fake values that capture recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ..torch_compat import has_symbolic_shape, storage_key
from .effects import effects_of, written_nodes
from .operands import freeze
from .spec import type_of


def storages_of(node: fx.Node) -> tuple[int, ...]:
    """Keys of the storages behind the node's value: several for a list of tensors, none for a number."""
    return _facts_of(node)[1]


def value_type_of(node: fx.Node) -> tuple[tuple[int | str, ...], str]:
    """Shape and dtype of the node's value (:func:`type_of`)."""
    return _facts_of(node)[2]


def _facts_of(node: fx.Node) -> tuple[Any, tuple[int, ...], tuple[tuple[int | str, ...], str]]:
    """What follows from the node's value, remembered with it, since every rule of the verifier asks for it."""
    value = node.meta.get("val")
    facts: tuple[Any, tuple[int, ...], tuple[tuple[int | str, ...], str]] | None = node.meta.get("facts")
    if facts is None or facts[0] is not value:
        facts = node.meta["facts"] = (value, tuple([storage_key(t) for t in tensors_in(value)]), type_of(value))
    return facts


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a fake value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device, equal for tensors whose elements lie alike.

    The stride of a dimension of length 1 addresses nothing and is given as 0: torch computes it one way for a fake tensor and
    another under its Python dispatcher, and its cache of fake results hands either out.
    """
    strides = tuple(
        [
            0 if isinstance(size, int) and size == 1 else stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
    )
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements fill the tensor's range without holes or overlap (``is_non_overlapping_and_dense``)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def filled_like(fake: torch.Tensor, value: float) -> torch.Tensor:
    """A real tensor of this value, on the device of ``fake`` and laid out like it."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).fill_(value)


def storage_sizes(node: fx.Node) -> dict[int, int]:
    """Bytes of each storage behind the node's value, by key; 0 where a size is symbolic."""
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(node.meta.get("val"))}
    return {key: size if isinstance(size, int) else 0 for key, size in sizes.items()}


def storage_bytes(node: fx.Node) -> int:
    """Bytes of the storages behind the node's value; 0 where a size is symbolic."""
    return sum(storage_sizes(node).values())


def likeness_of(node: fx.Node) -> Hashable:
    """Equal for calls of one operator with the same arguments and layouts, whichever values they work on.

    A call whose shapes depend on data is like no other.
    """
    if any(has_symbolic_shape(t) for n in (node, *node.all_input_nodes) for t in tensors_in(n.meta["val"])):
        return node
    layouts = [tuple(map(layout_of, tensors_in(n.meta["val"]))) for n in (node, *node.all_input_nodes)]
    arguments = freeze(node.args, lambda operand: "value"), freeze(node.kwargs, lambda operand: "value")
    return (node.target, arguments, tuple(layouts))


def is_view(node: fx.Node) -> bool:
    """Whether a call only names memory that is there: it allocates nothing and does nothing else."""
    held = set(storages_of(node))
    operands = {key for operand in node.all_input_nodes for key in storages_of(operand)}
    return bool(held) and held <= operands and effects_of(node).pure


def allocated_by(graph: fx.Graph) -> dict[fx.Node, list[int]]:
    """For each call, the storages that it allocates, in the order of its results."""
    known = {key for node in graph.find_nodes(op="placeholder") for key in storages_of(node)}
    allocated: dict[fx.Node, list[int]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            allocated[node] = [key for key in dict.fromkeys(storages_of(node)) if key not in known]
            known.update(allocated[node])
    return allocated


class StorageMap:
    """Writers of every storage of a graph, in execution order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.writers: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for operand in written_nodes(node):
                for key in storages_of(operand):
                    self.writers[key].append(node)

    def is_written(self, node: fx.Node) -> bool:
        """Whether any storage behind the node's value is ever written in place."""
        return any(key in self.writers for key in storages_of(node))

    def touches_written(self, node: fx.Node) -> bool:
        """Whether the node's value or any of its operands lives in a storage that is written in place."""
        return self.is_written(node) or any(self.is_written(operand) for operand in node.all_input_nodes)
