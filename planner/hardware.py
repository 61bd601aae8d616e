"""What a machine can do: the rates that the clock goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import ConfigError


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

    def __post_init__(self) -> None:
        for rates in (self.matmul_flops, self.attention_flops, self.convolution_flops):
            if "f32" not in rates:
                raise ConfigError(f"the hardware spec {self.name!r} has no rate for f32 in {dict(rates)}")
        for item in fields(self):
            value = getattr(self, item.name)
            values = value.values() if isinstance(value, Mapping) else [value]
            if any(isinstance(v, (int, float)) and not v > 0 for v in values):
                raise ConfigError(f"{item.name} of the hardware spec {self.name!r} must be above 0, got {value}")


# Of peak rates, what large operators reach: torch.distributed._tools.runtime_estimator plans with the same share.
_REACHED = 0.75


def _gpu(name: str, source: str, half: float, single: float, memory: float) -> HardwareSpec:
    """From a data sheet: TFLOP/s of 16 bit and of float32, TB/s of memory."""
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
    )


SPECS: dict[str, HardwareSpec] = {
    "a100": _gpu("NVIDIA A100 80GB SXM", "NVIDIA A100 data sheet", 312, 19.5, 2.039),
    "h100": _gpu("NVIDIA H100 SXM", "NVIDIA H100 data sheet", 989, 67, 3.35),
    "h200": _gpu("NVIDIA H200 SXM", "NVIDIA H200 data sheet", 989, 67, 4.8),
    "b200": _gpu("NVIDIA B200", "NVIDIA DGX B200 data sheet", 2250, 80, 8.0),
    "rtx4090": _gpu("NVIDIA RTX 4090", "NVIDIA Ada GPU architecture white paper", 165, 82.6, 1.008),
    "cpu": HardwareSpec(
        name="CPU",
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
