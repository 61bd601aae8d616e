"""Everything that a run needs to go on with the same bits, as a file that plain torch reads.

A checkpoint is one ``torch.save`` file, read with ``weights_only=True``: tensors, numbers, strings and containers of them, and
no code. ``["model"]`` and ``["optimizer"]`` are what ``state_dict()`` of either returns; the rest is under ``["stepgraph"]``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import tensors_of
from ..device import rng_state, set_rng_state
from ..errors import ConfigError
from ..torch_compat import pytree
from .state import StepState
from .tally import Tally

FORMAT = 1
FILE = "checkpoint.pt"


@dataclass
class Subjects:
    """What is saved and restored."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: StepState
    tally: Tally


def state_of(subjects: Subjects, extra: Any = None) -> dict[str, Any]:
    """The state of a run. Tensors are the live ones: copy or write them before the next step."""
    model, optimizer, state = subjects.model, subjects.optimizer, subjects.state
    state.masters.follow()  # parameters may have been written since the last step
    tensors = tensors_of(model)
    own = model.state_dict()
    held = tensors.buffers + tensors.attributes
    further = {h.key: h.current() for h in held if not any(name in own for name in h.names)}
    return {
        "model": own,
        "optimizer": optimizer.state_dict(),
        "stepgraph": {
            "format": FORMAT,
            "names": _names_of_groups(model, optimizer),
            "further": further,
            "masters": dict(state.masters.tensors),
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
            "window": None if state.window is None else state.window.state_dict(),
            "tally": asdict(subjects.tally),
            "random": _random_state({h.tensor.device for h in tensors.all}),
            "extra": extra,
        },
    }


def restore(subjects: Subjects, state: dict[str, Any], *, strict: bool = True) -> Any:
    """Puts a state of :func:`state_of`, or a plain checkpoint of model and optimizer, into live objects.

    Tensors of the model keep their identity. Nothing is changed where the state does not fit.

    Args:
        strict: whether everything has to be there and fit; otherwise what is there and fits is taken.

    Returns:
        ``extra``, as it was saved; None from a plain checkpoint.

    Raises:
        ConfigError: a list of what is missing, left over, or of another shape or dtype.
    """
    model_state, optimizer_state, own = _parts(state)
    problems = _tensor_problems("model:", subjects.model.state_dict(), model_state)
    ordered, found = _ordered(subjects, optimizer_state, own)
    problems += found
    if own is not None:
        problems += _own_problems(subjects, own)
    if problems and strict:
        shown = "\n  ".join(problems[:20]) + (f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ConfigError(
            f"the checkpoint does not fit in {len(problems)} points; nothing was loaded. Build model, optimizer and step as "
            f"they were saved, or pass strict=False to take what fits:\n  {shown}"
        )
    _restore_model(subjects.model, model_state)
    if ordered is not None:
        _restore_optimizer(subjects.optimizer, ordered)
    if own is None:
        return None
    _restore_own(subjects, own)
    return own["extra"]


def _parts(state: Any) -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, Any] | None]:
    if not isinstance(state, dict):
        raise ConfigError(f"a checkpoint is a dict with the keys model and optimizer, got {type(state).__name__}")
    model = next((state[name] for name in ("model", "model_state_dict", "state_dict") if name in state), None)
    optimizer = next((state[name] for name in ("optimizer", "optimizer_state_dict") if name in state), None)
    own = state.get("stepgraph")
    if model is None:
        raise ConfigError(f"the checkpoint has no model; its keys are {', '.join(map(str, state)) or 'none'}")
    if own is not None and own["format"] != FORMAT:
        raise ConfigError(f"the checkpoint has format {own['format']}; this version reads {FORMAT}")
    return model, optimizer, own


def _describe(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _tensor_problems(what: str, here: dict[str, Tensor], saved: dict[str, Tensor]) -> list[str]:
    problems = [f"{what} {name} is missing" for name in here if name not in saved]
    problems += [f"{what} {name} is left over" for name in saved if name not in here]
    for name in here.keys() & saved.keys():
        mine, theirs = here[name], saved[name]
        if isinstance(mine, Tensor) and _describe(mine) != _describe(theirs):
            problems.append(f"{what} {name} is {_describe(theirs)}, here {_describe(mine)}")
    return problems


def _restore_model(model: nn.Module, saved: dict[str, Tensor]) -> None:
    here = model.state_dict()
    fitting = {
        name: value for name, value in saved.items() if name in here and _describe(here[name]) == _describe(value)
    }
    model.load_state_dict(fitting, strict=False)


def _names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(held.tensor): held.key for held in tensors_of(model).params}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _ordered(
    subjects: Subjects, saved: dict[str, Any] | None, own: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The optimizer's saved state with parameters numbered as they are here, and what keeps it from fitting."""
    if saved is None:
        return None, ["optimizer: missing"]
    optimizer = subjects.optimizer
    here = _names_of_groups(subjects.model, optimizer)
    if own is not None:
        there: list[list[str]] = own["names"]
    elif [len(group["params"]) for group in saved["param_groups"]] == [len(group) for group in here]:
        there = here  # a plain checkpoint knows positions only
    else:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        return None, [f"optimizer: groups of {sizes} parameters, here of {[len(group) for group in here]}"]
    problems = []
    if len(here) != len(there):
        return None, [f"optimizer: {len(there)} parameter groups, here {len(here)}"]
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        problems += [f"optimizer: group {index} lacks {name}" for name in mine if name not in theirs]
        problems += [
            f"optimizer: group {index} has {name}, which it has not here" for name in theirs if name not in mine
        ]
    if problems:
        return None, problems
    numbers: dict[str, int] = {}
    for group, names in zip(saved["param_groups"], there, strict=True):
        numbers.update(zip(names, group["params"], strict=True))
    state, groups, position = {}, [], 0
    params = {held.key: held.tensor for held in tensors_of(subjects.model).params}
    # which entries there are, by group and by dimensions, which factored states depend on
    kinds: dict[tuple[int, int], set[frozenset[str]]] = {}
    for index, (group, names) in enumerate(zip(saved["param_groups"], here, strict=True)):
        groups.append({**group, "params": list(range(position, position + len(names)))})
        for name in names:
            entries = saved["state"].get(numbers[name])
            if entries is not None:
                state[position] = entries
                problems += _entry_problems(name, optimizer.state.get(params[name], {}), entries)
                kinds.setdefault((index, params[name].ndim), set()).add(frozenset(entries))
            position += 1
    for (index, _), found in kinds.items():
        if len(found) > 1:
            missing = sorted(frozenset.union(*found) - frozenset.intersection(*found))
            problems.append(f"optimizer: some parameters of group {index} have no {', '.join(missing)}")
    return {**saved, "state": state, "param_groups": groups}, problems


def _entry_problems(name: str, here: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Where the optimizer has state for the parameter already, its shapes are those to come."""
    return [
        f"optimizer: {name}/{entry} is {_describe(value)}, here {_describe(here[entry])}"
        for entry, value in saved.items()
        if isinstance(value, Tensor) and isinstance(here.get(entry), Tensor) and value.shape != here[entry].shape
    ]


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, which casts floating state to the parameters' dtype, and then the saved dtypes."""
    optimizer.load_state_dict(saved)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved["state"].items():
        held = optimizer.state[params[number]]
        for name, value in entries.items():
            if isinstance(value, Tensor) and held[name].dtype is not value.dtype:
                held[name] = value.to(held[name].device, copy=True)


def _own_problems(subjects: Subjects, own: dict[str, Any]) -> list[str]:
    state = subjects.state
    problems = _tensor_problems("model:", _further(subjects.model, own), own["further"])
    problems += [f"masters: {name} has none here" for name in own["masters"] if not state.masters.may_have(name)]
    if (state.scaler is None) != (own["scaler"] is None):
        problems.append(
            f"loss scale: {own['scaler'] or 'none'}, here {state.scaler and state.scaler.state_dict() or 'none'}"
        )
    saved = own["window"]
    if (state.window is None) != (saved is None):
        problems.append(
            f"window: {'none' if saved is None else 'there'}, here {'none' if state.window is None else 'there'}"
        )
    elif saved is not None and state.window is not None and saved["count"] >= state.window.size:
        problems.append(f"window: {saved['count']} micro-batches so far, here {state.window.size} make an update")
    return problems


def _further(model: nn.Module, own: dict[str, Any]) -> dict[str, Tensor]:
    tensors = tensors_of(model)
    return {h.key: h.current() for h in tensors.buffers + tensors.attributes if h.key in own["further"]}


def _restore_own(subjects: Subjects, own: dict[str, Any]) -> None:
    state = subjects.state
    with torch.no_grad():
        for name, here in _further(subjects.model, own).items():
            if _describe(here) == _describe(own["further"][name]):
                here.copy_(own["further"][name])
    state.masters.load(own["masters"])
    if state.scaler is not None and own["scaler"] is not None:
        state.scaler.load_state_dict(own["scaler"])
    if state.window is not None and own["window"] is not None and own["window"]["count"] < state.window.size:
        device = state.window.numbers["weight"].device
        sums = {key: value.to(device, copy=True) for key, value in own["window"]["gradients"].items()}
        state.window.load_state_dict({**own["window"], "gradients": sums})
    for field in fields(Tally):
        setattr(subjects.tally, field.name, own["tally"][field.name])
    _set_random_state(own["random"])


def _random_state(devices: set[torch.device]) -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": {str(device): state for device, state in rng_state(devices).items()},
        "python": random.getstate(),
        "numpy": None,
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], *rest)
    return states


def _set_random_state(states: dict[str, Any]) -> None:
    set_rng_state({torch.device(name): state for name, state in states["torch"].items()})
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def write(folder: str | os.PathLike[str], state: dict[str, Any]) -> Path:
    """Writes ``folder/checkpoint.pt``. The one before stays whole until the new one is, whenever the process dies.

    Raises:
        ConfigError: the state holds something that is neither a tensor nor plain, and could not be read back.
    """
    _check_plain(state)
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{FILE}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)
    return path


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # a rename is on disk when its folder is
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_plain(state: dict[str, Any]) -> None:
    skeleton = pytree.tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, state)
    for name, part in (("extra", skeleton["stepgraph"].pop("extra")), ("the optimizer's state", skeleton["optimizer"])):
        try:
            buffer = io.BytesIO()
            torch.save(part, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{name} holds something that a checkpoint cannot carry without code: {str(error).strip().splitlines()[0]}. "
                "Keep tensors, numbers, strings, and lists, tuples and dicts of them, such as scheduler.state_dict() returns."
            ) from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what :func:`write` wrote, or a file of plain torch, without running code from it.

    Raises:
        ConfigError: there is no such file, or it is no checkpoint of tensors and plain values.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.exists():
        raise ConfigError(f"there is no checkpoint at {file}")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(
            f"{file} is no checkpoint that can be read safely: {str(error).strip().splitlines()[0]}"
        ) from error
    return state  # type: ignore[no-any-return]
