"""One model on several ranks: PyTorch's DDP or FSDP2 around it.

| parallelism | each rank keeps | between the ranks, each step |
| --- | --- | --- |
| ddp | weights, gradients, optimizer states whole | gradients summed, while backward still runs |
| fsdp | 1 / ranks of each | a block's weights gathered to compute it, its gradients summed and cut up |
| fsdp_cpu_offload | the same, in host memory, where the optimizer steps too | the same |

DDP: Li et al. 2020, "PyTorch Distributed". FSDP: Rajbhandari et al. 2020, "ZeRO" (stage 3); Zhao et al. 2023,
"PyTorch FSDP"; here its second version, `torch.distributed.fsdp.fully_shard`.

Gradients are summed and not averaged: each rank divides its losses by the target tokens of all ranks, which
is right also where they have different numbers of them. In an accumulation window they travel once, with the
last micro-batch.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stages.model.llama import Llama
from stages.params import VariantParams
from stages.training.precision import PrecisionPolicy
from stages.training.ranks import ALONE, Ranks


def is_sharded(variant: VariantParams) -> bool:
    return variant.parallelism != "ddp"


def shard_model(
    model: Llama, variant: VariantParams, policy: PrecisionPolicy, device: torch.device, ranks: Ranks
) -> None:
    """Cut every parameter up over the ranks, in place; to be done before the optimizer is made.

    A model in host memory is moved to the device block by block, so that it never stands there whole.
    In mixed precision the matrices of a block are cast before they travel, to what autocast would cast them
    to, and gradients are summed in fp32. What else there is, norms, embedding and head, is gathered by the
    root, in fp32. So a sharded step rounds as a step of one rank does.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    mesh = dist.init_device_mesh(device.type, (ranks.count,))
    mixed = MixedPrecisionPolicy(
        param_dtype=policy.autocast_dtype,
        reduce_dtype=torch.float32 if policy.autocast_dtype else None,
        cast_forward_inputs=False,
    )
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    in_host_memory = variant.parallelism == "fsdp_cpu_offload" and device.type != "cpu"
    offload = CPUOffloadPolicy() if in_host_memory else OffloadPolicy()
    for block in model.blocks:
        fully_shard([block.self_attn, block.mlp], mesh=mesh, mp_policy=mixed, offload_policy=offload)
    root = fully_shard(model, mesh=mesh, mp_policy=whole, offload_policy=offload)
    # The loss reads the head after the root's forward: its weights stay gathered until backward is done.
    root.set_reshard_after_forward(False, recurse=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class Parallel:
    """How the ranks of one training step work together on a model."""

    def __init__(self, model: Llama, variant: VariantParams, ranks: Ranks = ALONE):
        """
        Args:
            model: as it will run, compiled and recomputing; sharded already if the variant says so.
        """
        self.ranks = ranks
        self._model = model
        self.is_sharded = is_sharded(variant)
        self._ddp: DistributedDataParallel | None = None
        if ranks.has_others and not self.is_sharded:
            # Gradients become views of what travels: no second copy of them.
            self._ddp = DistributedDataParallel(
                model, forward_sync_buffers=False, gradient_as_bucket_view=True
            )
            self._ddp.register_comm_hook(None, _sum_gradients)

    def forward(self, input_ids_BS: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Hidden states [B, S, D] of this rank's micro-batch."""
        return (self._ddp or self._model)(input_ids_BS, cu_seqlens)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are DDP's buckets, which stay. Given up, an accumulation window would make others
        beside them."""
        return self._ddp is not None

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step: give the gradients back, or zero what stays."""
        optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    @contextlib.contextmanager
    def gradients_travel(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: only with the last one gradients are summed."""
        if self.is_sharded:
            self._model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            self._model.set_is_last_backward(is_last)  # type: ignore[operator]
        with self._ddp.no_sync() if self._ddp is not None and not is_last else contextlib.nullcontext():
            yield


def local_gradients(model: torch.nn.Module) -> list[Tensor]:
    """What this rank has of each gradient: all of it, or where the model is sharded its part."""
    return [
        gradient.to_local() if hasattr(gradient, "to_local") else gradient
        for gradient in (parameter.grad for parameter in model.parameters())
        if gradient is not None
    ]


def _sum_gradients(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does with a full bucket of gradients; by default it would divide by the number of ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])
