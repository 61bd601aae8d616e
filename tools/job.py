"""What the command line works on: a model, its optimizer, a batch, and how the step is to be compiled."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api import TrainStep, compile_train_step
from ..errors import ConfigError
from .presets import PRESETS, preset_parts


class Job:
    """A training step to look at.

    Args:
        model: as for :func:`compile_train_step`.
        optimizer: as for :func:`compile_train_step`.
        batch: what the step is called with; real, fake or meta tensors.
        options: further arguments of :func:`compile_train_step`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, **options: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batch = batch
        self.options = options

    def compile(self, **options: Any) -> TrainStep:
        """The compiled step; ``options`` go before those of the job."""
        return compile_train_step(self.model, self.optimizer, **{**self.options, **options})


def load_job(name: str) -> Job:
    """The job that ``name`` stands for.

    Args:
        name: a preset, ``package.module:function`` where the function returns a :class:`Job`, or the path of a YAML or JSON
            file with the keys ``job`` (one of the other two) and ``options`` (arguments of :func:`compile_train_step`).

    Raises:
        ConfigError: there is no such preset, module, function or file, or it does not make a job.
    """
    if name in PRESETS:
        model, optimizer, batch, options = preset_parts(name)
        return Job(model, optimizer, batch, **options)
    if name.endswith((".yaml", ".yml", ".json")):
        return _from_file(Path(name))
    if ":" in name:
        return _from_function(name)
    raise ConfigError(
        f"{name!r} is no job: give a preset ({', '.join(PRESETS)}), package.module:function, or the path of a YAML or JSON file"
    )


def _from_function(name: str) -> Job:
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, "")  # modules of the working directory, as `python -m` has them
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"job {name!r}: {error}. The form is package.module:function") from error
    finally:
        sys.path.remove("")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"job {name!r}: {function_name}() is called without arguments, and {error}") from error
    job = function()
    if not isinstance(job, Job):
        raise ConfigError(
            f"job {name!r}: {function_name}() returned a {type(job).__name__}; it has to return "
            "stepgraph.Job(model, optimizer, batch)"
        )
    return job


def _from_file(path: Path) -> Job:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"job file {path}: {error.strerror or error}") from error
    try:
        contents = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise ConfigError(f"job file {path}: {error}") from error
    unknown = set(contents) - {"job", "options"} if isinstance(contents, dict) else None
    if unknown is None or unknown or not isinstance(contents.get("job"), str):
        raise ConfigError(
            f"job file {path}: expected the keys job (a preset or package.module:function) and, under options, arguments of "
            f"compile_train_step; got {sorted(contents) if isinstance(contents, dict) else type(contents).__name__}"
        )
    options = contents.get("options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"job file {path}: options must be names and values, got {type(options).__name__}")
    for option in options:
        if option not in _OPTIONS:
            near = difflib.get_close_matches(str(option), _OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(_OPTIONS)}"
            raise ConfigError(f"job file {path}: {option!r} is no option of compile_train_step; {hint}")
    job = load_job(contents["job"])
    job.options.update(options)
    return job


_OPTIONS = [
    name for name, p in inspect.signature(compile_train_step).parameters.items() if p.kind is p.KEYWORD_ONLY
] + ["plan"]


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
