"""What an optimizer keeps between steps, and what it needs on top while it steps, in bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stages.memory.block_activations import FP32, Formats
from stages.params import ModelParams, VariantParams

QUANTIZED_MIN_NUMBERS = 4096
"""Smaller matrices, and vectors, keep moments in the weights' type (low_precision_adamw.py)."""
QUANTIZED_BLOCK = 256
"""Numbers of a row that share one fp32 scale (stages/training/blockwise_quantization.py)."""
PIECE_NUMBERS = {"cpu": 2**16, "cuda": 2**22}
"""LowPrecisionAdamW works on so many numbers of a parameter at one time, in whole rows, ..."""
PIECE_TEMPORARIES = 8
"""... with so many fp32 temporaries beside them: weight, gradient, both moments, noise, codes."""

Shape = tuple[int, int]


@dataclass(frozen=True)
class OptimizerMemory:
    state: int
    """Kept from step to step."""
    step_temporary: int
    """Of the update that needs most; parameters are updated one after the other."""
    block_temporary: int
    """The same over the matrices of a block, for an optimizer that steps in backward."""


def optimizer_memory(
    model: ModelParams, vocab_size: int, variant: VariantParams, device: Literal["auto", "cuda", "cpu"]
) -> OptimizerMemory:
    """Bytes of the variant's optimizer over all parameters; auto takes the larger temporaries.

    adamw: first and second moment (Loshchilov & Hutter 2019) in the weights' type. Fused, so fp32 has no
    temporaries. Pure bf16 works in fp32 on a piece of a parameter at a time, to round stochastically.

    adamw_8bit: one byte a moment and one fp32 scale for 256 of a row (Dettmers et al. 2022) for matrices
    of at least 4096 numbers, moments in the weights' type for the rest; a piece at a time as well.

    muon: one fp32 momentum for the matrices of the blocks, AdamW for the rest (Jordan et al. 2024). The
    largest matrix is updated with four fp32 temporaries of its size: new momentum, orthogonal update,
    decayed weight, their difference. (The Newton-Schulz iterations before it need 8 bytes + 3 x 2.)
    """
    formats = Formats.of(variant)
    in_blocks = list(block_matrices(model))
    vocabulary = [(vocab_size, model.hidden_size)] * (1 if model.tie_word_embeddings else 2)
    matrices = in_blocks * model.num_hidden_layers + vocabulary
    gains = model.hidden_size * (2 * model.num_hidden_layers + 1)
    numbers = sum(rows * columns for rows, columns in matrices) + gains
    piece = PIECE_NUMBERS["cpu" if device == "cpu" else "cuda"]

    if variant.optimizer == "muon":
        matrix_numbers = model.num_hidden_layers * sum(rows * columns for rows, columns in in_blocks)
        # q, k and v, and gate and up, are one tensor each but are made orthogonal apart.
        largest = model.hidden_size * max(model.hidden_size, model.intermediate_size)
        state = FP32 * matrix_numbers + 2 * FP32 * (numbers - matrix_numbers)
        return OptimizerMemory(state, 4 * FP32 * largest, 4 * FP32 * largest)
    if variant.optimizer == "adamw_8bit":
        state = 2 * sum(_quantized_bytes(shape, formats.weight) for shape in matrices)
        state += 2 * formats.weight * gains
    elif variant.precision == "bf16":
        state = 2 * formats.weight * numbers
    else:
        return OptimizerMemory(2 * FP32 * numbers, 0, 0)
    return OptimizerMemory(state, _piece_bytes(matrices, piece), _piece_bytes(in_blocks, piece))


def block_matrices(model: ModelParams) -> Iterator[Shape]:
    """(rows, columns) of a block's weights as they are stored: q, k and v in one, gate and up in one."""
    D, F = model.hidden_size, model.intermediate_size
    yield D + 2 * model.num_key_value_heads * model.head_dim, D
    yield D, D
    yield 2 * F, D
    yield D, F


def _quantized_bytes(shape: Shape, weight_bytes: int) -> int:
    """One moment of a matrix under adamw_8bit."""
    rows, columns = shape
    if rows * columns < QUANTIZED_MIN_NUMBERS:
        return weight_bytes * rows * columns
    return rows * columns + FP32 * rows * -(-columns // QUANTIZED_BLOCK)


def _piece_bytes(matrices: list[Shape], piece: int) -> int:
    numbers = max(min(rows, max(1, piece // columns)) * columns for rows, columns in matrices)
    return PIECE_TEMPORARIES * FP32 * numbers
