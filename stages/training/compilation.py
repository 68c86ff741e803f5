"""torch.compile: which part of the model is handed to the compiler."""

import logging

import torch
from torch import nn

from stages.model.llama import Llama
from stages.params import VariantParams
from stages.training.determinism import use_deterministic_compiler


def apply_compile(model: Llama, variant: VariantParams) -> None:
    """Compile in place, after the weights are loaded and recompute is applied.

    `nn.Module.compile` replaces how a module is called and not the module: the state dict keeps its
    names, without `_orig_mod`. Blocks are alike, so `blocks` compiles one and reuses it; `model` gives
    the compiler everything but the loss, at a cost that grows with the number of layers.
    """
    if variant.recompute == "selective":
        # At every compilation it warns of in-place operations in recomputed regions; blocks have none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if variant.compile != "off":
        use_deterministic_compiler(model.device)
        import torch._dynamo

        # DDP would have graphs cut where a bucket is full. Blocks are small graphs as it is.
        torch._dynamo.config.optimize_ddp = variant.compile == "model"  # type: ignore[assignment]
    if variant.compile == "blocks":
        for block in model.blocks:
            if variant.parallelism == "ddp":
                block.compile(dynamic=False)
                continue
            # FSDP gathers weights in hooks around the two, which a compiled block would break in pieces at.
            part: nn.Module
            for part in (block.self_attn, block.mlp):
                part.forward = torch.compile(part.forward, dynamic=False)  # type: ignore[method-assign]
    elif variant.compile == "model":
        model.compile(dynamic=False)


def mark_dynamic_documents(cu_seqlens: torch.Tensor | None, variant: VariantParams) -> None:
    """Tell the compiler that the number of documents varies, so that it never specialises on one."""
    if cu_seqlens is not None and variant.compile != "off":
        import torch._dynamo

        torch._dynamo.mark_dynamic(cu_seqlens, 0)
