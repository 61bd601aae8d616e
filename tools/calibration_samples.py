"""What a calibration runs: operators of training steps, each at sizes from a few hundred elements to a few million."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..planner.cost import MATRICES, PATCHES, TENSORS, Work, work_of

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]  # an operator and its arguments
SIZES = (2**8, 2**13, 2**17, 2**20, 2**22)  # elements
EDGES = (16, 64, 256, 1024)  # of matrices in products
SMALL_EDGES = (16, 64, 256)  # in batched ones
WIDTH = 64  # of rows
LENGTHS, HEADS = (16, 128, 512), (1, 4)  # of sequences that attention looks at
PATCH_EDGE, IMAGES = 8, 4
ROW_COUNTS, ROW_LENGTHS = (4, 64, 1024, 8192), (64, 256, 1024)
_UNARY: dict[str, Any] = {
    name: getattr(aten, name).default
    for name in (
        "neg", "abs", "exp", "log", "tanh", "sigmoid", "silu", "gelu", "erf", "sin", "cos", "rsqrt", "sqrt", "reciprocal",
        "relu", "softplus", "clone",
    )
}  # fmt: skip
_BINARY: dict[str, Any] = {
    **{name: getattr(aten, name).Tensor for name in ("mul", "add", "sub", "div", "gt")},
    **{
        name: getattr(aten, name).default
        for name in ("silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward")
    },
    "copy": aten.copy_.default,
}
_SOFTMAX: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "_softmax": (aten._softmax.default, (-1, False)),
    "_safe_softmax": (aten._safe_softmax.default, (-1,)),
    "_log_softmax": (aten._log_softmax.default, (-1, False)),
}


@dataclass(frozen=True)
class Sample:
    """One place of a table.

    Attributes:
        table: its name, such as ``mul:f32``.
        calls: what to run; the mean of several counts.
        sizes: where; None where they follow from the call.
    """

    table: str
    calls: Callable[[], list[Call]]
    sizes: tuple[float, ...] | None = None


def samples(device: torch.device) -> Iterator[Sample]:
    """Everything that is measured on ``device``."""
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        make = _Maker(device, dtype)
        is_fast = dtype is torch.float32 or device.type == "cuda"
        edges, small = (EDGES, SMALL_EDGES) if is_fast else (SMALL_EDGES, SMALL_EDGES[:2])
        for m, k, n in itertools.product(edges, repeat=3):
            yield Sample(f"mm:{name}", partial(make.products, m, k, n), (m, k, n))
        for m, k, n in itertools.product(small, repeat=3):
            yield Sample(f"bmm:{name}", partial(make.batched, m, k, n), (m, k, n))
        for operator, build in make.by_elements().items():
            for size in SIZES if dtype is torch.float32 else SIZES[::2]:
                yield Sample(f"{operator}:{name}", partial(_alone, build, size))
        for heads, length in itertools.product(HEADS, LENGTHS if is_fast else LENGTHS[:2]):
            for kind, attend, products in (("", make.attention, 2), ("_backward", make.attention_backward, 5)):
                sizes = (2 * products * length**2 * WIDTH, heads)
                yield Sample(f"attention{kind}:{name}", partial(_alone, attend, heads, length), sizes)
        for operator, build_rows in make.by_rows().items():
            for count, length in itertools.product(
                ROW_COUNTS if dtype is torch.float32 else ROW_COUNTS[1::2], ROW_LENGTHS
            ):
                yield Sample(f"{operator}:{name}", partial(_alone, build_rows, count, length), (count, length))


def _alone(build: Callable[..., Call], *sizes: int) -> list[Call]:
    return [build(*sizes)]


def work_of_call(target: Any, args: tuple[Any, ...], result: Any) -> Work:
    """:func:`work_of` for a call that was run."""
    graph = fx.Graph()

    def node(tensor: Tensor) -> fx.Node:
        placeholder = graph.placeholder("t")
        placeholder.meta["val"] = tensor
        return placeholder

    call = graph.call_function(target, fx.node.map_aggregate(args, lambda a: node(a) if isinstance(a, Tensor) else a))
    call.meta["val"] = result
    return work_of(call)


class _Maker:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._where: dict[str, Any] = {"device": device, "dtype": dtype}
        self._device = device

    def values(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.6, **self._where)

    def rows(self, size: int) -> Tensor:
        return self.values(size // WIDTH, WIDTH)

    def indices(self, count: int, below: int) -> Tensor:
        return torch.randint(0, below, (count,), device=self._device)

    def products(self, m: int, k: int, n: int) -> list[Call]:
        """The three of a linear layer: forward, and in backward for its input and for its weight."""
        a, b = self.values(m, k), self.values(n, k)
        return [
            (aten.mm.default, (a, b.t())),
            (aten.mm.default, (self.values(m, k), self.values(k, n))),
            (aten.mm.default, (self.values(k, m).t(), self.values(k, n))),
        ]

    def batched(self, m: int, k: int, n: int) -> list[Call]:
        a = self.values(MATRICES, m, k)
        return [
            (aten.bmm.default, (a, self.values(MATRICES, n, k).transpose(1, 2))),
            (aten.bmm.default, (a, self.values(MATRICES, k, n))),
            (aten.bmm.default, (self.values(MATRICES, k, m).transpose(1, 2), self.values(MATRICES, k, n))),
        ]

    def by_elements(self) -> dict[str, Callable[[int], Call]]:
        """By name of the table, a call on about as many elements."""
        v, rows = self.values, self.rows
        found: dict[str, Callable[[int], Call]] = {
            name: partial(self._unary, target) for name, target in _UNARY.items()
        }
        found |= {name: partial(self._binary, target) for name, target in _BINARY.items()}

        def tensors(size: int) -> list[Tensor]:
            return [v(size // TENSORS) for _ in range(TENSORS)]

        found |= {
            "pow": lambda size: (aten.pow.Tensor_Scalar, (v(size), 2)),
            "where": lambda size: (aten.where.self, (v(size) > 0.5, v(size), v(size))),
            "copy permuted": lambda size: (aten.copy_.default, (v(4, size // WIDTH, WIDTH // 4), self._permuted(size))),
            "cat": lambda size: (aten.cat.default, ([rows(size), rows(size)], -1)),
            "sum": lambda size: (aten.sum.dim_IntList, (rows(size), [-1])),
            "sum outer": lambda size: (aten.sum.dim_IntList, (rows(size), [0])),
            "mean": lambda size: (aten.mean.dim, (rows(size), [-1], True)),
            "embedding": lambda size: (aten.embedding.default, (v(1000, WIDTH), self.indices(size // WIDTH, 1000))),
            "embedding_dense_backward": lambda size: (
                aten.embedding_dense_backward.default,
                (rows(size), self.indices(size // WIDTH, 1000), 1000, -1, False),
            ),
            "nll_loss_forward": lambda size: (
                aten.nll_loss_forward.default,
                (rows(size), self.indices(size // WIDTH, WIDTH), None, 1, -100),
            ),
            "nll_loss_backward": lambda size: (
                aten.nll_loss_backward.default,
                (v(1)[0], rows(size), self.indices(size // WIDTH, WIDTH), None, 1, -100, v(1)[0]),
            ),
            "bernoulli": lambda size: (aten.bernoulli_.float, (v(size), 0.9)),
            "select_backward": lambda size: (
                aten.select_backward.default,
                (v(size // WIDTH), [size // WIDTH, WIDTH], 1, 0),
            ),
            "slice_backward": lambda size: (
                aten.slice_backward.default,
                (rows(size), [size // WIDTH, 2 * WIDTH], 1, 0, WIDTH, 1),
            ),
            "constant_pad_nd": lambda size: (aten.constant_pad_nd.default, (rows(size), [0, 1], 0.0)),
            "index": lambda size: (aten.index.Tensor, (rows(size), [self.indices(size // WIDTH, size // WIDTH)])),
            "new_zeros": lambda size: (aten.new_zeros.default, (v(1), [size])),
            "empty_like": lambda size: (aten.empty_like.default, (v(size),)),
            "linalg_vector_norm": lambda size: (aten.linalg_vector_norm.default, (v(size),)),
            "_foreach_norm": lambda size: (aten._foreach_norm.Scalar, (tensors(size), 2)),
            "_foreach_add": lambda size: (aten._foreach_add_.List, (tensors(size), tensors(size))),
            "_foreach_mul": lambda size: (aten._foreach_mul_.Scalar, (tensors(size), 1.0)),
        }
        if self._where["dtype"] is torch.float32:
            for stride, kind in ((1, ""), (PATCH_EDGE, PATCHES)):
                found[f"convolution{kind}"] = partial(self._convolution, stride)
                found[f"convolution_backward{kind}"] = partial(self._convolution_backward, stride)
            found |= {f"fused_{kind}": partial(self._fused, kind) for kind in ("adam", "adamw")}
        return found

    def by_rows(self) -> dict[str, Callable[[int, int], Call]]:
        """By name of the table, a call on so many rows of such a length."""
        v, dtype = self.values, self._where["dtype"]

        def layer_norm(count: int, length: int) -> Call:
            return aten.native_layer_norm.default, (v(count, length), [length], v(length), v(length), 1e-5)

        def layer_norm_backward(count: int, length: int) -> Call:
            rows, each = v(count, length), v(count, 1)
            arguments = (v(count, length), rows, [length], each, each, v(length), v(length), [True, True, True])
            return aten.native_layer_norm_backward.default, arguments

        def softmax(name: str, count: int, length: int) -> Call:
            target, arguments = _SOFTMAX[name]
            return target, (v(count, length), *arguments)

        def softmax_backward(name: str, count: int, length: int) -> Call:
            return getattr(aten, name).default, (v(count, length), v(count, length), -1, dtype)

        found: dict[str, Callable[[int, int], Call]] = {name: partial(softmax, name) for name in _SOFTMAX}
        found |= {n: partial(softmax_backward, n) for n in ("_softmax_backward_data", "_log_softmax_backward_data")}
        return found | {"native_layer_norm": layer_norm, "native_layer_norm_backward": layer_norm_backward}

    def _permuted(self, size: int) -> Tensor:
        return self.rows(size).view(-1, 4, WIDTH // 4).transpose(0, 1)

    def _unary(self, target: Any, size: int) -> Call:
        return target, (self.values(size),)

    def _binary(self, target: Any, size: int) -> Call:
        return target, (self.values(size), self.values(size))

    def attention(self, heads: int, length: int) -> Call:
        kernel = "_flash_attention" if self._device.type == "cuda" else "_flash_attention_for_cpu"
        operands = tuple(self.values(1, heads, length, WIDTH) for _ in range(3))
        return getattr(aten, f"_scaled_dot_product{kernel}").default, operands

    def attention_backward(self, count: int, length: int) -> Call:
        forward, heads = self.attention(count, length)
        output, *rest = forward(*heads)
        if self._device.type == "cuda":
            random = rest[5:7]
            return aten._scaled_dot_product_flash_attention_backward.default, (
                output, *heads, output, rest[0], rest[1], rest[2], rest[3], rest[4], 0.0, False, *random,
            )  # fmt: skip
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (
            output, *heads, output, rest[0], 0.0, False,
        )  # fmt: skip

    def _convolution(self, stride: int, size: int) -> Call:
        """Windows of 3 by 3 side by side in a stack of images, or the patches that colour images are cut into."""
        is_cut = stride > 1
        channels = min(max(int(size**0.5) // 128, 1) * 8, 64)
        edge = max(int((size / channels / IMAGES) ** 0.5) // stride, 1) * stride
        images = self.values(IMAGES, 3 if is_cut else channels, edge, edge)
        weight = self.values(channels, images.shape[1], *[max(stride, 3)] * 2)
        padding = [0, 0] if is_cut else [1, 1]
        return aten.convolution.default, (images, weight, None, [stride] * 2, padding, [1, 1], False, [0, 0], 1)

    def _convolution_backward(self, stride: int, size: int) -> Call:
        forward, arguments = self._convolution(stride, size)
        images, weight, _, *rest = arguments
        return aten.convolution_backward.default, (
            torch.empty_like(forward(*arguments)), images, weight, [0], *rest, [stride == 1, True, False],
        )  # fmt: skip

    def _fused(self, kind: str, size: int) -> Call:
        tensors = [[self.values(size // TENSORS) for _ in range(TENSORS)] for _ in range(4)]
        steps = [torch.ones((), device=self._device) for _ in range(TENSORS)]
        numbers = (1e-3, 0.9, 0.999, 0.01, 1e-8, False, False)  # lr, betas, weight decay, eps, amsgrad, maximize
        return getattr(torch.ops.stepgraph, f"fused_{kind}_").default, (*tensors, [], steps, *numbers)
