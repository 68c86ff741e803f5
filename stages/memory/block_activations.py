"""What one transformer block keeps from its forward pass for its backward pass, in bytes.

Letters: T tokens of a micro-batch (B x S), D hidden size, K key-value width (KV heads x head size),
F intermediate size, H query heads, n weights of the block's matrix products. w is the size of a weight
and of the residual stream: 4, or 2 in pure bf16. e is the size of what matrix products give out: 4, or 2
where they run in 16 bits (fp8 gives out bf16).

The count follows Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.1, which finds 34 T D bytes + the attention scores for GPT in 16 bits. For this Llama:

    residual stream, input of both norms             2 x w T D   fp32 also under autocast
        on a CPU always in fp32, a copy in bf16      2 x 4 T D
    both norms: 1 / root mean square                 2 x 4 T
    CPU only: both normalised inputs, fp32           2 x 4 T D   CUDA's fused RMSNorm keeps none
    inputs of the qkv and gate_up products           2 x i T D
    q, k, v after rotation                           e T (D + 2 K)
        CUDA fp32 expands k and v to all heads       e T 3 D
    attention output, input of the o product         e T D       fp8: and its 8-bit copy, T D
    attention's log-sum-exp                          4 T H       no S x S scores: flash attention
    gate and up, in one tensor                       e T 2 F
    silu(gate)                                       e T F
    silu(gate) x up, input of the down product       i T F
    autocast: 16-bit copy of the block's weights     2 n         kept by the products, like inputs

There is no dropout. i is e, or 1 in fp8, whose products keep their inputs in 8 bits and cast the fp32
weight again in backward (stages/training/fp8.py).

Recompute changes what is kept and, for the time of the block's own backward pass, restores the rest:

    none            the table                        nothing to restore
    every_block     the block's input, w T D         the table less the input (Chen et al. 2016)
    selective       the input, every product's       the table less what was kept and is in it: gate and
                    output (qkv, o, gate_up, down),  up, attention output, log-sum-exp
                    attention output, log-sum-exp
    budget: x       every_block + x (none - every_block), a straight line between two ends that are
                    known. What the compiler's partitioner really keeps is a step function of x, so
                    in between this is a guide and no more.
    offload         the table, on the device for two blocks at a time only: the one at work and the one
                    whose copy to or from the host is under way
"""

from dataclasses import dataclass

from stages.measure.flops import block_matmul_parameters
from stages.params import BlockGroups, MemoryBudget, ModelParams, VariantParams

FP32 = 4


@dataclass(frozen=True)
class Formats:
    """Sizes in bytes that follow from a variant's precision."""

    weight: int
    """Of a weight, its gradient, and a number of the residual stream."""
    compute: int
    """Of a number that a matrix product gives out."""
    product_input: int
    """Of a number that a product in a block keeps of its input."""
    autocast: bool
    """Matrix products cast fp32 weights to 16 bits in each forward pass."""

    @classmethod
    def of(cls, variant: VariantParams) -> "Formats":
        autocast = variant.precision in ("amp_bf16", "amp_fp16", "fp8")
        compute = 2 if autocast or variant.precision == "bf16" else FP32
        return cls(
            weight=2 if variant.precision == "bf16" else FP32,
            compute=compute,
            product_input=1 if variant.precision == "fp8" else compute,
            autocast=autocast,
        )


@dataclass(frozen=True)
class BlockActivations:
    """One block, in bytes."""

    kept: int
    """From the block's forward pass to its backward pass."""
    restored: int
    """Beside what was kept, while its own backward pass runs."""
    kept_copies: int
    """16-bit weight copies that its products hold until backward."""
    restored_copies: int


def weight_copy_bytes(model: ModelParams, formats: Formats) -> int:
    """Copies of one block's weights that a forward pass makes and keeps; fp8 keeps none."""
    copied = formats.autocast and formats.product_input == 2
    return 2 * block_matmul_parameters(model) if copied else 0


def block_activations(
    model: ModelParams, variant: VariantParams, tokens: int, on_cuda: bool
) -> list[BlockActivations]:
    """For every block, first to last, what it keeps under the variant's precision and recompute.

    Under `offload` the kept bytes are those of a block that is on the device; how many are there at one
    time is `blocks_on_device`.
    """
    formats = Formats.of(variant)
    layers = model.num_hidden_layers
    copies = weight_copy_bytes(model, formats)
    whole = _saved(model, formats, tokens, on_cuda)
    block_input = formats.weight * tokens * model.hidden_size
    plain = BlockActivations(kept=whole, restored=0, kept_copies=copies, restored_copies=0)
    recomputed = BlockActivations(
        kept=block_input, restored=whole - block_input, kept_copies=0, restored_copies=copies
    )
    match variant.recompute:
        case "none" | "offload":
            return [plain] * layers
        case "every_block":
            return [recomputed] * layers
        case "selective":
            D, kv, e = model.hidden_size, _kv_width(model), formats.compute
            shared = e * tokens * (D + 2 * model.intermediate_size)
            shared += FP32 * tokens * model.num_attention_heads
            only_kept = e * tokens * (D + 2 * kv + 2 * D)
            return [
                BlockActivations(
                    kept=block_input + shared + only_kept,
                    restored=max(whole - block_input - shared, 0),
                    kept_copies=0,
                    restored_copies=copies,
                )
            ] * layers
        case BlockGroups(every_n_blocks=n):
            return [recomputed if block % n == 0 else plain for block in range(layers)]
        case MemoryBudget(budget=x):
            kept = block_input + round(x * (whole - block_input))
            kept_copies = round(x * copies)
            return [BlockActivations(kept, whole - kept, kept_copies, copies - kept_copies)] * layers


def blocks_on_device(variant: VariantParams, layers: int) -> int:
    """How many blocks' kept bytes are on the device at one time."""
    return min(2, layers) if variant.recompute == "offload" else layers


def _kv_width(model: ModelParams) -> int:
    return model.num_key_value_heads * model.head_dim


def _saved(model: ModelParams, formats: Formats, tokens: int, on_cuda: bool) -> int:
    """The table at the head of this file, without the weight copies."""
    D, F, T, e = model.hidden_size, model.intermediate_size, tokens, formats.compute
    norms = norm_saved_bytes(D, T, formats, on_cuda) * 2
    expands = on_cuda and e == FP32  # memory-efficient attention knows no groups
    qkv = e * T * (3 * D if expands else D + 2 * _kv_width(model))
    inputs = formats.product_input * T * (2 * D + F)
    if formats.product_input == 1:
        inputs += T * D
    outputs = e * T * (D + 3 * F)
    return norms + qkv + inputs + outputs + FP32 * T * model.num_attention_heads


def norm_saved_bytes(hidden_size: int, tokens: int, formats: Formats, on_cuda: bool) -> int:
    """An RMSNorm: its input, 1 / root mean square and, where there is no fused kernel, x / rms."""
    numbers = tokens * hidden_size
    return (formats.weight if on_cuda else 2 * FP32) * numbers + FP32 * tokens
