"""The peak memory of one optimizer step, added up by hand from the shapes.

This is an analytic estimate, and it approximates: it follows the tensors of stages/model and
stages/training one by one as eager PyTorch keeps them, and knows nothing of an allocator's rounding
and fragmentation, of workspaces inside a kernel, or of what torch.compile fuses away. For a
compiled variant it is an upper bound (compilation removed 40 to 60 % of the activations of a small
Llama). A later version runs the real step on fake tensors.

Letters: T tokens of a micro-batch (B x S), D hidden size, F intermediate size, V vocabulary, L blocks,
w bytes of a weight (4; 2 in pure bf16), e bytes of a matrix product's operand (4; 2 in 16 bits). What
a block keeps is derived in block_activations.py, what the optimizer keeps in optimizer_memory.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stages.measure.flops import block_matmul_parameters, parameter_count
from stages.memory.block_activations import (
    FP32,
    Formats,
    block_activations,
    blocks_on_device,
    norm_saved_bytes,
    weight_copy_bytes,
)
from stages.memory.optimizer_memory import block_matrices, optimizer_memory
from stages.params import ModelParams, TrainingParams, VariantParams


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted live tensor bytes at the fullest moment of a step; the components are its sum."""

    moment: str
    """Where in the step the peak is."""
    parameters: int
    gradients: int
    """Those that exist at that moment; without accumulation there are none before backward."""
    optimizer_state: int
    """Kept between steps, and the temporaries of an update where the peak is in one."""
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
        self.formats = Formats.of(variant)
        self.on_cuda = device == "cuda"
        self.model = model
        self.vocab_size = vocab_size
        self.tokens = variant.micro_batch_size * training.sequence_length
        self.accumulates = variant.accumulation_steps(training.global_batch_size) > 1
        self.parameters = self.formats.weight * parameter_count(model, vocab_size)
        self.optimizer = optimizer_memory(model, vocab_size, variant, device)
        # Token ids and targets of the whole global batch (int64), rotary cosines and sines.
        self.batch = 2 * 8 * training.global_batch_size * training.sequence_length
        self.batch += FP32 * model.max_position_embeddings * model.head_dim
        self.blocks = block_activations(model, variant, self.tokens, self.on_cuda)

    def moments(self) -> Iterator[MemoryPrediction]:
        """The candidates for the peak, in the order of the step."""
        D, V, L, T = self.model.hidden_size, self.vocab_size, self.model.num_hidden_layers, self.tokens
        w, e = self.formats.weight, self.formats.compute
        # Gradients of the micro-batches before stay while the next one runs. A new gradient is then
        # made beside the old one and added; the first one is kept as it is.
        held = self.parameters if self.accumulates else 0
        head_gradient = w * V * D
        final = self._final_norm_saved()
        kept, kept_copies = self._kept(L)

        # 1. Loss, forward: all that was saved, and the logits. Autocast keeps every 16-bit weight copy
        # until the forward pass is over; the backward pass keeps those that products saved.
        loss_forward, loss_backward = self._loss_bytes()
        hidden = w * T * D if self.formats.autocast or self.variant.loss == "chunked" else 0
        copies = L * weight_copy_bytes(self.model, self.formats) + self._head_copy()
        yield self._moment("loss, forward", held, kept + final + hidden + copies, loss_forward)
        if self.variant.loss == "full":
            # 2. Loss, backward.
            activations = kept + final + kept_copies + self._head_copy()
            yield self._moment("loss, backward", held, activations, loss_backward)
            # 3. The head's backward: gradient of the logits, of the head and of the hidden states.
            gradients = max(held, head_gradient) + self._gradient_temporary(V * D)
            yield self._moment("head, backward", gradients, activations + e * T * D, e * T * V)
        yield from self._block_moments(held, head_gradient)
        # 5. The embedding's gradient is dense: V x D, even for one token.
        extra = head_gradient if self.accumulates or self.model.tie_word_embeddings else 0
        gradients = head_gradient if self.variant.optimizer_in_backward else self.parameters
        yield self._moment("embedding, backward", gradients + extra, w * T * D, 0)
        # 6. Clipping and the optimizer, in place. In backward it steps on one gradient at a time, the
        # largest of which is the head's or the embedding's.
        yield self._moment("optimizer step", gradients, 0, 0, self.optimizer.step_temporary)

    def _block_moments(self, held: int, head_gradient: int) -> Iterator[MemoryPrediction]:
        """4. Backward through the blocks, the last first: gradients grow as activations go.

        At its fullest, in the feed-forward, a block holds the gradients of silu(gate), up and their
        product (3 T F) where silu(gate) x up (T F) has gone, and that of the residual stream.
        """
        D, F, L, T = (
            self.model.hidden_size,
            self.model.intermediate_size,
            self.model.num_hidden_layers,
            self.tokens,
        )
        w, e = self.formats.weight, self.formats.compute
        working = e * 2 * T * F + w * T * D + (e * T * D if self.formats.autocast else 0)
        if self.formats.product_input == 1:
            working += 2 * FP32 * T * 2 * F  # the gradient of gate and up, scaled in fp32 before the cast
        # Beside a held gradient the new one of the largest matrix; without, down_proj's is there when
        # the feed-forward is at its fullest.
        largest = max(rows * columns for rows, columns in block_matrices(self.model))
        gradients = head_gradient
        for number in reversed(range(L)):
            kept, kept_copies = self._kept(number + 1)
            block = self.blocks[number]
            activations = kept + kept_copies + working + block.restored + block.restored_copies
            moment = f"backward of block {number + 1} of {L}"
            if self.accumulates:
                now = held + self._gradient_temporary(largest)
            elif self.variant.optimizer_in_backward:
                # Each gradient is used and freed before the next is made, but for that of a tied
                # matrix, which waits for its second half. The largest update is gate_up's: silu(gate),
                # the product, and gate and up themselves (4 T F) are gone by then.
                waiting = head_gradient if self.model.tie_word_embeddings else 0
                now = waiting + w * largest + self._gradient_temporary(largest)
                update = self.optimizer.block_temporary
                yield self._moment(moment, now, max(activations - e * 4 * T * F, 0), 0, update)
            else:
                now = gradients + w * D * F
            yield self._moment(moment, now, activations, 0)
            gradients += w * (block_matmul_parameters(self.model) + 2 * D)

    def _moment(
        self,
        name: str,
        gradients: int,
        activations: int,
        logits_and_loss: int,
        optimizer_temporary: int = 0,
    ) -> MemoryPrediction:
        return MemoryPrediction(
            moment=name,
            parameters=self.parameters,
            gradients=gradients,
            optimizer_state=self.optimizer.state + optimizer_temporary,
            activations=activations + self.batch,
            logits_and_loss=logits_and_loss,
        )

    def _kept(self, blocks: int) -> tuple[int, int]:
        """What the first so many blocks keep on the device: activations, and copies of weights."""
        there = self.blocks[:blocks]
        on_device = there[-blocks_on_device(self.variant, self.model.num_hidden_layers) :]
        return sum(block.kept for block in on_device), sum(block.kept_copies for block in there)

    def _head_copy(self) -> int:
        """Autocast's 16-bit copy of the head; fp8 leaves the head in 16 bits too."""
        return 2 * self.vocab_size * self.model.hidden_size if self.formats.autocast else 0

    def _final_norm_saved(self) -> int:
        D, T = self.model.hidden_size, self.tokens
        norm = norm_saved_bytes(D, T, self.formats, self.on_cuda)
        # The head saves its input; the chunked loss saves its gradient instead (see _loss_bytes).
        return norm + (self.formats.compute * T * D if self.variant.loss == "full" else 0)

    def _gradient_temporary(self, numbers: int) -> int:
        """Beside the stored gradient: the new one before it is added, and its 16-bit original."""
        new = self.formats.weight * numbers if self.accumulates else 0
        return new + (2 * numbers if self.formats.autocast else 0)

    def _loss_bytes(self) -> tuple[int, int]:
        """Logits and what the loss makes of them, in the forward and the backward pass."""
        V, T, D = self.vocab_size, self.tokens, self.model.hidden_size
        w, e = self.formats.weight, self.formats.compute
        sixteen_bit = 2 if e == 2 else 0
        if self.variant.loss == "full":
            # Forward: logits (16-bit too where products are) and log-softmax. Backward: log-softmax,
            # the gradient with respect to it and that with respect to the logits.
            return (2 * FP32 + sixteen_bit) * T * V, 3 * FP32 * T * V
        # The chunked loss makes its gradients in the forward pass: that of the head and of the hidden
        # states are complete at its end. A chunk's fullest moments: the log-sum-exp with a temporary
        # of the logits' size; and the product that gives the head's gradient.
        chunk = min(self.variant.loss_chunk_tokens, T)
        log_sum_exp = 2 * FP32 * chunk * V
        product = (FP32 + sixteen_bit) * chunk * V + e * V * D
        if sixteen_bit and not self.on_cuda:
            product += FP32 * V * D  # the CPU adds 16 bits to 32 by way of a copy
        return FP32 * V * D + w * T * D + max(log_sum_exp, product), 0
