"""Step each parameter in the backward pass, as soon as its gradient is there, and free the gradient.

All gradients never exist at one time: the parameter-sized buffer that backward otherwise fills is gone.
The price is that nothing can look at all gradients before the first weight changes: no clipping, no
GradScaler, no accumulation over micro-batches. The weights end up bit-equal to a step at the end: when
a parameter's gradient is complete, nothing in the rest of the backward pass reads that parameter.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.training.step_verdict import step_unless


class OptimizerInBackward(torch.optim.Optimizer):
    """Looks like an optimizer over all parameters; `step` finds the work done."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        learning_rate: Tensor,
    ):
        """
        Args:
            groups: parameters, each group with its `weight_decay`.
            make_optimizer: from groups to the optimizer that steps them; called once per parameter.
            learning_rate: scalar on the parameters' device.
        """
        super().__init__(groups, {"lr": learning_rate})
        parameters = [(group, p) for group in self.param_groups for p in group["params"]]
        self.norms = torch.zeros(len(parameters), dtype=torch.float32, device=learning_rate.device)
        """L2 norm of each parameter's gradient in the last backward pass (fp32)."""
        self.skipped = torch.zeros((), dtype=torch.bool, device=learning_rate.device)
        """Set before a backward pass: no parameter is stepped in it. Besides, each parameter whose own
        gradient is no number is left alone; which of them will be so, nobody knows before."""
        self.singles: dict[Tensor, torch.optim.Optimizer] = {}
        """The optimizer of each parameter."""
        for index, (group, parameter) in enumerate(parameters):
            single = self.singles[parameter] = make_optimizer([{**group, "params": [parameter]}])
            single.state = self.state  # one state, so that a checkpoint finds it as usual
            # A weak reference: from a parameter through its hook back to it, Python finds no cycle to free.
            hook = partial(_step_parameter, weakref.ref(self), index)
            parameter.register_post_accumulate_grad_hook(hook)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing: every parameter was stepped in the backward pass."""

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients of the last backward pass (fp32 scalar)."""
        return torch.linalg.vector_norm(self.norms)


def _step_parameter(reference: "weakref.ref[OptimizerInBackward]", index: int, parameter: Tensor) -> None:
    """The hook: called once per backward pass, after all uses of a tied matrix were summed."""
    optimizer = reference()
    if optimizer is None or parameter.grad is None:
        return
    norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
    optimizer.norms[index] = norm
    step_unless(optimizer.singles[parameter], optimizer.skipped | ~torch.isfinite(norm))
    parameter.grad = None
