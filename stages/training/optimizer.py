"""The optimizer of a variant."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.model.hugging_face import to_hugging_face
from stages.model.llama import Llama
from stages.params import TrainingParams, VariantParams
from stages.training.low_precision_adamw import LowPrecisionAdamW
from stages.training.muon import MuonWithAdamW
from stages.training.optimizer_in_backward import OptimizerInBackward


def make_optimizer(
    model: Llama, training: TrainingParams, learning_rate: Tensor, variant: VariantParams
) -> torch.optim.Optimizer:
    """AdamW or Muon over the model's parameters, as the variant says.

    Args:
        model: its parameters, on the device and in the type they train in.
        training: betas, epsilon and decay.
        learning_rate: fp32 scalar on the same device, shared with the schedule, which writes to it. A
            tensor because the value may depend on a step that only the device knows to be skipped.
        variant: its `optimizer`, `optimizer_in_backward` and `precision`.

    All take the GradScaler's verdict on the device, so a step costs no synchronisation.
    """
    parameters = list(model.parameters())
    betas = (training.adam_beta1, training.adam_beta2)
    if variant.optimizer == "muon":
        matrices = _block_matrices(model)
        in_blocks = {id(matrix) for matrix, _ in matrices}
        return MuonWithAdamW(
            matrices,
            _decay_groups([p for p in parameters if id(p) not in in_blocks], training),
            learning_rate=learning_rate,
            weight_decay=training.weight_decay,
            betas=betas,
            epsilon=training.adam_epsilon,
        )
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    if variant.optimizer == "adamw_8bit" or variant.precision == "bf16":
        make = partial(
            LowPrecisionAdamW,
            learning_rate=learning_rate,
            betas=betas,
            epsilon=training.adam_epsilon,
            quantized=variant.optimizer == "adamw_8bit",
        )
    else:
        # Fused: one kernel over all parameters and no parameter-sized temporary, which foreach needs.
        make = partial(
            torch.optim.AdamW, lr=learning_rate, betas=betas, eps=training.adam_epsilon, fused=True
        )
    groups = _decay_groups(parameters, training)
    if variant.optimizer_in_backward:
        return OptimizerInBackward(groups, make, learning_rate)
    return make(groups)


def _decay_groups(parameters: Iterable[Tensor], training: TrainingParams) -> list[dict[str, Any]]:
    """Weight decay on matrices only: shrinking a norm's gain towards 0 regularises nothing."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _block_matrices(model: Llama) -> list[tuple[Tensor, list[int]]]:
    """The blocks' matrices, each with the rows of the matrices that are fused in it."""
    return [
        (
            parameter,
            [len(piece) for piece in to_hugging_face({f"layers.{name}": parameter}, model.params).values()],
        )
        for name, parameter in model.layers.named_parameters()
        if parameter.dim() == 2
    ]
