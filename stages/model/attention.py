"""Causal attention that stays inside a document, without ever building an S x S mask.

One entry, `causal_attention`; `attention_kernel` picks the kernel, and nothing else may run:

| device, type | rows are whole documents | documents packed (cu_seqlens) |
| --- | --- | --- |
| CPU | stages/model/cpu_attention.py | the same, per document piece |
| CUDA fp16, bf16 | SDPA's flash kernel | variable-length flash attention |
| CUDA fp32, and fp16 before Ampere | memory-efficient kernel, KV heads expanded | the same, with cu_seqlens |

Grouped key-value heads go to the kernels as they are, except fp32 on CUDA: flash knows no fp32, and
the memory-efficient kernel no groups, so SDPA would silently fall to the math kernel and build the
scores.
"""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from stages.model.cpu_attention import document_attention

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
    if kernel == "document":
        return document_attention(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)
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
    if kernel == "flash":
        return _document_flash_cuda(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)
    return _document_efficient_cuda(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)


def attention_kernel(device: torch.device, dtype: torch.dtype) -> Literal["flash", "efficient", "document"]:
    """The family of kernels that attention of `dtype` runs on `device`."""
    if device.type != "cuda":
        return "document"
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
