"""What each optimizer keeps for a parameter: a checkpoint is held against it before it is used."""

import torch
from torch import Tensor

from stages.training.low_precision_adamw import LowPrecisionAdamW, new_state
from stages.training.muon import MuonWithAdamW
from stages.training.optimizer_in_backward import OptimizerInBackward

_META = torch.device("meta")


def state_layout(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state after the first step: names, shapes and types, in tensors without memory."""
    if isinstance(optimizer, OptimizerInBackward):
        return state_layout(optimizer.singles[parameter], parameter)
    if isinstance(optimizer, LowPrecisionAdamW):
        return new_state(parameter, optimizer.quantized, _META)
    if isinstance(optimizer, MuonWithAdamW) and any(parameter is matrix for matrix in optimizer.matrices):
        return {"momentum_buffer": torch.empty_like(parameter, device=_META)}
    return new_state(parameter, False, _META)  # torch.optim.AdamW's is the same
