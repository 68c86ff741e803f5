"""Causal attention that stays inside a document, without ever building an S x S mask.

One entry, `causal_attention`; `attention_kernel` picks the kernel, and nothing else may run:

| device, type | rows are whole documents | documents packed (cu_seqlens) |
| --- | --- | --- |
| CPU | SDPA's flash kernel | the same kernel, called per document piece |
| CUDA fp16, bf16 | SDPA's flash kernel | variable-length flash attention |
| CUDA fp32, and fp16 before Ampere | memory-efficient kernel, KV heads expanded | the same, with cu_seqlens |

Grouped key-value heads go to the kernels as they are, except fp32 on CUDA: flash knows no fp32, and
the memory-efficient kernel no groups, so SDPA would silently fall to the math kernel and build the
scores.
"""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Not in torch 2.11: keys and values are expanded there."""


def causal_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Softmax(q k^T / sqrt(E)) v over earlier positions of the same document, as [B, S, H, E].

    Args:
        q_BSHE: queries.
        k_BSKE: keys; K divides H, head h reads key-value head h // (H / K).
        v_BSKE: values.
        cu_seqlens: int32 [documents + 1], starts in the flattened B x S tokens, with every row's
            start among them; None when each row is one document.
    """
    kernel = attention_kernel(q_BSHE.device, q_BSHE.dtype)
    if cu_seqlens is None and not q_BSHE.is_cuda and _backward_is_wide(q_BSHE):
        return _FlashWithWideBackward.apply(q_BSHE, k_BSKE, v_BSKE)
    if cu_seqlens is None:
        if kernel == "efficient":
            k_BSKE, v_BSKE = _expand(k_BSKE, q_BSHE), _expand(v_BSKE, q_BSHE)
        backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        # SDPA raises where this kernel cannot run, instead of taking the math one and building the scores.
        with sdpa_kernel(backends[kernel]):
            out_BHSE = F.scaled_dot_product_attention(
                q_BSHE.transpose(1, 2),
                k_BSKE.transpose(1, 2),
                v_BSKE.transpose(1, 2),
                is_causal=True,
                enable_gqa=k_BSKE.shape[2] != q_BSHE.shape[2],
            )
        return out_BHSE.transpose(1, 2)
    if not q_BSHE.is_cuda:
        return _document_attention_cpu(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)[0]
    if kernel == "flash":
        return _document_flash_cuda(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)
    return _document_efficient_cuda(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)


def attention_kernel(device: torch.device, dtype: torch.dtype) -> Literal["flash", "efficient"]:
    """The family of kernels that attention of `dtype` runs on `device`."""
    if device.type != "cuda":
        return "flash"
    half = dtype in (torch.float16, torch.bfloat16)
    # Flash begins with Ampere and knows no fp32; the memory-efficient kernels take the rest.
    return "flash" if half and torch.cuda.get_device_properties(device).major >= 8 else "efficient"


def _expand(kv_BSKE: Tensor, q_BSHE: Tensor) -> Tensor:
    return kv_BSKE.repeat_interleave(q_BSHE.shape[2] // kv_BSKE.shape[2], dim=2)


def _document_flash_cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    B, S, H, E = q.shape
    options: dict[str, Any] = {}
    if k.shape[2] != H and _VARLEN_TAKES_GROUPS:
        options["enable_gqa"] = True
    elif k.shape[2] != H:
        k, v = _expand(k, q), _expand(v, q)
    out = varlen_attn(
        q.reshape(B * S, H, E),
        k.reshape(B * S, -1, E),
        v.reshape(B * S, -1, E),
        cu_seqlens,
        cu_seqlens,
        S,
        S,
        window_size=(-1, 0),
        **options,
    )
    assert isinstance(out, Tensor)
    return out.view(B, S, H, E)


def _document_efficient_cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    B, S, H, E = q.shape
    causal_from_top_left = 1
    out, *_ = torch.ops.aten._efficient_attention_forward(
        q.reshape(1, B * S, H, E),
        _expand(k, q).reshape(1, B * S, H, E),
        _expand(v, q).reshape(1, B * S, H, E),
        None,
        cu_seqlens,
        cu_seqlens,
        S,
        S,
        0.0,
        causal_from_top_left,
        compute_log_sumexp=True,
    )
    return out.view(B, S, H, E)


WIDE_BACKWARD_CHANNELS = 32
"""Heads of up to so many channels go backward in fp32 on a CPU."""


def _backward_is_wide(q: Tensor) -> bool:
    """Whether a CPU's flash backward is run in fp32 on operands of 16 bits.

    For heads of few channels it takes half the time: its products are too small for oneDNN's 16-bit ones.
    From 64 channels on the 16-bit kernel is as fast.
    """
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= WIDE_BACKWARD_CHANNELS


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, E] and log-sum-exp [B, H, S]."""
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), 0.0, True
    )
    return out.transpose(1, 2), logsumexp


def _flash_backward_cpu(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v [B, S, H or K, E], in the type in which they were computed."""
    operands = [tensor.transpose(1, 2) for tensor in (grad_out, q, k, v, out)]
    if _backward_is_wide(q):
        operands = [tensor.float() for tensor in operands]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, logsumexp, 0.0, True
    )
    return tuple(grad.transpose(1, 2) for grad in grads)


class _FlashWithWideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
        out, logsumexp = _flash_cpu(q, k, v)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        grads = _flash_backward_cpu(grad_out, *ctx.saved_tensors)
        return tuple(grad.to(grad_out.dtype) for grad in grads)


# On the CPU there is no variable-length kernel. An operator of our own calls the flash kernel once for
# each run of whole rows and once for each piece of a row that holds several documents. As an operator it
# is opaque to torch.compile: how many documents a batch holds never recompiles anything.


@torch.library.custom_op("frugal::document_attention", mutates_args=(), device_types="cpu")
def _document_attention_cpu(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Attention output [B, S, H, E] and the softmax's log-sum-exp [B, S, H]."""
    B, S, H, E = q.shape
    out, logsumexp = q.new_empty(B, S, H, E), q.new_empty((B, S, H), dtype=_accumulation_dtype(q))
    for rows, positions in _pieces(cu_seqlens, S):
        at = (slice(*rows), slice(*positions))
        out[at], piece_lse = _flash_cpu(q[at], k[at], v[at])
        logsumexp[at] = piece_lse.transpose(1, 2)
    return out, logsumexp


@torch.library.custom_op("frugal::document_attention_backward", mutates_args=(), device_types="cpu")
def _document_attention_backward_cpu(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, positions in _pieces(cu_seqlens, q.shape[1]):
        at = (slice(*rows), slice(*positions))
        piece_grads = _flash_backward_cpu(
            grad_out[at], q[at], k[at], v[at], out[at], logsumexp[at].transpose(1, 2).contiguous()
        )
        for grad, piece in zip(grads, piece_grads, strict=True):
            grad[at] = piece
    return grads


def _accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _pieces(cu_seqlens: Tensor, row_length: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(first and last row, first and last position) of every piece one kernel call can do.

    Neighbouring rows that are each one document go together.
    """
    starts = cu_seqlens.tolist()
    whole_from = None
    for start, end in itertools.pairwise(starts):
        row, position = divmod(start, row_length)
        if end - start == row_length:
            whole_from = row if whole_from is None else whole_from
            continue
        if whole_from is not None:
            yield (whole_from, row), (0, row_length)
            whole_from = None
        if end > start:
            yield (row, row + 1), (position, position + end - start)
    if whole_from is not None:
        yield (whole_from, starts[-1] // row_length), (0, row_length)


@_document_attention_cpu.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_accumulation_dtype(q))


@_document_attention_backward_cpu.register_fake
def _(grad_out, q, k, v, out, logsumexp, cu_seqlens):  # type: ignore[no-untyped-def]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _grad_logsumexp):  # type: ignore[no-untyped-def]
    *saved, cu_seqlens = ctx.saved_tensors
    return *_document_attention_backward_cpu(grad_out, *saved, cu_seqlens), None


_document_attention_cpu.register_autograd(_backward, setup_context=_save_for_backward)
