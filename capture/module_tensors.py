"""Which tensors a module holds, and running it with others in their place.

Registered parameters and buffers are not all: plain tensor attributes, and lists, tuples and dicts of tensors (an LSTM
keeps a list of its weights) are found too. Everything is restored afterwards, whatever happened.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One place that holds a tensor.

    Attributes:
        name: its path.
        owner: module that holds it.
        attribute: its name there.
        kind: ``param``, ``buffer``, or ``attribute`` for what is not registered.
        item: index or key within the attribute where that is a list, tuple or dict, else None.
    """

    name: str
    owner: nn.Module
    attribute: str
    kind: str
    item: int | str | None = None

    def get(self) -> Any:
        """What is there now."""
        if self.kind == "param":
            return self.owner._parameters.get(self.attribute)
        if self.kind == "buffer":
            return self.owner._buffers.get(self.attribute)
        value = self.owner.__dict__.get(self.attribute)
        if self.item is None or value is None:
            return value
        try:
            return value[self.item]
        except (IndexError, KeyError):
            return None

    def put(self, tensor: Tensor) -> None:
        """Binds another tensor there, as ``module.attribute = tensor`` does."""
        if self.kind == "buffer":
            self.owner._buffers[self.attribute] = tensor
        elif self.item is None:
            self.owner.__dict__[self.attribute] = tensor
        else:
            container = self.owner.__dict__[self.attribute]
            if isinstance(container, tuple):
                items = list(container)
                items[self.item] = tensor  # type: ignore[index]
                self.owner.__dict__[self.attribute] = tuple(items)
            else:
                container[self.item] = tensor


@dataclass(eq=False)
class HeldTensor:
    """One tensor of a module, and every place that holds it; the first place names it."""

    tensor: Tensor
    slots: list[Slot]

    @property
    def key(self) -> str:
        """The first name."""
        return self.slots[0].name

    @property
    def kind(self) -> str:
        """Kind of the first place."""
        return self.slots[0].kind

    @property
    def names(self) -> list[str]:
        """Every name."""
        return [slot.name for slot in self.slots]

    def current(self) -> Any:
        """What the first place holds now."""
        return self.slots[0].get()


@dataclass
class ModuleTensors:
    """Every tensor that a model holds, each once, in the order of ``named_parameters`` and ``named_buffers``."""

    params: list[HeldTensor] = field(default_factory=list)
    buffers: list[HeldTensor] = field(default_factory=list)
    attributes: list[HeldTensor] = field(default_factory=list)

    @property
    def all(self) -> list[HeldTensor]:
        """Parameters, then buffers, then plain attributes."""
        return self.params + self.buffers + self.attributes


def tensors_of(model: nn.Module) -> ModuleTensors:
    """Finds every tensor that ``model`` holds."""
    found = ModuleTensors()
    by_id: dict[int, HeldTensor] = {}

    def add(group: list[HeldTensor], tensor: Tensor, slot: Slot) -> None:
        if id(tensor) not in by_id:
            by_id[id(tensor)] = HeldTensor(tensor, [])
            group.append(by_id[id(tensor)])
        by_id[id(tensor)].slots.append(slot)

    modules = list(model.named_modules())
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                add(found.params, param, Slot(_join(path, name), module, name, "param"))
    for path, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                add(found.buffers, buffer, Slot(_join(path, name), module, name, "buffer"))
    for path, module in modules:
        for name, value in module.__dict__.items():
            if name in MODULE_INTERNALS:
                continue
            for item, tensor in _tensors_within(value):
                full = name if item is None else f"{name}.{item}"
                add(found.attributes, tensor, Slot(_join(path, full), module, name, "attribute", item))
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensors_within(value: Any) -> Iterator[tuple[int | str | None, Tensor]]:
    if isinstance(value, Tensor):
        yield None, value
    elif type(value) in (list, tuple):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, Tensor))
    elif type(value) is dict:
        yield from ((key, item) for key, item in value.items() if isinstance(item, Tensor))


MODULE_INTERNALS = frozenset(nn.Module().__dict__)


class ModuleState:
    """What a model's modules held at one moment: tensors, plain attributes, and the contents of plain containers."""

    def __init__(self, model: nn.Module) -> None:
        self._records = [_ModuleRecord(path, module) for path, module in model.named_modules()]

    def restore(self) -> None:
        """Puts everything back. A module that cannot be restored keeps no other from it; the first error is raised."""
        errors: list[BaseException] = []
        for record in self._records:
            while True:
                try:
                    record.restore()
                except KeyboardInterrupt as interrupt:  # not now: a half-restored model has lost its weights
                    errors.append(interrupt)
                    continue
                except Exception as error:
                    errors.append(error)
                break
        if errors:
            raise errors[0]

    def changed_attributes(self) -> list[tuple[str, bool]]:
        """Attributes and registered tensors that are new, gone or changed, and whether the number of tensors did.

        A tensor that was replaced by another tensor does not count: that is how tensors are swapped for a trace.
        """
        return [change for record in self._records for change in record.changes()]


class _ModuleRecord:
    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.attributes = {k: v for k, v in module.__dict__.items() if k not in MODULE_INTERNALS or k == "training"}
        self.containers = {name: list(containers_in(value)) for name, value in self.attributes.items()}
        self.tensor_counts = {name: _count_tensors(value) for name, value in self.attributes.items()}
        self.registered: list[tuple[Any, dict[str, Any]]] = [
            (d, dict(d)) for d in (module._parameters, module._buffers, module._modules)
        ]

    def changes(self) -> Iterator[tuple[str, bool]]:
        now = self.module.__dict__
        for name in dict.fromkeys([*self.attributes, *now]):
            if name in MODULE_INTERNALS and name != "training":
                continue
            if self._has_changed(name):
                yield _join(self.path, name), _count_tensors(now.get(name)) != self.tensor_counts.get(name, 0)
        for registered, saved in self.registered:
            for name in dict.fromkeys([*saved, *registered]):
                if (saved.get(name) is None) != (registered.get(name) is None):
                    yield _join(self.path, name), True

    def _has_changed(self, name: str) -> bool:
        now = self.module.__dict__
        if name not in self.attributes or name not in now:
            return True
        if not _equal(now[name], self.attributes[name]):
            return True
        return any(not _same_contents(container, saved) for container, saved in self.containers[name])

    def restore(self) -> None:
        now = self.module.__dict__
        for name in [n for n in now if n not in self.attributes and n not in MODULE_INTERNALS]:
            del now[name]
        now.update(self.attributes)
        for saved_containers in self.containers.values():
            for container, saved in saved_containers:
                refill(container, saved)
        for registered, saved in self.registered:
            registered.clear()
            registered.update(saved)


def containers_in(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The mutable containers in a value, innermost last, each with a copy of its contents."""
    if not isinstance(value, (list, dict, set, deque, tuple)) or depth > _DEEPEST_CONTAINER:
        return
    if not isinstance(value, tuple):
        yield value, copy.copy(value)
    for item in value.values() if isinstance(value, dict) else value:
        yield from containers_in(item, depth + 1)


def _count_tensors(value: Any) -> int:
    if isinstance(value, Tensor):
        return 1
    containers = [container for container, _ in containers_in((value,))]
    if isinstance(value, tuple):
        containers.append(value)
    items = (c.values() if isinstance(c, dict) else c for c in containers)
    return sum(isinstance(item, Tensor) for contents in items for item in contents)


_DEEPEST_CONTAINER = 8


def refill(container: Any, saved: Any) -> None:
    """Gives a list, dict, set or deque the contents that it had."""
    if isinstance(container, list):
        container[:] = saved
        return
    container.clear()
    container.extend(saved) if isinstance(container, deque) else container.update(saved)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values count as the same: equal plain values, any two tensors, containers of such."""
    if a is b or (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, str, torch.dtype, torch.device, type(None))):
        return bool(a == b)
    if isinstance(a, (list, dict, set, deque, tuple)):
        return _same_contents(a, b)
    return isinstance(a, weakref.ref)  # an LSTM renews the references to its weights


def _same_contents(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(k in b and _equal(v, b[k]) for k, v in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(_equal(x, y) for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def tensors_replaced(model: nn.Module, replacements: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, every tensor of ``model`` whose ``id`` is in ``replacements`` is the replacement.

    The caller restores (:class:`ModuleState`); tied names all get the same replacement.
    """
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None and id(tensor) in replacements:
                    registered[name] = replacements[id(tensor)]  # type: ignore[assignment]
        for name, value in list(module.__dict__.items()):
            if name in MODULE_INTERNALS:
                continue
            replaced = _replaced(value, replacements)
            if replaced is not value:
                module.__dict__[name] = replaced
    yield


def _replaced(value: Any, replacements: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if type(value) in (list, tuple) and any(id(v) in replacements for v in value):
        return type(value)(replacements.get(id(v), v) for v in value)
    if type(value) is dict and any(id(v) in replacements for v in value.values()):
        return {k: replacements.get(id(v), v) for k, v in value.items()}
    return value
