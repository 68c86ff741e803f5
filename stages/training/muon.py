"""Muon: momentum made orthogonal, for the matrices of the blocks; AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of the update from
Liu et al. 2025, "Muon is Scalable for LLM Training" (Moonlight), so that AdamW's learning rate
and weight decay serve both.

The same arithmetic as `torch.optim.Muon`, which the tests hold it against. That one could not be used: it
reads a tensor learning rate on the host once per matrix, knows no GradScaler but through a wait for the
device, and takes a fused matrix for one (our q, k and v are rows of the same tensor, and orthogonal rows
of the three together are something else).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.training.step_verdict import overflowed, store, unscaled

MOMENTUM = 0.95
ADAMW_RMS = 0.2
"""Root mean square of AdamW's update divided by the learning rate, as Liu et al. measured it (0.2 to 0.4)."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration: steep at 0, and near 1 for singular values that are not."""
_ITERATIONS = 5
_EPSILON = 1e-7


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for all parameters, so that a GradScaler and a checkpoint see one."""

    _step_supports_amp_scaling = True  # see stages/training.step_verdict.py

    def __init__(
        self,
        matrices: Sequence[tuple[Tensor, Sequence[int]]],
        adamw_groups: Iterable[dict[str, Any]],
        *,
        learning_rate: Tensor,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
    ):
        """
        Args:
            matrices: parameters that Muon steps, each with the row counts of the matrices fused in it.
            adamw_groups: the other parameters, each group with its `weight_decay`.
            learning_rate: scalar on the parameters' device; read at every step, there.
            weight_decay: of the matrices.
            betas: AdamW's.
            epsilon: AdamW's.
        """
        own = {"params": [matrix for matrix, _ in matrices], "weight_decay": weight_decay}
        super().__init__([own], {"lr": learning_rate})
        self._row_counts = [list(rows) for _, rows in matrices]
        self._adamw = torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
        self._adamw.state = self.state
        self.param_groups.extend(self._adamw.param_groups)

    @property
    def matrices(self) -> list[Tensor]:
        """The parameters that Muon steps; AdamW steps the others."""
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        skipped = overflowed(self)
        group = self.param_groups[0]
        for matrix, row_counts in zip(self.matrices, self._row_counts, strict=True):
            if matrix.grad is not None:
                self._step_matrix(matrix, matrix.grad, row_counts, group, skipped)
        for attribute in ("found_inf", "grad_scale"):
            setattr(self._adamw, attribute, getattr(self, attribute, None))
        self._adamw.step()

    def _step_matrix(
        self,
        matrix: Tensor,
        gradient: Tensor,
        row_counts: list[int],
        group: dict[str, Any],
        skipped: Tensor | None,
    ) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        rate = group["lr"].double()
        tensors = (matrix, unscaled(gradient, self), state["momentum_buffer"])
        for weight, slope, buffer in zip(*(tensor.split(row_counts) for tensor in tensors), strict=True):
            momentum = buffer.lerp(slope, 1 - MOMENTUM)
            update = orthogonalize(slope.lerp(momentum, MOMENTUM)).to(weight.dtype)  # Nesterov's
            update *= rate * ADAMW_RMS * max(weight.shape) ** 0.5
            store(buffer, momentum, skipped)
            store(weight, weight * (1 - rate * group["weight_decay"]) - update, skipped)


def orthogonalize(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and all singular values near 1 (between 0.7 and 1.2).

    Newton-Schulz iteration in bfloat16, whose rounding is far below that band; the result is bfloat16.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x  # the Gram matrix of the shorter side is the smaller one
    x = x / x.norm().clamp(min=_EPSILON)  # singular values at most 1, where the iteration converges
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
