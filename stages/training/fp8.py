"""Matrix products of the blocks in 8 bits: e4m3 forward, e5m2 for gradients, one scale per tensor.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning". e4m3 has 3 bits of mantissa and ends at 448,
e5m2 has 2 and ends at 57344: activations and weights need the precision, gradients the range. Each
tensor is scaled so that its largest magnitude becomes the format's largest number ("current" or dynamic
scaling: amax of this tensor, not of the steps before), and the product is divided by both scales in the
kernel, which accumulates in fp32. Weights stay fp32, everything but these products is as under bf16
autocast: embeddings, norms, attention, the head.

torchao's `Float8Linear` and Transformer Engine do the same with more recipes; this is one recipe and no
dependency.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.llama import Llama
from stages.params import ModelParams

FORWARD_DTYPE = torch.float8_e4m3fn
BACKWARD_DTYPE = torch.float8_e5m2
SIDE_MULTIPLE = 16
"""`torch._scaled_mm` takes matrices whose sides are multiples of 16 bytes."""

_SMALLEST_AMAX = 1e-30  # a tensor of zeros has no scale; fp32 holds 57344 / 1e-30 and its inverse


def fp8_problems(params: ModelParams) -> list[str]:
    """One sentence for each matrix of the blocks that 8-bit products cannot take; empty when all can."""
    heads, kv_heads = params.num_attention_heads, params.num_key_value_heads
    sides = {
        "model.hidden_size": params.hidden_size,
        "model.intermediate_size": params.intermediate_size,
        "(model.num_attention_heads + 2 x model.num_key_value_heads) x head size": (heads + 2 * kv_heads)
        * params.head_dim,
    }
    return [
        f"{name} is {side} and precision fp8 needs a multiple of {SIDE_MULTIPLE}; "
        f"use {_neighbours(side)}, or precision amp_bf16"
        for name, side in sides.items()
        if side % SIDE_MULTIPLE
    ]


def apply_fp8(model: Llama) -> int:
    """Give every linear of the blocks an 8-bit forward; returns how many.

    Before recompute and compilation. The linears' forward is replaced and no module: parameters keep
    their names, their type and their optimizer. The head, tied or not, stays as it is: its gradients
    reach the loss directly, and 8 bits there are what hurts most.

    Raises:
        ValueError: a matrix has a side that is no multiple of 16; the message names the model's key.
    """
    if problems := fp8_problems(model.params):
        raise ValueError("; ".join(problems))
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.forward = _fp8_forward(linear)  # type: ignore[method-assign,assignment]
    return len(linears)


def _fp8_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return fp8_linear(x, linear.weight)

    return forward


def fp8_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight.T` in e4m3, as bf16 [..., O]; its gradients' products in e5m2 x e4m3.

    Args:
        x: [..., I], any floating type.
        weight_OI: the fp32 master weight, whose gradient comes in fp32 too.
    """
    out_TO: Tensor = _Fp8Linear.apply(x.flatten(0, -2), weight_OI)
    return out_TO.view(*x.shape[:-1], weight_OI.shape[0])


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits with its largest magnitude at the format's largest, and what to multiply it by again.

    Returns:
        8-bit tensor in row-major order, and the inverse scale (fp32 scalar on the same device): no value
        goes to the host.

    A cast to e4m3 saturates and would hide an overflow. With inf or NaN in `x` the scale is 0 or NaN, so
    the product is not finite and shows in the loss and the gradient norm.
    """
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float()
    scale = largest / amax.clamp_min(_SMALLEST_AMAX)
    # The multiplication rounds, and an e5m2 cast of what is above the largest number gives inf.
    scaled = (x.float() * scale).clamp(-largest, largest)
    return scaled.to(dtype, memory_format=torch.contiguous_format), scale.reciprocal()


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, weight_OI: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        x8_TI, x_inverse = quantise(x_TI, FORWARD_DTYPE)
        weight8_OI, weight_inverse = quantise(weight_OI, FORWARD_DTYPE)
        # Saved are 1 byte per activation, and the weight that exists anyhow: casting it again in
        # backward costs less than a copy of it for every layer.
        ctx.save_for_backward(x8_TI, x_inverse, weight_OI)
        ctx.x_dtype = x_TI.dtype
        # Fast accumulation (cuBLAS adds in fewer bits between promotions) is for forward alone, as
        # Transformer Engine and torchao have it. A CPU multiplies in fp32 underneath, and autocast, which
        # is on out here, would round the operands of that to bf16.
        with torch.autocast(x_TI.device.type, enabled=False):
            return torch._scaled_mm(
                x8_TI,
                weight8_OI.t(),
                scale_a=x_inverse,
                scale_b=weight_inverse,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

    @staticmethod
    def backward(ctx, grad_TO: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x8_TI, x_inverse, weight_OI = ctx.saved_tensors
        grad8_TO, grad_inverse = quantise(grad_TO, BACKWARD_DTYPE)
        weight8_OI, weight_inverse = quantise(weight_OI, FORWARD_DTYPE)
        grad_x_TI = torch._scaled_mm(
            grad8_TO,
            _column_major(weight8_OI),
            scale_a=grad_inverse,
            scale_b=weight_inverse,
            out_dtype=torch.bfloat16,
        )
        # Here tokens are the inner dimension. Rows of zeros add nothing.
        missing = -x8_TI.shape[0] % SIDE_MULTIPLE
        grad_weight_OI = torch._scaled_mm(
            _with_rows(grad8_TO, missing).t().contiguous(),
            _column_major(_with_rows(x8_TI, missing)),
            scale_a=grad_inverse,
            scale_b=x_inverse,
            out_dtype=weight_OI.dtype,
        )
        return grad_x_TI.to(ctx.x_dtype), grad_weight_OI


def _column_major(matrix: Tensor) -> Tensor:
    """The same matrix with columns contiguous: cuBLAS takes 8-bit products in that one layout."""
    return matrix.t().contiguous().t()


def _with_rows(matrix: Tensor, rows: int) -> Tensor:
    """Rows of zeros below; as bytes, which can be padded where 8-bit floats cannot."""
    return F.pad(matrix.view(torch.uint8), (0, 0, 0, rows)).view(matrix.dtype) if rows else matrix


def _neighbours(side: int) -> str:
    below, above = side // SIDE_MULTIPLE * SIDE_MULTIPLE, -(-side // SIDE_MULTIPLE) * SIDE_MULTIPLE
    return f"{below} or {above}" if below else str(above)
