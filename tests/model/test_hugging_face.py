"""Names and shapes on disk are Hugging Face's, there and back without loss."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from stages.model.hugging_face import from_hugging_face, llama_config, to_hugging_face
from stages.model.llama import Llama
from stages.params import ModelParams
from tests.model.small_llama import VOCAB, small_llama, small_params

SPECIAL = {"bos": 0, "eos": 1, "pad": 2}


@st.composite
def shapes(draw: st.DrawFn) -> ModelParams:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    return ModelParams(
        hidden_size=heads * 2 * draw(st.integers(1, 4)),
        num_hidden_layers=draw(st.integers(1, 12)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 40)),
        max_position_embeddings=16,
        tie_word_embeddings=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None)
@given(params=shapes())
def test_there_and_back(params: ModelParams) -> None:
    weights = small_llama(params, vocab_size=40).state_dict()
    outer = to_hugging_face(weights, params)
    back = from_hugging_face(outer, params)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    # What was split comes together without a row more or less.
    shared = weights["lm_head.weight"].numel() if params.tie_word_embeddings else 0
    assert sum(t.numel() for t in outer.values()) == sum(t.numel() for t in weights.values()) - shared


@settings(max_examples=15, deadline=None)
@given(params=shapes())
def test_names_and_shapes_are_hugging_faces(params: ModelParams) -> None:
    config = LlamaConfig.from_dict(llama_config(params, 40, SPECIAL))
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config).state_dict()
    if params.tie_word_embeddings:
        theirs.pop("lm_head.weight")  # not on disk: it is the embedding
    ours = to_hugging_face(Llama(params, 40).state_dict(), params)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@settings(max_examples=15, deadline=None)
@given(params=shapes())
def test_what_an_optimizer_keeps_for_each_parameter(params: ModelParams) -> None:
    """Moments have the weight's shape; the step count is a scalar."""
    names = [name for name, _ in Llama(params, 40).named_parameters()]
    steps = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    outer = to_hugging_face(steps, params)
    assert all(step.shape == () for step in outer.values())
    back = from_hugging_face(outer, params)
    assert {name: float(back[name]) for name in names} == {name: float(s) for name, s in steps.items()}


def test_pieces_are_views_and_not_copies() -> None:
    weights = small_llama(small_params()).state_dict()
    outer = to_hugging_face(weights, small_params())
    storages = {t.untyped_storage().data_ptr() for t in weights.values()}
    assert {t.untyped_storage().data_ptr() for t in outer.values()} == storages


@pytest.mark.parametrize(
    "missing", ["layers.1.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.up_proj"]
)
def test_a_missing_piece_is_named(missing: str) -> None:
    params = small_params()
    outer = to_hugging_face(small_llama(params).state_dict(), params)
    del outer[f"model.{missing}.weight"]
    with pytest.raises(KeyError, match=missing):
        from_hugging_face(outer, params)


@pytest.mark.parametrize("tied", [False, True])
def test_config_says_everything(tied: bool) -> None:
    params = small_params(tie_word_embeddings=tied)
    config = LlamaConfig.from_dict(json.loads(json.dumps(llama_config(params, VOCAB, SPECIAL))))
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "tie_word_embeddings",
        "head_dim",
    ):
        assert getattr(config, key) == getattr(params, key), key
    assert config.to_dict()["rope_parameters"]["rope_theta"] == params.rope_theta
    assert config.vocab_size == VOCAB
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert not (config.attention_bias or config.mlp_bias)
    assert config.hidden_act == "silu"
