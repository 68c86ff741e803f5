"""AdamW that keeps less: bfloat16 weights and moments, or fp32 weights with moments of 8 bits.

The arithmetic is AdamW's in fp32 (Loshchilov & Hutter 2019, algorithm 2), a piece of one parameter at a
time; only what is kept between steps is smaller. Bytes per parameter:

| | weight | gradient | moments |
| --- | --- | --- | --- |
| torch.optim.AdamW, fp32 | 4 | 4 | 8 |
| here, fp32 weight, 8-bit moments | 4 | 4 | 2 + 8 / 256 for the scales |
| here, bfloat16 | 2 | 2 | 4 |

torchao has 8-bit states too. Its step must be compiled, once per shape (20 s for the first one on a CPU),
which would count as recompilation here, and it keeps tensor subclasses, which safetensors cannot hold.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stages.training.blockwise_quantization import block_count, dequantize, quantize
from stages.training.step_verdict import overflowed, store, unscaled
from stages.training.stochastic_rounding import stochastic_round

MIN_QUANTIZED_ELEMENTS = 4096
"""Smaller tensors, and vectors, keep moments in the weight's type: they cost nothing and are the sensitive
ones."""

_PIECE_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Of a parameter at one time: what the CPU's cache holds; what keeps a GPU busy. The temporaries are about
nine times this in fp32."""


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW over parameters of fp32 or bfloat16.

    bfloat16 weights get bfloat16 moments (8-bit codes where quantized), and all three are rounded
    stochastically: to the nearest, a weight would not see small updates, and a second moment with beta2
    0.999 would never decay.
    """

    _step_supports_amp_scaling = True  # see stages/training.step_verdict.py

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        learning_rate: Tensor,
        betas: tuple[float, float],
        epsilon: float,
        quantized: bool,
    ):
        """
        Args:
            groups: parameters, each group with its `weight_decay`.
            learning_rate: scalar on the parameters' device; read at every step, there.
            betas: decay of the first and the second moment.
            epsilon: added to the root of the second moment.
            quantized: moments of matrices in 8 bits.
        """
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon})
        self.quantized = quantized

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        skipped = overflowed(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group, skipped)

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, self.quantized, parameter.device))
        step = state["step"]
        step += 1 if skipped is None else (~skipped).to(step.dtype)
        # In fp64, like the fused kernel: 1 - 0.999 in fp32 is off by 1e-5.
        taken, rate = step.double(), group["lr"].double()
        beta1, beta2 = group["betas"]
        bias1, bias2 = 1 - beta1**taken, 1 - beta2**taken

        rows = max(1, _PIECE_ELEMENTS[parameter.device.type] * parameter.shape[0] // parameter.numel())
        tensors = {"weight": parameter, "grad": parameter.grad, **state}
        del tensors["step"]
        split = [tensor.split(rows) for tensor in tensors.values()]
        for piece in zip(*split, strict=True):
            kept = dict(zip(tensors, piece, strict=True))
            gradient = unscaled(kept["grad"].float(), self)
            first, second = _read(kept, "exp_avg"), _read(kept, "exp_avg_sq")
            first = torch.lerp(first, gradient, 1 - beta1)
            second = (second * beta2).addcmul_(gradient, gradient, value=1 - beta2)
            update = first / (second / bias2).sqrt_().add_(group["eps"])
            weight = kept["weight"].float() * (1 - rate * group["weight_decay"])
            weight -= update.mul_(rate / bias1)
            _write(kept, "weight", weight, skipped)
            del gradient, update, weight  # quantizing has temporaries of its own
            _write(kept, "exp_avg", first, skipped)
            _write(kept, "exp_avg_sq", second, skipped)


def new_state(parameter: Tensor, quantized: bool, device: torch.device) -> dict[str, Tensor]:
    """Zeros; the first dimension of all but `step` is the parameter's, so that they are cut alike."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for moment in ("exp_avg", "exp_avg_sq"):
        if quantized and parameter.dim() == 2 and parameter.numel() >= MIN_QUANTIZED_ELEMENTS:
            scales = (parameter.shape[0], block_count(parameter.shape[1]))
            state[f"{moment}_codes"] = torch.zeros(parameter.shape, dtype=torch.uint8, device=device)
            state[f"{moment}_scales"] = torch.zeros(scales, dtype=torch.float32, device=device)
        else:
            state[moment] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    return state


def _read(kept: dict[str, Tensor], key: str) -> Tensor:
    """A moment in fp32."""
    if key in kept:
        return kept[key].float()
    return dequantize(kept[f"{key}_codes"], kept[f"{key}_scales"], signed=_is_signed(key))


def _write(kept: dict[str, Tensor], key: str, value: Tensor, skipped: Tensor | None) -> None:
    """Keep an fp32 value in the form that this parameter's has."""
    if key not in kept:
        codes, scales = quantize(value, signed=_is_signed(key))
        store(kept[f"{key}_codes"], codes, skipped)
        store(kept[f"{key}_scales"], scales, skipped)
    elif kept[key].dtype is torch.bfloat16:
        store(kept[key], stochastic_round(value), skipped)
    else:
        store(kept[key], value, skipped)


def _is_signed(moment: str) -> bool:
    return moment == "exp_avg"
