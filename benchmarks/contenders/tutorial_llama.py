"""The Llama of the tutorial, written by us from its description.

A dense mask [B, 1, S, S] is built from a causal and a padding mask and carried to every layer; the logits are
returned in full. Module names are Hugging Face's, so that its weights load.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def dense_mask(input_ids_BS: Tensor, pad_id: int) -> Tensor:
    """fp32 [B, 1, S, S]: 0 where a position may look, -inf elsewhere."""
    B, S = input_ids_BS.shape
    causal_SS = torch.full((S, S), float("-inf"), device=input_ids_BS.device).triu(1)
    padding_BS = torch.zeros(B, S, device=input_ids_BS.device).masked_fill(
        input_ids_BS == pad_id, float("-inf")
    )
    return causal_SS[None, None] + padding_BS[:, None, None, :]


class Attention(nn.Module):
    """Four projections, rotary positions, attention with the mask it is given."""

    def __init__(self, model: dict[str, Any], causal_switch: bool):
        super().__init__()
        self.num_heads = model["num_attention_heads"]
        self.num_kv_heads = model["num_key_value_heads"]
        self.head_dim = model["hidden_size"] // self.num_heads
        self.causal_switch = causal_switch
        D, kv_size = model["hidden_size"], self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, kv_size, bias=False)
        self.v_proj = nn.Linear(D, kv_size, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        q = self.q_proj(x_BSD).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x_BSD).view(B, S, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x_BSD).view(B, S, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos_SE, sin_SE).to(v.dtype), rotate(k, cos_SE, sin_SE).to(v.dtype)
        if self.causal_switch:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, D))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: dict[str, Any]):
        super().__init__()
        D, F_ = model["hidden_size"], model["intermediate_size"]
        self.gate_proj = nn.Linear(D, F_, bias=False)
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class DecoderLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, model: dict[str, Any], causal_switch: bool):
        super().__init__()
        D, epsilon = model["hidden_size"], model["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(D, eps=epsilon)
        self.self_attn = Attention(model, causal_switch)
        self.post_attention_layernorm = nn.RMSNorm(D, eps=epsilon)
        self.mlp = FeedForward(model)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE, mask)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    cos_SE: Tensor
    sin_SE: Tensor

    def __init__(self, model: dict[str, Any], vocab_size: int, causal_switch: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, model["hidden_size"])
        self.layers = nn.ModuleList(
            DecoderLayer(model, causal_switch) for _ in range(model["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(model["hidden_size"], eps=model["rms_norm_eps"])
        head_dim = model["hidden_size"] // model["num_attention_heads"]
        frequencies = 1.0 / model["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(model["max_position_embeddings"]).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_SE", angles.cos(), persistent=False)
        self.register_buffer("sin_SE", angles.sin(), persistent=False)
        self.recompute = False

    def forward(self, input_ids_BS: Tensor, mask: Tensor) -> Tensor:
        S = input_ids_BS.shape[1]
        cos_SE, sin_SE = self.cos_SE[:S], self.sin_SE[:S]
        x_BSD = self.embed_tokens(input_ids_BS)
        for layer in self.layers:
            if self.recompute:
                x_BSD = checkpoint(layer, x_BSD, cos_SE, sin_SE, mask, use_reentrant=False)
            else:
                x_BSD = layer(x_BSD, cos_SE, sin_SE, mask)
        return self.norm(x_BSD)


class PretrainingModel(nn.Module):
    """The decoder and its head."""

    def __init__(self, model: dict[str, Any], vocab_size: int, causal_switch: bool = False):
        """
        Args:
            model: the shape, as in `Job.model`.
            vocab_size: rows of the embedding.
            causal_switch: let attention's own causal kernel run instead of the dense mask.
        """
        super().__init__()
        self.model = Decoder(model, vocab_size, causal_switch)
        self.lm_head = nn.Linear(model["hidden_size"], vocab_size, bias=False)

    def forward(self, input_ids_BS: Tensor, mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids_BS, mask))


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), with the halves of a head as pairs."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE
