"""What is known of this machine: its calibration, or what is built in for the device."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import torch

from ..device import describe
from ..errors import ConfigError
from ..knobs import cache_folder
from ..planner import SPECS, HardwareSpec, spec_from_json


def calibration_path(device: torch.device) -> Path:
    """Where the calibration of this machine is kept: by device, number of threads and version of torch."""
    name = f"{describe(device)}, torch {torch.__version__}"
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return cache_folder() / "hardware" / f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def spec_of(device: torch.device) -> HardwareSpec:
    """What was measured on this machine, or else what is built in.

    Raises:
        ConfigError: the file of the calibration is damaged.
    """
    path = calibration_path(device)
    if path.exists():
        try:
            return spec_from_json(path.read_text())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}. Delete it, or run `stepgraph calibrate` again.") from error
    return built_in_spec(device)


def built_in_spec(device: torch.device) -> HardwareSpec:
    """What is known of a device without measuring it."""
    if device.type == "cpu":
        return SPECS["cpu"]
    name = describe(device).lower().replace(" ", "")
    known = next((spec for key, spec in SPECS.items() if key in name), None)
    likened = SPECS["a100"]
    return known or replace(likened, name=f"{describe(device)}, of which nothing is known: taken for {likened.name}")
