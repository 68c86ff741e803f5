"""The highest number of live tensor bytes during one training step.

CUDA's allocator keeps this figure itself. The CPU's keeps none, so it is put together from two
sources that are exact together:

1. before the step, every block of memory that a tensor holds (a scan of Python's objects);
2. during it, every allocation and release, in order, as PyTorch's profiler records them.

Two traps are closed. The profiler does not report the release of a block that it did not see
allocated (c10/core/CPUAllocator.cpp, ProfiledCPUMemoryReporter::Delete), for example a gradient of
the step before: a weak reference on each block of (1) marks that moment in the profile. And it
remembers addresses across profiles, so that it may report a wrong size for an address used again:
blocks are therefore followed by address, and a release counts with the size that we know.
"""

import ctypes
import gc
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

CPU_KIND = "cpu: live tensor bytes of one profiled step"
CUDA_KIND = "cuda: max_memory_allocated"

_RELEASED = "stages.measure: released block at "


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one step."""

    bytes: int
    """Highest number of live tensor bytes."""
    kind: str
    """How `bytes` was measured; a CPU figure and a CUDA figure are not the same thing."""
    reserved_bytes: int | None
    """cuda: what the allocator took from the driver at its highest (max_memory_reserved)."""


def measure_peak(device: torch.device, fn: Callable[[], object]) -> PeakMemory:
    """Run `fn` once, for example a whole optimizer step, and measure its peak memory.

    On a CPU the step runs under the profiler and is slower: leave it out of the timing. On CUDA it
    is not slowed, but the device is synchronised before and after.

    Three things a CPU figure does not see: what threads of `fn`'s own allocate, other than autograd's;
    what gloo's threads release, so that with several ranks a step may show too much (the least of a few
    is right); and tensors that only a graph from before `fn` holds, so let `fn` do forward and backward
    both.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return PeakMemory(
            bytes=torch.cuda.max_memory_allocated(device),
            kind=CUDA_KIND,
            reserved_bytes=torch.cuda.max_memory_reserved(device),
        )
    return PeakMemory(bytes=_cpu_peak(fn), kind=CPU_KIND, reserved_bytes=None)


def highest(peaks: Iterable[PeakMemory | None]) -> PeakMemory | None:
    """The highest of those that were measured."""
    return max((peak for peak in peaks if peak is not None), key=lambda peak: peak.bytes, default=None)


def peak_rss_bytes() -> int:
    """The process's peak resident set since it began (Linux reports it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def live_cpu_blocks() -> dict[int, int]:
    """Address and bytes of every block of CPU memory that a tensor holds.

    Blocks that PyTorch's allocator does not own are left out: arrays of NumPy and mapped files,
    which the page cache holds and not the process.
    """
    return {storage.data_ptr(): storage.nbytes() for storage in _live_cpu_storages()}


def _live_cpu_storages() -> Iterator[torch.UntypedStorage]:
    gc.collect()
    seen: set[int] = set()
    for found in gc.get_objects():
        # Not isinstance: it asks the object for __class__, and lazy-import proxies raise there.
        if not issubclass(type(found), torch.Tensor) or issubclass(type(found), FakeTensor):
            continue  # torch.compile leaves fake tensors behind, which hold no memory
        for tensor in _with_gradient(found):
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                continue
            try:
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
            except (NotImplementedError, RuntimeError):
                continue  # functional tensors hold no memory
            # resizable() is true only for blocks that come from PyTorch's own allocator.
            if address and address not in seen and storage.resizable():
                seen.add(address)
                yield storage


def _with_gradient(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    # A gradient that only autograd has touched has no Python object of its own yet.
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad


def _cpu_peak(fn: Callable[[], object]) -> int:
    live: dict[int, int] = {}
    markers = []
    for storage in _live_cpu_storages():
        address = storage.data_ptr()
        live[address] = storage.nbytes()
        markers.append(weakref.ref(storage, partial(_mark_release, address)))
    storage = None  # type: ignore[assignment]  # it would keep its block alive through the step
    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as session,
    ):
        fn()
    results = session.profiler.kineto_results if session.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler returned no events; is this torch built with Kineto?")
    events = _memory_events(results.experimental_event_tree())
    return _highest(live, events)


def _mark_release(address: int, _: Any) -> None:
    with record_function(f"{_RELEASED}{address}"):
        pass


def _memory_events(roots: Iterable[Any]) -> list[tuple[int, int]]:
    """(address, bytes) in time order; a release has bytes <= 0."""
    timed: list[tuple[int, int, int]] = []
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            block = event.typed[1]
            if block.device.type == "cpu":
                timed.append((event.start_time_ns, block.ptr, block.alloc_size))
        elif event.name.startswith(_RELEASED):
            timed.append((event.start_time_ns, int(event.name.removeprefix(_RELEASED)), 0))
    return [(address, size) for _, address, size in sorted(timed, key=lambda event: event[0])]


def _highest(live: dict[int, int], events: Iterable[tuple[int, int]]) -> int:
    """The largest sum of live blocks, before and between the events."""
    live = dict(live)
    current = highest = sum(live.values())
    for address, size in events:
        # An address that is allocated while we think it is in use was released unseen.
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            highest = max(highest, current)
    return highest


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep two harmless notices of the profiler off the terminal, where a progress bar may be.

    Kineto announces its start and stop; it reads its log level from the environment when it first
    starts. The allocator warns about blocks it did not see allocated, which are dealt with here;
    its level is the variable behind TORCH_CPP_LOG_LEVEL, read once at import.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        level = ctypes.c_int()  # other platforms: a line too many on stderr
    before = level.value
    level.value = max(before, 2)  # 2 is ERROR
    try:
        yield
    finally:
        level.value = before
