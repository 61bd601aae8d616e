"""Whether a checkpoint fits the model, the optimizer and the step that it is loaded into: found out before anything changes."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..capture import tensors_of
from ..errors import ConfigError
from .state import StepState
from .tally import Tally

FORMAT = 1
_MODEL_NAMES = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_NAMES = ("optimizer", "optimizer_state_dict")


@dataclass
class Subjects:
    """What is saved and restored."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: StepState
    tally: Tally

    @property
    def params(self) -> dict[str, Tensor]:
        """Parameters of the model, by key."""
        return {held.key: held.tensor for held in tensors_of(self.model).params}


@dataclass
class Fit:
    """A checkpoint, held against what it is loaded into.

    Attributes:
        model: the saved ``model.state_dict()``.
        optimizer: the saved ``optimizer.state_dict()`` with parameters numbered as they are here; None where it does not fit.
        own: those parts of the step's own state that are whole; of a plain checkpoint, the state of its ``GradScaler``, if any.
        problems: what is missing, left over, or of another kind, one line each.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    own: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def fit(subjects: Subjects, state: Any) -> Fit:
    """Holds a checkpoint against live objects.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(state, dict):
        raise ConfigError(f"a checkpoint is a dict with the keys model and optimizer, got {type(state).__name__}")
    model = next((state[name] for name in _MODEL_NAMES if name in state), None)
    if not isinstance(model, dict):
        raise ConfigError(f"the checkpoint has no model; its keys are {', '.join(map(str, state)) or 'none'}")
    found = Fit(model, problems=list(tensor_problems("model:", subjects.model.state_dict(), model)))
    own = state.get("stepgraph")
    if own is not None:
        if not isinstance(own, dict) or own.get("format") != FORMAT:
            got = own.get("format") if isinstance(own, dict) else type(own).__name__
            raise ConfigError(f"the checkpoint has format {got}; this version reads {FORMAT}")
        for name, check in _CHECKS.items():
            problems = [f"{name}: missing"] if name not in own else list(check(subjects, own[name]))
            found.problems += problems
            if not problems or (name in _TAKEN_IN_PARTS and isinstance(own.get(name), dict)):
                found.own[name] = own[name]
    elif subjects.state.scaler is not None and (scaler := grad_scaler_state(state.get("scaler"))) is not None:
        problems = list(_scaler_problems(subjects, scaler))
        found.problems += problems
        found.own = {} if problems else {"scaler": scaler}
    optimizer = next((state[name] for name in _OPTIMIZER_NAMES if name in state), None)
    if not _is_optimizer_state(optimizer):
        found.problems.append("optimizer: missing" if optimizer is None else "optimizer: no state of an optimizer")
        return found
    found.optimizer, problems = _ordered(subjects, optimizer, found.own)
    found.problems += problems
    found.problems += _missing_masters(subjects, found)
    return found


def grad_scaler_state(saved: Any) -> dict[str, Any] | None:
    """The state of a torch ``GradScaler`` as that of a loss scale; None where it is none, or of one that was switched off."""
    if not isinstance(saved, dict) or not {"scale", "_growth_tracker"} <= saved.keys():
        return None
    return {"scale": saved["scale"], "growth_tracker": saved["_growth_tracker"], "hysteresis_tracker": 1}


def describe(value: Any) -> str:
    """Dtype and shape of a tensor; anything else as it is."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def tensor_problems(what: str, here: dict[str, Tensor], saved: Any) -> Iterator[str]:
    """What is missing, left over or of another shape or dtype among named tensors."""
    if not isinstance(saved, dict):
        yield f"{what} {type(saved).__name__}, and should be tensors by name"
        return
    yield from (f"{what} {name} is missing" for name in here if name not in saved)
    yield from (f"{what} {name} is left over" for name in saved if name not in here)
    for name in here:
        if name in saved and isinstance(here[name], Tensor) and describe(here[name]) != describe(saved[name]):
            yield f"{what} {name} is {describe(saved[name])}, here {describe(here[name])}"


# The optimizer


def names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Keys of the parameters of each group."""
    names = {id(held.tensor): held.key for held in tensors_of(model).params}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def entries_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    """Dtype and shape of every entry of the optimizer's state, by parameter key."""
    return {
        held.key: {name: _kind(value) for name, value in optimizer.state[held.tensor].items()}
        for held in tensors_of(model).params
        if held.tensor in optimizer.state
    }


def _kind(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else type(value).__name__


def _is_optimizer_state(saved: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return False
    groups = saved.get("param_groups")
    return isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)


def _ordered(subjects: Subjects, saved: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The saved state with parameters numbered as they are here, and what keeps it from fitting."""
    optimizer = subjects.optimizer
    here = names_of_groups(subjects.model, optimizer)
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    there = own.get("names", here)  # a plain checkpoint knows positions only
    if [len(names) for names in there] != sizes or len(here) != len(there):
        return None, [f"optimizer: groups of {sizes} parameters, here of {[len(names) for names in here]}"]
    problems = []
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        problems += [f"optimizer: group {index} lacks {name}" for name in mine if name not in theirs]
        problems += [
            f"optimizer: group {index} has {name}, which it has not here" for name in theirs if name not in mine
        ]
    if problems:
        return None, problems
    numbers: dict[str, Any] = {}
    for group, names in zip(saved["param_groups"], there, strict=True):
        numbers.update(zip(names, group["params"], strict=True))
    by_name = {name: saved["state"][number] for name, number in numbers.items() if number in saved["state"]}
    unfit = list(_state_problems(subjects, here, by_name, own.get("entries")))
    fitting = by_name.keys() - {name for name, _ in unfit}
    state, groups, position = {}, [], 0
    for index, (group, names) in enumerate(zip(saved["param_groups"], here, strict=True)):
        problems += _option_problems(index, optimizer, group)
        live = optimizer.param_groups[index]
        groups.append({**live, **group, "params": list(range(position, position + len(names)))})
        for name in names:
            if name in fitting:
                state[position] = by_name[name]
            position += 1
    problems += [f"optimizer: {name}{problem}" for name, problem in unfit]
    return {**saved, "state": state, "param_groups": groups}, problems


def _option_problems(index: int, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> Iterator[str]:
    """Flags may be missing, which versions of torch add; numbers may not."""
    for name, value in optimizer.defaults.items():
        if value is not None and not isinstance(value, bool) and name not in saved:
            yield f"optimizer: group {index} has no {name}"


def _state_problems(
    subjects: Subjects, groups: list[list[str]], saved: dict[str, Any], described: dict[str, dict[str, str]] | None
) -> Iterator[tuple[str, str]]:
    """Parameters whose saved state does not fit, each with a reason.

    ``described`` tells which had state when it was saved; None from a plain checkpoint.
    """
    params = subjects.params
    for name, param in params.items():
        entries = saved.get(name)
        if entries is not None and not isinstance(entries, dict):
            yield name, f" has a {type(entries).__name__}, and should have entries by name"
            continue
        for entry, kind in (described or {}).get(name, {}).items():
            if entries is None or entry not in entries:
                yield name, f"/{entry} is missing"
            elif _kind(entries[entry]) != kind:
                yield name, f"/{entry} is {_kind(entries[entry])}, and was saved as {kind}"
        if entries is not None:
            for problem in _entry_problems(param, subjects.optimizer, entries):
                yield name, problem
        elif saved and described is None and subjects.optimizer.state.get(param):
            yield name, f" has no state, and has {', '.join(subjects.optimizer.state[param])} here"
    for names in groups:  # parameters of a group with as many dimensions have the same entries, where they have any
        present = [name for name in names if isinstance(saved.get(name), dict)]
        union: dict[int, set[str]] = {}
        for name in present:
            union.setdefault(params[name].ndim, set()).update(saved[name])
        for name in present:
            for entry in sorted(union[params[name].ndim] - saved[name].keys() - (described or {}).get(name, {}).keys()):
                yield name, f"/{entry} is missing"


def _entry_problems(param: Tensor, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> Iterator[str]:
    """Shapes are those of the live state. Where there is none, those of torch's optimizers broadcast to the parameter's."""
    live = optimizer.state.get(param, {})
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    for entry, value in saved.items():
        if not isinstance(value, Tensor):
            continue
        if isinstance(live.get(entry), Tensor):
            if value.shape != live[entry].shape:
                yield f"/{entry} is {describe(value)}, here {describe(live[entry])}"
        elif is_torchs and not _broadcasts(value, param):
            yield f"/{entry} is {describe(value)}, for a parameter of shape {list(param.shape)}"


def _broadcasts(value: Tensor, param: Tensor) -> bool:
    if value.numel() == 1:
        return True
    return value.ndim == param.ndim and all(a in (1, b) for a, b in zip(value.shape, param.shape, strict=True))


# The step's own state


def _names_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    if not (isinstance(saved, list) and all(isinstance(names, list) for names in saved)):
        yield "names: no lists of parameters"


def _entries_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    if not (isinstance(saved, dict) and all(isinstance(entries, dict) for entries in saved.values())):
        yield "entries: no description of the optimizer's state"


def further_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and attributes that ``model.state_dict()`` leaves out."""
    own = model.state_dict()
    tensors = tensors_of(model)
    held = tensors.buffers + tensors.attributes
    return {h.key: h.current() for h in held if not any(name in own for name in h.names)}


def _further_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    here = further_tensors(subjects.model)
    if isinstance(saved, dict):  # attributes come and go with the first forward
        here = {name: value for name, value in here.items() if name in saved or name in _buffers(subjects.model)}
    yield from tensor_problems("model:", here, saved)


def _buffers(model: nn.Module) -> set[str]:
    return {held.key for held in tensors_of(model).buffers}


def _masters_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield "masters: no tensors by name"
        return
    masters, params = subjects.state.masters, subjects.params
    for name, value in saved.items():
        if not masters.may_have(name):
            yield f"masters: {name} has none here"
        elif not masters.fits(name, value):
            yield f"masters: {name} is {describe(value)}, here float32{list(params[name].shape)}"


def _missing_masters(subjects: Subjects, found: Fit) -> Iterator[str]:
    """An update makes masters before it makes state."""
    masters = found.own.get("masters")
    for name in found.own.get("entries", {}):
        if masters is not None and subjects.state.masters.may_have(name) and name not in masters:
            yield f"masters: {name} is missing"


def _scaler_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    here = subjects.state.scaler
    if (here is None) != (saved is None):
        yield f"loss scale: {saved or 'none'}, here {here and here.state_dict() or 'none'}"
        return
    if here is None:
        return
    if not isinstance(saved, dict):
        yield f"loss scale: {saved!r}"
        return
    for name in here.state_dict():
        if name not in saved:
            yield f"loss scale: {name} is missing"
        elif name != "scale" and not isinstance(saved[name], int):
            yield f"loss scale: {name} is {saved[name]!r}"
    if "scale" in saved and (problem := here.problem_with(saved["scale"])):
        yield f"loss scale: {problem}"
    if isinstance(saved.get("growth_tracker"), int) and saved["growth_tracker"] < 0:
        yield f"loss scale: growth_tracker is {saved['growth_tracker']}"


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _window_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    here = subjects.state.window
    if (here is None) != (saved is None):
        yield f"window: {'none' if saved is None else 'there'}, here {'none' if here is None else 'there'}"
        return
    if here is None:
        return
    missing = [name for name in here.state_dict() if not isinstance(saved, dict) or name not in saved]
    if missing:
        yield f"window: {', '.join(missing)} is missing"
        return
    count = saved["count"]
    if not (isinstance(count, int) and count >= 0):
        yield f"window: count is {count!r}"
    elif count >= here.size:
        yield f"window: {count} micro-batches so far, here {here.size} make an update"
    if not (_is_finite_number(saved["weight_sum"]) and saved["weight_sum"] >= 0) or (
        isinstance(count, int) and count and saved["is_weighted"] is False and saved["weight_sum"] != count
    ):
        yield f"window: weight_sum is {saved['weight_sum']!r}"
    if not isinstance(saved["loss_sum"], float):
        yield f"window: loss_sum is {saved['loss_sum']!r}"
    if saved["is_weighted"] not in (None, True, False):
        yield f"window: is_weighted is {saved['is_weighted']!r}"
    params = subjects.params
    gradients = saved["gradients"]
    if not isinstance(gradients, dict) or (not gradients and saved["weight_sum"]):
        yield "window: it holds no gradients"
        return
    for name, value in gradients.items():
        if name not in params:
            yield f"window: {name} is left over"
        elif not isinstance(value, Tensor) or value.shape != params[name].shape or not value.dtype.is_floating_point:
            yield f"window: the gradient of {name} is {describe(value)}, here {describe(params[name])}"


def _tally_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    for each in fields(Tally):
        value = saved.get(each.name) if isinstance(saved, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            yield f"tally: {each.name} is {'missing' if value is None else repr(value)}"


def _random_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    """Tries streams of its own."""
    try:
        torch.Generator().set_state(saved["torch"]["cpu"])
        random.Random().setstate(python_random_state(saved["python"]))
        if saved["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.RandomState().set_state(numpy_random_state(saved["numpy"]))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        yield f"random streams: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def python_random_state(saved: Any) -> tuple[Any, ...]:
    """The state of Python's generator, as ``random.setstate`` takes it, from what a file holds."""
    version, internal, gauss = saved
    return (version, tuple(internal), gauss)


def numpy_random_state(saved: Any) -> tuple[Any, ...]:
    """The same for numpy's global generator."""
    import numpy

    name, keys, *rest = saved
    return (name, numpy.array(keys, dtype=numpy.uint32), *rest)


def _no_problems(subjects: Subjects, saved: Any) -> Iterator[str]:
    yield from ()


_CHECKS = {
    "names": _names_problems,
    "entries": _entries_problems,
    "further": _further_problems,
    "masters": _masters_problems,
    "scaler": _scaler_problems,
    "window": _window_problems,
    "tally": _tally_problems,
    "random": _random_problems,
    "extra": _no_problems,
}
_TAKEN_IN_PARTS = {"further", "masters"}
