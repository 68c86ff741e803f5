"""Which device trains, what it is, and how fast it multiplies matrices."""

import os
import platform
import shutil
import subprocess
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from stages.params.variant import Precision


class HardwareError(RuntimeError):
    """The device that the params ask for cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Device:
    """What a measurement was made on; belongs beside every figure of memory or speed."""

    kind: Literal["cpu", "cuda"]
    name: str
    threads: int
    """CPU threads that one torch operation may use."""
    memory_bytes: int
    """cuda: the GPU's memory. cpu: the machine's, or the container's limit where that is lower."""
    compute_capability: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    """The CUDA version that torch was built for."""


@dataclass(frozen=True)
class MatmulCeiling:
    """The fastest dense matrix product that was seen on this device."""

    flops_per_second: float
    source: str
    """How it came about, for example "measured 2048x2048x2048 bf16 matmul"."""


# The oldest NVIDIA driver that runs a build for this CUDA major version, and the one it was made
# for. Source: "CUDA Toolkit and minimum required driver version for CUDA minor version
# compatibility" in the CUDA release notes.
_DRIVERS = {"12": "525 (560 for every feature of CUDA 12.6)", "13": "580"}
_OLDEST_DRIVER = {"12": 525, "13": 580}


def select_device(requested: Literal["auto", "cuda", "cpu"]) -> torch.device:
    """The device for `hardware.device`; auto is the GPU where there is one, else the CPU.

    Raises:
        HardwareError: cuda was asked for and there is none; or an NVIDIA GPU is here that this
            torch, built for CUDA, cannot use. auto does not fall back to the CPU then: a run that
            is a hundred times slower than expected is worse than none.
    """
    if requested == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        # torch only warns when the driver is too old; the error below says it in full.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
    built_for = torch.version.cuda
    if _gpus_are_hidden():
        if requested == "auto":
            return torch.device("cpu")
        raise HardwareError(
            "hardware.device: cuda was asked for, but CUDA_VISIBLE_DEVICES is "
            f"{os.environ['CUDA_VISIBLE_DEVICES']!r}, which hides every GPU; unset it, or set "
            "hardware.device: cpu"
        )
    present, driver = nvidia_gpu()
    if built_for is None:
        if requested == "auto":
            return torch.device("cpu")
        found = (
            f"an NVIDIA GPU is here (driver {driver or 'unknown'}), but"
            if present
            else "no NVIDIA GPU was found and"
        )
        raise HardwareError(
            f"hardware.device: cuda was asked for; {found} this torch {torch.__version__} is a build "
            "for CPUs only; install the CUDA build, or set hardware.device: cpu"
        )
    if not present:
        if requested == "auto":
            return torch.device("cpu")
        raise HardwareError(
            "hardware.device: cuda was asked for, but no NVIDIA GPU was found (no /dev/nvidia0, no "
            "nvidia-smi; in a container the GPU must be passed in); set hardware.device: auto or cpu"
        )
    raise HardwareError(_unusable_gpu(built_for, driver))


def describe_device(device: torch.device) -> Device:
    """What `device` is, in the words that go into every measurement."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda",
            name=properties.name,
            threads=torch.get_num_threads(),
            memory_bytes=properties.total_memory,
            compute_capability=f"{properties.major}.{properties.minor}",
            driver_version=nvidia_gpu()[1],
            cuda_version=torch.version.cuda,
        )
    return Device(
        kind="cpu", name=_cpu_name(), threads=torch.get_num_threads(), memory_bytes=_host_memory_bytes()
    )


_MATMUL_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "bf16": torch.bfloat16,
    # Only the blocks' products run in 8 bits; the head runs in bf16, whose ceiling is the honest one to name.
    "fp8": torch.bfloat16,
}


_SHORTEST_RUN_SECONDS = 0.004
"""A shorter run would measure the clock and the launch as much as the product."""


def measure_matmul_flops_per_second(
    device: torch.device, precision: Precision, budget_seconds: float = 1.0
) -> MatmulCeiling:
    """Time square matrix products in the number format of `precision`'s matrix products.

    The result is the ceiling that utilisation (MFU) is measured against. It is the measured one on
    a GPU too, not the data sheet's: data sheets assume clocks that a card does not hold under load,
    and name none for CPUs. An MFU against it reads higher than one against the data sheet.

    fp32 products run under the current torch.set_float32_matmul_precision, so set that first, as
    training does; tf32 is the same call with "high".

    The size doubles from 128 while one product fits the budget, up to 2048 on a CPU and 8192 on a
    GPU (about 0.3 s in all, up to 1 s on a busy machine): float16 on a CPU runs at about 3 GFLOP/s
    and must stay small. The fastest run counts, not the median: it is a ceiling, and on a machine
    shared with others the median measures them. The global random state is left alone.
    """
    dtype = _MATMUL_DTYPES[precision]
    largest = 8192 if device.type == "cuda" else 2048
    began = time.perf_counter()
    size, best, best_size = 128, 0.0, 128
    while True:
        try:
            rate = _matmul_rate(device, dtype, size, budget_seconds / 6)
        except torch.OutOfMemoryError:
            if not best:
                raise
            break  # what a smaller one reached must do: training may fit where this does not
        if rate > best:
            best, best_size = rate, size
        next_product_seconds = 2 * (2 * size) ** 3 / rate
        if size == largest or next_product_seconds > budget_seconds:
            break
        if time.perf_counter() - began > 2 * budget_seconds:
            break
        size *= 2
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or the training's reserved bytes would hold these matrices
    label = {torch.float32: precision, torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return MatmulCeiling(best, f"measured {best_size}x{best_size}x{best_size} {label} matmul")


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int, budget_seconds: float) -> float:
    """FLOP/s of the fastest run of size x size products, each run long enough for the clock."""
    generator = torch.Generator(device).manual_seed(0)  # the global one belongs to training
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)  # starts threads, loads libraries
    end = time.perf_counter() + budget_seconds
    best, products = 0.0, 1
    while True:
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        _synchronize(device)
        now = time.perf_counter()
        if now - began < _SHORTEST_RUN_SECONDS:
            products *= 2
            continue
        best = max(best, products * 2 * size**3 / (now - began))
        if now > end:
            return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpus_are_hidden() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1")


def nvidia_gpu() -> tuple[bool, str | None]:
    """Whether an NVIDIA GPU is present, by its device file or nvidia-smi, and its driver's version."""
    driver = None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            answer = None
        if answer is not None and answer.returncode == 0 and answer.stdout.strip():
            driver = answer.stdout.split()[0]
    # Of several GPUs a container may have been given another than the first.
    return driver is not None or any(Path("/dev").glob("nvidia[0-9]*")), driver


def _unusable_gpu(built_for: str, driver: str | None) -> str:
    """The message for a GPU that torch cannot use: the driver found and the one needed."""
    major = built_for.split(".")[0]
    needed = _DRIVERS.get(major, "a newer one")
    message = (
        f"an NVIDIA GPU is here, but torch {torch.__version__} (built for CUDA {built_for}) cannot use it: "
        f"found driver {driver or 'of unknown version'}, needed {needed} or newer; "
    )
    if (
        driver
        and driver.split(".")[0].isdigit()
        and int(driver.split(".")[0]) >= _OLDEST_DRIVER.get(major, 0)
    ):
        message += f"the driver is new enough, so something else fails ({_cuda_failure()}); "
    else:
        message += "update the driver or install a torch build for an older CUDA; "
    return message + "to train on the CPU all the same, set hardware.device: cpu"


def _cuda_failure() -> str:
    """What CUDA itself says is wrong."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n")[0]
    return "CUDA starts but names no device"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def _host_memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container's limit (control group version 2) is what the process really has
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory
