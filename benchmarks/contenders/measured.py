"""How every contender measures itself: the same code in all of them.

Needs torch alone.
"""

import importlib
import platform
import resource
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.contenders.job import Job, Result, write_result

LOSSES = 5
"""So many first steps have their loss compared."""
_STEPS_BETWEEN_SYNCHRONISATIONS = 5
"""On a GPU: after each counted step the host would wait and the device stand still."""


class Measured:
    """Made first thing in the process; then `before_model`, `first_step`, `step_done` and `finish`."""

    def __init__(self, job: Job, packages: list[str], switches: list[str]):
        """
        Args:
            packages: whose versions go into the result, beside torch and Python.
            switches: what this contender has switched on.
        """
        self.job = job
        self._packages = packages
        self._switches = switches
        self._losses: list[Tensor] = []
        self._seconds: list[float] = []
        self._steps = 0
        self._steps_at_lap = 0
        # An optimizer imports this when it is made, and some contenders have it by then: 70 MiB that would
        # stand in the peaks of the others.
        importlib.import_module("torch._dynamo")
        if job.compiled:
            importlib.import_module("torch._inductor.compile_fx")
        torch.set_num_threads(job.threads)
        torch.manual_seed(job.seed)
        if job.device == "cuda" and job.memory_limit_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(job.memory_limit_bytes / total, 1.0))

    def before_model(self) -> None:
        """What stands now is no part of the peak."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            self._stood = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._stood = begin_peak_rss()

    def first_step(self) -> None:
        """The first step begins: its data are asked for."""
        self._first_step_after = time.monotonic() - self.job.started
        self._last = time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """A micro-batch's share of its step's mean loss; kept, not read: reading would wait."""
        if self._steps < LOSSES:
            share = loss.detach().float().clone()
            if len(self._losses) == self._steps:
                self._losses.append(share)
            else:
                self._losses[self._steps] += share

    def step_done(self) -> None:
        """The optimizer has stepped."""
        job = self.job
        self._steps += 1
        counted = self._steps - job.warmup_steps
        if job.device == "cuda":
            if counted > 0 and counted % _STEPS_BETWEEN_SYNCHRONISATIONS and self._steps < job.total_steps:
                return
            torch.cuda.synchronize()
        now = time.perf_counter()
        steps = self._steps - self._steps_at_lap
        self._seconds.append((now - self._last) / steps)
        self._last, self._steps_at_lap = now, self._steps

    def finish(self, parameters: int, ceiling: Callable[[], float] | None = None) -> None:
        """Write the result.

        Args:
            ceiling: measures the device's FLOP/s, after all else was measured.

        Raises:
            RuntimeError: the contender did another number of steps than it was asked to.
        """
        job = self.job
        if self._steps != job.total_steps:
            raise RuntimeError(f"{self._steps} optimizer steps were done and {job.total_steps} asked for")
        peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else peak_rss()
        counted = self._seconds[job.warmup_steps :]
        write_result(
            Result(
                parameters=parameters,
                warmup_seconds=self._seconds[: job.warmup_steps],
                step_seconds=counted,
                tokens_per_second=job.tokens_per_step / statistics.median(counted),
                first_step_after_seconds=self._first_step_after,
                losses=[float(loss) for loss in self._losses],
                peak_bytes=peak - self._stood,
                reserved_bytes=torch.cuda.max_memory_reserved() if job.device == "cuda" else None,
                versions=versions(self._packages),
                threads=torch.get_num_threads(),
                switches=self._switches,
                ceiling_flops_per_second=ceiling() if ceiling else None,
            ),
            job.result,
        )


def begin_peak_rss() -> int:
    """The resident bytes of this process; from here on `peak_rss` counts.

    Raises:
        OSError: the kernel does not let the peak be set back, and the peak of the imports would hide that of
            the training.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()


def peak_rss() -> int:
    """The highest number of resident bytes since `begin_peak_rss` (Linux: VmHWM, in KiB)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions(packages: list[str]) -> dict[str, str]:
    """Installed versions; what is not installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def sequences(job: Job) -> Tensor:
    """int64 [steps x global batch, S], in the order of training."""
    return torch.from_numpy(np.load(Path(job.data) / "sequences.npy"))


def weights(job: Job) -> dict[str, Tensor]:
    """The initial weights under Hugging Face's names."""
    from safetensors.torch import load_file

    return load_file(Path(job.data) / "weights.safetensors")


def use_float32_matmul_precision(job: Job) -> list[str]:
    """Switch on what is as exact as fp32 and faster; returns it in words."""
    if torch.get_float32_matmul_precision() == job.float32_matmul_precision:
        return []
    torch.set_float32_matmul_precision(job.float32_matmul_precision)
    return [f'torch.set_float32_matmul_precision("{job.float32_matmul_precision}")']
