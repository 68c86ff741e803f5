"""What the hardware is and can do, and what a training run took of it: time, FLOPs, memory."""

from stages.measure.compilation import CompileWatch
from stages.measure.flops import model_flops_per_token, parameter_count
from stages.measure.hardware import (
    Device,
    HardwareError,
    MatmulCeiling,
    describe_device,
    measure_matmul_flops_per_second,
    select_device,
)
from stages.measure.peak_memory import PeakMemory, measure_peak
from stages.measure.throughput import StepTimer, Throughput

__all__ = [
    "CompileWatch",
    "Device",
    "HardwareError",
    "MatmulCeiling",
    "PeakMemory",
    "StepTimer",
    "Throughput",
    "describe_device",
    "measure_matmul_flops_per_second",
    "measure_peak",
    "model_flops_per_token",
    "parameter_count",
    "select_device",
]
