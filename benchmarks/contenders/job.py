"""What one contender is asked to do, and what it answers: two JSON files between two processes.

Standard library only: every contender reads it in an environment of its own.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training of a few steps."""

    contender: str
    switched: bool
    """Whether every one-line switch that helps is on; else the contender is as it comes."""
    model: dict[str, Any]
    """The shape, in the words of Hugging Face's `LlamaConfig`."""
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    """Sequences in one forward and backward pass."""
    accumulation_steps: int
    """Micro-batches in one optimizer step."""
    precision: str
    """fp32, tf32 or amp_bf16."""
    recompute: bool
    """Forget the activations of every block and compute them again in the backward pass."""
    compiled: bool
    warmup_steps: int
    """Optimizer steps that are not counted for speed: compilation, the allocator's growth, cold caches."""
    steps: int
    """Optimizer steps that are counted."""
    seed: int
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    device: str
    """cpu or cuda."""
    threads: int
    float32_matmul_precision: str
    """What is switched on for torch.set_float32_matmul_precision: as exact as fp32 on this device."""
    memory_limit_bytes: int | None
    """CUDA: the allocator may take no more."""
    data: str
    """Folder with the data and the initial weights (benchmarks/peer_data.py)."""
    scratch: str
    """Folder that the contender may write to."""
    result: str
    """File that the contender writes its `Result` to."""
    started: float
    """time.monotonic() of the parent right before it started the process; one clock for all processes."""

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class Result:
    """What one contender measured of itself."""

    parameters: int
    warmup_seconds: list[float]
    """Of each step that is not counted."""
    step_seconds: list[float]
    """Of the counted steps: each on a CPU, means between two synchronisations on a GPU."""
    tokens_per_second: float
    """Median over `step_seconds`."""
    first_step_after_seconds: float
    """From the start of the process until the first step began: imports, model, weights, data."""
    losses: list[float]
    """Of the first steps, in nats per target token: all contenders must have the same."""
    peak_bytes: int
    """CPU: highest resident set since the model was begun, less what stood before. CUDA: the allocator's."""
    reserved_bytes: int | None
    """CUDA: what the allocator took from the driver at its highest."""
    versions: dict[str, str]
    """Of the packages that matter, by name."""
    threads: int
    switches: list[str]
    """What was switched on, in words for the reader."""
    ceiling_flops_per_second: float | None
    """Of the fastest matrix product in this precision, measured after the training by this project's process;
    None in the others."""


def read_job() -> Job:
    """The job that the first argument of this process names."""
    return Job(**json.loads(Path(sys.argv[1]).read_text()))


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(asdict(job)))


def read_result(path: Path) -> Result:
    """
    Raises:
        FileNotFoundError: the contender wrote none.
    """
    return Result(**json.loads(path.read_text()))


def write_result(result: Result, path: str) -> None:
    Path(path).write_text(json.dumps(asdict(result)))
