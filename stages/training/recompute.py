"""Recompute (activation checkpointing): which activations wait for the backward pass, and where.

| policy | what is kept of a block | what backward does again |
| --- | --- | --- |
| none | everything autograd saves | nothing |
| every_block, every_n_blocks | its input | the block |
| selective | its input, outputs of matrix products and attention | norms, rotary, SwiGLU, casts |
| {budget: x} | what the compiler's partitioner chooses | what is cheapest in FLOPs |
| offload | everything, in host memory (offload.py) | nothing |

Blocks: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Selective, of other outputs:
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

Always the non-reentrant checkpoint: the reentrant one cannot be compiled, ignores inputs that need no
gradient and runs a second autograd graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stages.model.llama import Llama
from stages.params import BlockGroups, MemoryBudget, VariantParams
from stages.training.offload import BlockOffload


def apply_recompute(model: Llama, variant: VariantParams) -> int:
    """Make the blocks that the policy names recompute or offload; returns how many.

    Goes after weights are cast and before compilation, so that the compiler sees the recomputation and
    plans for it. The blocks' forward is replaced and not wrapped in a module: names in the state dict
    stay what they were.

    `{budget: x}` changes no block: it sets the process-wide `activation_memory_budget` that the compiler
    reads when it splits forward from backward (torch/_functorch/config.py); every other policy sets it
    back to 1. A block that this process has compiled before keeps the budget of that time. Below 1 the
    gradients are wrong where a graph holds dropout (pytorch#190758): this model has none, and must not
    get any while that stands.
    """
    _set_memory_budget(variant.recompute.budget if isinstance(variant.recompute, MemoryBudget) else 1.0)
    if variant.recompute == "none":
        return 0
    if isinstance(variant.recompute, MemoryBudget):
        return len(model.layers)
    every = variant.recompute.every_n_blocks if isinstance(variant.recompute, BlockGroups) else 1
    chosen: list[nn.Module] = list(model.layers[::every])
    if variant.recompute == "offload":
        BlockOffload(model.device).apply(chosen)
        return len(chosen)
    recomputed = _recomputed_selectively if variant.recompute == "selective" else _recomputed
    for block in chosen:
        block.forward = recomputed(block.forward)
    return len(chosen)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # A function and not functools.partial: the compiler recognises `checkpoint` only where it is called.
    def recomputed_forward(*args: Tensor | None) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True)

    return recomputed_forward


def _recomputed_selectively(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # pytorch#193338: with selective recompute, autocast's cache of cast weights breaks two regions that
    # share a weight. Here a region is one block and no weight has two uses inside the blocks: a tied
    # embedding is used outside of them.
    def recomputed_forward(*args: Tensor | None) -> Tensor:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=_keep_products_and_attention,
        )

    return recomputed_forward


# Overloads, not packets: the policy is asked about `aten.mm.default`, which is not equal to `aten.mm`, so
# that a list of packets keeps nothing and says nothing. Strings, because an operator exists only once
# the module that defines it was imported, and torch's differ from version to version.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
        "frugal::document_attention",
    }
)


def _policy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    schema = getattr(op, "_schema", None)  # higher-order operators have none
    if schema is not None and schema.name in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products_and_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(_policy)


# The compiler's cache cannot hash a function. Without a hash of our own, a graph with selective recompute
# is never cached and every run compiles anew. It must change whenever the policy does.
_keep_products_and_attention.cache_hash = " ".join(sorted(_KEPT))  # type: ignore[attr-defined]


def _set_memory_budget(budget: float) -> None:
    from torch._functorch import config

    config.activation_memory_budget = budget  # type: ignore[attr-defined]
