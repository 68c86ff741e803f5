"""The prediction repeats some of the engine's constants: floors forbid it to import them."""

from stages.data import sequences
from stages.memory import optimizer_memory
from stages.model import loss
from stages.training import blockwise_quantization, low_precision_adamw


def test_the_prediction_has_the_optimizers_constants() -> None:
    assert optimizer_memory.QUANTIZED_MIN_NUMBERS == low_precision_adamw.MIN_QUANTIZED_ELEMENTS
    assert optimizer_memory.QUANTIZED_BLOCK == blockwise_quantization.BLOCK
    assert optimizer_memory.PIECE_NUMBERS == low_precision_adamw._PIECE_ELEMENTS


def test_the_loss_ignores_what_the_sequences_mark() -> None:
    assert loss.IGNORE_INDEX == sequences.IGNORE_INDEX
