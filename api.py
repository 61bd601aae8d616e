"""``compile_train_step`` and ``TrainStep``: wires capture, passes and runtime together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .capture import LossCall, check_model, check_optimizer, flatten_batch, tensors_of, warn_user
from .device import read_later, reads_are_cheap
from .errors import ConfigError, NotYetAttributeError, NotYetError
from .graph import OutputRole, StepGraph
from .planner import HardwareSpec, Plan
from .runtime import (
    AUTOCAST_DTYPES,
    LARGEST_DELAY,
    Captures,
    CompiledBatch,
    LossScale,
    Masters,
    Measurement,
    NonfiniteReport,
    Outcome,
    Outcomes,
    Part,
    Program,
    Scaler,
    StepLog,
    StepOptions,
    StepResult,
    StepState,
    Subjects,
    Tally,
    Variant,
    VerifyReport,
    Window,
    check_call,
    check_choice,
    check_flag,
    check_weight,
    checked_options,
    describe_compiled,
    describe_nonfinite,
    describe_plan,
    first_nonfinite,
    measured,
    read,
    refuse_16_bit_parameters,
    register_clipping,
    restore,
    settings_of,
    state_of,
    verify_step,
    warn_of_batch_norm,
    write,
)
from .torch_compat import mark_stepped

logger = logging.getLogger("stepgraph")

_METHODS_TO_COME = ("full_params",)


def compile_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: str | PathLike[str] | Plan = "auto",
    *,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    criterion: Callable[[Any, Any], Any] | None = None,
    precision: str = "fp32",
    master_weights: bool = True,
    loss_scale: float | LossScale | None = None,
    fp32_outputs: bool = False,
    input_dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    clip_value: float | None = None,
    nonfinite: str = "skip",
    skips_before_warning: int | None = 20,
    skips_before_error: int | None = 100,
    spare_backward: bool = False,
    accumulate: int = 1,
    memory_budget: int | str | None = None,
    hardware: HardwareSpec | str | PathLike[str] | None = None,
    mesh: Any = None,
    reduce_dtype: torch.dtype | None = None,
    numerics: str = "exact",
    lowering: str = "auto",
    verify: str = "off",
    log: str | PathLike[str] | StepLog | None = None,
) -> TrainStep:
    """Compiles one training step of ``model`` with ``optimizer``: forward, loss, backward, norm, clip and update.

    Nothing is traced before the first call, or before :meth:`TrainStep.prepare`. The model and the optimizer stay the
    user's: the step updates their own tensors in place.

    Args:
        model: any module whose parameters are on one device.
        optimizer: built from the model's parameters. Its hyperparameters are read at every step.
        plan: what is kept in memory between forward and backward. ``"auto"`` keeps everything where it fits the budget, and
            otherwise computes again what costs least time; ``"sqrt"`` keeps the inputs of every √L-th block; ``"none"`` changes
            nothing but what the arguments and the model's own checkpointed regions ask for. A :class:`Plan`, or the path of a
            saved one, is replayed. The bits of a step are the same under each.
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
        fp32_outputs: turns what the model returns in 16 bit into float32, before ``criterion`` or ``loss_fn`` get it.
        input_dtype: casts the floating tensors that the model is called with, such as float32 batches of a model that is
            held in bfloat16.
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
        spare_backward: ends a step whose loss is not finite before its backward, where reading the loss is cheap (CPU); the
            skip then names no parameter, and its ``grad_norm`` is NaN.
        memory_budget: peak bytes of the whole step, parameters, gradients and optimizer state included, as a number or as text
            such as ``"8GiB"``. None is the device's memory less a tenth, under ``plan="auto"``.
        hardware: what to plan for: ``"h100"`` or the like, a spec or its file; None is this machine, calibrated or not.
        accumulate: how many batches, here micro-batches, make an update: gradients are summed and divided by their number, or
            by the sum of their weights, before norm and clip. Each call takes one; the last of a window updates.
            The sums, of weight times gradient, are divided once, by the sum of weights: the bits of ``(loss / k).backward()``
            where k is a power of two, otherwise those of a loop that divides the sums.
        log: path of a CSV with a row for each update, or a :class:`StepLog` with its alarms. The file of an earlier run is
            kept under another name.
        numerics: ``"exact"`` gives the bits of eager; ``"fast"`` may round differently, within what :meth:`TrainStep.verify`
            allows.
        lowering: ``"eager"`` runs each operator by itself, ``"inductor"`` compiles forward and backward, under ``"fast"`` the
            update too; ``"auto"`` is ``"inductor"`` under ``"fast"``, else ``"eager"``.
        verify: ``"first"`` runs eager beside the graph at the first step and warns where any bit differs.

    The other arguments belong to the contract and are not implemented yet: away from their defaults they raise.

    Raises:
        ConfigError: an argument, or model and optimizer, cannot work.
        NotYetError: an argument asks for what this version does not do.
        CaptureError: the model has something that cannot be traced.
        PlanError: at the first call, or at :meth:`TrainStep.prepare`: no plan keeps to ``memory_budget``.
    """
    if isinstance(plan, nn.Module) or callable(plan):
        hint = "criterion" if isinstance(plan, nn.Module) else "loss_fn"
        raise ConfigError(f"plan must be a name, a path or a Plan, got {type(plan).__name__}; did you mean {hint}=?")
    check_call(loss_fn, criterion, fp32_outputs=fp32_outputs, input_dtype=input_dtype)
    check_choice("verify", verify, ("off", "first"))
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
        spare_backward=spare_backward,
        accumulate=accumulate,
        numerics=numerics,
        lowering=lowering,
        plan=plan,
        memory_budget=memory_budget,
        hardware=hardware,
    )
    _refuse_unimplemented(
        mesh=(mesh, mesh is None),
        reduce_dtype=(reduce_dtype, reduce_dtype is None),
    )
    check_flag("master_weights", master_weights)
    call = LossCall(loss_fn, criterion, AUTOCAST_DTYPES[precision], fp32_outputs=fp32_outputs, input_dtype=input_dtype)
    return TrainStep(
        model,
        optimizer,
        call,
        options,
        verify_first=verify == "first",
        master_weights=master_weights,
        log=log if log is None or isinstance(log, StepLog) else StepLog(log),
        precision=precision,
    )


def _refuse_unimplemented(**arguments: tuple[Any, bool]) -> None:
    for name, (value, is_implemented) in arguments.items():
        if not is_implemented:
            raise NotYetError(f"{name}={value!r} is not implemented yet; leave {name} at its default in this version.")


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
        verify_first: bool,
        master_weights: bool = True,
        log: StepLog | None = None,
        precision: str = "fp32",
    ) -> None:
        if not isinstance(model, nn.Module):
            got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            raise ConfigError(
                f"model must be an nn.Module, got {got}; the call is compile_train_step(model, optimizer)"
            )
        tensors = tensors_of(model)
        self._device = check_model(model, tensors)
        check_optimizer(optimizer, tensors)
        self.model = model
        self.optimizer = optimizer
        self.last_verification: VerifyReport | None = None
        self._call = replace(call, device_type=self._device.type)
        self._options = options
        self._verify_first = verify_first
        if options.spare_backward and not reads_are_cheap(self._device):
            raise ConfigError(
                f"spare_backward=True reads each loss before its backward, and on {self._device.type} every step would wait "
                "for the device; leave it out"
            )
        if not master_weights:
            refuse_16_bit_parameters(tensors.params, options)
        scale = options.loss_scale
        self._state = StepState(
            None if scale is None else Scaler(scale, self._device),
            Masters(tensors.params if master_weights else []),
            Window(options.accumulate, self._device) if options.accumulate > 1 else None,
        )
        self._captures = Captures(model, optimizer, tensors, self._call, options, self._state)
        self._tally = Tally()
        self._outcomes = Outcomes(self._learn)
        self._log = log
        if log is not None:
            log.describe(settings_of(options, precision, self._device))
        if options.accumulate > 1:
            warn_of_batch_norm(model, options.accumulate)
        self._last_norm: Tensor | None = None
        self._measured: Measurement | None = None
        if options.max_norm or options.clip_value:
            register_clipping(self, [p for group in optimizer.param_groups for p in group["params"]])

    def __call__(self, batch: Any, weight: float | None = None) -> StepResult:
        """Runs one training step on ``batch``, or adds a micro-batch to the window and runs the update if that is full.

        Args:
            weight: of the batch in the update, which is the sum of weight times gradient, divided by the sum of weights: the
                number of tokens where the loss is a mean over tokens. None weighs all alike; 0 leaves a batch out.

        Raises:
            CaptureError: the first time that a batch of this kind is seen and cannot be traced; nothing was changed.
            GuardError: a parameter was replaced after compilation; nothing was changed.
            NonFiniteError: under ``nonfinite="raise"`` or ``error_if_nonfinite``; nothing was updated.
        """
        check_weight(weight)
        self._outcomes.settle(keep=LARGEST_DELAY - 1)
        window = self._state.window
        if self._verify_first and self._tally.updates == 0 and not (window and window.count):
            self._report_verification(self.verify(batch))
        if weight == 0:
            return self._leave_out(batch)
        if window is None:
            return self._update(batch, None)
        window.check(weight)
        window.expect(1.0 if weight is None else weight)
        part = window.part(weighted=weight is not None)
        if window.count + 1 < window.size:
            return self._add(batch, weight, part)
        return self._update(batch, part)

    def flush(self) -> StepResult | None:
        """Applies a window that is not full, divided by what it holds; its ``loss`` is the window's mean.

        Returns None where there is nothing to apply.
        """
        window = self._state.window
        if window is None or not window.count:
            return None
        self._captures.check()
        return self._apply(self._latest()[0])

    def _update(self, batch: Any, part: Part | None) -> StepResult:
        compiled, variant, flat = self._captures.find(batch, part)
        assert isinstance(variant, Variant)
        try:
            return self._finish(compiled, variant, self._captures.run(compiled, variant, flat))
        finally:
            if self._state.window is not None:
                self._state.window.clear()

    def _add(self, batch: Any, weight: float | None, part: Part) -> StepResult:
        """Runs a micro-batch that is not the last of its window."""
        assert self._state.window is not None
        compiled, program, flat = self._captures.find(batch, part, is_micro=True)
        try:
            outputs = self._captures.run(compiled, program, flat)
        except Exception:
            self._state.window.clear()  # sums may be half done
            raise
        program.binding.store(outputs)
        self._state.window.take(weight, program.gradients(outputs))
        return self._without_update(program.first(OutputRole.LOSS, outputs), compiled.aux_of(program, outputs))

    def _leave_out(self, batch: Any) -> StepResult:
        """Runs forward and backward of a batch of weight 0, for what they do to buffers and random streams."""
        window = self._state.window
        if window is not None:
            window.check(0.0)
        compiled, program, flat = self._captures.find(batch, None, is_micro=True)
        outputs = self._captures.run(compiled, program, flat)
        program.binding.store(outputs)
        result = self._without_update(program.first(OutputRole.LOSS, outputs), compiled.aux_of(program, outputs))
        if window is not None:
            window.take(0.0, {})
            if window.count < window.size:
                return result
        return replace(self._apply(compiled), loss=result.loss, aux=result.aux)

    def _apply(self, compiled: CompiledBatch) -> StepResult:
        """Ends a window with what it holds."""
        window = self._state.window
        if window is None or not window.weight_sum:
            self._tally.updates += 1
            result = self._without_update(None, None, skip_reason="the weights of its batches sum to 0")
            if window is not None:
                window.clear()
            return result
        window.expect(0.0)
        try:
            variant = compiled.variant(window.part(weighted=False, has_batch=False))
            self._captures.latest = (compiled, variant)
            return self._finish(compiled, variant, variant.executor(variant.inputs([])))
        finally:
            window.clear()

    def _without_update(self, loss: Tensor | None, aux: Any, skip_reason: str | None = None) -> StepResult:
        """The result of a call that updates nothing: amid a window, or, for a reason, at the end of one."""
        number = self._tally.updates + (skip_reason is None)
        result = StepResult(loss, aux, None, None, number, Outcome(reason=skip_reason))
        self._outcomes.add(result)
        if len(self._outcomes) == 1:  # nothing that is still on the device comes before it
            self._outcomes.settle()
        return result

    def state_dict(self, extra: Any = None) -> dict[str, Any]:
        """Everything that a run needs to go on with the same bits; see :meth:`save`. Tensors are the live ones."""
        self._outcomes.settle()
        return state_of(self._subjects, extra)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """Restores what :meth:`state_dict` returned; see :meth:`load`."""
        self._outcomes.settle()
        return restore(self._subjects, state, strict=strict)

    def save(self, folder: str | PathLike[str], extra: Any = None) -> Path:
        """Writes a checkpoint, ``folder/checkpoint.pt``, whole or not at all: the one before stays until then.

        It holds parameters, buffers, masters, optimizer, loss scale, window, counters and random streams, and is read by plain
        torch too: ``torch.load(path)["model"]`` and ``["optimizer"]`` are ``state_dict()`` of either.

        Args:
            extra: what else a run needs, such as ``scheduler.state_dict()`` and the loader's position: tensors, numbers,
                strings, and containers of them.
        """
        return write(folder, self.state_dict(extra))

    def load(self, path: str | PathLike[str], strict: bool = True) -> Any:
        """Restores a checkpoint into the model, the optimizer and this step, and returns its ``extra``.

        Args:
            path: a folder that :meth:`save` wrote to, or a file of plain torch with ``model`` and ``optimizer``.
            strict: whether everything has to be there and to fit; otherwise what fits is taken.

        Raises:
            ConfigError: a list of what is missing, left over or of another shape; nothing was changed.
        """
        return self.load_state_dict(read(path), strict)

    @property
    def _subjects(self) -> Subjects:
        return Subjects(self.model, self.optimizer, self._state, self._tally)

    def prepare(self, batch: Any) -> StepGraph:
        """Captures and rewrites for batches like ``batch``, which may hold real, fake or meta tensors; runs nothing.

        Returns the graph that a call with such a batch would run; under accumulation, the last call of a window.
        """
        if self._state.window is None:
            return self._captures.find(batch)[1].graph
        compiled, _, _ = self._captures.find(batch, Part(), is_micro=True)
        variant = compiled.variant(compiled.last_part)
        compiled.micro(compiled.last_part)
        self._captures.latest = (compiled, variant)
        return variant.graph

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS_TO_COME:
            raise NotYetAttributeError(f"TrainStep.{name} belongs to the contract and is not implemented yet.")
        raise AttributeError(f"TrainStep has no attribute {name!r}")

    def __repr__(self) -> str:
        names = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return f"TrainStep({names}, {self._options}, {self.captures} captures, {self._tally.updates} steps)"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainStep is bound to live tensors and cannot be copied or pickled. Save it with step.save(folder), "
            "compile again, and load it with step.load(folder)."
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
    def plan(self) -> Plan:
        """The plan of what ran or was prepared last, with its predictions."""
        return self._latest()[0].explained_plan()

    @property
    def captures(self) -> int:
        """How many times forward and backward were captured."""
        return len(self._captures.all)

    @property
    def update_traces(self) -> int:
        """How many times the optimizer's update was traced."""
        return sum(len(compiled.variants) for compiled in self._captures.all)

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
        with self._window_set_aside():
            self.prepare(batch)
            compiled, variant = self._latest()
            assert isinstance(variant, Variant)
            return verify_step(
                self.model, self.optimizer, self._call, compiled, variant, flatten_batch(batch), self._options
            )

    def _latest(self) -> tuple[CompiledBatch, Program]:
        if self._captures.latest is None:
            raise ConfigError("nothing was captured yet: call the step, or step.prepare(batch), first")
        return self._captures.latest

    def measure(self, batch: Any, weight: float | None = None) -> StepResult:
        """Runs one step, as a call does, and measures its time and its peak, which :meth:`report` holds against the plan's.

        The peak is the allocator's: on the CPU what this thread's operators asked for, on CUDA what was allocated. The time
        includes what measuring costs, a few microseconds an operator.
        """
        self.prepare(batch)
        result, self._measured = measured(lambda: self(batch, weight), lambda: self._latest()[1], self._device)
        return result

    def find_nonfinite(self, batch: Any) -> NonfiniteReport:
        """Runs one step node by node and names the operator that made the first NaN or infinity, with its module and line.

        Nothing has changed afterwards. Needs memory for a copy of parameters, buffers and optimizer state, and for every
        activation that a step keeps.
        """
        with self._window_set_aside() as window:
            if window is not None:
                window.expect(1.0)
            compiled, variant, flat = self._captures.find(batch, None if window is None else Part())
            assert isinstance(variant, Variant)
            return first_nonfinite(self.model, self.optimizer, compiled, variant, flat)

    @contextlib.contextmanager
    def _window_set_aside(self) -> Iterator[Window | None]:
        self._outcomes.settle()
        window = self._state.window
        with contextlib.nullcontext() if window is None else window.set_aside():
            yield window

    def report(self) -> str:
        """What was captured, what the passes did, and what the user should know."""
        self._outcomes.settle()
        lines: list[str] = []
        if self._captures.latest is not None:
            lines += describe_plan(self.plan, self._measured)
        else:
            lines.append(f"plan: {self._options.planning.strategy}, made at the first call")
        lines.append(
            f"captures: {self.captures}, update traces: {self.update_traces}, "
            f"steps: {self._tally.updates} ({self._tally.skips} skipped)"
        )
        for number, compiled in enumerate(self._captures.all):
            lines += describe_compiled(number, compiled)
        if self.last_verification is not None:
            lines.append(f"first step: {self.last_verification}")
        return "\n".join(lines)

    def _finish(self, compiled: CompiledBatch, variant: Variant, outputs: list[Any]) -> StepResult:
        """Takes over what an update left, and tells what became of it."""
        loss, code = variant.first(OutputRole.LOSS, outputs), variant.nonfinite_code(outputs)
        self._tally.updates += 1
        variant.binding.store(outputs)
        self._state.masters.note()
        norm = variant.first(OutputRole.NORM, outputs)
        if norm is None:  # the backward was spared
            norm = torch.full((), torch.nan, dtype=variant.norm_dtype, device=self._device)
        self._last_norm = norm
        has_batch = variant.part is None or variant.part.has_batch
        mean_loss = None
        if self._state.window is not None:
            mean_loss = variant.first(OutputRole.LOSS_SUM, outputs) / self._state.window.numbers["weight_sum"]
        result = StepResult(
            loss=loss if has_batch else mean_loss,
            aux=compiled.aux_of(variant, outputs) if has_batch else None,
            grad_norm=norm,
            clip_factor=variant.first(OutputRole.CLIP_FACTOR, outputs),
            step=self._tally.updates,
            outcome=Outcome(
                None if code is None else read_later(code),
                describe=lambda code: describe_nonfinite(code, variant.grad_keys, loss),
                moves_scale=variant.is_read_later,
            ),
            mean_loss=mean_loss,
            norm_after_clip_value=variant.first(OutputRole.CLIPPED_NORM, outputs),
        )
        self._outcomes.add(result)
        if variant.is_read_later and self._log is None:
            mark_stepped(self.optimizer)  # what a scheduler asks for, whatever will be read
        else:
            self._outcomes.settle()
        return result

    def _learn(self, result: StepResult, code: int) -> None:
        """Counts what became of an update, moves the loss scale by it, and logs it."""
        outcome, scaler, parameter = result.outcome, self._state.scaler, None
        is_update = outcome.describe is not None
        if is_update and scaler is not None:
            scaler.update(skipped=code != 0, is_moved=outcome.moves_scale)
        if outcome.describe is not None and code:
            outcome.reason, parameter = outcome.describe(code)
        elif is_update:
            outcome.applied = True
            self._tally.applied()
            mark_stepped(self.optimizer)
        outcome.describe = None  # holds the loss and the graph
        outcome.loss_scale = None if scaler is None else scaler.value
        if (is_update or outcome.reason) and self._log is not None:
            self._log.record(result, self.optimizer, norm_is_l2=self._options.norm_type == 2.0)
        if code:
            self._tally.not_finite(result.step, code, str(outcome.reason), parameter, self._options, scaler)
        elif outcome.reason:
            self._tally.skipped(result.step, outcome.reason)

    def _report_verification(self, report: VerifyReport) -> None:
        self.last_verification = report
        if report.ok:
            logger.info("first step: %s", report)
        else:
            warn_user(f"first step: {report}")
