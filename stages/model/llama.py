"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023, "LLaMA" and "Llama 2". The same function of the same weights as Hugging Face's
`LlamaForCausalLM`, which the tests hold it against.

Letters in tensor names: B sequences, S positions, D hidden size, H query heads, K key-value heads,
E channels of a head, F intermediate size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from stages.model.attention import causal_attention
from stages.model.elementwise import RMSNorm, rotary_heads, swiglu
from stages.params import ModelParams


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, params: ModelParams):
        super().__init__()
        self.num_heads = params.num_attention_heads
        self.num_kv_heads = params.num_key_value_heads
        self.head_dim = params.head_dim
        # One matrix for q, k and v: autocast would otherwise save a cast of the same input for each.
        self.qkv_proj = nn.Linear(
            params.hidden_size, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, params.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        B, S, _ = x_BSD.shape
        qkv_BSNE = self.qkv_proj(x_BSD).view(B, S, -1, self.head_dim)
        q_BSHE, k_BSKE, v_BSKE = rotary_heads(qkv_BSNE, cos_SE, sin_SE, self.num_heads, self.num_kv_heads)
        out_BSHE = causal_attention(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)
        return self.o_proj(out_BSHE.reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, params: ModelParams):
        super().__init__()
        self.gate_up_proj = nn.Linear(params.hidden_size, 2 * params.intermediate_size, bias=False)
        self.down_proj = nn.Linear(params.intermediate_size, params.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x_BSD)))


class Block(nn.Module):
    """One pre-norm transformer layer; the unit of recompute and of compilation."""

    def __init__(self, params: ModelParams):
        super().__init__()
        self.input_layernorm = RMSNorm(params.hidden_size, eps=params.rms_norm_eps)
        self.self_attn = Attention(params)
        self.post_attention_layernorm = RMSNorm(params.hidden_size, eps=params.rms_norm_eps)
        self.mlp = FeedForward(params)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE, cu_seqlens)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Llama(nn.Module):
    """Token ids to final hidden states; `lm_head` turns those into logits.

    The head is not part of `forward`, so that a loss can decide how many logits exist at a time
    (stages/model/loss.py).
    """

    cos_SE: Tensor
    sin_SE: Tensor

    def __init__(self, params: ModelParams, vocab_size: int):
        super().__init__()
        self.params = params
        self.vocab_size = vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, params.hidden_size)
        self.layers = nn.ModuleList(Block(params) for _ in range(params.num_hidden_layers))
        self.norm = RMSNorm(params.hidden_size, eps=params.rms_norm_eps)
        self.lm_head = nn.Linear(params.hidden_size, vocab_size, bias=False)
        if params.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        cos_SE, sin_SE = rotary_tables(params)
        self.register_buffer("cos_SE", cos_SE, persistent=False)
        self.register_buffer("sin_SE", sin_SE, persistent=False)

    @property
    def blocks(self) -> list[Block]:
        """The layers, as what they are."""
        return [block for block in self.layers if isinstance(block, Block)]

    @property
    def device(self) -> torch.device:
        """Where it computes; weights may wait in host memory (stages/training/parallel.py)."""
        return self.cos_SE.device

    def forward(self, input_ids_BS: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states [B, S, D] after the final norm.

        Args:
            input_ids_BS: int64 token ids.
            cu_seqlens: int32 [documents + 1], where each document starts in the flattened B x S
                tokens, row starts included; attention stays inside a document. None: every row is
                one document.
        """
        S = input_ids_BS.shape[1]
        # One cast here, not one in every block. Tables are built in fp32: bf16 angles would be wrong
        # by whole turns at high positions.
        dtype = _compute_dtype(self.embed_tokens.weight)
        cos_SE, sin_SE = self.cos_SE[:S].to(dtype), self.sin_SE[:S].to(dtype)
        x_BSD = self.embed_tokens(input_ids_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, cos_SE, sin_SE, cu_seqlens)
        return self.norm(x_BSD)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the initial weights, on the CPU and from a generator of their own.

        So they depend on the seed alone: not on the device, not on what was drawn before. Normal
        with `initializer_range`; the two projections that write into the residual stream are scaled
        by 1/sqrt(2 x layers), so that its variance does not grow with depth (GPT-2, section 2.3).
        """
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.params.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = self.params.initializer_range
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def rotary_tables(params: ModelParams) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_position_embeddings, E] of the rotary embedding (Su et al. 2021).

    Channel i turns together with channel i + E/2 (Hugging Face's pairing): x cos + swap(x) sin, where swap
    exchanges the halves and sines of the first half are negative.
    """
    exponent = torch.arange(0, params.head_dim, 2, dtype=torch.float32) / params.head_dim
    frequencies = 1.0 / params.rope_theta**exponent
    angles = torch.outer(torch.arange(params.max_position_embeddings, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The type that matrix products run in: autocast's where it is on, else the weights'."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
