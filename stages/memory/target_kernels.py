"""The kernels of the target device, for a step that runs on fake CPU tensors.

A fake CUDA tensor cannot run backward where CUDA is not linked in, so the tensors of the trace say that they
are on a CPU, whatever the target. What a step keeps differs between the two in few places, and each is put
right here: attention, RMSNorm, and the pieces that LowPrecisionAdamW and the loss take at a time. The bytes
that a kernel holds inside, which no operator's result shows, are in kernel_workspaces.py.

Autocast needs nothing. CUDA's list of fp32 operators is longer than the CPU's (ATen/autocast_mode.h), but of
those on it this model runs only RMSNorm, on a residual stream that is fp32 already, and the loss, which asks
for fp32 itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stages.memory.kernel_workspaces import Target
from stages.model import attention, llama, loss
from stages.model.llama import Llama
from stages.training import blockwise_quantization, low_precision_adamw

aten = torch.ops.aten
_SMALLEST_FLASH_CAPABILITY = (8, 0)


@contextmanager
def kernels_of(target: Target, compute_capability: tuple[int, int]) -> Iterator[None]:
    """Inside, the engine on fake CPU tensors takes the code paths of the target.

    For the whole process, so nothing real may be trained meanwhile.
    """
    replaced: list[tuple[Any, str, Any]] = [
        # A fake parameter cannot be swapped for another one, and is on the right device already.
        (Llama, "to", lambda model, device: model),
        # Offload tells storages apart by their address; a fake one has none, its C++ object has. And it
        # says that it is on `meta`, whatever its tensor says.
        (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        (torch.UntypedStorage, "device", property(lambda storage: torch.device("cpu"))),
        # apply_recompute sets this for the process, and a compilation after us may need another value.
        (functorch_config, "activation_memory_budget", functorch_config.activation_memory_budget),
    ]
    if target == "cuda":
        flash = compute_capability >= _SMALLEST_FLASH_CAPABILITY

        def causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
            half = q.dtype in (torch.float16, torch.bfloat16)
            return _cuda_attention(q, k, v, cu_seqlens, "flash" if half and flash else "efficient")

        replaced += [
            (llama, "causal_attention", causal_attention),
            *(
                (owner, name, getattr(owner, name) | {"cpu": getattr(owner, name)["cuda"]})
                for owner, name in (
                    (low_precision_adamw, "_PIECE_ELEMENTS"),
                    (loss, "SOFTMAX_ELEMENTS"),
                    (loss, "HEAD_ELEMENTS"),
                    (loss, "LOGIT_COLUMNS"),
                    (loss, "BACKWARD_ROWS"),
                )
            ),
        ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def quantization_tables() -> list[Tensor]:
    """The tables of adamw_8bit, which the process makes once. To be called where tensors are real: they
    depend on values, and are kept for real steps too."""
    return [
        table
        for signed in (False, True)
        for table in (
            blockwise_quantization._table(signed, torch.device("cpu")),
            *blockwise_quantization._search_tables(signed, torch.device("cpu")),
        )
    ]


def use_cuda_norms(module: nn.Module) -> None:
    """Give all norms in it CUDA's fused kernel, which has less beside what it keeps than a CPU's."""
    for norm in module.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = _fused_norm(norm)  # type: ignore[method-assign]


def _fused_norm(norm: nn.RMSNorm) -> Any:
    def forward(x: Tensor) -> Tensor:
        # Autocast has RMSNorm on its list of fp32. The weight is another tensor where it is sharded.
        return _FusedRMSNorm.apply(x.float() if torch.is_autocast_enabled("cpu") else x, norm.weight)

    return forward


class _FusedRMSNorm(torch.autograd.Function):
    """The allocations of `aten::_fused_rms_norm` and its backward (native/cuda/layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _cuda_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, cu_seqlens: Tensor | None, kernel: str
) -> Tensor:
    """`causal_attention` as it goes on CUDA, with the kernels that SDPA would choose named."""
    if cu_seqlens is not None:
        document = attention._document_flash_cuda if kernel == "flash" else attention._document_efficient_cuda
        return document(q_BSHE, k_BSKE, v_BSKE, cu_seqlens)
    if kernel == "efficient":
        k_BSKE, v_BSKE = attention._expand(k_BSKE, q_BSHE), attention._expand(v_BSKE, q_BSHE)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHE, k_BSKE, v_BSKE))
    if kernel == "flash":
        out_BHSE = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    else:
        out_BHSE = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    return out_BHSE.transpose(1, 2)


class FakeAnswers(TorchDispatchMode):
    """What fake tensors cannot answer themselves, or would answer by allocating real ones."""

    def __init__(self, fake_mode: FakeTensorMode):
        super().__init__()
        self.subclasses: tuple[type, ...] = ()
        """As StorageTracker's."""
        self._fake_mode = fake_mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as StorageTracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if self.subclasses and any(issubclass(kind, self.subclasses) for kind in types):
            return NotImplemented
        if func is aten._local_scalar_dense.default:
            # torch.optim checks that its learning rate is at least 0.
            return args[0].dtype is torch.bool or 1
        if func in (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr):
            # In place. It has no fake kernel, and torch would run it on real zeros to see what it does.
            return None
        if func is aten.set_.source_Storage_storage_offset or func is aten.set_.source_Storage:
            # As a key of the cache of results the storage would never be let go.
            self._fake_mode.cache_enabled = False
        try:
            result = func(*args, **kwargs or {})
        finally:
            self._fake_mode.cache_enabled = True
        if func is aten.split.Tensor and len(result) > _ENOUGH_PIECES:
            # LowPrecisionAdamW and the loss take a large matrix in up to thousands of pieces. All but the
            # last, which is smaller, are alike, and the second finds what the first has left.
            return list(result[:_ENOUGH_PIECES])
        return result


_ENOUGH_PIECES = 2
