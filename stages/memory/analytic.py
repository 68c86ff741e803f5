"""The peak memory of one optimizer step, added up by hand from the shapes.

This is an analytic estimate, and it approximates: it follows the tensors of stages/model and
stages/training one by one as eager PyTorch keeps them, and knows nothing of an allocator's rounding
and fragmentation, of workspaces inside a kernel, or of what torch.compile fuses away. For a
compiled variant it is an upper bound (compilation removed 40 to 60 % of the activations of a small
Llama). A later version runs the real step on fake tensors.

Letters: T tokens of a micro-batch (B x S), D hidden size, K key-value width (KV heads x head size),
F intermediate size, H query heads, V vocabulary, N parameters, L blocks, C tokens of a loss chunk.
All results in bytes. e is 4, or 2 where autocast runs matrix products in 16 bits.

What a block keeps for its backward pass follows Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.1, which counts 34 T D bytes + the attention
scores for GPT in 16 bits. For this Llama:

    residual stream, input of both norms             2 x 4 T D   fp32 also under autocast
    both norms: 1 / root mean square                 2 x 4 T
    CPU only: both normalised inputs                 2 x 4 T D   CUDA's fused RMSNorm keeps none
    inputs of the qkv and gate_up products           2 x e T D
    q, k, v after rotation                           e T (D + 2 K)
        CUDA fp32 expands k and v to all heads       e T 3 D
    attention output, input of the o product         e T D
    attention's log-sum-exp                          4 T H       no S x S scores: flash attention
    gate and up, in one tensor                       e T 2 F
    silu(gate)                                       e T F
    silu(gate) x up, input of the down product       e T F
    autocast: 16-bit copy of the block's weights     2 n         kept by the products, like inputs

There is no dropout. With recompute a block keeps its input alone, 4 T D (Chen et al. 2016), and has
all of the above for the time of its own backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stages.measure.flops import block_matmul_parameters, parameter_count
from stages.params import BlockGroups, ModelParams, TrainingParams, VariantParams

FP32 = 4


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted live tensor bytes at the fullest moment of a step; the components are its sum."""

    moment: str
    """Where in the step the peak is."""
    parameters: int
    gradients: int
    """Those that exist at that moment; without accumulation there are none before backward."""
    optimizer_state: int
    activations: int
    """Saved for backward, temporaries of the running block, 16-bit weight copies, the batch."""
    logits_and_loss: int

    @property
    def peak_bytes(self) -> int:
        return (
            self.parameters + self.gradients + self.optimizer_state + self.activations + self.logits_and_loss
        )


def predict(
    model: ModelParams,
    vocab_size: int,
    training: TrainingParams,
    variant: VariantParams,
    device: Literal["auto", "cuda", "cpu"] = "auto",
) -> MemoryPrediction:
    """Predict the peak of a step in which the optimizer state exists already (the second or later).

    Args:
        device: whose kernels run; auto takes the CPU's, which keep the most, as an upper bound.
    """
    return max(_Step(model, vocab_size, training, variant, device).moments(), key=lambda m: m.peak_bytes)


class _Step:
    """One optimizer step as a sequence of moments at which memory can be at its highest."""

    def __init__(
        self,
        model: ModelParams,
        vocab_size: int,
        training: TrainingParams,
        variant: VariantParams,
        device: Literal["auto", "cuda", "cpu"],
    ):
        self.variant = variant
        self.autocast = variant.precision.startswith("amp_")
        self.compute_bytes = 2 if self.autocast else FP32
        self.on_cuda = device == "cuda"
        self.model = model
        self.vocab_size = vocab_size
        self.tokens = variant.micro_batch_size * training.sequence_length
        self.accumulates = variant.accumulation_steps(training.global_batch_size) > 1
        self.parameters = FP32 * parameter_count(model, vocab_size)
        # AdamW: first and second moment (Loshchilov & Hutter 2019), fp32. The fused kernel needs no
        # temporaries, so the step itself adds nothing.
        self.optimizer_state = 2 * self.parameters
        # Token ids and targets of the whole global batch (int64), rotary cosines and sines.
        self.batch = 2 * 8 * training.global_batch_size * training.sequence_length
        self.batch += FP32 * model.max_position_embeddings * model.head_dim
        self.recomputed = _recomputed(variant, model.num_hidden_layers)

    def moments(self) -> Iterator[MemoryPrediction]:
        """The candidates for the peak, in the order of the step."""
        D, V, L, T = self.model.hidden_size, self.vocab_size, self.model.num_hidden_layers, self.tokens
        block_weights = block_matmul_parameters(self.model)
        block_gradients = FP32 * (block_weights + 2 * D)
        head_gradient = FP32 * V * D
        # Gradients of the micro-batches before stay while the next one runs. A new gradient is then
        # made beside the old one and added; the first one is kept as it is.
        held = self.parameters if self.accumulates else 0
        saved = [FP32 * T * D if recomputes else self._block_saved() for recomputes in self.recomputed]
        # Autocast keeps every 16-bit weight copy until the forward pass is over; the backward pass
        # keeps those that products saved, which recomputed blocks do not.
        block_copy = 2 * block_weights if self.autocast else 0
        head_copy = 2 * V * D if self.autocast else 0
        saved_copies = [0 if recomputes else block_copy for recomputes in self.recomputed]
        final = self._final_norm_saved()

        # 1. Loss, forward: all that was saved, and the logits.
        loss_forward, loss_backward = self._loss_bytes()
        hidden = FP32 * T * D if self.autocast or self.variant.loss == "chunked" else 0
        activations = sum(saved) + final + hidden + L * block_copy + head_copy
        yield self._moment("loss, forward", held, activations, loss_forward)
        if self.variant.loss == "full":
            # 2. Loss, backward.
            activations = sum(saved) + final + sum(saved_copies) + head_copy
            yield self._moment("loss, backward", held, activations, loss_backward)
            # 3. The head's backward: gradient of the logits, of the head and of the hidden states.
            logits_gradient = self.compute_bytes * T * V
            temporary = self._gradient_temporary(V * D)
            yield self._moment(
                "head, backward",
                max(held, head_gradient) + temporary,
                activations + self.compute_bytes * T * D,
                logits_gradient,
            )
        # 4. Backward through the blocks, the last first: gradients grow as activations go. At its
        # fullest, in the feed-forward, a block holds the gradients of silu(gate), up and their
        # product (3 T F) where silu(gate) x up (T F) has gone, and that of the residual stream.
        working = self.compute_bytes * 2 * T * self.model.intermediate_size + FP32 * T * D
        working += self.compute_bytes * T * D if self.autocast else 0
        largest = max(2 * D * self.model.intermediate_size, D * (D + 2 * self._kv_width()))
        gradients = head_gradient
        for block in reversed(range(L)):
            activations = sum(saved[: block + 1]) + sum(saved_copies[: block + 1]) + working
            if self.recomputed[block]:
                activations += self._block_saved() - FP32 * T * D + block_copy
            if self.accumulates:
                now = held + self._gradient_temporary(largest)
            else:
                # down_proj's gradient is there when the feed-forward is at its fullest.
                now = gradients + FP32 * D * self.model.intermediate_size
            yield self._moment(f"backward of block {block + 1} of {L}", now, activations, 0)
            gradients += block_gradients
        # 5. The embedding's gradient is dense: V x D, even for one token.
        extra = head_gradient if self.accumulates or self.model.tie_word_embeddings else 0
        yield self._moment("embedding, backward", self.parameters + extra, FP32 * T * D, 0)
        # 6. Clipping and AdamW, in place.
        yield self._moment("optimizer step", self.parameters, 0, 0)

    def _moment(self, name: str, gradients: int, activations: int, logits_and_loss: int) -> MemoryPrediction:
        return MemoryPrediction(
            moment=name,
            parameters=self.parameters,
            gradients=gradients,
            optimizer_state=self.optimizer_state,
            activations=activations + self.batch,
            logits_and_loss=logits_and_loss,
        )

    def _kv_width(self) -> int:
        return self.model.num_key_value_heads * self.model.head_dim

    def _block_saved(self) -> int:
        """The table at the head of this file, without the weight copies."""
        D, F, T, e = self.model.hidden_size, self.model.intermediate_size, self.tokens, self.compute_bytes
        norms = 2 * FP32 * T * D + 2 * FP32 * T
        if not self.on_cuda:
            norms += 2 * FP32 * T * D
        expands = self.on_cuda and not self.autocast  # memory-efficient attention knows no groups
        qkv = e * T * (3 * D if expands else D + 2 * self._kv_width())
        products = e * T * (2 * D + D + 4 * F)
        return norms + qkv + products + FP32 * T * self.model.num_attention_heads

    def _final_norm_saved(self) -> int:
        D, T = self.model.hidden_size, self.tokens
        norm = FP32 * T * D + FP32 * T + (0 if self.on_cuda else FP32 * T * D)
        # The head saves its input; the chunked loss saves its gradient instead (see _loss_bytes).
        return norm + (self.compute_bytes * T * D if self.variant.loss == "full" else 0)

    def _gradient_temporary(self, numbers: int) -> int:
        """Beside the stored gradient: the new one before it is added, and its 16-bit original."""
        return (FP32 * numbers if self.accumulates else 0) + (2 * numbers if self.autocast else 0)

    def _loss_bytes(self) -> tuple[int, int]:
        """Logits and what the loss makes of them, in the forward and the backward pass."""
        V, T, D = self.vocab_size, self.tokens, self.model.hidden_size
        if self.variant.loss == "full":
            # Forward: logits (16-bit too under autocast) and log-softmax. Backward: log-softmax, the
            # gradient with respect to it and that with respect to the logits.
            return (2 * FP32 + (2 if self.autocast else 0)) * T * V, 3 * FP32 * T * V
        # The chunked loss makes its gradients in the forward pass: that of the head (fp32) and of
        # the hidden states are complete at its end. A chunk's fullest moments: the log-sum-exp with
        # a temporary of the logits' size; and the product
        # that gives the head's gradient.
        chunk = min(self.variant.loss_chunk_tokens, T)
        log_sum_exp = 2 * FP32 * chunk * V
        product = (FP32 + (2 if self.autocast else 0)) * chunk * V + self.compute_bytes * V * D
        if self.autocast and not self.on_cuda:
            product += FP32 * V * D  # the CPU adds 16 bits to 32 by way of a copy
        return FP32 * V * D + FP32 * T * D + max(log_sum_exp, product), 0


def _recomputed(variant: VariantParams, layers: int) -> list[bool]:
    """For each block, whether it is recomputed: every n-th, starting with the first."""
    if variant.recompute == "none":
        return [False] * layers
    every = variant.recompute.every_n_blocks if isinstance(variant.recompute, BlockGroups) else 1
    return [block % every == 0 for block in range(layers)]
