"""An allocation that failed: on a GPU, on the CPU, whatever type of error it comes as."""

import re
from dataclasses import dataclass

import torch

from stages.measure.peak_memory import live_cpu_blocks
from stages.measure.units import readable_bytes

# PyTorch's allocator, C++'s, and what oneDNN makes of either.
_CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "could not create a primitive")
# The driver's (contexts, pinned host memory), and what the libraries make of it.
_CUDA_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# "Tried to allocate 1.50 GiB." (c10/cuda/CUDACachingAllocator.cpp), "you tried to allocate 4096 bytes."
# (c10/core/impl/alloc_cpu.cpp).
_TRIED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)


@dataclass(frozen=True)
class FailedAllocation:
    """What the device's allocator was asked for, and what it had given away."""

    requested_bytes: int | None
    """None where the error does not say."""
    in_use_bytes: int
    """Bytes of all tensors when the error was looked at, while its traceback still held them."""

    def in_words(self) -> str:
        wanted = "an allocation" if self.requested_bytes is None else readable_bytes(self.requested_bytes)
        return f"out of memory: {wanted} could not be had beside {readable_bytes(self.in_use_bytes)} in use"


def failed_allocation(error: BaseException, device: torch.device) -> FailedAllocation | None:
    """None where the error is another one. To be asked before the error's traceback is let go."""
    message = str(error)
    is_cpu = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in message for words in _CPU_WORDS)
    )
    is_cuda = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in message for words in _CUDA_WORDS)
    )
    if not is_cpu and not is_cuda:
        return None
    found = _TRIED.search(message)
    requested = None if found is None else int(float(found[1]) * _UNITS[found[2]])
    if device.type == "cuda":
        return FailedAllocation(requested, torch.cuda.memory_allocated(device))
    return FailedAllocation(requested, sum(live_cpu_blocks().values()))
