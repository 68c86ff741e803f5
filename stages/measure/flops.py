"""Parameters and model FLOPs of the Llama, counted from its shapes.

The convention is that of PaLM (Chowdhery et al. 2022, appendix B), which nanochat and torchtitan
follow as well, so that utilisation figures can be compared:

- one multiply-add is 2 FLOPs; the backward pass does each matrix product twice (once for the
  input's gradient, once for the weight's), so a training step costs 3 forward passes;
- every matrix product of the network counts, the output head included; the embedding is a lookup
  and costs nothing; norms, rotary embedding, softmax and the loss are not matrix products and are
  left out (under 1 % at the reference size);
- attention counts the full sequence_length x sequence_length square. The causal mask, and the
  document boundaries of packed sequences, make about half of it unnecessary; a kernel that skips
  it shows a higher utilisation, as it does for everyone else who counts this way;
- activations that are computed again under recompute are work, but not model FLOPs: they are never
  counted, so recompute lowers the utilisation that it costs.
"""

from stages.params import ModelParams


def block_matmul_parameters(model: ModelParams) -> int:
    """Weights of the matrix products of one transformer block: q, k, v, output, gate, up, down."""
    kv_size = model.num_key_value_heads * model.head_dim
    attention = model.hidden_size * (model.hidden_size + 2 * kv_size) + model.hidden_size**2
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    return attention + feed_forward


def parameter_count(model: ModelParams, vocab_size: int) -> int:
    """All trained numbers; a tied embedding and head count once."""
    per_block = block_matmul_parameters(model) + 2 * model.hidden_size
    vocabulary_matrices = 1 if model.tie_word_embeddings else 2
    return (
        vocabulary_matrices * vocab_size * model.hidden_size
        + model.num_hidden_layers * per_block
        + model.hidden_size
    )


def model_flops_per_token(model: ModelParams, vocab_size: int, sequence_length: int) -> int:
    """FLOPs of the forward and backward pass for one position of a sequence.

    6 x the matmul parameters + 12 x layers x heads x head size x sequence length: the 12 is
    2 products (q k^T and weights v) x 2 FLOPs x 3 passes.
    """
    matmul_parameters = (
        model.num_hidden_layers * block_matmul_parameters(model) + vocab_size * model.hidden_size
    )
    attention = 12 * model.num_hidden_layers * model.hidden_size * sequence_length
    return 6 * matmul_parameters + attention
