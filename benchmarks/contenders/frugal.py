"""This project's engine, set up and run as the train stage does it. Run by benchmarks/peers.py.

As it comes is the plain recipe; switched on is the line that docs/techniques.md advises first,
`loss: chunked`.
"""

import stages  # before torch: it sets what OpenMP reads on import

# isort: split
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders.job import Job, read_job
from benchmarks.contenders.measured import LOSSES, Measured
from stages.data.sequences import make_sequences
from stages.data.token_files import TokenFile
from stages.measure.compilation import CompileWatch
from stages.measure.hardware import measure_matmul_flops_per_second
from stages.measure.host_allocator import keep_freed_memory
from stages.measure.peak_memory import PeakMemory
from stages.measure.throughput import StepTimer
from stages.params import Params, check_params
from stages.training import loop
from stages.training.compilation import apply_compile
from stages.training.compile_cache import use_compile_cache
from stages.training.determinism import use_deterministic_kernels
from stages.training.precision import set_float32_matmul
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state

VARIANT = "contender"
assert stages


def main() -> None:
    job = read_job()
    measured = Measured(job, ["numpy"], ["loss: chunked"] if job.switched else [])
    device = torch.device(job.device)
    params = params_of(job)
    variant = params.variants[VARIANT]
    use_deterministic_kernels(device)
    if device.type == "cpu":
        keep_freed_memory()
    use_compile_cache(Path(job.scratch))
    tokens = TokenFile.open(Path(job.data) / "train.safetensors")
    sequences = make_sequences(tokens, params.training.sequences, params.training.sequence_length)
    measured.before_model()
    set_float32_matmul(variant.precision, device)
    state, policy = initial_state(params, VARIANT, device)
    apply_recompute(state.model, variant)
    apply_compile(state.model, variant)
    # The loop profiles its second step on a CPU to count live bytes. Here the process itself is measured, as
    # are the peers, and the profiler's own memory would stand in it.
    loop.measure_peak = _run_unprofiled  # type: ignore[assignment]
    with CompileWatch(enabled=job.compiled) as watch:
        measurements = loop.Measurements(StepTimer(), watch)
        steps = loop.training_steps(state, sequences, params, VARIANT, policy, measurements)
        measured.first_step()
        so_far = torch.zeros_like(state.loss_since_row)
        for row in steps:
            if state.step <= LOSSES:  # fewer than there are between two rows, so the sum is of all steps
                total = state.loss_since_row.clone() if row is None else torch.tensor(row.loss * state.step)
                measured.add_loss(total - so_far)
                so_far = total
            measured.step_done()
    measured.finish(
        sum(parameter.numel() for parameter in state.model.parameters()),
        ceiling=lambda: measure_matmul_flops_per_second(device, variant.precision).flops_per_second,
    )


def _run_unprofiled(_device: torch.device, fn: Any) -> PeakMemory:
    fn()
    return PeakMemory(bytes=0, kind="not measured", reserved_bytes=None)


def params_of(job: Job) -> Params:
    """The params file that a user would write for this job."""
    return check_params(
        {
            "seed": job.seed,
            "corpus": {"source": "embedded"},
            "tokenizer": {"vocab_size": job.vocab_size},
            "model": job.model,
            "training": {
                "sequences": "packed",
                "sequence_length": job.sequence_length,
                "global_batch_size": job.global_batch_size,
                "token_budget": job.total_steps * job.tokens_per_step,
                "learning_rate": job.learning_rate,
                "min_learning_rate_ratio": 1.0,
                "warmup_steps": 0,
                "weight_decay": job.weight_decay,
                "adam_beta1": job.adam_beta1,
                "adam_beta2": job.adam_beta2,
                "adam_epsilon": job.adam_epsilon,
                "max_grad_norm": job.max_grad_norm,
            },
            "hardware": {"device": job.device},
            "variants": {
                VARIANT: {
                    "micro_batch_size": job.micro_batch_size,
                    "precision": job.precision,
                    "recompute": "every_block" if job.recompute else "none",
                    "compile": "blocks" if job.compiled else "off",
                    "loss": "chunked" if job.switched else "full",
                }
            },
        },
        source="benchmark job",
    )


if __name__ == "__main__":
    main()
