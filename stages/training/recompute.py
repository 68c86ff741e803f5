"""Recompute (activation checkpointing): keep a block's input, forget the rest, compute it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Always the non-reentrant form: the
reentrant one cannot be compiled, ignores inputs that need no gradient and runs a second autograd graph.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.model.llama import Llama
from stages.params import BlockGroups, VariantParams


def apply_recompute(model: Llama, variant: VariantParams) -> int:
    """Make the blocks that the policy names recompute; returns how many.

    Goes before compilation, so that the compiler sees the recomputation and plans for it. The blocks'
    forward is replaced and not wrapped in a module: names in the state dict stay what they were.
    """
    if variant.recompute == "none":
        return 0
    every = variant.recompute.every_n_blocks if isinstance(variant.recompute, BlockGroups) else 1
    chosen = model.layers[::every]
    for block in chosen:
        block.forward = _recomputed(block.forward)  # type: ignore[method-assign]
    return len(chosen)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # A function and not functools.partial: the compiler recognises `checkpoint` only where it is called.
    def recomputed_forward(*args: Tensor | None) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True)

    return recomputed_forward
