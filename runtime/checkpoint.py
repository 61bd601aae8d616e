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
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import tensors_of
from ..device import rng_state, set_rng_state
from ..errors import ConfigError
from ..torch_compat import pytree
from .checkpoint_fit import (
    FORMAT,
    Subjects,
    describe,
    entries_of,
    fit,
    further_tensors,
    names_of_groups,
    numpy_random_state,
    python_random_state,
)
from .tally import Tally

FILE = "checkpoint.pt"


def state_of(subjects: Subjects, extra: Any = None) -> dict[str, Any]:
    """The state of a run. Tensors are the live ones: copy or write them before the next step."""
    model, optimizer, state = subjects.model, subjects.optimizer, subjects.state
    state.masters.follow()  # parameters may have been written since the last step
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "stepgraph": {
            "format": FORMAT,
            "names": names_of_groups(model, optimizer),
            "entries": entries_of(model, optimizer),
            "further": further_tensors(model),
            "masters": dict(state.masters.tensors),
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
            "window": None if state.window is None else state.window.state_dict(),
            "tally": asdict(subjects.tally),
            "random": _random_state({h.tensor.device for h in tensors_of(model).all}),
            "extra": extra,
        },
    }


def restore(subjects: Subjects, state: dict[str, Any], *, strict: bool = True) -> Any:
    """Puts a state of :func:`state_of`, or a plain checkpoint of model and optimizer, into live objects.

    Tensors of the model keep their identity. Nothing is changed where the state does not fit.

    Args:
        strict: whether everything has to be there and fit; otherwise what is there and fits is taken.

    Returns:
        ``extra``, as it was saved; None from a plain checkpoint, of which ``scaler``, a ``GradScaler``'s state, is taken too.

    Raises:
        ConfigError: a list of what is missing, left over, or of another shape or dtype.
    """
    found = fit(subjects, state)
    if found.problems and strict:
        count = len(found.problems)
        shown = "\n  ".join(found.problems[:20]) + (f"\n  ... and {count - 20} more" if count > 20 else "")
        raise ConfigError(
            f"the checkpoint does not fit in {count} points; nothing was loaded. Build model, optimizer and step as they were "
            f"saved, or pass strict=False to take what fits:\n  {shown}"
        )
    _restore_model(subjects.model, found.model)
    if found.optimizer is not None:
        _restore_optimizer(subjects.optimizer, found.optimizer)
    _restore_own(subjects, found.own)
    return found.own.get("extra")


def _restore_model(model: nn.Module, saved: dict[str, Any]) -> None:
    here = model.state_dict()
    fitting = {name: value for name, value in saved.items() if name in here and describe(here[name]) == describe(value)}
    model.load_state_dict(fitting, strict=False)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, which casts floating state to the parameters' dtype, and then the saved dtypes."""
    optimizer.load_state_dict(saved)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved["state"].items():
        held = optimizer.state[params[number]]
        for name, value in entries.items():
            if isinstance(value, Tensor) and held[name].dtype is not value.dtype:
                held[name] = value.to(held[name].device, copy=True)


def _restore_own(subjects: Subjects, own: dict[str, Any]) -> None:
    state = subjects.state
    saved = own.get("further", {})
    with torch.no_grad():
        for name, here in further_tensors(subjects.model).items():
            if name in saved and describe(here) == describe(saved[name]):
                here.copy_(saved[name])
    masters = own.get("masters", {})
    state.masters.load({name: value for name, value in masters.items() if state.masters.fits(name, value)})
    if state.scaler is not None and own.get("scaler") is not None:
        state.scaler.load_state_dict(own["scaler"])
    if state.window is not None and own.get("window") is not None:
        device = state.window.numbers["weight"].device
        sums = {key: value.to(device, copy=True) for key, value in own["window"]["gradients"].items()}
        state.window.load_state_dict({**own["window"], "gradients": sums})
    for field in fields(Tally) if "tally" in own else ():
        setattr(subjects.tally, field.name, own["tally"][field.name])
    if "random" in own:
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
    random.setstate(python_random_state(states["python"]))
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(numpy_random_state(states["numpy"]))


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
    except Exception as error:  # torch.load raises what its parts happen to raise on broken files
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        raise ConfigError(f"{file} is no checkpoint that can be read safely ({what})") from error
    return state  # type: ignore[no-any-return]
