"""FLOPs and parameters, against PyTorch's own counter and Hugging Face's Llama."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from stages.measure import model_flops_per_token, parameter_count
from stages.params import ModelParams
from tests.reference_model import REFERENCE

VOCAB_SIZE = 96
SEQUENCE_LENGTH = 24


def shape(**changes: object) -> ModelParams:
    values: dict = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
    }
    return ModelParams(**values | changes)


def hugging_face(model: ModelParams) -> LlamaForCausalLM:
    fields = model.model_dump(exclude={"rope_theta"})
    return LlamaForCausalLM(LlamaConfig(**fields, vocab_size=VOCAB_SIZE, attn_implementation="eager"))  # type: ignore[call-arg]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_parameter_count_is_hugging_faces(kv_heads: int, tied: bool) -> None:
    model = shape(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    assert parameter_count(model, VOCAB_SIZE) == hugging_face(model).num_parameters()


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_forward_and_backward_equal_the_flop_counter(kv_heads: int) -> None:
    """Eager attention multiplies the full square, as the convention counts it."""
    model = shape(num_key_value_heads=kv_heads)
    llama = hugging_face(model)
    # Layer by layer: a whole LlamaForCausalLM also multiplies the rotary frequencies as a matrix.
    tokens = torch.randint(0, VOCAB_SIZE, (2, SEQUENCE_LENGTH))
    positions = torch.arange(SEQUENCE_LENGTH)[None]
    embedded = llama.model.embed_tokens(tokens)
    rotary = llama.model.rotary_emb(embedded, positions)
    with FlopCounterMode(display=False) as counter:
        hidden = embedded
        for layer in llama.model.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        logits = llama.lm_head(llama.model.norm(hidden))
        logits.sum().backward()
    expected = tokens.numel() * model_flops_per_token(model, VOCAB_SIZE, SEQUENCE_LENGTH)
    assert counter.get_total_flops() == expected


def test_reference_model_by_hand() -> None:
    model = REFERENCE
    block = 768 * 768 * 2 + 768 * 192 * 2 + 3 * 768 * 3072
    assert parameter_count(model, 50_000) == 2 * 50_000 * 768 + 12 * (block + 2 * 768) + 768
    flops = 6 * (12 * block + 50_000 * 768) + 12 * 12 * 12 * 64 * 512
    assert model_flops_per_token(model, 50_000, 512) == flops
