"""``compile_train_step`` and ``TrainStep``: wires capture, passes and runtime together."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from .capture import (
    CapturedStep,
    FlatBatch,
    LossCall,
    batch_signature,
    capture_forward_backward,
    check_model,
    check_optimizer,
    flatten_batch,
    is_capturing,
    tensors_of,
    varying_leaves,
)
from .errors import (
    ConfigError,
    NonFiniteError,
    NotYetAttributeError,
    NotYetError,
    StepGraphError,
    StepGraphWarning,
)
from .graph import OutputRole, StepGraph
from .graph.ops import NONFINITE_LOSS
from .runtime import (
    AUTOCAST_DTYPES,
    AttributeWatch,
    CompiledBatch,
    LossScale,
    Masters,
    MembershipGuard,
    ModelGuard,
    NonfiniteReport,
    Scaler,
    StepOptions,
    StepResult,
    StepState,
    Variant,
    VerifyReport,
    check_choice,
    checked_options,
    describe_compiled,
    describe_nonfinite,
    first_nonfinite,
    first_run_error,
    refuse_fp16_parameters,
    register_clipping,
    restored_on_error,
    verify_step,
)
from .torch_compat import mark_stepped

logger = logging.getLogger("stepgraph")

CAPTURES_BEFORE_WARNING = 8
Signature = tuple[Hashable, int, tuple[int, ...]]  # batch; model; optimizer membership and companions of the model
_METHODS_TO_COME = ("flush", "plan", "full_params", "state_dict", "load_state_dict", "save", "load")


def compile_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: str | PathLike[str] = "auto",
    *,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    criterion: Callable[[Any, Any], Any] | None = None,
    precision: str = "fp32",
    master_weights: bool = True,
    loss_scale: float | LossScale | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    clip_value: float | None = None,
    nonfinite: str = "skip",
    skips_before_warning: int | None = 20,
    skips_before_error: int | None = 100,
    accumulate: int = 1,
    memory_budget: int | str | None = None,
    mesh: Any = None,
    reduce_dtype: torch.dtype | None = None,
    numerics: str = "exact",
    lowering: str = "auto",
    verify: str = "off",
    log: Any = None,
) -> TrainStep:
    """Compiles one training step of ``model`` with ``optimizer``: forward, loss, backward, norm, clip and update.

    Nothing is traced before the first call, or before :meth:`TrainStep.prepare`. The model and the optimizer stay the
    user's: the step updates their own tensors in place.

    Args:
        model: any module whose parameters are on one device.
        optimizer: built from the model's parameters. Its hyperparameters are read at every step.
        plan: ``"none"`` changes nothing but what the arguments ask for. ``"auto"`` means ``"none"`` until there is a
            planner; the report says so.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss, or a pair of it and a pytree ``aux``.
        criterion: ``criterion(model(inputs), targets)`` for batches ``(inputs, targets)``; exclusive with ``loss_fn``.
            With neither, a mapping is passed as ``model(**batch)``, a tuple or list as ``model(*batch)``, anything else as
            ``model(batch)``, and the output is the loss, or has it as ``.loss`` or ``["loss"]``.
        precision: ``"bf16"`` and ``"fp16"`` run model and loss under autocast in that dtype, as ``with torch.autocast(...)``
            around them does; gradients and the update stay in the parameters' dtype. ``"fp16"`` scales the loss.
        master_weights: updates parameters that are held in 16 bit through float32 copies, with float32 gradients and moments;
            False updates them as they are.
        loss_scale: under ``"fp16"``, a :class:`LossScale`, which is torch's ``GradScaler``, or a number that never changes.
            None is ``LossScale()``.
        max_norm: clips the norm of all gradients, taken as one vector, to this; None or 0 is off.
        norm_type: p of that norm and of ``StepResult.grad_norm``: 1 or more, or infinity (the largest absolute element).
        error_if_nonfinite: whether a norm that is not finite raises :class:`NonFiniteError`, whatever ``nonfinite`` says of
            the loss; nothing is updated then.
        clip_value: clamps every element of the gradients to [-clip_value, clip_value] instead; None or 0 is off.
        nonfinite: what a non-finite loss or gradient does: ``"skip"`` leaves parameters and optimizer state bit-unchanged,
            ``"raise"`` does too and raises :class:`NonFiniteError`, ``"ignore"`` updates as eager would. A dynamic loss scale
            backs off in either case.
        skips_before_warning: how many updates in a row are skipped before a warning; None is never.
        skips_before_error: and before :class:`NonFiniteError`, which names the parameter.
        verify: ``"first"`` runs eager beside the graph at the first step and warns where any bit differs.

    The other arguments belong to the contract and are not implemented yet: away from their defaults they raise.

    Raises:
        ConfigError: an argument, or model and optimizer, cannot work.
        NotYetError: an argument asks for what this version does not do.
        CaptureError: the model has something that cannot be traced.
    """
    if not isinstance(plan, (str, PathLike)):
        hint = "; did you mean criterion=?" if isinstance(plan, nn.Module) else ""
        hint = hint or ("; did you mean loss_fn=?" if callable(plan) else "")
        raise ConfigError(f"plan must be a name or a path, got {type(plan).__name__}{hint}")
    for name, function in (("loss_fn", loss_fn), ("criterion", criterion)):
        if isinstance(function, type):
            raise ConfigError(f"{name} is the class {function.__name__}; pass an instance, {function.__name__}()")
    check_choice("verify", verify, ("off", "first"))
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate must be a whole number of microbatches, 1 or more, got {accumulate!r}")
    options = checked_options(
        precision=precision,
        loss_scale=loss_scale,
        max_norm=max_norm,
        norm_type=norm_type,
        clip_value=clip_value,
        error_if_nonfinite=error_if_nonfinite,
        nonfinite=nonfinite,
        skips_before_warning=skips_before_warning,
        skips_before_error=skips_before_error,
        numerics=numerics,
        lowering=lowering,
    )
    _refuse_unimplemented(
        plan=(plan, plan in ("auto", "none")),
        accumulate=(accumulate, accumulate == 1),
        memory_budget=(memory_budget, memory_budget is None),
        mesh=(mesh, mesh is None),
        reduce_dtype=(reduce_dtype, reduce_dtype is None),
        log=(log, log is None),
    )
    call = LossCall(loss_fn, criterion, AUTOCAST_DTYPES[precision])
    return TrainStep(
        model,
        optimizer,
        call,
        options,
        plan=str(plan),
        verify_first=verify == "first",
        master_weights=bool(master_weights),
    )


def _refuse_unimplemented(**arguments: tuple[Any, bool]) -> None:
    for name, (value, is_implemented) in arguments.items():
        if not is_implemented:
            raise NotYetError(f"{name}={value!r} is not implemented yet; leave {name} at its default in this version.")


@contextlib.contextmanager
def _torch_log_quiet() -> Iterator[None]:
    """Keeps torch from printing the traceback of an error that is raised in better words."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class TrainStep:
    """A compiled training step; made by :func:`compile_train_step`.

    Attributes:
        model: the user's module.
        optimizer: the user's optimizer.
        captures: how many times forward and backward were captured.
        update_traces: how many times the optimizer's update was traced.
        last_verification: the report of ``verify="first"``, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        call: LossCall,
        options: StepOptions,
        *,
        plan: str,
        verify_first: bool,
        master_weights: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            raise ConfigError(
                f"model must be an nn.Module, got {got}; the call is compile_train_step(model, optimizer)"
            )
        self._tensors = tensors_of(model)
        self._device = check_model(model, self._tensors)
        check_optimizer(optimizer, self._tensors)
        self.model = model
        self.optimizer = optimizer
        self.last_verification: VerifyReport | None = None
        self._call = replace(call, device_type=self._device.type)
        self._options = options
        self._plan = plan
        self._verify_first = verify_first
        if options.loss_scale is not None and not master_weights:
            refuse_fp16_parameters(self._tensors.params)
        self._guard = ModelGuard(model, self._tensors)
        self._members = MembershipGuard(optimizer)
        self._companions: dict[int, AttributeWatch] = {}
        self._cache: dict[Signature, CompiledBatch] = {}
        self._current: tuple[CompiledBatch, Variant] | None = None
        self._tensor_ids = {id(held.tensor) for held in self._tensors.all}
        scale = options.loss_scale
        self._state = StepState(
            None if scale is None else Scaler(scale, self._device),
            Masters(self._tensors.params if master_weights else []),
        )
        self._calls = 0
        self._skips = 0
        self._skips_in_a_row = 0
        self._last_norm: Tensor | None = None
        if options.max_norm or options.clip_value:
            register_clipping(self, [p for group in optimizer.param_groups for p in group["params"]])

    def __call__(self, batch: Any, weight: float | None = None) -> StepResult:
        """Runs one training step on ``batch``.

        Raises:
            CaptureError: the first time that a batch of this kind is seen and cannot be traced; nothing was changed.
            GuardError: a parameter was replaced after compilation; nothing was changed.
            NonFiniteError: under ``nonfinite="raise"`` or ``error_if_nonfinite``; nothing was updated.
        """
        if weight is not None:
            if not isinstance(weight, (int, float)):
                raise ConfigError(
                    f"a step takes one batch, and got a second {type(weight).__name__}: pass step((x, y))"
                )
            raise NotYetError("weight= belongs to accumulation, which is not implemented yet; leave it out.")
        if self._verify_first and self._calls == 0:
            self._report_verification(self.verify(batch))
        compiled, variant, flat = self._compiled_for(batch)
        inputs = compiled.inputs(variant, flat)
        outputs = variant.executor(inputs) if compiled.has_run else self._first_run(compiled, variant, inputs)
        self._calls += 1
        return self._finish(compiled, variant, outputs)

    def prepare(self, batch: Any) -> StepGraph:
        """Captures and rewrites for batches like ``batch``, which may hold real, fake or meta tensors; runs nothing.

        Returns the graph that a call with such a batch would run.
        """
        return self._compiled_for(batch)[1].graph

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS_TO_COME:
            raise NotYetAttributeError(f"TrainStep.{name} belongs to the contract and is not implemented yet.")
        raise AttributeError(f"TrainStep has no attribute {name!r}")

    def __repr__(self) -> str:
        names = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return f"TrainStep({names}, {self._options}, {self.captures} captures, {self._calls} steps)"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainStep is bound to live tensors and cannot be copied or pickled. Save model.state_dict() and "
            "optimizer.state_dict(), and compile again."
        )

    @property
    def graph(self) -> StepGraph:
        """The rewritten graph that ran last, or was prepared last."""
        return self._latest()[1].graph

    @property
    def captured_graph(self) -> StepGraph:
        """Forward and backward as they were captured, before any pass, of the graph that ran or was prepared last."""
        return self._latest()[0].step.graph

    @property
    def captures(self) -> int:
        """How many times forward and backward were captured."""
        return len(self._cache)

    @property
    def update_traces(self) -> int:
        """How many times the optimizer's update was traced."""
        return sum(len(compiled.variants) for compiled in self._cache.values())

    def grad_norm(self) -> Tensor | None:
        """The last pre-clip norm of all gradients, 0-dim; None before the first step."""
        return self._last_norm

    def verify(self, batch: Any) -> VerifyReport:
        """Runs eager beside the graph and says whether every bit agrees.

        Compares the loss, aux, the gradient norm, every parameter, buffer and optimizer state entry, and the random
        streams. Where they differ, names the first node whose value differs by its logical key. Both run on the model and
        the optimizer themselves and are undone; afterwards nothing has changed. Needs memory for three copies of parameters,
        buffers and optimizer state.
        """
        compiled, variant, flat = self._compiled_for(batch)
        return verify_step(self.model, self.optimizer, self._call, compiled, variant, flat, self._options)

    def find_nonfinite(self, batch: Any) -> NonfiniteReport:
        """Runs one step node by node and names the operator that made the first NaN or infinity, with its module and line.

        Nothing has changed afterwards. Needs memory for a copy of parameters, buffers and optimizer state, and for every
        activation that a step keeps.
        """
        compiled, variant, flat = self._compiled_for(batch)
        return first_nonfinite(self.model, self.optimizer, compiled, variant, flat)

    def report(self) -> str:
        """What was captured, what the passes did, and what the user should know."""
        lines = [f"plan: {self._plan}" + (" (= none: there is no planner yet)" if self._plan == "auto" else "")]
        lines.append(
            f"captures: {self.captures}, update traces: {self.update_traces}, steps: {self._calls} ({self._skips} skipped)"
        )
        for number, compiled in enumerate(self._cache.values()):
            lines += describe_compiled(number, compiled)
        if self.last_verification is not None:
            lines.append(f"first step: {self.last_verification}")
        return "\n".join(lines)

    def _latest(self) -> tuple[CompiledBatch, Variant]:
        if self._current is None:
            raise ConfigError("nothing was captured yet: call the step, or step.prepare(batch), first")
        return self._current

    def _compiled_for(self, batch: Any) -> tuple[CompiledBatch, Variant, FlatBatch]:
        if is_capturing():
            raise ConfigError("a compiled step is called inside the loss of another; call one after the other")
        self._guard.check()
        self._state.masters.follow()
        flat = flatten_batch(batch)
        if not self._tensor_ids.isdisjoint(map(id, flat.leaves)):
            raise ConfigError("the batch holds a parameter or buffer of the model itself; pass a copy of it")
        compiled = self._cache.get(self._signature(flat)) or self._capture(flat)
        variant = compiled.variant()
        self._current = (compiled, variant)
        return compiled, variant, flat

    def _signature(self, batch: FlatBatch) -> Signature:
        surroundings = (self._members.signature(), *[watch.number() for watch in self._companions.values()])
        return (batch_signature(batch, self._device), self._guard.signature(), surroundings)

    def _capture(self, batch: FlatBatch) -> CompiledBatch:
        with _torch_log_quiet():
            return self._capture_alone(batch)

    def _capture_alone(self, batch: FlatBatch) -> CompiledBatch:
        start = time.perf_counter()
        tensors = tensors_of(self.model)  # buffers may have been replaced, and hooks added, since the last capture
        check_model(self.model, tensors)
        check_optimizer(self.optimizer, tensors)
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        step = capture_forward_backward(self.model, tensors, trained, self._call, batch)
        compiled = CompiledBatch(step, batch, tensors, self.optimizer, self._options, self._state)
        compiled.variant()
        compiled.capture_seconds = time.perf_counter() - start
        logger.info("captured %s in %.1f s", ", ".join(batch.describe()), compiled.capture_seconds)
        for companion in step.companions:
            named = [(f"{type(companion).__name__}.{path}", module) for path, module in companion.named_modules()]
            self._companions.setdefault(id(companion), AttributeWatch(named, of_companions=True))
        self._guard.ignore(step.changed_attributes)
        self._guard.ignore(self._irrelevant_attributes(step, batch))
        self._cache[self._signature(batch)] = compiled
        if len(self._cache) == CAPTURES_BEFORE_WARNING:
            varying = varying_leaves(batch.paths, [s[0] for s in self._cache])
            warnings.warn(
                StepGraphWarning(
                    f"{len(self._cache)} captures so far, each for another kind of batch or state of the model. "
                    + (f"What varies: {'; '.join(varying)}. " if varying else "")
                    + "Pad or bucket batches to few shapes, and pass numbers that change as tensors."
                ),
                stacklevel=5,
            )
        return compiled

    def _irrelevant_attributes(self, step: CapturedStep, batch: FlatBatch) -> list[str]:
        """Attributes whose change led to a capture of the very same graph: a step counter that forward does not read."""
        batch_part, number, surroundings = self._signature(batch)
        alike = [
            (other, compiled)
            for (other_batch, other, others), compiled in self._cache.items()
            if (other_batch, others) == (batch_part, surroundings)
        ]
        text = str(step.graph) if alike else ""
        for other, compiled in alike:
            if str(compiled.step.graph) == text:
                return self._guard.differing_attributes(number, other)
        return []

    def _first_run(self, compiled: CompiledBatch, variant: Variant, inputs: list[Any]) -> list[Any]:
        """Runs a capture that has never run: what only real values show, such as dtypes that do not fit, is told as a capture's
        failure, and undone."""
        try:
            with restored_on_error(self.model):
                outputs = variant.executor(inputs)
        except Exception as error:
            if isinstance(error, StepGraphError):
                raise
            self._cache = {key: value for key, value in self._cache.items() if value is not compiled}
            self._current = None
            raise first_run_error(error) from error
        compiled.has_run = True
        return outputs

    def _finish(self, compiled: CompiledBatch, variant: Variant, outputs: list[Any]) -> StepResult:
        gate = variant.first(OutputRole.NONFINITE, outputs)
        code = 0 if gate is None else int(gate)
        reason, parameter = (
            describe_nonfinite(code, compiled.step.grad_keys, variant.first(OutputRole.LOSS, outputs))
            if code
            else (None, None)
        )
        variant.binding.store(outputs)
        self._state.masters.note()
        norm = self._last_norm = variant.first(OutputRole.NORM, outputs)
        scaler = self._state.scaler
        if scaler is not None:
            scaler.update(skipped=reason is not None)
        if reason is None:
            self._skips_in_a_row = 0
            mark_stepped(self.optimizer)
        elif self._options.nonfinite == "skip" and not (self._options.error_if_nonfinite and code != NONFINITE_LOSS):
            self._count_skip(reason, parameter)
        else:
            raise NonFiniteError(
                f"step {self._calls}: {reason}. Parameters and optimizer state are unchanged. "
                "step.find_nonfinite(batch) names the operator that made it.",
                parameter,
            )
        return StepResult(
            loss=variant.first(OutputRole.LOSS, outputs),
            aux=compiled.aux_of(variant, outputs),
            grad_norm=norm,
            clip_factor=variant.first(OutputRole.CLIP_FACTOR, outputs),
            skipped=reason is not None,
            skip_reason=reason,
            applied=reason is None,
            step=self._calls,
            loss_scale=None if scaler is None else scaler.value,
        )

    def _count_skip(self, reason: str, parameter: str | None) -> None:
        self._skips += 1
        self._skips_in_a_row += 1
        logger.warning("step %d: the update is skipped, since %s", self._calls, reason)
        count, scaler, options = self._skips_in_a_row, self._state.scaler, self._options
        if count not in (options.skips_before_warning, options.skips_before_error):
            return
        where = "" if scaler is None else f" The loss scale is {scaler.value:g}."
        what = (
            f"step {self._calls}: {count} updates in a row were skipped, the last since {reason}.{where} Parameters and "
            "optimizer state are unchanged since. step.find_nonfinite(batch) names the operator that made it."
        )
        if count == options.skips_before_error:
            self._skips_in_a_row = 0
            raise NonFiniteError(what, parameter)
        warnings.warn(StepGraphWarning(what), stacklevel=4)

    def _report_verification(self, report: VerifyReport) -> None:
        self.last_verification = report
        if report.ok:
            logger.info("first step: %s", report)
        else:
            warnings.warn(StepGraphWarning(f"first step: {report}"), stacklevel=3)
