"""What a machine can do: the rates that the clock goes by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class HardwareSpec:
    """Rates and sizes of one device and of what it is connected with.

    Attributes:
        name: of the device.
        source: where the figures are from.
        matmul_flops: floating-point operations per second in matrix products, by short dtype (``f32``, ``bf16``, ``f16``);
            dtypes that are not named go at the rate of ``f32``.
        attention_flops: the same in fused attention.
        convolution_flops: the same in convolutions.
        memory_bytes_per_second: read or written by operators that do little else.
        scalar_ops_per_second: of ``exp``, ``tanh`` and the like, one for each element.
        launch_seconds: of one operator, whatever its size.
        view_seconds: of a call that only names memory.
        memory_bytes: of the device.
        link_bytes_per_second: between ranks, one direction.
        link_latency_seconds: of one message between ranks.
        host_bytes_per_second: between device and host memory, one direction.
        disk_bytes_per_second: between host memory and disk.
    """

    name: str
    source: str
    matmul_flops: Mapping[str, float]
    attention_flops: Mapping[str, float]
    convolution_flops: Mapping[str, float]
    memory_bytes_per_second: float
    scalar_ops_per_second: float
    launch_seconds: float
    view_seconds: float
    memory_bytes: int
    link_bytes_per_second: float = 10 * GB
    link_latency_seconds: float = 1e-5
    host_bytes_per_second: float = 10 * GB
    disk_bytes_per_second: float = 1 * GB

    def __post_init__(self) -> None:
        for rates in (self.matmul_flops, self.attention_flops, self.convolution_flops):
            if "f32" not in rates:
                raise ConfigError(f"the hardware spec {self.name!r} has no rate for f32 in {dict(rates)}")
        for item in fields(self):
            value = getattr(self, item.name)
            values = value.values() if isinstance(value, Mapping) else [value]
            if any(isinstance(v, (int, float)) and not v > 0 for v in values):
                raise ConfigError(f"{item.name} of the hardware spec {self.name!r} must be above 0, got {value}")

    def scaled(self, **factors: float) -> HardwareSpec:
        """The same with the named rates multiplied."""
        changes: dict[str, Any] = {}
        for name, factor in factors.items():
            value = getattr(self, name)
            changes[name] = {k: v * factor for k, v in value.items()} if isinstance(value, Mapping) else value * factor
        return replace(self, **changes)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")


def load_spec(path: Path) -> HardwareSpec:
    """Reads what :meth:`HardwareSpec.save` wrote.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        values = json.loads(path.read_text())
        return HardwareSpec(**values)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no hardware spec: {error}") from error


# Of peak rates, what large operators reach: torch.distributed._tools.runtime_estimator plans with the same share.
_REACHED = 0.75


def _gpu(
    name: str, source: str, half: float, single: float, memory: float, gib: int, link: int, host: int
) -> HardwareSpec:
    """From a data sheet: TFLOP/s of 16 bit and float32, TB/s of memory, GiB, GB/s one way between ranks and to the host."""
    matmul = {"bf16": half * 1e12 * _REACHED, "f16": half * 1e12 * _REACHED, "f32": single * 1e12 * _REACHED}
    return HardwareSpec(
        name=name,
        source=f"{source}; dense rates, of which 75 % are assumed in products and 85 % of the bandwidth",
        matmul_flops=matmul,
        attention_flops={dtype: rate * 0.6 for dtype, rate in matmul.items()},
        convolution_flops={dtype: rate * 0.7 for dtype, rate in matmul.items()},
        memory_bytes_per_second=memory * 1e12 * 0.85,
        scalar_ops_per_second=single * 1e12 / 8,
        launch_seconds=4e-6,
        view_seconds=1e-6,
        memory_bytes=gib * GIB,
        link_bytes_per_second=link * GB,
        host_bytes_per_second=host * GB,
    )


SPECS: dict[str, HardwareSpec] = {
    "a100": _gpu("NVIDIA A100 80GB SXM", "NVIDIA A100 data sheet", 312, 19.5, 2.039, 80, 300, 25),
    "h100": _gpu("NVIDIA H100 SXM", "NVIDIA H100 data sheet", 989, 67, 3.35, 80, 450, 50),
    "h200": _gpu("NVIDIA H200 SXM", "NVIDIA H200 data sheet", 989, 67, 4.8, 141, 450, 50),
    "b200": _gpu("NVIDIA B200", "NVIDIA DGX B200 data sheet", 2250, 80, 8.0, 180, 900, 50),
    "rtx4090": _gpu("NVIDIA RTX 4090", "NVIDIA Ada GPU architecture white paper", 165, 82.6, 1.008, 24, 25, 25),
    "cpu": HardwareSpec(
        name="CPU",
        source="one core of a server with AVX2, measured with `stepgraph calibrate`",
        matmul_flops={"f32": 70e9, "bf16": 25e9, "f16": 20e9, "f64": 35e9},
        attention_flops={"f32": 45e9, "bf16": 20e9, "f16": 15e9, "f64": 20e9},
        convolution_flops={"f32": 45e9, "bf16": 20e9, "f16": 15e9, "f64": 20e9},
        memory_bytes_per_second=12e9,
        scalar_ops_per_second=0.6e9,
        launch_seconds=5e-6,
        view_seconds=1.5e-6,
        memory_bytes=16 * GIB,
    ),
}
