"""Kernels that give the same bits for the same input.

On a CUDA device some add up in whatever order their threads arrive, the backward passes of flash and
memory-efficient attention among them (aten/src/ATen/native/transformers/cuda/attention_backward.cu). A run
that was killed could then not end in the bytes of one that was not.
"""

import os

import torch

from stages.measure.hardware import HardwareError

_WORKSPACES = (":4096:8", ":16:8")


def use_deterministic_kernels(device: torch.device) -> None:
    """Before the first CUDA call of the process. A CPU needs nothing: its sums have one order.

    With `warn_only` attention would warn and go on adding up in any order, though it has a kernel that does
    not. So an operator without such a kernel raises; the train step has none.

    Raises:
        HardwareError: the environment asks for a cuBLAS workspace with which products may differ.
    """
    if device.type != "cuda":
        return
    # Read when cuBLAS is first used; without it PyTorch refuses every matrix product.
    found = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if found not in _WORKSPACES:
        raise HardwareError(
            f"CUBLAS_WORKSPACE_CONFIG is {found}, with which cuBLAS does not repeat its results; "
            f"unset it, or set {' or '.join(_WORKSPACES)}"
        )
    torch.use_deterministic_algorithms(True)
    # Else every torch.empty is filled too, for the sake of code that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_deterministic_compiler(device: torch.device) -> None:
    """Let no timing on a CUDA device decide how a compiled graph adds up."""
    if device.type != "cuda":
        return
    import torch._inductor.config

    torch._inductor.config.deterministic = True
