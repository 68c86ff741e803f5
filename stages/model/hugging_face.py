"""The model under the names and in the shapes of Hugging Face's `LlamaForCausalLM`.

Everything that is written to disk, optimizer states included, uses these names: a reader with
`transformers` needs no converter, and how our own modules fuse their matrices is nobody's business.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stages.params import ModelParams

_OUTER_PREFIXES = {
    "embed_tokens.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
}


def to_hugging_face(tensors: Mapping[str, Tensor], params: ModelParams) -> dict[str, Tensor]:
    """Rename and split tensors keyed by our parameter names.

    They may be the weights, or what an optimizer keeps for each: moments are split like their weight,
    a scalar goes to every piece. The pieces of a split matrix are views of it.
    """
    kv = params.num_key_value_heads * params.head_dim
    splits = {
        "self_attn.qkv_proj": (["q_proj", "k_proj", "v_proj"], [params.hidden_size, kv, kv]),
        "mlp.gate_up_proj": (["gate_proj", "up_proj"], [params.intermediate_size] * 2),
    }
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for fused, (pieces, sizes) in splits.items():
            if fused in name:
                parent = fused.split(".")[0]
                parts = tensor.split(sizes) if tensor.dim() else [tensor] * len(pieces)
                for piece, part in zip(pieces, parts, strict=True):
                    renamed[_outer_name(name.replace(fused, f"{parent}.{piece}"))] = part
                break
        else:
            renamed[_outer_name(name)] = tensor
    if params.tie_word_embeddings:
        renamed.pop("lm_head.weight", None)
    return renamed


def from_hugging_face(tensors: Mapping[str, Tensor], params: ModelParams) -> dict[str, Tensor]:
    """The inverse of `to_hugging_face`.

    Raises:
        KeyError: a piece of a fused matrix is missing; the message names it.
    """
    inner: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        if ".self_attn.q_proj." in own:
            pieces = [tensors[name.replace("q_proj", piece)] for piece in ("q_proj", "k_proj", "v_proj")]
            inner[own.replace("q_proj", "qkv_proj")] = torch.cat(pieces) if tensor.dim() else tensor
        elif ".mlp.gate_proj." in own:
            pieces = [tensors[name.replace("gate_proj", piece)] for piece in ("gate_proj", "up_proj")]
            inner[own.replace("gate_proj", "gate_up_proj")] = torch.cat(pieces) if tensor.dim() else tensor
        elif not any(piece in own for piece in (".k_proj.", ".v_proj.", ".up_proj.")):
            inner[own] = tensor
    if params.tie_word_embeddings and "embed_tokens.weight" in inner:
        inner["lm_head.weight"] = inner["embed_tokens.weight"]
    return inner


def _outer_name(name: str) -> str:
    for inner, outer in _OUTER_PREFIXES.items():
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name


def llama_config(
    params: ModelParams, vocab_size: int, special_token_ids: Mapping[str, int]
) -> dict[str, Any]:
    """`config.json` for `transformers`.

    Args:
        params: the model's shape.
        vocab_size: rows of the embedding.
        special_token_ids: ids under the names bos, eos and pad.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
        "dtype": "float32",
        "vocab_size": vocab_size,
        "head_dim": params.head_dim,
        # transformers 5 reads rope_parameters, earlier versions rope_theta.
        "rope_theta": params.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": params.rope_theta},
        "bos_token_id": special_token_ids["bos"],
        "eos_token_id": special_token_ids["eos"],
        "pad_token_id": special_token_ids["pad"],
        **params.model_dump(exclude={"rope_theta"}),
    }
