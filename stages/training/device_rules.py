"""What a device cannot do of a recipe, said before anything is computed.

Params refuse what no device can do, and what `hardware.device: cpu` cannot; with `auto` the device is known
only here. Number formats have rules of their own (precision.py).
"""

import os
import shutil

import torch

from stages.params import ModelParams, VariantParams

_LARGEST_CUDA_HEAD = 256


class DeviceRuleError(RuntimeError):
    """The device cannot carry out a technique; the message names the key and what to do."""


def cuda_head_problem(
    model: ModelParams, variant: VariantParams, compute_capability: tuple[int, int]
) -> str | None:
    """Why attention on CUDA cannot have this head size; None where it can."""
    heads, channels = model.num_attention_heads, model.head_dim
    made = f"model.num_attention_heads: {heads} heads make a head size of {channels}"
    if channels % 8 or channels > _LARGEST_CUDA_HEAD:
        return f"{made}, and attention on CUDA needs a multiple of 8 up to {_LARGEST_CUDA_HEAD}"
    # SDPA's own gate: GPUs with less shared memory have no room for these in flash attention's backward
    # (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in cuda/sdp_utils.cpp).
    has_little = (8, 6) <= compute_capability <= (8, 9) or compute_capability[0] == 12
    if has_little and 192 < channels <= 224 and variant.precision not in ("fp32", "tf32"):
        capability = ".".join(map(str, compute_capability))
        return (
            f"{made}, and flash attention on compute capability {capability} trains none above 192 up to "
            "224; use another number of heads, or precision fp32"
        )
    return None


def check_device_rules(model: ModelParams, variant: VariantParams, device: torch.device) -> None:
    """Raises DeviceRuleError for the first technique that `device` cannot carry out."""
    if variant.recompute == "offload" and device.type == "cpu":
        raise DeviceRuleError(
            "recompute: offload moves activations from the GPU to host memory and training runs on cpu; "
            "use every_block or selective"
        )
    if device.type == "cuda" and (
        problem := cuda_head_problem(model, variant, torch.cuda.get_device_capability(device))
    ):
        raise DeviceRuleError(problem)
    if variant.compile != "off" and (missing := _missing_compiler(device)):
        raise DeviceRuleError(
            f"compile: {variant.compile} needs a {missing}; install one, or set compile: off"
        )


def _missing_compiler(device: torch.device) -> str | None:
    """For a CPU what is generated is C++; for a GPU Triton makes a C module that starts its kernels."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"C++ compiler and found no {compiler}"
    named = os.environ.get("CC")
    compilers = (named,) if named else ("gcc", "clang")
    return None if any(map(shutil.which, compilers)) else f"C compiler and found no {' or '.join(compilers)}"
