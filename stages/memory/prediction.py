"""The predicted peak memory of a training step, and what it is made of."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

import torch.distributed as dist

from stages.memory.cuda_allocator import MIN_BLOCK, allocator_peaks
from stages.memory.make_up import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS_AND_LOSS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    Timeline,
    host_peak_bytes,
    make_up_of_peak,
    timeline,
)
from stages.memory.step_trace import StepTrace, trace_step
from stages.params import ModelParams, TrainingParams, VariantParams
from stages.training.parallel import is_sharded

TIMELINE_POINTS = 2000

_ROUNDING = {"cuda": MIN_BLOCK, "cpu": 1}
"""Bytes; the CPU's measurement counts what was asked for."""

DEFAULT_COMPUTE_CAPABILITY = (8, 6)
DEFAULT_MULTIPROCESSORS = 82
"""Of a GeForce RTX 3090."""

UNSPLIT, CUBLAS = "rests that the allocator does not split off", "cuBLAS workspaces"
FRAGMENTATION, CONTEXT = "fragmentation", "CUDA context and kernels"
NCCL = "NCCL buffers"
"""Names of the allowances. The first two are part of torch.cuda.max_memory_allocated, the first three of
max_memory_reserved, the others of neither. Fragmentation is that of a device with room: short of memory, the
allocator gives segments that are free as a whole back to the driver, and some of it is saved."""

_CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 2**10
"""Of one handle, as CUBLAS_WORKSPACE_CONFIG=:4096:8 has it (stages/training/determinism.py); the forward pass
and autograd's thread have a handle each, for good."""

CONTEXT_BYTES = 512 * 2**20
"""What a process with CUDA and PyTorch's kernels takes beside its tensors. Assumed, not computed: nvidia-smi
shows some 200 to 500 MiB, more for larger GPUs, where kernels are loaded as they are first used
(CUDA_MODULE_LOADING is LAZY since CUDA 12.2)."""

NCCL_BYTES = 512 * 2**20
"""What NCCL takes for one group of ranks. Assumed, not computed: a channel has buffers of 4 MiB
(NCCL_BUFFSIZE) and smaller ones for short messages, to and from a neighbour; 32 channels make some 0.5 GiB.
It takes fewer channels on slower links."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted live tensor bytes of one rank at the fullest moment of a step; the components are its sum."""

    moment: str
    """Where in the step the peak is, such as `head and loss, backward`."""
    parameters: int
    gradients: int
    """Those that exist at that moment."""
    optimizer_state: int
    """Kept between steps."""
    activations: int
    """Saved for backward, recomputed or brought back; weights gathered from other ranks; 16-bit copies of
    weights; the batch."""
    logits_and_loss: int
    temporaries: int
    """Gradients of activations, what a kernel holds inside, the optimizer's scratch."""
    activations_by_kind: dict[str, int]
    """The activations by the part of the model that made them, the largest first."""
    allowances: dict[str, int]
    """What the process needs on the device beside live tensors, each in bytes; empty on a CPU."""
    host_bytes: int
    """Highest bytes of a rank's tensors in host memory; 0 where a GPU's step keeps none there."""
    accuracy: Literal["exact", "estimate"]
    """exact: byte for byte on a CPU (benchmarks/plan_accuracy.py). estimate: the variant is compiled, and
    what the compiler fuses away is reckoned by rules, within 10 % there, or, where ranks share the weights,
    not at all, so that less may be needed."""
    timeline: Timeline
    """Live bytes over the step."""
    method: str = "traced"

    @property
    def peak_bytes(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.activations
            + self.logits_and_loss
            + self.temporaries
        )

    @property
    def allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated will say; on a CPU the peak."""
        return self.peak_bytes + self.allowances.get(UNSPLIT, 0) + self.allowances.get(CUBLAS, 0)

    @property
    def needed_bytes(self) -> int:
        """The peak and the allowances: what the device must have free."""
        return self.peak_bytes + sum(self.allowances.values())


def predict(
    model: ModelParams,
    vocab_size: int,
    training: TrainingParams,
    variant: VariantParams,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    compute_capability: tuple[int, int] = DEFAULT_COMPUTE_CAPABILITY,
    multiprocessors: int = DEFAULT_MULTIPROCESSORS,
) -> MemoryPrediction:
    """Predict the peak of a step in which the optimizer state exists already (the second or later).

    It is that of the first of training.ranks; the others need as much or less.

    Args:
        device: whose kernels run; auto takes the CPU's.
        compute_capability: of a CUDA device.
        multiprocessors: of a CUDA device; flash attention adds up in as many pieces as keep them busy.
    """
    target: Literal["cuda", "cpu"] = "cuda" if device == "cuda" else "cpu"
    if is_sharded(variant) and dist.is_initialized():
        # A process has one default group, and the trace needs a group that moves nothing.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            arguments = (model, vocab_size, training, variant, device, compute_capability, multiprocessors)
            return other.submit(predict, *arguments).result()
    trace = trace_step(model, vocab_size, training, variant, target, compute_capability, multiprocessors)
    peak = make_up_of_peak(trace, _ROUNDING[target])
    return MemoryPrediction(
        moment=peak.moment,
        parameters=peak.by_category[PARAMETERS],
        gradients=peak.by_category[GRADIENTS],
        optimizer_state=peak.by_category[OPTIMIZER_STATE],
        activations=peak.by_category[ACTIVATIONS],
        logits_and_loss=peak.by_category[LOGITS_AND_LOSS],
        temporaries=peak.by_category[TEMPORARIES],
        activations_by_kind=peak.activations_by_kind,
        allowances=_allowances(trace, peak.bytes, training.ranks) if target == "cuda" else {},
        host_bytes=host_peak_bytes(trace) if target == "cuda" else 0,
        accuracy="exact" if variant.compile == "off" else "estimate",
        timeline=timeline(trace, _ROUNDING[target], TIMELINE_POINTS),
    )


def _allowances(trace: StepTrace, peak_bytes: int, ranks: int) -> dict[str, int]:
    blocks = trace.recorded.blocks
    peaks = allocator_peaks(
        [block.bytes for block in blocks],
        trace.recorded.events,
        trace.second_step,
        [block.stream for block in blocks],
    )
    allowances = {
        UNSPLIT: peaks.allocated - peak_bytes,
        CUBLAS: 2 * _CUBLAS_WORKSPACE_BYTES,
        FRAGMENTATION: peaks.reserved - peaks.allocated,
        CONTEXT: CONTEXT_BYTES,
    }
    return allowances | ({NCCL: NCCL_BYTES} if ranks > 1 else {})
