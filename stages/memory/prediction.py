"""The predicted peak memory of a training step, and what it is made of."""

from dataclasses import dataclass
from typing import Literal

from stages.memory.make_up import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS_AND_LOSS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    Timeline,
    make_up_of_peak,
    timeline,
)
from stages.memory.step_trace import trace_step
from stages.params import ModelParams, TrainingParams, VariantParams

TIMELINE_POINTS = 2000

_ROUNDING = {"cuda": 512, "cpu": 1}
"""Bytes: kMinBlockSize of c10/core/AllocatorConfig.h; the CPU's measurement counts what was asked for."""

DEFAULT_COMPUTE_CAPABILITY = (8, 6)


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted live tensor bytes at the fullest moment of a step; the components are its sum."""

    moment: str
    """Where in the step the peak is, such as `head and loss, backward`."""
    parameters: int
    gradients: int
    """Those that exist at that moment."""
    optimizer_state: int
    """Kept between steps."""
    activations: int
    """Saved for backward, recomputed or brought back; 16-bit copies of weights; the batch."""
    logits_and_loss: int
    temporaries: int
    """Gradients of activations, what a kernel holds inside, the optimizer's scratch."""
    activations_by_kind: dict[str, int]
    """The activations by the part of the model that made them, the largest first."""
    allowances: dict[str, int]
    """What the process needs on the device beside live tensors, each in bytes; empty on a CPU."""
    bound: Literal["exact", "upper"]
    """upper: the variant is compiled, and the eager step was traced: the compiler keeps less."""
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
) -> MemoryPrediction:
    """Predict the peak of a step in which the optimizer state exists already (the second or later).

    Args:
        device: whose kernels run; auto takes the CPU's.
        compute_capability: of a CUDA device.
    """
    target: Literal["cuda", "cpu"] = "cuda" if device == "cuda" else "cpu"
    trace = trace_step(model, vocab_size, training, variant, target, compute_capability)
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
        allowances={},
        bound="exact" if variant.compile == "off" else "upper",
        timeline=timeline(trace, _ROUNDING[target], TIMELINE_POINTS),
    )
