"""The model that published figures of this project are about: 179.5 M parameters with 50,000 tokens."""

from stages.params import ModelParams

REFERENCE = ModelParams(
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=3,
    intermediate_size=3072,
    max_position_embeddings=512,
)
