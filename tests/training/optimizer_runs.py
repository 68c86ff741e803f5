"""A small run with any optimizer, and a plain problem to step by hand."""

from pathlib import Path
from typing import Any

import torch

from stages.params import Params
from tests.training.small_run import SmallRun, small_params, small_run

MODEL = {"hidden_size": 64}
"""Matrices of a block have at least 4096 numbers then, fused ones and single ones."""

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw bf16": {"precision": "bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "muon": {"optimizer": "muon"},
    "adamw in backward": {"optimizer_in_backward": True},
    "adamw bf16 in backward": {"precision": "bf16", "optimizer_in_backward": True},
    "adamw_8bit in backward": {"optimizer": "adamw_8bit", "optimizer_in_backward": True},
}


def optimizer_params(variant: dict[str, Any], **training: Any) -> Params:
    settings = {"max_grad_norm": None} if variant.get("optimizer_in_backward") else {}
    model = MODEL | training.pop("model", {})
    return small_params(variant, **{**settings, **training}, model=model)


def optimizer_run(
    folder: Path, variant: dict[str, Any], scaler: torch.amp.GradScaler | None = None, **training: Any
) -> SmallRun:
    return small_run(folder, optimizer_params(variant, **training), scaler)


def state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    return sum(tensor.nbytes for key, tensor in optimizer.state[parameter].items() if key != "step")
