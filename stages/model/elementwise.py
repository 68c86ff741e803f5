"""RMSNorm, rotary positions and SwiGLU, each with its gradient written by hand.

They do little arithmetic on much memory, so their time is the number of times that they read and write a
tensor. Left to autograd each of their small operators does so in both directions, keeps its own result for
the backward pass, and a gradient of a slice is first a tensor of zeros. By hand:

| | kept for backward, beside the input | passes that are left |
| --- | --- | --- |
| RMSNorm | 1 / rms, one number a row | 3 forward, 6 backward |
| rotary positions of q, k | nothing, not the input | 3 and 3, straight into the gradient of q, k and v |
| SwiGLU | nothing: silu(gate) is computed again | 2 and 5, over gate and up themselves |

A compiler fuses the plain formulas into fewer passes still, so it is given those. CUDA has a fused RMSNorm.

Letters as in llama.py; N: query, key and value heads together.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        wide = _wide(x)
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse_rms, weight)
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, inverse_rms, weight = ctx.saved_tensors
        D = x.shape[-1]
        x_TD, grad_TD = _wide(x).reshape(-1, D), _wide(grad).reshape(-1, D)
        inverse_rms_T = inverse_rms.view(-1)
        # With r = 1 / rms: d weight = sum over rows of grad x r, and
        # dx = r (grad weight) - x r^3 / D (sum over channels of grad weight x).
        product_TD = grad_TD * x_TD
        weight_grad = inverse_rms_T @ product_TD
        slope_T = (product_TD @ _wide(weight)).mul_(inverse_rms_T.pow(3)).div_(D)
        del product_TD
        x_grad = (grad_TD * weight).mul_(inverse_rms_T[:, None]).addcmul_(x_TD, slope_T[:, None], value=-1)
        return x_grad.view(x.shape).to(x.dtype), weight_grad.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_heads(
    qkv_BSNE: Tensor, cos_SE: Tensor, sin_SE: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, E] and keys [B, S, K, E] at their positions, and values, each a tensor of its own.

    Attention keeps all three for its backward: as views they would keep all of qkv as well.

    Args:
        qkv_BSNE: what one projection made, N = H + 2 K.
        cos_SE: cosines of the positions' angles, for channel i and channel i + E/2 the same.
        sin_SE: sines, negative for the first half of the channels.
    """
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    cos_S1E, sin_S1E = cos_SE[:, None, :], sin_SE[:, None, :]
    if not torch.compiler.is_compiling():
        return _RotaryHeads.apply(qkv_BSNE, cos_S1E, sin_S1E, sizes)
    q, k, v = qkv_BSNE.split(sizes, dim=2)
    return _plainly_rotated(q, cos_S1E, sin_S1E), _plainly_rotated(k, cos_S1E, sin_S1E), v.contiguous()


class _RotaryHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, sizes):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.sizes = sizes
        q, k, v = qkv.split(sizes, dim=2)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        B, S, _, E = grads[0].shape
        qkv_grad = grads[0].new_empty(B, S, sum(ctx.sizes), E)
        q, k, v = qkv_grad.split(ctx.sizes, dim=2)
        for grad, place in zip(grads[:2], (q, k), strict=True):
            _rotated(grad, cos, sin, backwards=True, out=place)
        v.copy_(grads[2])
        return qkv_grad, None, None, None


def _rotated(
    x_BSHE: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool = False, out: Tensor | None = None
) -> Tensor:
    """Channel i and channel i + E/2 turned together by the position's angle (Hugging Face's pairing)."""
    half = x_BSHE.shape[-1] // 2
    out = torch.mul(x_BSHE, cos, out=out)
    return out.addcmul_(x_BSHE.roll(half, -1), sin, value=-1 if backwards else 1)


def _plainly_rotated(x_BSHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BSHE.chunk(2, dim=-1)
    return x_BSHE * cos + torch.cat((second, first), dim=-1) * sin


def swiglu(gate_up_BSG: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) as [B, S, F].

    Args:
        gate_up_BSG: what one projection made, G = 2 F: gate, then up. Backward writes its gradient over it:
            nothing else may read it after this.
    """
    if torch.compiler.is_compiling():
        gate_BSF, up_BSF = gate_up_BSG.chunk(2, dim=-1)
        return F.silu(gate_BSF) * up_BSF
    return _SwiGLU.apply(gate_up_BSG)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # Written over gate and up, which nothing else keeps: of a recomputed block the peak is often here. A
        # second backward finds that they were changed, and autograd refuses it.
        gate_up = ctx.saved_tensors[0].detach()
        gate, up = gate_up.chunk(2, dim=-1)
        up_grad = F.silu(gate).mul_(grad)
        up.mul_(grad)
        torch.ops.aten.silu_backward.grad_input(up, gate, grad_input=gate)
        up.copy_(up_grad)
        return gate_up
