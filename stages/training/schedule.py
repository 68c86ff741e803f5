"""Linear warm-up, then half a cosine (Loshchilov & Hutter 2017), counted in optimizer steps."""

import math

import torch
from torch import Tensor

from stages.params import TrainingParams


class WarmupCosine:
    """The learning rate as a tensor on the training device.

    Under fp16 a step with overflown gradients is skipped, and then the schedule must not move. Only the
    device knows whether that happened. With the count on the device too, nothing has to wait for it.
    """

    def __init__(self, training: TrainingParams, device: torch.device):
        self._training = training
        self.steps_taken = torch.zeros((), dtype=torch.int64, device=device)
        """Optimizer steps that really changed the weights."""
        self.learning_rate = torch.zeros((), dtype=torch.float32, device=device)
        """Of the step to come; the optimizer holds this very tensor."""
        self.restore(0)

    def advance(self, skipped: Tensor | None) -> None:
        """Move on by one step, unless `skipped` (bool scalar on the device) says it did not happen."""
        self.steps_taken += 1 if skipped is None else (~skipped).to(torch.int64)
        self.learning_rate.copy_(learning_rate_at(self.steps_taken, self._training))

    def restore(self, steps_taken: int) -> None:
        """Go to the state after this many real steps."""
        self.steps_taken.fill_(steps_taken)
        self.learning_rate.copy_(learning_rate_at(self.steps_taken, self._training))


def learning_rate_at(steps_taken: Tensor, training: TrainingParams) -> Tensor:
    """Rate of the step that follows `steps_taken` steps, as an fp32 scalar.

    Step k of the warm-up (k = 1 … warmup_steps) has k / warmup_steps of the peak, so the first step is
    not wasted on a rate of 0. The last step has min_learning_rate_ratio of it.
    """
    warmup, total = training.warmup_steps, training.num_steps
    step = steps_taken.double()
    rising = (step + 1) / max(warmup, 1)
    progress = ((step - warmup) / max(total - 1 - warmup, 1)).clamp(0.0, 1.0)
    floor = training.min_learning_rate_ratio
    falling = floor + (1 - floor) * 0.5 * (1 + torch.cos(math.pi * progress))
    return (training.learning_rate * torch.where(step < warmup, rising, falling)).float()
