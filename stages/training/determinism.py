"""Kernels that give the same bits for the same input.

On a CUDA device some add up in whatever order their threads arrive, the backward passes of flash and
memory-efficient attention among them (aten/src/ATen/native/transformers/cuda/attention_backward.cu). A run
that was killed could then not end in the bytes of one that was not.
"""

import os
import warnings

import torch


def use_deterministic_kernels(device: torch.device) -> None:
    """Before the first CUDA call of the process. A CPU needs nothing: its sums have one order.

    An operator that has no such kernel is left as it is, with PyTorch's warning that names it.
    """
    if device.type != "cuda":
        return
    # Read when cuBLAS is first used; without it PyTorch warns at every matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every torch.empty is filled too, for the sake of code that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("once", message=".*deterministic.*")


def use_deterministic_compiler(device: torch.device) -> None:
    """Let no timing on a CUDA device decide how a compiled graph adds up."""
    if device.type != "cuda":
        return
    import torch._inductor.config

    torch._inductor.config.deterministic = True
