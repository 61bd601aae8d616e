"""What a machine can do: the rates that the clock goes by, from data sheets or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError
from .tables import Table

_MAY_BE_ZERO = ("memory_bytes", "disk_bytes_per_second", "step_seconds", "first_call_seconds")


@dataclass(frozen=True)
class HardwareSpec:
    """Rates of one device.

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
        python_seconds: of a call on numbers, such as taking one result of several.
        memory_bytes: that the device has; 0 where that is for the machine to say.
        link_bytes_per_second: between devices, in one direction.
        link_seconds: that a collective takes beside its bytes.
        host_bytes_per_second: copied between the device and the host, in one direction.
        disk_bytes_per_second: written to disk and read back, the slower of the two; 0 where that is for the machine to say.
        tables: measured seconds by operator and dtype, such as ``mul:f32``; they go before the rates.
        launch_factor: how many times as long a launch takes amid a step as it does in the tables, for which one operator was
            called over and over.
        amid_factor: the same for what operators take beside their launch.
        first_call_seconds: that an operator's first call in a step takes beside that, since its code is in no cache by then.
        step_seconds: that a step takes beside its operators.
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
    python_seconds: float = 1e-7
    memory_bytes: int = 0
    link_bytes_per_second: float = 1e10
    link_seconds: float = 2e-5
    host_bytes_per_second: float = 1e10
    disk_bytes_per_second: float = 0.0
    tables: Mapping[str, Table] = field(default_factory=dict)
    launch_factor: float = 1.0
    amid_factor: float = 1.0
    first_call_seconds: float = 0.0
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        for rates in (self.matmul_flops, self.attention_flops, self.convolution_flops):
            if "f32" not in rates:
                raise ConfigError(f"the hardware spec {self.name!r} has no rate for f32 in {dict(rates)}")
        for item in fields(self):
            value = getattr(self, item.name)
            may_be_zero = item.name in _MAY_BE_ZERO
            values = value.values() if isinstance(value, Mapping) else [value]
            numbers = [v for v in values if isinstance(v, (int, float))]
            if any(not (v > 0 or (may_be_zero and v == 0)) for v in numbers):
                raise ConfigError(f"{item.name} of the hardware spec {self.name!r} must be above 0, got {value}")

    def to_json(self) -> str:
        """The spec as text."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        tables = {name: table.as_json() for name, table in self.tables.items()}
        return json.dumps({**data, "tables": tables}, indent=1, sort_keys=True) + "\n"


def spec_from_json(text: str) -> HardwareSpec:
    """What :meth:`HardwareSpec.to_json` gave.

    Raises:
        ConfigError: it is something else.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        tables = {name: Table.from_json(table) for name, table in data.pop("tables").items()}
        return HardwareSpec(**data, tables=tables)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"this is no hardware spec: {error}") from error


# Of peak rates, what large operators reach: torch.distributed._tools.runtime_estimator plans with the same share.
_REACHED = 0.75


def _gpu(
    name: str,
    source: str,
    *,
    half_tflops: float,
    single_tflops: float,
    memory_tb_per_second: float,
    memory_gb: int,
    link_gb_per_second: float,
    host_gb_per_second: float,
) -> HardwareSpec:
    """From a data sheet: dense rates, links in one direction."""
    half, single = half_tflops * 1e12 * _REACHED, single_tflops * 1e12 * _REACHED
    matmul = {"bf16": half, "f16": half, "f32": single}
    return HardwareSpec(
        name=name,
        source=f"{source}; dense rates, of which 75 % are assumed in products and 85 % of the bandwidth",
        matmul_flops=matmul,
        attention_flops={dtype: rate * 0.6 for dtype, rate in matmul.items()},
        convolution_flops={dtype: rate * 0.7 for dtype, rate in matmul.items()},
        memory_bytes_per_second=memory_tb_per_second * 1e12 * 0.85,
        scalar_ops_per_second=single_tflops * 1e12 / 8,
        launch_seconds=4e-6,
        view_seconds=1e-6,
        memory_bytes=memory_gb * 10**9,
        link_bytes_per_second=link_gb_per_second * 1e9 * 0.8,
        host_bytes_per_second=host_gb_per_second * 1e9 * 0.8,
    )


SPECS: dict[str, HardwareSpec] = {
    "a100": _gpu(
        "NVIDIA A100 80GB SXM",
        "NVIDIA A100 data sheet (312 and 19.5 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4.0)",
        half_tflops=312,
        single_tflops=19.5,
        memory_tb_per_second=2.039,
        memory_gb=80,
        link_gb_per_second=300,
        host_gb_per_second=32,
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM",
        "NVIDIA H100 data sheet (989 and 67 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5.0)",
        half_tflops=989,
        single_tflops=67,
        memory_tb_per_second=3.35,
        memory_gb=80,
        link_gb_per_second=450,
        host_gb_per_second=64,
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM",
        "NVIDIA H200 data sheet (989 and 67 TFLOP/s, 4.8 TB/s, NVLink 900 GB/s both ways, PCIe 5.0)",
        half_tflops=989,
        single_tflops=67,
        memory_tb_per_second=4.8,
        memory_gb=141,
        link_gb_per_second=450,
        host_gb_per_second=64,
    ),
    "b200": _gpu(
        "NVIDIA B200",
        "NVIDIA HGX B200 data sheet, at 1,000 W (2,250 and 80 TFLOP/s, 8 TB/s, NVLink 1.8 TB/s both ways, PCIe 5.0)",
        half_tflops=2250,
        single_tflops=80,
        memory_tb_per_second=8.0,
        memory_gb=180,
        link_gb_per_second=900,
        host_gb_per_second=64,
    ),
    "rtx4090": _gpu(
        "NVIDIA RTX 4090",
        "NVIDIA Ada GPU architecture white paper (165 and 82.6 TFLOP/s, 1,008 GB/s, no NVLink, PCIe 4.0)",
        half_tflops=165,
        single_tflops=82.6,
        memory_tb_per_second=1.008,
        memory_gb=24,
        link_gb_per_second=32,
        host_gb_per_second=32,
    ),
    "cpu": HardwareSpec(
        name="a typical CPU (run stepgraph calibrate)",
        source="round figures of one core of a server with AVX2",
        matmul_flops={"f32": 70e9, "bf16": 25e9, "f16": 20e9, "f64": 35e9},
        attention_flops={"f32": 45e9, "bf16": 20e9, "f16": 15e9, "f64": 20e9},
        convolution_flops={"f32": 45e9, "bf16": 20e9, "f16": 15e9, "f64": 20e9},
        memory_bytes_per_second=12e9,
        scalar_ops_per_second=0.6e9,
        launch_seconds=5e-6,
        view_seconds=1.5e-6,
    ),
}
