"""Recording: results remembered within a capture are those that torch computes, with the same memory behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stepgraph.capture.context import TraceContext
from stepgraph.capture.fake_results import FakeResults
from stepgraph.capture.recorder import Recorder
from stepgraph.graph import tensors_in

aten = torch.ops.aten

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda x, y: aten.add.Tensor(x, y),
    "the same tensor twice": lambda x, y: aten.mul.Tensor(x, x),
    "broadcast": lambda x, y: aten.add.Tensor(x, aten.select.int(y, 0, 0)),
    "another dtype": lambda x, y: aten._to_copy.default(x, dtype=torch.float64),
    "transpose": lambda x, y: aten.t.default(x),
    "slice": lambda x, y: aten.slice.Tensor(x, 1, 1, 3),
    "expand": lambda x, y: aten.expand.default(aten.unsqueeze.default(x, 0), [5, 4, 4]),
    "strided": lambda x, y: aten.as_strided.default(x, [2, 2], [1, 3], 2),
    "bits": lambda x, y: aten.view.dtype(x, torch.int32),
    "unsafe view": lambda x, y: aten._unsafe_view.default(x, [16]),
    "list of views": lambda x, y: aten.split.Tensor(x, 3, 1),
    "two results": lambda x, y: aten.topk.default(x, 2),
    "one of two results is a view of nothing": lambda x, y: aten.native_layer_norm.default(x, [4], None, None, 1e-5),
    "in place": lambda x, y: aten.mul_.Tensor(x, y),
    "in place on itself": lambda x, y: aten.add_.Tensor(x, x),
    "list in place": lambda x, y: aten._foreach_add.List([x, y], [y, x]),
    "number": lambda x, y: aten.mul.Tensor(x, 2),
    "factory": lambda x, y: aten.zeros.default([3, 2], dtype=torch.int64, device=torch.device("cpu"), pin_memory=False),
    "nothing in it": lambda x, y: aten.slice.Tensor(x, 0, 4, 4),
    "channels last": lambda x, y: aten.clone.default(
        aten.view.default(x, [1, 4, 2, 2]), memory_format=torch.channels_last
    ),
    "complex": lambda x, y: aten.view_as_complex.default(aten.view.default(x, [8, 2])),
    "conjugate": lambda x, y: aten._conj.default(aten.view_as_complex.default(aten.view.default(x, [8, 2]))),
    "random": lambda x, y: aten.bernoulli.p(x, 0.5),
    "indices": lambda x, y: aten.index.Tensor(
        x, [aten.zeros.default([2], dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)]
    ),
}


def described(out: Any, operands: list[Tensor]) -> list[Any]:
    """Metadata of each tensor, and which operands and which other results share its memory."""
    tensors = tensors_in(out)
    return [
        (
            type(t),
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.is_conj(),
            t.untyped_storage().nbytes(),
            [t is o for o in operands],
            [shares(t, o) for o in (*operands, *tensors)],
        )
        for t in tensors
    ]


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def operands_of(mode: FakeTensorMode, layout: str) -> list[Tensor]:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    if layout == "aliased":
        y = x
    if layout == "views of one":
        x, y = torch.randn(8, 4).split(4)
    if layout == "transposed":
        x = x.t()
    x, y = (mode.from_tensor(t, static_shapes=True) for t in (x, y))
    return [x, x] if layout == "aliased" else [x, y]


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_what_torch_computes(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    recorder = Recorder(mode, TraceContext(torch.nn.Module()).label)
    for layout in ("plain", "aliased", "plain", "views of one", "transposed", "plain", "aliased"):
        operands = operands_of(mode, layout)
        recorder.add_inputs(operands)
        want = recorded = None
        with mode:
            try:
                want = described(CALLS[name](*operands), operands)
            except (RuntimeError, ValueError):
                continue  # the operator does not take this layout
        with mode, recorder:
            recorded = CALLS[name](*operands)
        assert described(recorded, operands) == want, layout


@pytest.mark.parametrize("name", CALLS)
def test_the_recorded_value_shares_memory_with_the_result(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    recorder = Recorder(mode, TraceContext(torch.nn.Module()).label)
    for _ in range(2):
        operands = operands_of(mode, "plain")
        recorder.add_inputs(operands)
        with mode, recorder:
            out = CALLS[name](*operands)
        last_call = [n for n in recorder.graph.nodes if n.op == "call_function" and "getitem" not in n.name][-1]
        values = tensors_in(last_call.meta["val"])
        for result, value in zip(tensors_in(out), values, strict=True):
            assert value is not result
            assert type(value) is FakeTensor
            assert shares(value, result)
            assert (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)


def test_what_is_remembered_depends_on_default_dtype_and_argument_types() -> None:
    mode = FakeTensorMode()
    results = FakeResults(mode)
    with mode:
        x = torch.ones(3, dtype=torch.int64)

        def dtype_of(scalar: float) -> torch.dtype:
            arguments = ["x", type(scalar), scalar]
            return results.call(aten.mul.Tensor, (x, scalar), {}, [x], arguments)[0].dtype

        assert [dtype_of(1), dtype_of(1.0), dtype_of(1)] == [torch.int64, torch.float32, torch.int64]
        torch.set_default_dtype(torch.float64)
        try:
            assert dtype_of(1.0) is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert dtype_of(1.0) is torch.float32
