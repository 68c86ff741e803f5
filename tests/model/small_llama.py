"""Small Llamas with weights that are not nearly zero, and their twins of Hugging Face."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.model.hugging_face import llama_config, to_hugging_face
from stages.model.llama import Llama
from stages.params import ModelParams

VOCAB = 96


def small_params(**changes: object) -> ModelParams:
    """Values that are nobody's default, so that a setting which does not arrive is seen."""
    values: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rope_theta": 500.0,
        "rms_norm_eps": 3e-3,
    }
    return ModelParams(**(values | changes))  # type: ignore[arg-type]


def small_llama(params: ModelParams, *, seed: int = 0, vocab_size: int = VOCAB) -> Llama:
    """Random weights at which attention is far from uniform and every norm's gain is another."""
    model = Llama(params, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean, std = (1.0, 0.3) if parameter.dim() < 2 else (0.0, 0.25)
            parameter.copy_(torch.empty(parameter.shape).normal_(mean, std, generator=generator))
    return model


def hugging_face_twin(model: Llama) -> LlamaForCausalLM:
    """`transformers`' own model with the same weights; its loading accepts no missing or extra name."""
    config = llama_config(model.params, model.vocab_size, {"bos": 0, "eos": 1, "pad": 2})
    twin = LlamaForCausalLM(LlamaConfig.from_dict(config))
    weights = to_hugging_face(model.state_dict(), model.params)
    if model.params.tie_word_embeddings:  # one matrix there as well, under two names in its state dict
        weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    twin.load_state_dict(weights, strict=True)
    return twin


def tokens(*shape: int, seed: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference over that of `expected`."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))
