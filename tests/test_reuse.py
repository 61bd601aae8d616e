"""Results that are written over operands which nothing reads any more."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stepgraph as sg
from stepgraph.device import keep_freed_memory
from stepgraph.graph import StepGraph, nodes_in, overwritten_operands, storages_of, writing_variant
from stepgraph.runtime import Executor

from .fixtures import FIXTURES
from .graphs import of_fixture, subject
from .mutants import mystery

ODD = 40_003  # elements: several threads' share, and a rest beyond whole vectors


def _elementwise() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    overloads = [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    return [o for o in overloads if writing_variant(o) is not None]


def _arguments(target: Any, dtype: torch.dtype) -> list[Any]:
    """Values for the arguments without a default: tensors, and a 2 for each number."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for argument in target._schema.arguments:
        if "Tensor" in str(argument.type) and "List" not in str(argument.type):
            drawn = torch.rand(ODD, generator=generator) * 3 - 1
            values.append(drawn.to(dtype) if dtype.is_floating_point else (drawn * 5).to(dtype))
        elif argument.has_default_value():
            break
        else:
            values.append(2)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_every_elementwise_operator_gives_the_same_bits_over_each_operand(dtype: torch.dtype) -> None:
    checked = 0
    for target in _elementwise():
        overload, out = writing_variant(target)
        arguments = _arguments(target, dtype)
        try:
            expected = target(*arguments)
        except (RuntimeError, ValueError):
            continue  # not for this dtype, or not with these numbers
        if expected.dtype is not dtype:
            continue
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and (out is not None or i == 0):
                given = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
                result = overload(*given, **{out: given[i]} if out else {})
                assert result is given[i]
                assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)), (target, i)
                checked += 1
    assert checked > (20 if dtype is torch.int64 else 60)


def _check(graph: StepGraph) -> int:
    """No operand that is overwritten is an input or an output, or shares memory with anything that is used later."""
    overwritten = overwritten_operands(graph)
    given = {key for node in graph.placeholders for key in storages_of(node)}
    position = {node: i for i, node in enumerate(graph.calls)}
    for node, operand in overwritten.items():
        (key,) = storages_of(operand)
        assert key not in given
        sharing = [n for n in graph.calls if key in storages_of(n)]
        readers = [user for n in sharing for user in n.users]
        assert all(isinstance(u, fx.Node) and u.op != "output" for u in readers)
        assert max(position[u] for u in readers) == position[node]
        assert sum(n is operand for n in nodes_in((node.args, node.kwargs))) >= 1
    return len(overwritten)


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_only_what_nothing_reads_later_is_overwritten(name: str) -> None:
    of = of_fixture(name)
    _check(of.graph)
    _check(of.rewritten(max_norm=1.0))


class Chain(nn.Module):
    """Elementwise operators in a row, and one operand that is needed again."""

    def __init__(self, needed_again: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.needed_again = needed_again

    def forward(self, x: Tensor) -> Tensor:
        first = x * self.weight
        second = first + 1.0
        return (second * 3.0).sum() + (first.sum() if self.needed_again else 0.0)


def test_the_first_dying_operand_is_overwritten_and_a_needed_one_is_not() -> None:
    def overwritten(needed_again: bool) -> set[str]:
        of = subject((Chain(needed_again), torch.ones(64), None))
        lines = [line for line in Executor(of.graph).source.splitlines() if "out=" in line]
        return {line.partition("  # ")[2] for line in lines}

    free, needed = overwritten(False), overwritten(True)
    assert "(root)/add#0@forward" in free
    assert "(root)/add#0@forward" not in needed


class WithUnknown(Chain):
    """An operator of the user's amid elementwise ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(mystery(x * 2.0))


def test_beside_unknown_operators_nothing_is_overwritten() -> None:
    of = subject((WithUnknown(False), torch.ones(64), None))
    assert overwritten_operands(of.graph) == {}
    assert overwritten_operands(subject((Chain(False), torch.ones(64), None)).graph)


_KEPT_BYTES = """
import ctypes, torch, stepgraph as sg

class Heap(ctypes.Structure):  # mallinfo2 of glibc's malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f in_use free top".split()]

heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
model = torch.nn.Linear(4, 4)
step = sg.compile_train_step(model, torch.optim.SGD(model.parameters()), loss_fn=lambda m, x: m(x).sum())
step(torch.ones(1, 4))
made = [torch.ones(2**20) for _ in range(32)]
before = heap().free
del made
print(heap().free - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the setting is one of glibc")
def test_after_a_step_what_is_freed_stays_in_the_process() -> None:
    def kept_bytes(keeps: str) -> int:
        environment = {**os.environ, "STEPGRAPH_KEEP_HEAP": keeps}
        command = [sys.executable, "-c", _KEPT_BYTES]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout)

    assert kept_bytes("1") > 120 * 2**20
    assert kept_bytes("0") < 8 * 2**20


def test_keeping_the_heap_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_KEEP_HEAP", "maybe")
    with pytest.raises(sg.ConfigError, match="STEPGRAPH_KEEP_HEAP must be 0 or 1"):
        keep_freed_memory.__wrapped__()
    monkeypatch.setenv("STEPGRAPH_KEEP_HEAP", "0")
    assert not keep_freed_memory.__wrapped__()
