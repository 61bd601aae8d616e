"""What is alive while a step runs, counted on the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..graph import OutputRole, Rehearses, StepGraph, overwritten_operands, storages_of, tensors_in
from ..planner import CATEGORIES, STATE, categories_of, category_of_input, unread_bytes
from ..torch_compat import StorageWeakRef


class Census:
    """Counts storages that are alive after each call, before what it read is freed, and remembers where they were most.

    Attributes:
        peak_bytes: the most that was alive.
        by_category: of that, the bytes of each category of the memory simulator, in its order.
        resident_bytes: what was there at the beginning.
        creates_state: whether optimizer state was not there then.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.by_category: dict[str, int] = {}
        self.resident_bytes = 0
        self.creates_state = False
        self._beside: Counter[str] = Counter()
        self._alive: dict[int, tuple[StorageWeakRef, str, int]] = {}

    def begin(self, graph: StepGraph, inputs: Sequence[Any]) -> None:
        """To be called before ``graph`` runs on ``inputs``."""
        self._calls = graph.calls
        self._category = categories_of(graph)
        self._overwriting = set(overwritten_operands(graph))
        self._alive = {}
        for spec, value in zip(graph.inputs, inputs, strict=True):
            if (category := category_of_input(spec.role)) is not None:
                for tensor in tensors_in(value):
                    self._count(tensor, category)
        targets: list[Any] = [node.target for node in self._calls]
        opaque = [target for target in targets if isinstance(target, Rehearses)]
        resident = sum(size for _, _, size in self._alive.values())
        kept = sum(target.held_bytes() for target in opaque)
        self._beside = unread_bytes(graph) + Counter({STATE: kept})
        self.creates_state = bool(graph.output_nodes(OutputRole.STATE)) or (bool(opaque) and not kept)
        self.resident_bytes = resident + self._beside.total()

    def add(self, position: int, value: Any) -> None:
        """To be called with what the call at ``position`` returned."""
        node = self._calls[position]
        for tensor, key in zip(tensors_in(value), storages_of(node), strict=False):
            storage = tensor.untyped_storage()._cdata
            known = self._alive.get(storage)
            if known is None or known[0].expired() or node in self._overwriting:
                self._count(tensor, self._category(node, key))
        self._alive = {storage: entry for storage, entry in self._alive.items() if not entry[0].expired()}
        total = sum(size for _, _, size in self._alive.values()) + self._beside.total()
        if total > self.peak_bytes:
            counted = self._by_category() + self._beside
            self.peak_bytes, self.by_category = total, {c: counted[c] for c in CATEGORIES if counted[c]}

    def _by_category(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for _, category, size in self._alive.values():
            counted[category] += size
        return counted

    def _count(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = (StorageWeakRef(storage), category, storage.nbytes())
