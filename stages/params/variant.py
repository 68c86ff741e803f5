"""A variant: one named training recipe, an entry under `variants:`.

The techniques are independent switches. What cannot be combined is refused here, with the reason,
before anything is computed.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from stages.params.section import Section, divisors, one_of

Precision = Literal["fp32", "tf32", "amp_bf16", "amp_fp16"]


class BlockGroups(Section):
    """`{every_n_blocks: n}`: recompute one transformer block of every n."""

    every_n_blocks: PositiveInt


def _off_is_a_word(value: Any) -> Any:
    """YAML 1.1 (PyYAML) reads a bare `off` as false; YAML 1.2 (DVC) reads the word."""
    return "off" if value is False else value


class VariantParams(Section):
    """Which techniques are on. Defaults are the plain fp32 recipe."""

    micro_batch_size: PositiveInt
    """Sequences in one forward and backward pass: what memory depends on. The accumulation follows
    from it: training.global_batch_size / micro_batch_size."""
    precision: Precision = "fp32"
    """fp32: IEEE single everywhere. tf32: fp32 storage, matrix products on 19-bit tensor cores
    (NVIDIA Ampere and newer). amp_bf16: fp32 weights, autocast to bfloat16. amp_fp16: autocast to
    float16, which needs a GradScaler because its smallest normal is 6e-5; bfloat16 has fp32's
    range and needs none."""
    recompute: Literal["none", "every_block"] | BlockGroups = "none"
    """Activation (gradient) checkpointing: forget a block's activations and compute them again in
    the backward pass (Chen et al. 2016)."""
    compile: Annotated[Literal["off", "blocks", "model"], BeforeValidator(_off_is_a_word)] = "off"
    """torch.compile of each transformer block (one compilation, reused) or of the whole model."""
    loss: Literal["full", "chunked"] = "full"
    """chunked: head and cross-entropy over chunks of tokens, so that the logits of the whole
    micro-batch never exist."""
    loss_chunk_tokens: Annotated[int, Field(ge=16)] = 1024
    """Tokens whose logits exist at one time when loss is chunked."""

    def accumulation_steps(self, global_batch_size: int) -> int:
        """Micro-batches in one optimizer step."""
        return global_batch_size // self.micro_batch_size

    def conflicts(self, global_batch_size: int | None, device: str | None) -> Iterator[tuple[str, str]]:
        """Rules against other sections; None where that section itself could not be read."""
        if global_batch_size is not None and global_batch_size % self.micro_batch_size:
            yield (
                "micro_batch_size",
                f"{self.micro_batch_size} does not divide training.global_batch_size "
                f"{global_batch_size}; use {one_of(divisors(global_batch_size))}",
            )
        if self.precision == "tf32" and device == "cpu":
            yield (
                "precision",
                "tf32 is a mode of NVIDIA's tensor cores (compute capability 8.0 or newer) and "
                "hardware.device is cpu; use fp32 or amp_bf16",
            )
