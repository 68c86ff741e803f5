"""`python -m stages.preflight`: what the pipeline will run on, one line each, before anything is computed.

`python -m stages.repro` calls it first. Exit status 1 where `hardware.device` cannot be had: a GPU whose
driver is too old is refused here, with the version that is needed, instead of training on the CPU in silence.
"""

import os
import re
import sys
from pathlib import Path

import torch

from stages.container_image import ContainerImageError, container_image
from stages.measure.hardware import Device, HardwareError, describe_device, nvidia_gpu, select_device
from stages.measure.units import readable_bytes
from stages.params import ParamsError, load_params

_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY_BYTES = 2**30


def main() -> int:
    try:
        params = load_params()
        device = describe_device(select_device(params.hardware.device))
        lines = preflight_lines(device, params.hardware.device)
    except (ParamsError, HardwareError, ContainerImageError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def preflight_lines(device: Device, requested: str) -> list[str]:
    """GPU or CPU, driver, CUDA, torch, shared memory, image: each found, with a warning where it is poor.

    Args:
        device: the one that will train.
        requested: `hardware.device`.
    """
    image = container_image()
    return [
        *_device_lines(device, requested),
        f"torch: {torch.__version__}, {_cuda_of_torch()}",
        f"/dev/shm: {_shared_memory()}",
        f"image: {image.identity if image else 'none, this is no container of this project'}",
    ]


def _device_lines(device: Device, requested: str) -> list[str]:
    memory = readable_bytes(device.memory_bytes)
    if device.kind == "cuda":
        count = torch.cuda.device_count()
        others = f", the first of {count}" if count > 1 else ""
        return [
            f"GPU: {device.name}, {memory}, compute capability {device.compute_capability}{others}",
            f"driver: {device.driver_version or 'version unknown (no nvidia-smi)'}",
        ]
    cpu = f"{device.name}, {device.threads} threads, {memory}"
    if requested == "cpu":
        return [f"GPU: not used, hardware.device is cpu; training runs on the CPU ({cpu})"]
    is_here, driver = nvidia_gpu()
    driver = driver or host_driver_version() or ("of unknown version" if is_here else None)
    if driver is None:
        return [f"GPU: none; training runs on the CPU ({cpu})", "driver: no NVIDIA driver"]
    return [
        f"GPU: none that this process may use; training runs on the CPU ({cpu})",
        f"driver: {driver}; WARNING: the machine has an NVIDIA driver: {_why_no_gpu()}",
    ]


def host_driver_version(version_file: Path = _DRIVER) -> str | None:
    """Of the kernel's NVIDIA module, which a container sees even where no GPU was passed into it."""
    try:
        text = version_file.read_text()
    except OSError:
        return None
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 …
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else "of unknown version"


def _why_no_gpu() -> str:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    if torch.version.cuda is None:
        return "this torch is a build for CPUs"
    return "pass the GPU in (docker run --gpus all, or -f docker/compose.gpu.yaml)"


def _cuda_of_torch() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"


def _shared_memory(folder: Path = _SHARED_MEMORY) -> str:
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return f"none ({error.strerror}); WARNING: processes of one training cannot share memory"
    size = state.f_frsize * state.f_blocks
    if size >= _ENOUGH_SHARED_MEMORY_BYTES:
        return readable_bytes(size)
    return (
        f"{readable_bytes(size)}; WARNING: small for several processes that share memory (NCCL, data "
        "loaders); docker run --ipc=host or --shm-size=8g gives more"
    )


if __name__ == "__main__":
    sys.exit(main())
