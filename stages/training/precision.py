"""Number formats of training: what is computed in which, and whether gradients must be scaled.

Mixed precision (Micikevicius et al. 2018) keeps fp32 master weights and lets `torch.autocast` run the
matrix products in 16 bits. bfloat16 has fp32's exponent: nothing overflows or vanishes that would not in
fp32. float16 has 5 exponent bits: gradients below 3e-8 become zero, so the loss is multiplied by a large
scale before backward and the gradients divided by it before they are used. That is the GradScaler; it
exists for fp16 alone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stages.model.llama import Llama
from stages.params import VariantParams
from stages.training.fp8 import apply_fp8


class PrecisionError(RuntimeError):
    """This device cannot do the precision that was asked for."""


@dataclass(frozen=True)
class PrecisionPolicy:
    """How a variant's `precision` is carried out on one device."""

    name: str
    device_type: str
    autocast_dtype: torch.dtype | None
    """What matrix products run in; None: in the weights' own type."""
    needs_scaler: bool
    weights_dtype: torch.dtype = torch.float32
    """What weights, and with them gradients and optimizer states, are kept in."""

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Around the forward pass and the loss only: backward runs in the types forward chose.

        Without autocast's cache: it would keep a 16-bit copy of every weight until the loss is done, also of
        blocks that are recomputed, and here every weight is used once in a forward pass.
        """
        enabled = self.autocast_dtype is not None
        with torch.autocast(
            self.device_type, dtype=self.autocast_dtype, enabled=enabled, cache_enabled=False
        ):
            yield

    def make_scaler(self) -> torch.amp.GradScaler:
        """A GradScaler, which does nothing and is free where the format needs none."""
        return torch.amp.GradScaler(self.device_type, enabled=self.needs_scaler)


def precision_policy(variant: VariantParams, device: torch.device) -> PrecisionPolicy:
    """The policy of a variant on a device.

    Raises:
        PrecisionError: the device cannot do it; the message says what it found and what is needed.
    """
    name = variant.precision
    if device.type == "cuda":
        capability, needed = torch.cuda.get_device_capability(device), CAPABILITIES.get(name, (0, 0))
        if capability < needed:
            raise PrecisionError(
                f"precision {name} needs compute capability {needed[0]}.{needed[1]} ({_FAMILIES[needed]}); "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; "
                f"use {'amp_bf16 or fp32' if capability >= (8, 0) else 'amp_fp16 or fp32'}"
            )
    elif name in ("tf32", "fp8"):
        raise PrecisionError(
            f"precision {name} is a mode of NVIDIA's tensor cores and training runs on {device.type}; "
            "use fp32 or amp_bf16"
        )
    autocast_dtypes = {"amp_bf16": torch.bfloat16, "fp8": torch.bfloat16, "amp_fp16": torch.float16}
    return PrecisionPolicy(
        name,
        device.type,
        autocast_dtypes.get(name),
        needs_scaler=name == "amp_fp16",
        weights_dtype=torch.bfloat16 if name == "bf16" else torch.float32,
    )


CAPABILITIES = {"tf32": (8, 0), "amp_bf16": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
_FAMILIES = {(8, 0): "Ampere", (8, 9): "Ada, Hopper"}


def apply_precision(model: Llama, policy: PrecisionPolicy) -> None:
    """Put the weights in the policy's type, and for fp8 the blocks' products in 8 bits.

    After the weights are there and before recompute and compilation. `Parameter` objects stay the same,
    so an optimizer that holds them stays valid, and a tied head stays tied. Buffers are not cast: rotary
    tables are kept in fp32 and cast at use.

    Raises:
        PrecisionError: fp8 and the model has a matrix that 8-bit products cannot take.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(policy.weights_dtype)
    if policy.name == "fp8":
        try:
            apply_fp8(model)
        except ValueError as error:
            raise PrecisionError(str(error)) from None


def set_float32_matmul(name: str, device: torch.device) -> str:
    """Choose how fp32 matrix products are computed, and return the setting.

    On CUDA `high` is TF32: 10 bits of mantissa, right for tf32 and wrong for fp32. On a CPU without AMX
    `medium` picks oneDNN's faster fp32 kernels, which round like the slow ones; with AMX the same word
    means bfloat16. The name tells nothing, so it is tried.
    """
    if device.type == "cuda":
        setting = "high" if name == "tf32" else "highest"
        torch.set_float32_matmul_precision(setting)
        return setting
    torch.set_float32_matmul_precision("medium")
    if not _rounds_like_fp32():
        torch.set_float32_matmul_precision("highest")
    return torch.get_float32_matmul_precision()


def _rounds_like_fp32() -> bool:
    """Whether a product of the current setting keeps 24 bits: bfloat16 would be off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return bool((a @ b - exact).abs().max() < 1e-5 * exact.abs().max())
