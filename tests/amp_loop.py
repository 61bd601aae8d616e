"""The training loop that users write by hand: autocast, `GradScaler`, accumulation, clipping, the skip of a bad update.

Against it every precision and every window of micro-batches is held, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

import stepgraph as sg

from . import oracle
from .oracle import Snapshot, snapshot

INF = math.inf
SEQUENCE = [1.0, INF, 1.0, 1.0, math.nan, 1.0, 1.0]  # gradients of case B15
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Outcome:
    """What one update, applied or skipped, left behind."""

    snapshot: Snapshot
    applied: bool
    scale: float | None


@dataclass
class HandWritten:
    """A loop by hand.

    Attributes:
        scaler: torch's, under fp16.
        masters: float32 copies of all parameters, which the optimizer was built from; none where it has the parameters.
        divide_early: divides the loss by the number of micro-batches, as most loops do; else gradients are summed and divided
            once, after they were unscaled.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Any, Any], Tensor]
    precision: str = "fp32"
    scaler: torch.amp.GradScaler | None = None
    divide_early: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    masters: list[Tensor] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def update(self, window: Sequence[Any], weights: Sequence[float] | None = None) -> Outcome:
        """One update over the micro-batches of ``window``."""
        is_finite = True
        for position, batch in enumerate(window):
            dtype = DTYPES[self.precision]
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = self.loss_fn(self.model, batch)
            is_finite &= bool(loss.isfinite().all())
            self._backward(loss / len(window) if self.divide_early else loss, weights[position] if weights else None)
        for master, param in zip(self.masters, self.model.parameters(), strict=False):
            master.grad = None if param.grad is None else param.grad.float()
        updated = self.masters or list(self.model.parameters())
        grads = [p.grad for p in updated if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        total = sum(weights) if weights else len(window)
        if not self.divide_early and total != 1:
            for grad in grads:
                grad.div_(total)
        is_finite &= all(bool(grad.isfinite().all()) for grad in grads)
        norm = get_total_norm(grads, self.norm_type)
        if self.max_norm:
            clip_grads_with_norm_(updated, self.max_norm, norm)
        if self.clip_value:
            clip_grad_value_(updated, self.clip_value)
        if is_finite and self.scaler is not None:
            self.scaler.step(self.optimizer)  # fused optimizers would make their state here, were it not finite
        elif is_finite:
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=False):
                param.copy_(master)
        self.model.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        return self._note(loss.detach(), norm, is_finite, None if self.scaler is None else self.scaler.get_scale())

    def _backward(self, loss: Tensor, weight: float | None) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        if weight is None:
            scaled.backward()
            return
        params = [p for p in self.model.parameters() if p.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(scaled, params, allow_unused=True), strict=True):
            if grad is not None:
                param.grad = grad * weight if param.grad is None else param.grad.add_(grad * weight)

    def _note(self, loss: Tensor, norm: Tensor, applied: bool, scale: float | None) -> Outcome:
        taken = snapshot(self.model, self.optimizer, len(self.outcomes) + 1, loss, norm)
        self.outcomes.append(Outcome(taken, applied, scale))
        return self.outcomes[-1]


def compiled_update(
    step: sg.TrainStep, number: int, window: Sequence[Any], weights: Sequence[float] | None = None
) -> Outcome:
    """The same update by a compiled step; ``number`` counts updates from 1."""
    for position, batch in enumerate(window):
        result = step(batch, weights[position]) if weights else step(batch)
        assert result.applied is False or position == len(window) - 1
    taken = snapshot(step.model, step.optimizer, number, result.loss, result.grad_norm)
    return Outcome(taken, result.applied, result.loss_scale)


def pair(
    build: Callable[[], nn.Module],
    loss_fn: Any,
    optimizer: str,
    precision: str = "fp32",
    *,
    accumulate: int,
    divide_early: bool = False,
    init_scale: float = 2.0**16,
    further: dict[str, Any] | None = None,
    **clip: Any,
) -> tuple[HandWritten, sg.TrainStep]:
    """A loop by hand and a compiled step, which has ``further`` options, on equal models."""
    eager, graph = oracle.twin(build)
    make = oracle.OPTIMIZERS[optimizer]
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2) if precision == "fp16" else None
    loop = HandWritten(eager, make(eager.parameters()), loss_fn, precision, scaler, divide_early, **clip)
    scale = {"loss_scale": sg.LossScale(init_scale, growth_interval=2)} if precision == "fp16" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm
        step = sg.compile_train_step(
            graph,
            make(graph.parameters()),
            loss_fn=loss_fn,
            precision=precision,
            accumulate=accumulate,
            **scale,
            **clip,
            **(further or {}),
        )
    return loop, step


def same_update(
    loop: HandWritten, step: sg.TrainStep, number: int, window: list[Any], weights: list[float] | None = None
) -> Outcome:
    """One update of both, from the same random state, equal in every bit."""
    torch.manual_seed(number)
    want = loop.update(window, weights)
    random_state = torch.get_rng_state()
    torch.manual_seed(number)
    got = compiled_update(step, number, window, weights)
    assert torch.equal(torch.get_rng_state(), random_state)
    want.snapshot.rng = got.snapshot.rng
    if loop.divide_early:  # the loss of the loop is divided by its window
        want.snapshot.loss = got.snapshot.loss
    oracle.assert_bitwise(want.snapshot, got.snapshot)
    assert (got.applied, got.scale) == (want.applied, want.scale)
    return got


class Pulls(nn.Module):
    """One scalar parameter; the batch is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, gradient: Tensor) -> Tensor:
        return Multiplied.apply(self.weight, gradient)


class Multiplied(torch.autograd.Function):
    """A finite loss whose gradient is what the batch says, times what the backward starts from."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor, None]:
        return seed * ctx.saved_tensors[0], None


def poisoned(batch: Any, value: float) -> Any:
    """The batch with one element of its first floating tensor replaced."""
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    for position, leaf in enumerate(leaves):
        if leaf.is_floating_point():
            leaves[position] = leaf.clone()
            leaves[position].view(-1)[0] = value
            break
    return torch.utils._pytree.tree_unflatten(leaves, spec)
