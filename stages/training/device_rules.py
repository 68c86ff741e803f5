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


def cuda_head_problem(model: ModelParams) -> str | None:
    """Why attention on CUDA cannot have this head size; None where it can."""
    if model.head_dim % 8 == 0 and model.head_dim <= _LARGEST_CUDA_HEAD:
        return None
    return (
        f"model.num_attention_heads: {model.num_attention_heads} heads make a head size of "
        f"{model.head_dim}, and attention on CUDA needs a multiple of 8 up to {_LARGEST_CUDA_HEAD}"
    )


def check_device_rules(model: ModelParams, variant: VariantParams, device: torch.device) -> None:
    """Raises DeviceRuleError for the first technique that `device` cannot carry out."""
    if variant.recompute == "offload" and device.type == "cpu":
        raise DeviceRuleError(
            "recompute: offload moves activations from the GPU to host memory and training runs on cpu; "
            "use every_block or selective"
        )
    if device.type == "cuda" and (problem := cuda_head_problem(model)):
        raise DeviceRuleError(problem)
    compiler = os.environ.get("CXX", "g++")
    if variant.compile != "off" and device.type == "cpu" and not shutil.which(compiler):
        raise DeviceRuleError(
            f"compile: {variant.compile} needs a C++ compiler and found no {compiler}; install one, or set "
            "compile: off"
        )
