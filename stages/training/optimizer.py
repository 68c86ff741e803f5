"""AdamW (Loshchilov & Hutter 2019) over the model's parameters."""

import torch

from stages.model.llama import Llama
from stages.params import TrainingParams


def make_optimizer(model: Llama, training: TrainingParams, learning_rate: torch.Tensor) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: shrinking a norm's gain towards 0 regularises nothing.

    Args:
        model: its parameters, on the device they train on.
        training: betas, epsilon and decay.
        learning_rate: fp32 scalar on the same device, shared with the schedule, which writes to it. A
            tensor because the value may depend on a step that only the device knows to be skipped.

    Fused: one kernel over all parameters and no parameter-sized temporary, which foreach needs. It also
    takes the GradScaler's verdict on the device, so a step costs no synchronisation.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
