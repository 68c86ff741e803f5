"""torch.compile: which part of the model is handed to the compiler."""

import logging
import os
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from stages.model.llama import Llama
from stages.params import VariantParams


def apply_compile(model: Llama, variant: VariantParams) -> None:
    """Compile in place, after the weights are loaded and recompute is applied.

    `nn.Module.compile` replaces how a module is called and not the module: the state dict keeps its
    names, without `_orig_mod`. Blocks are alike, so `blocks` compiles one and reuses it; `model` gives
    the compiler everything but the loss, at a cost that grows with the number of layers.
    """
    if variant.recompute == "selective":
        # At every compilation it warns of in-place operations in recomputed regions; blocks have none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if variant.compile == "blocks":
        for block in model.layers:
            block.compile(dynamic=False)
    elif variant.compile == "model":
        model.compile(dynamic=False)


def mark_dynamic_documents(cu_seqlens: torch.Tensor | None, variant: VariantParams) -> None:
    """Tell the compiler that the number of documents varies, so that it never specialises on one."""
    if cu_seqlens is not None and variant.compile != "off":
        import torch._dynamo

        torch._dynamo.mark_dynamic(cu_seqlens, 0)


def use_compile_cache(folder: Path) -> None:
    """Keep compiled graphs and kernels in `folder`, so that a second run starts warm.

    Must be called before the first compilation. A folder the user named in the environment wins; torch's
    own default, which merely importing parts of the compiler writes there, does not: it lies under the
    temporary folder and is lost with the machine. What is compiled is found again by a hash of the traced
    graph, the compiler's settings (the memory budget among them) and torch's version; tracing itself is
    done in every run.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, str(Path(default_cache_dir()).absolute())):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    folder.mkdir(parents=True, exist_ok=True)
