"""The verdict on a step, that its gradients are no numbers, taken and obeyed on the device.

An optimizer that declares `_step_supports_amp_scaling` is handed two tensors by `GradScaler.step`:
`found_inf` (above 0: the gradients overflowed, leave everything as it is) and `grad_scale` (None once
`unscale_` was called). To others it reads the first one on the host, which waits for the device. In the
precisions that need no scaler `step_unless` hands over our own verdict in the same way.
"""

import torch
from torch import Tensor


def step_unless(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """One step of `optimizer`; where `skipped` (bool scalar on the device) is true all stays as it is."""
    optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def overflowed(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """bool scalar on the device; None without a scaler."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return None if found_inf is None else found_inf > 0


def unscaled(gradient: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The gradient without the scale, if the scaler left that to the optimizer."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return gradient if scale is None else gradient / scale


def store(target: Tensor, value: Tensor, skipped: Tensor | None) -> None:
    """Put `value` into `target`, unless the step is skipped."""
    target.copy_(value if skipped is None else torch.where(skipped, target, value))
